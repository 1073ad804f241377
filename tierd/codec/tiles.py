"""What the quantising codecs have in common: a group of tokens as a tile of float32.

One span of work is (page, head) tasks; a task goes group by group through a
tile that stays in the first cache, so a page is read once and written once.
A codec's kernel is put together from these functions and its own, and takes
only integers: so it compiles once, whatever the dtype; the kind of element is
a branch outside the arithmetic. Importing this imports Numba.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tierd.codec import vector as v
from tierd.codec.elements import (
    FLOAT32,
    inlined,
    inner,
    load,
    store_all,
)
from tierd.codec.reference import (
    HALF_MAX,
)
from tierd.units import CACHE_LINE_BYTES

ZERO = np.float32(0)
NORMAL_MIN = np.float32(2.0**-126)
ROUND = np.float32(2.0**23)  # x + 2^23 is x rounded half to even, its integer in the low bits
_ONE, _HALF_TINY, _HALF_MAX = np.float32(1), np.float32(2.0**-24), np.float32(HALF_MAX)
NOT_FINITE, OUT_OF_RANGE = 1, 2  # bits of a task's flags


class Shape(NamedTuple):
    """What a kernel must know of a layout; `padded` is head_dim rounded up to 16 lanes.

    `starts` and `used` are the offsets and bytes of a head's parts, for the gaps between them.
    """

    kind: int
    heads: int
    tokens: int
    d: int
    padded: int
    group: int
    tile_tokens: int  # of a tile of 4-bit keys
    hot_keys: int
    hot_values: int
    hot_head_bytes: int
    keys: int
    values: int
    key_scale: int
    key_zero: int
    value_scale: int
    value_zero: int
    key_error: int
    head_bytes: int
    starts: tuple[int, ...]
    used: tuple[int, ...]
    error_slack: np.float32


class Scratch(NamedTuple):
    """Addresses of one span's scratch: float32 unless said otherwise; [lanes] hold a group's
    tokens, or a row."""

    tile: int  # [group, padded]
    codes: int  # uint8 [group, padded]
    low: int  # [lanes], as the next five
    high: int
    zero: int
    scale: int
    inverse: int
    error: int
    zero_half: int  # float16 [lanes]
    scale_half: int
    spare: int  # uint8 [16, 64]: one vector's or one transposed tile's tail
    wide: int  # uint8 [padded, TILE_LANES]: codes of a tile of 4-bit keys
    lows: int  # [16, 16]: what fold_rows_min takes
    highs: int


@inner
def code_keys(hot: Any, out: Any, group: Any, s: Any, codes_max: Any, w: Any) -> Any:
    """Code a group of keys in equal steps per channel: all of it but the codes is in the page.

    They are left in w.codes. Returns the flags.
    """
    row_bytes = 4 * s.padded
    bits = read_keys(hot + s.hot_keys, group, s, w) | choose_scales(s.padded, codes_max, w)
    v.copy_bytes(out + s.key_zero + 2 * group * s.d, w.zero_half, 2 * s.d)
    v.copy_bytes(out + s.key_scale + 2 * group * s.d, w.scale_half, 2 * s.d)
    magic = v.splat(ROUND)
    for t in range(s.group):
        prefetch_row(hot + s.hot_keys, out + s.keys, (group + 1) * s.group + t, s.d, s)
        total = v.splat(ZERO)
        for c in range(0, s.padded, 16):
            x = v.load_f32(w.tile + t * row_bytes + 4 * c)
            zero = v.load_f32(w.zero + 4 * c)
            shifted = v.add(v.mul(v.sub(x, zero), v.load_f32(w.inverse + 4 * c)), magic)
            v.store_low_bytes(w.codes + t * s.padded + c, shifted)
            product = v.mul(v.load_f32(w.scale + 4 * c), v.sub(shifted, magic))
            error = v.sub(x, v.add(zero, product))
            total = v.add(total, v.mul(error, error))
        v.write_f32(w.error + 4 * t, v.fold_sum(total))
    store_key_error(out + s.key_error + 2 * group * s.group, s, w)
    return bits


@inner
def read_keys(part: Any, group: Any, s: Any, w: Any) -> Any:
    """Widen a group into the tile, padded with 0; find each channel's low and high."""
    row_bytes = s.d * item_bytes(s.kind)
    first = part + group * s.group * row_bytes
    zero = v.splat(ZERO)
    check = zero
    for c in range(0, s.padded, 16):
        low = _widened(first, c, zero, s, w)
        high = low
        for t in range(s.group):
            x = _widened(first + t * row_bytes, c, zero, s, w)
            low, high = v.lesser(x, low), v.greater(x, high)
            check = v.add(check, v.mul(x, zero))
            v.store_f32(w.tile + 4 * (t * s.padded + c), x)
        v.store_f32(w.low + 4 * c, low)
        v.store_f32(w.high + 4 * c, high)
    return flags_of(check)


@inner
def read_values(part: Any, group: Any, s: Any, w: Any) -> Any:
    """Widen a group into the tile, padded with its own element; find each token's low and high."""
    item = item_bytes(s.kind)
    zero = v.splat(ZERO)
    check = zero
    whole = s.d // 16 * 16
    for first in range(0, s.group, v.LANES):
        for i in range(v.LANES):
            row = part + (group * s.group + first + i) * s.d * item
            tile = w.tile + 4 * (first + i) * s.padded
            low, high = v.splat(np.float32(np.inf)), v.splat(np.float32(-np.inf))
            for c in range(0, whole, 16):
                x = load(row + c * item, s.kind)
                check = v.add(check, v.mul(x, zero))
                low, high = v.lesser(x, low), v.greater(x, high)
                v.store_f32(tile + 4 * c, x)
            if whole < s.d:
                x = _widened(row, whole, _first_element(row, s, w), s, w)
                check = v.add(check, v.mul(x, zero))
                low, high = v.lesser(x, low), v.greater(x, high)
                v.store_f32(tile + 4 * whole, x)
            v.store_f32(w.lows + 4 * v.LANES * i, low)
            v.store_f32(w.highs + 4 * v.LANES * i, high)
        # 16 tokens at once: folding one vector costs as much as coding it.
        v.store_f32(w.low + 4 * first, v.fold_rows_min(w.lows))
        v.store_f32(w.high + 4 * first, v.fold_rows_max(w.highs))
    return flags_of(check)


@inlined
def _widened(row: Any, c: Any, pad: Any, s: Any, w: Any) -> Any:
    """Elements c.. of a row as lanes; past the row's end, `pad`."""
    if c + 16 <= s.d:
        return load(row + c * item_bytes(s.kind), s.kind)
    store_all(w.spare, pad, s.kind)
    v.copy_bytes(w.spare, row + c * item_bytes(s.kind), (s.d - c) * item_bytes(s.kind))
    return load(w.spare, s.kind)


@inlined
def _first_element(row: Any, s: Any, w: Any) -> Any:
    v.copy_bytes(w.spare, row, item_bytes(s.kind))
    v.store_f32(w.error, load(w.spare, s.kind))
    return v.splat(v.read_f32(w.error))


@inlined
def item_bytes(kind: Any) -> Any:
    """Bytes of an element of a kind."""
    return 4 if kind == FLOAT32 else 2


@inlined
def flags_of(check: Any) -> Any:
    """The flags for a sum of elements, each times 0: NaN and infinity make it NaN."""
    return 0 if v.fold_sum(check) == ZERO else NOT_FINITE


@inlined
def prefetch_row(part: Any, codes: Any, row: Any, code_bytes: Any, s: Any) -> None:
    """While a group is in the arithmetic, fetch a row of the next and of where it will go.

    Groups are too short for the processor to see the pattern: without this a
    core waits for RAM a third of the time. Past the page's end it does no harm.
    """
    row_bytes = s.d * item_bytes(s.kind)
    for line in range(0, row_bytes, CACHE_LINE_BYTES):
        v.prefetch_read(part + row * row_bytes + line)
    for line in range(0, code_bytes, CACHE_LINE_BYTES):
        v.prefetch_write(codes + row * code_bytes + line)


@inner
def choose_scales(count: Any, codes_max: Any, w: Any) -> Any:
    """From low and high make zero, scale and inverse, [count] each, and their halves."""
    nothing, tiny, normal = v.splat(ZERO), v.splat(_HALF_TINY), v.splat(NORMAL_MIN)
    codes = v.splat(codes_max)
    largest = nothing
    for i in range(0, count, 16):
        low, high = v.load_f32(w.low + 4 * i), v.load_f32(w.high + 4 * i)
        largest = v.greater(v.greater(high, v.sub(nothing, low)), largest)
        low = v.where_less(v.greater(low, v.sub(nothing, low)), normal, nothing, low)
        high = v.where_less(v.greater(high, v.sub(nothing, high)), normal, nothing, high)
        zero = v.half_down(low)
        span = v.sub(high, zero)
        step = v.greater(v.div(span, codes), tiny)
        scale = v.half_up(v.where_less(nothing, span, step, nothing))
        v.store_f32(w.zero + 4 * i, zero)
        v.store_f16(w.zero_half + 2 * i, zero)
        _store_scale(scale, i, w)
    return range_flags(largest)


@inner
def choose_sizes(count: Any, codes_max: Any, w: Any) -> Any:
    """As `choose_scales`, for codes with a sign: scale and inverse, from the larger end."""
    nothing, tiny, normal = v.splat(ZERO), v.splat(_HALF_TINY), v.splat(NORMAL_MIN)
    codes = v.splat(codes_max)
    largest = nothing
    for i in range(0, count, 16):
        low, high = v.load_f32(w.low + 4 * i), v.load_f32(w.high + 4 * i)
        size = v.greater(high, v.sub(nothing, low))
        largest = v.greater(size, largest)
        step = v.greater(v.div(size, codes), tiny)
        _store_scale(v.half_up(v.where_less(size, normal, nothing, step)), i, w)
    return range_flags(largest)


@inlined
def _store_scale(scale: Any, i: Any, w: Any) -> None:
    nothing = v.splat(ZERO)
    inverse = v.where_less(nothing, scale, v.div(v.splat(_ONE), scale), nothing)
    v.store_f32(w.scale + 4 * i, scale)
    v.store_f32(w.inverse + 4 * i, inverse)
    v.store_f16(w.scale_half + 2 * i, scale)


@inlined
def range_flags(largest: Any) -> Any:
    """The flags for magnitudes: float16 must hold them."""
    return OUT_OF_RANGE if v.fold_max(largest) > _HALF_MAX else 0


@inner
def transpose_codes(out: Any, stride: Any, s: Any, w: Any) -> None:
    """Transpose w.codes [group, padded] into rows of out [head_dim, group], `stride` apart."""
    for c in range(0, s.padded, 16):
        last = c + 16 > s.d
        tile = w.spare if last else out + c * stride
        for t in range(0, s.group, 16):
            v.transpose_16x16(w.codes + t * s.padded + c, s.padded, tile + t, stride)
        if last:
            v.copy_bytes(out + c * stride, tile, (s.d - c) * stride)


@inner
def untranspose_codes(codes: Any, stride: Any, s: Any, w: Any) -> None:
    """The way back: rows of codes [head_dim, group], `stride` apart, into w.codes."""
    for c in range(0, s.padded, 16):
        tile = codes + c * stride
        if c + 16 > s.d:
            v.copy_bytes(w.spare, tile, (s.d - c) * stride)
            tile = w.spare
        for t in range(0, s.group, 16):
            v.transpose_16x16(tile + t, stride, w.codes + t * s.padded + c, s.padded)


@inner
def store_key_error(out: Any, s: Any, w: Any) -> None:
    """Store the norms of a group, from their squares in w.error."""
    nothing = v.splat(ZERO)
    largest = nothing
    for c in range(0, s.padded, 16):
        largest = v.greater(v.load_f32(w.scale + 4 * c), largest)
    least = v.splat(_HALF_TINY) if v.fold_max(largest) > ZERO else nothing
    raised = v.splat(s.error_slack)
    for t in range(0, s.group, 16):
        norm = v.mul(v.sqrt(v.load_f32(w.error + 4 * t)), raised)
        v.store_f16(out + 2 * t, v.half_up(v.greater(norm, least)))


@inner
def zero_gaps(out: Any, s: Any) -> None:
    """Zero a head's bytes that belong to no part."""
    for i in range(len(s.starts)):
        v.zero_bytes(out + s.starts[i] + s.used[i], -s.used[i] % CACHE_LINE_BYTES)


@inner
def load_scales(payload: Any, part: Any, group: Any, s: Any, into: Any) -> None:
    """Copy a group's key scales or zeros to scratch, where 16 lanes may be read past d."""
    v.copy_bytes(into, payload + part + 2 * group * s.d, 2 * s.d)
