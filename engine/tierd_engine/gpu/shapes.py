"""What a kernel is compiled for: the numbers of a page's layout and of a call, as constants.

Triton takes a NamedTuple of them as one compile-time argument; equal tuples share a build. Triton
before 3.8 does not know the fields of one for constants, unless each says so: `constants`.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, TypeVar

import triton
import triton.language as tl

from tierd.codec.layout import PageLayout
from tierd.codec.reference import raw_layout, slack
from tierd.types import CodecId
from tierd.units import CACHE_LINE_BYTES, round_up

LANES = 16  # channels that an encoder of keys takes at a time; key_error is summed in as many
ROWS_MAX = 32  # query rows of one program
WARPS_4_MAX = 2048  # sums that four warps hold, 16 a thread, beside a tile of keys or values
VALUES_4_BIT_MAX = 32  # tokens whose 4-bit values are made at a time: registers hold no more
DOT_MIN = 16  # the least extent of a matrix that tensor cores multiply


class PageShape(NamedTuple):
    """A layout's numbers. Offsets are bytes from a head's start; `padded` is a power of two.

    `hot_*`: the raw layout of the same geometry. `gaps`: (start, size) of the bytes between
    parts, each less than 64, that an encoder sets to zero. `tile`: tokens of a key group.
    """

    codec: str
    dtype: str
    kv_heads: int
    d: int
    padded: int
    tokens: int
    tile: int
    hot_keys: int
    hot_values: int
    hot_head_bytes: int
    key_part: int  # codes, or elements of raw; a Triton tuple has a `values` of its own
    value_part: int
    key_scale: int
    key_zero: int
    value_scale: int
    value_zero: int
    key_error: int
    head_bytes: int
    gaps: tuple[tuple[int, int], ...]
    slack: float


class CallShape(NamedTuple):
    """A call's numbers: `rows` query rows a program, `share` query heads a KV head.

    `tile`: tokens at a time; they share a key scale.
    """

    heads: int
    share: int
    rows: int
    tile: int
    is_causal: bool
    is_interpreted: bool


Shape = TypeVar("Shape", PageShape, CallShape)


def constants(shape: Shape) -> Shape:
    """Return the shape as a kernel takes it."""
    return shape if triton.knobs.runtime.interpret else _wrapped(shape)


class _PageConstants(PageShape):
    """Hashed by its place, as a launch does it hundreds of times a step: `_wrapped` keeps it."""

    __slots__ = ()
    __hash__ = object.__hash__
    __eq__ = object.__eq__


class _CallConstants(CallShape):
    """As _PageConstants."""

    __slots__ = ()
    __hash__ = object.__hash__
    __eq__ = object.__eq__


@functools.lru_cache(maxsize=256)  # few models, each with some layouts and numbers of queries
def _wrapped(shape: Shape) -> Shape:
    kind: type[Any] = _PageConstants if isinstance(shape, PageShape) else _CallConstants
    wrapped: Shape = kind(*map(tl.constexpr, shape))
    return wrapped


@functools.lru_cache(maxsize=64)
def page_shape(layout: PageLayout) -> PageShape:
    """Return what kernels need of a layout."""
    hot = raw_layout(layout)
    gaps = []
    for start, size in zip(layout.parts, layout.part_bytes, strict=True):
        gap = round_up(size, CACHE_LINE_BYTES) - size
        if gap:
            gaps.append((start + size, gap))
    return PageShape(
        layout.codec.name.lower(), layout.dtype.value, layout.kv_heads, layout.head_dim,
        padded(layout.head_dim), layout.block_tokens, min(layout.group_tokens, layout.block_tokens),
        hot.keys, hot.values, hot.head_bytes, layout.keys, layout.values, layout.key_scale,
        layout.key_zero, layout.value_scale, layout.value_zero, layout.key_error,
        layout.head_bytes, tuple(gaps), float(slack(layout.head_dim)),
    )  # fmt: skip


def call_shape(
    layout: PageLayout, heads: int, n: int, *, is_causal: bool, is_interpreted: bool
) -> CallShape:
    """Return what an attention kernel needs of a call with `n` queries of `heads` heads."""
    share = heads // layout.kv_heads
    rows = min(padded(n * share), ROWS_MAX)
    tile = min(layout.group_tokens, layout.block_tokens)
    if layout.codec is CodecId.K8V4:
        tile = min(tile, VALUES_4_BIT_MAX)
    return CallShape(heads, share, rows, tile, is_causal, is_interpreted)


def warps_of(page: PageShape, call: CallShape) -> int:
    """Return the warps of an attention program: with fewer, its registers would spill."""
    # float32 elements are three terms each to a tensor core, so more of them stand by; of int4
    # both keys and values are taken out of bytes that two codes share; int8 codes beside float32
    # queries spill by Triton 3.7 alone.
    is_single = page.dtype == "float32"
    terms = {"int4": 2, "raw": 1 + is_single, "int8": 1 + 2 * is_single}.get(page.codec, 1)
    return 8 if call.rows * page.padded * terms > WARPS_4_MAX else 4


def padded(extent: int) -> int:
    """Return the least power of two that tensor cores take and that holds `extent`."""
    return max(DOT_MIN, 1 << (extent - 1).bit_length())
