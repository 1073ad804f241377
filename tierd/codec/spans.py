"""The quantising codecs in batches: one compiled span of work to encode, one to decode, per codec.

Which codec is known when a span is compiled, as a constant's type. The machine code is kept on
disk (`compiling`): a process compiles only what the machine has not yet seen. Importing this
imports Numba.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import typeof, types
from numba.extending import overload

from tierd.codec import fp8, int4, int8, k8v4
from tierd.codec import vector as v
from tierd.codec.compiling import Const, ConstType, compile_cached
from tierd.codec.elements import INNER, Target, element_kind
from tierd.codec.intrinsics import as_array
from tierd.codec.layout import TILE_LANES, PageLayout, page_layout
from tierd.codec.reference import STATUS_NOT_FINITE, STATUS_OUT_OF_RANGE, raw_layout, slack
from tierd.codec.tiles import NOT_FINITE, OUT_OF_RANGE, Scratch, Shape, item_bytes, zero_gaps
from tierd.codec.workers import run_spans
from tierd.types import CodecId, DType, Geometry
from tierd.units import CACHE_LINE_BYTES, round_up

IntArray = npt.NDArray[np.int64]

_MODULES = {CodecId.INT8: int8, CodecId.K8V4: k8v4, CodecId.INT4: int4, CodecId.FP8: fp8}
_STATUS_OF_FLAGS = np.zeros(4, dtype=np.uint8)
_STATUS_OF_FLAGS[[NOT_FINITE, NOT_FINITE | OUT_OF_RANGE]] = STATUS_NOT_FINITE
_STATUS_OF_FLAGS[OUT_OF_RANGE] = STATUS_OUT_OF_RANGE


def encode_pages(
    source: IntArray, destination: IntArray, layout: PageLayout, threads: int | None = None
) -> npt.NDArray[np.uint8]:
    """Encode hot pages at [pages] addresses; payloads go to [pages] addresses.

    Returns uint8 [pages]: 0 ok, 1 NaN or infinity, 2 beyond float16's range;
    with 1 or 2 the payload's bytes are unspecified. Zero pages is allowed.
    """
    kernel = _encoder(layout.codec)
    shape = _shape(layout)
    tasks = len(source) * layout.kv_heads
    flags = np.zeros(tasks, dtype=np.uint8)
    addresses = source.ctypes.data, destination.ctypes.data, flags.ctypes.data

    def span(first: int, end: int) -> None:
        scratch, memory = _scratch(shape)
        kernel(*addresses, first, end, shape, scratch)
        del memory  # alive until here: the kernel knows only its address

    run_spans(span, tasks, len(source) * layout.payload_bytes, threads)
    pages = np.bitwise_or.reduce(flags.reshape(-1, layout.kv_heads), axis=1)
    return _STATUS_OF_FLAGS[pages]


def decode_pages(
    source: IntArray, layout: PageLayout, target: Target, threads: int | None = None
) -> None:
    """Decode payloads at [pages] addresses into `target`, one after the other."""
    kernel = _decoder(layout.codec)
    shape = _shape(layout)

    def span(first: int, end: int) -> None:
        scratch, memory = _scratch(shape)
        kernel(source.ctypes.data, first, end, shape, target, scratch)
        del memory

    run_spans(span, len(source) * layout.kv_heads, len(source) * layout.payload_bytes, threads)


def _encode_head(codec: Any, hot: Any, out: Any, s: Any, w: Any) -> Any:
    raise NotImplementedError("which codec is chosen when the kernel is compiled")


@overload(_encode_head, jit_options=INNER, strict=False)
def _choose_encode_head(codec: Any, hot: Any, out: Any, s: Any, w: Any) -> Callable[..., Any]:
    head = _MODULES[CodecId(codec.value)].encode_head
    return lambda codec, hot, out, s, w: head(hot, out, s, w)


def _decode_head(
    codec: Any, payload: Any, keys: Any, values: Any, s: Any, kind: Any, w: Any
) -> None:
    raise NotImplementedError("which codec is chosen when the kernel is compiled")


@overload(_decode_head, jit_options=INNER, strict=False)
def _choose_decode_head(
    codec: Any, payload: Any, keys: Any, values: Any, s: Any, kind: Any, w: Any
) -> Callable[..., None]:
    head = _MODULES[CodecId(codec.value)].decode_head
    return lambda codec, payload, keys, values, s, kind, w: head(payload, keys, values, s, kind, w)


def _encode_span(
    codec: Any, source: Any, target: Any, flags: Any, first: Any, end: Any, s: Any, w: Any
) -> None:
    sources, targets = as_array(source, end, np.int64), as_array(target, end, np.int64)
    found = as_array(flags, end, np.uint8)
    for task in range(first, end):
        page, head = task // s.heads, task % s.heads
        out = targets[page] + head * s.head_bytes
        found[task] = _encode_head(codec, sources[page] + head * s.hot_head_bytes, out, s, w)
        zero_gaps(out, s)


def _decode_span(
    codec: Any, source: Any, first: Any, end: Any, s: Any, target: Any, w: Any
) -> None:
    sources = as_array(source, end, np.int64)
    row_bytes = s.d * item_bytes(target.kind)
    for task in range(first, end):
        page, head = task // s.heads, task % s.heads
        row = (target.start_token + page * s.tokens) * row_bytes
        keys = target.keys + head * target.keys_head_bytes + row
        values = target.values + head * target.values_head_bytes + row
        payload = sources[page] + head * s.head_bytes
        _decode_head(codec, payload, keys, values, s, target.kind, w)


_SCRATCH = typeof(Scratch(*[0] * len(Scratch._fields)))
_TARGET = typeof(Target(*[0] * len(Target._fields)))


@functools.cache
def _encoder(codec: CodecId) -> Callable[..., None]:
    """Return `_encode_span` for a codec, without its first argument."""
    signature = (ConstType(int(codec)), *[types.int64] * 5, _shape_type(), _SCRATCH)
    kernel = compile_cached(_encode_span, signature, nogil=True)
    return functools.partial(kernel.call, Const(int(codec)))


@functools.cache
def _decoder(codec: CodecId) -> Callable[..., None]:
    """Return `_decode_span` for a codec, without its first argument."""
    signature = (ConstType(int(codec)), *[types.int64] * 3, _shape_type(), _TARGET, _SCRATCH)
    kernel = compile_cached(_decode_span, signature, nogil=True)
    return functools.partial(kernel.call, Const(int(codec)))


def _shape_type() -> Any:
    """Return the type of every layout's Shape: all have the same parts, some of no bytes."""
    return typeof(_shape(page_layout(Geometry(1, 1, 32, DType.FLOAT32, 64), CodecId.INT8)))


def _shape(layout: PageLayout) -> Shape:
    raw = raw_layout(layout)
    return Shape(
        element_kind(layout.dtype), layout.kv_heads, layout.block_tokens, layout.head_dim,
        round_up(layout.head_dim, v.LANES), layout.group_tokens,
        min(TILE_LANES, layout.block_tokens), raw.keys, raw.values,
        raw.head_bytes, layout.keys, layout.values, layout.key_scale, layout.key_zero,
        layout.value_scale, layout.value_zero, layout.key_error, layout.head_bytes, layout.parts,
        layout.part_bytes, slack(layout.head_dim),
    )  # fmt: skip


def _scratch(shape: Shape) -> tuple[Scratch, npt.NDArray[np.uint8]]:
    """Return addresses and the memory behind them, which the caller must keep."""
    lanes = max(shape.group, shape.padded)
    sizes = [4 * shape.group * shape.padded, shape.group * shape.padded]
    sizes += [4 * lanes] * 6 + [2 * lanes] * 2 + [v.LANES * 64]
    sizes += [shape.padded * TILE_LANES] + [4 * v.LANES * v.LANES] * 2
    memory = np.zeros(sum(sizes) + CACHE_LINE_BYTES, dtype=np.uint8)
    start = round_up(memory.ctypes.data, CACHE_LINE_BYTES)
    addresses = [start + sum(sizes[:i]) for i in range(len(sizes))]
    return Scratch(*addresses), memory
