"""Plan of a step: for each layer, which executor handles which pages.

A plan is made from what is hot (the engine knows) and the page table (the
daemon wrote it), and stays good until either changes. It holds arrays, so
that a layer costs a few kernel calls and no Python per page.

The order of a layer's pages is fixed: hot, then warm, then cold, these by codec
and block. So a run repeats bit for bit.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tierd.codec.layout import HEADER_BYTES, PageLayout, page_layout
from tierd.errors import InvalidArgument, PageMiss
from tierd.memory.pagetable import PageTableView
from tierd.types import CodecId, Geometry, Tier
from tierd_engine.arena import HotArena
from tierd_engine.coldread import ColdPage, ColdUnit

IntArray = npt.NDArray[np.int64]


class PlanMode(enum.StrEnum):
    """STREAM copies encoded pages to staging first; NEAR attends where they lie.

    AUTO: near for a few queries, stream for many (on a host without a GPU).
    """

    AUTO = "auto"
    STREAM = "stream"
    NEAR = "near"

    @classmethod
    def parse(cls, text: str) -> PlanMode:
        """Return the mode named `text`. Raises InvalidArgument."""
        try:
            return cls(text)
        except ValueError:
            raise InvalidArgument(f"plan {text!r} is none of stream, near, auto") from None


@dataclass(frozen=True, slots=True)
class PageRun:
    """Warm pages of one layer and codec: payload addresses, in block order."""

    layout: PageLayout
    addresses: IntArray
    tokens: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """What one layer attends over below the hot tier."""

    warm: tuple[PageRun, ...]
    cold: tuple[ColdUnit, ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """All layers' plans, at one page-table version and one set of hot blocks.

    `hot_addresses`: [layers, hot blocks] absolute addresses; `hot_first`: [hot
    blocks] first token position of each.
    """

    table_version: int
    hot_blocks: tuple[int, ...]
    hot_slots: tuple[int, ...]
    hot_addresses: IntArray
    hot_first: IntArray
    layers: tuple[LayerPlan, ...]
    cold_units: tuple[ColdUnit, ...]
    warm_pages: int
    cold_pages: int
    parts_max: int

    @classmethod
    def of(
        cls, arena: HotArena, hot: dict[int, int], layers: tuple[LayerPlan, ...],
        table_version: int, parts_max: int,
    ) -> StepPlan:  # fmt: skip
        """Make a plan of what is hot, arena slot by block, and of what lies below."""
        hot_blocks = tuple(sorted(hot))
        slots = np.array([hot[block] for block in hot_blocks], dtype=np.int64)
        starts = arena.base_address + slots * arena.slot_bytes
        offsets = np.arange(len(layers), dtype=np.int64) * arena.layout.payload_bytes
        return cls(
            table_version=table_version,
            hot_blocks=hot_blocks,
            hot_slots=tuple(int(slot) for slot in slots),
            hot_addresses=np.ascontiguousarray(offsets[:, None] + starts[None, :]),
            hot_first=np.array(hot_blocks, dtype=np.int64) * arena.geometry.block_tokens,
            layers=layers,
            cold_units=tuple(unit for layer in layers for unit in layer.cold),
            warm_pages=sum(len(run.addresses) for layer in layers for run in layer.warm),
            cold_pages=sum(len(unit.pages) for layer in layers for unit in layer.cold),
            parts_max=parts_max,
        )


def require_published(table: PageTableView, below_hot: IntArray) -> None:
    """Raise PageMiss for the first block (then layer) that is neither hot nor published."""
    missing = table.tier[:, below_hot] == Tier.NONE
    if not missing.any():
        return
    column = int(np.argmax(missing.any(axis=0)))
    layer = int(np.argmax(missing[:, column]))
    block = int(below_hot[column])
    raise PageMiss(
        f"layer {layer} block {block} is in no tier",
        layer=layer,
        block=block,
    )


def _by_codec(
    table: PageTableView, layer: int, below_hot: IntArray, tier: Tier
) -> Iterator[tuple[CodecId, IntArray]]:
    """Yield the layer's blocks in a tier, codec by codec; none is empty."""
    blocks = below_hot[table.tier[layer, below_hot] == tier]
    codecs = table.codec[layer, blocks]
    for number in np.unique(codecs).tolist():
        yield CodecId(number), blocks[codecs == number]


def warm_runs(
    geometry: Geometry,
    table: PageTableView,
    layer: int,
    below_hot: IntArray,
    slab_address: Callable[[int], int],
) -> tuple[PageRun, ...]:
    """Return the layer's warm pages, one run a codec."""
    runs = []
    for codec, blocks in _by_codec(table, layer, below_hot, Tier.WARM):
        layout = page_layout(geometry, codec)
        slabs = table.slab[layer, blocks]
        unique, inverse = np.unique(slabs, return_inverse=True)
        bases = np.array([slab_address(int(slab)) for slab in unique], dtype=np.int64)
        offsets = table.slot[layer, blocks].astype(np.int64) * layout.slot_bytes
        addresses = bases[inverse] + offsets + HEADER_BYTES
        tokens = np.full(len(blocks), geometry.block_tokens, dtype=np.int32)
        runs.append(PageRun(layout, addresses, tokens))
    return tuple(runs)


def cold_units(
    geometry: Geometry,
    table: PageTableView,
    layer: int,
    below_hot: IntArray,
    chunk_bytes: int,
    make_page: Callable[[int, int, PageLayout], ColdPage],
) -> tuple[ColdUnit, ...]:
    """Return the layer's cold pages in units that fit a staging chunk."""
    units = []
    for codec, blocks in _by_codec(table, layer, below_hot, Tier.COLD):
        layout = page_layout(geometry, codec)
        per_unit = chunk_bytes // layout.slot_bytes
        for start in range(0, len(blocks), per_unit):
            part = blocks[start : start + per_unit]
            pages = tuple(make_page(layer, int(block), layout) for block in part)
            units.append(ColdUnit(layout, pages))
    return tuple(units)
