"""Promotion: which warm blocks of a resumed session come up to hot, and where each page goes.

A hot page is the model's dtype in the raw layout. From codec raw the copy is exact. From a
lossy codec it is what `near` attends over, decoded, and rounded to the model's dtype, once: to
float32 not at all, to bfloat16 by at most 2^-8 of each element, as the model's own cache is.
Warm pages are trusted as attention trusts them: inside an epoch no digest is looked at.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tierd.codec import decode_pages
from tierd.codec.layout import PageLayout
from tierd.codec.reference import raw_layout
from tierd.memory.pagetable import PageTableView
from tierd.types import DType, Tier
from tierd_engine.attention.plan import IntArray, PageRun, warm_runs

if TYPE_CHECKING:
    from collections.abc import Callable

    from tierd_engine.arena import HotArena


@dataclass(frozen=True, slots=True)
class Ascent:
    """Warm pages of one layer and codec, and int64 [pages], the addresses of their hot pages."""

    layer: int
    run: PageRun
    targets: IntArray


def choose_blocks(table: PageTableView, room: int) -> list[int]:
    """Return at most `room` blocks that are warm in every layer: the first, then the newest."""
    warm: list[int] = np.flatnonzero((table.tier == Tier.WARM).all(axis=0)).tolist()
    first = [block for block in warm if block == 0]
    return (first + [block for block in reversed(warm) if block > 0])[: max(room, 0)]


def ascents(
    table: PageTableView,
    slots: Mapping[int, int],
    arena: HotArena,
    slab_address: Callable[[int], int],
) -> tuple[Ascent, ...]:
    """Return the ways up of warm blocks, layer by layer. slots: arena slot by block."""
    blocks = np.array(sorted(slots), dtype=np.int64)
    found = []
    for layer in range(arena.geometry.layers):
        codecs = table.codec[layer, blocks]
        for run in warm_runs(arena.geometry, table, layer, blocks, slab_address):
            here = blocks[codecs == run.layout.codec].tolist()  # the run's own, in its order
            targets = [arena.page_address(slots[block], layer) for block in here]
            found.append(Ascent(layer, run, np.array(targets, dtype=np.int64)))
    return tuple(found)


def decode_to_hot(source: IntArray, target: IntArray, layout: PageLayout) -> None:
    """Decode payloads of `layout` to hot pages of the same geometry, with the CPU.

    source, target: int64 [pages], absolute addresses in host memory. Zero pages is allowed.
    """
    hot = raw_layout(layout)
    for page, address in zip(source.reshape(-1, 1), target.tolist(), strict=True):
        decode_pages(page, layout, *_parts_at(address, hot))


def _parts_at(address: int, hot: PageLayout) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return a hot page's keys and values, writable views [kv_heads, block_tokens, head_dim].

    Their dtype is float32, or uint16 for the bits of a 2-byte one, as decode_pages takes them.
    """
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * hot.payload_bytes).from_address(address))
    heads = memory.reshape(hot.kv_heads, hot.head_bytes)
    size = hot.block_tokens * hot.head_dim * hot.dtype.itemsize
    kind = np.float32 if hot.dtype is DType.FLOAT32 else np.uint16
    shape = (hot.kv_heads, hot.block_tokens, hot.head_dim)
    keys, values = (
        heads[:, start : start + size].view(kind).reshape(shape) for start in (hot.keys, hot.values)
    )
    return keys, values
