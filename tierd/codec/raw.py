"""Codec raw: the hot page's own bytes, with the padding between parts set to zero.

It stores anything, NaN included: it is where a page goes that no other codec takes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import typeof, types

from tierd.codec import vector as v
from tierd.codec.compiling import compile_cached
from tierd.codec.elements import FLOAT32, Target, element_kind, load
from tierd.codec.intrinsics import as_array
from tierd.codec.layout import PageLayout
from tierd.codec.reference import STATUS_OK
from tierd.codec.workers import run_spans
from tierd.units import CACHE_LINE_BYTES

IntArray = npt.NDArray[np.int64]


class _Shape(NamedTuple):
    kind: int
    heads: int
    tokens: int
    elements: int  # of one part: block_tokens * head_dim, a multiple of 16
    keys: int
    values: int
    head_bytes: int


def encode_pages(
    source: IntArray, destination: IntArray, layout: PageLayout, threads: int | None = None
) -> npt.NDArray[np.uint8]:
    """Copy hot pages at [pages] addresses to [pages] addresses; returns all 0, uint8 [pages]."""
    shape = _shape(layout)
    addresses = source.ctypes.data, destination.ctypes.data
    kernel = _encoder()
    run_spans(
        lambda first, end: kernel(*addresses, first, end, shape),
        len(source) * layout.kv_heads,
        len(source) * layout.payload_bytes,
        threads,
    )
    return np.full(len(source), STATUS_OK, dtype=np.uint8)


def decode_pages(
    source: IntArray, layout: PageLayout, target: Target, threads: int | None = None
) -> None:
    """Copy, or widen to float32, payloads at [pages] addresses into `target` in order."""
    shape = _shape(layout)
    kernel = _decoder()
    run_spans(
        lambda first, end: kernel(source.ctypes.data, first, end, shape, target),
        len(source) * layout.kv_heads,
        len(source) * layout.payload_bytes,
        threads,
    )


def _shape(layout: PageLayout) -> _Shape:
    return _Shape(
        element_kind(layout.dtype), layout.kv_heads, layout.block_tokens,
        layout.block_tokens * layout.head_dim, layout.keys, layout.values, layout.head_bytes,
    )  # fmt: skip


def _encode_span(source: Any, target: Any, first: Any, end: Any, s: Any) -> None:
    sources, targets = as_array(source, end, np.int64), as_array(target, end, np.int64)
    part_bytes = s.elements * (4 if s.kind == FLOAT32 else 2)
    for task in range(first, end):
        page, offset = task // s.heads, task % s.heads * s.head_bytes
        for part in (s.keys, s.values):
            out = targets[page] + offset + part
            v.copy_bytes(out, sources[page] + offset + part, part_bytes)
            v.zero_bytes(out + part_bytes, -part_bytes % CACHE_LINE_BYTES)


def _decode_span(source: Any, first: Any, end: Any, s: Any, target: Any) -> None:
    sources = as_array(source, end, np.int64)
    item = 4 if s.kind == FLOAT32 else 2
    out_item = 4 if target.kind == FLOAT32 else 2
    for task in range(first, end):
        page, head = task // s.heads, task % s.heads
        payload = sources[page] + head * s.head_bytes
        token = target.start_token + page * s.tokens
        done = token * (s.elements // s.tokens) * out_item
        keys = target.keys + head * target.keys_head_bytes + done
        values = target.values + head * target.values_head_bytes + done
        for part, out in ((s.keys, keys), (s.values, values)):
            if item == out_item:
                v.copy_bytes(out, payload + part, s.elements * item)
            else:
                for i in range(0, s.elements, 16):
                    v.store_f32(out + 4 * i, load(payload + part + i * item, s.kind))


_SHAPE = typeof(_Shape(*[0] * len(_Shape._fields)))
_TARGET = typeof(Target(*[0] * len(Target._fields)))


@functools.cache
def _encoder() -> Callable[..., None]:
    return compile_cached(_encode_span, (*[types.int64] * 4, _SHAPE), nogil=True).call


@functools.cache
def _decoder() -> Callable[..., None]:
    return compile_cached(_decode_span, (*[types.int64] * 3, _SHAPE, _TARGET), nogil=True).call
