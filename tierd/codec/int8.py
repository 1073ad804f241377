"""Codec int8: keys per channel over a group of tokens, values per token; Numba kernels.

Bytes are those of `reference`, which defines each step. One span of work is
(page, head) tasks; a task goes group by group through a float32 tile that
stays in the first cache, so a page is read once and written once.

Both kernels take only integers, so each compiles once per process, whatever
the dtype: the element kind is a branch outside the arithmetic.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from tierd.codec import vector as v
from tierd.codec.elements import (
    FLOAT32,
    Target,
    element_kind,
    inlined,
    inner,
    load,
    store,
    store_all,
)
from tierd.codec.intrinsics import as_array
from tierd.codec.layout import PageLayout
from tierd.codec.reference import (
    HALF_MAX,
    STATUS_NOT_FINITE,
    STATUS_OUT_OF_RANGE,
    raw_layout,
    slack,
)
from tierd.codec.workers import run_spans
from tierd.units import CACHE_LINE_BYTES, round_up

IntArray = npt.NDArray[np.int64]

_ZERO, _ONE, _CODES = np.float32(0), np.float32(1), np.float32(255)
_NORMAL_MIN, _HALF_TINY = np.float32(2.0**-126), np.float32(2.0**-24)
_HALF_MAX = np.float32(HALF_MAX)
_ROUND = np.float32(2.0**23)  # x + 2^23 is x rounded half to even, its integer in the low bits
_NOT_FINITE, _OUT_OF_RANGE = 1, 2  # bits of a task's flags
_STATUS_OF_FLAGS = np.array(
    [0, STATUS_NOT_FINITE, STATUS_OUT_OF_RANGE, STATUS_NOT_FINITE], dtype=np.uint8
)


class _Shape(NamedTuple):
    """What a kernel must know of a layout; `padded` is head_dim rounded up to 16 lanes."""

    kind: int
    heads: int
    tokens: int
    d: int
    padded: int
    group: int
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


class _Scratch(NamedTuple):
    """Addresses of one span's scratch: float32 unless said otherwise."""

    tile: int  # [group, padded]
    codes: int  # uint8 [group, padded]
    low: int  # [max(group, padded)], as the next five
    high: int
    zero: int
    scale: int
    inverse: int
    error: int
    zero_half: int  # float16 [max(group, padded)]
    scale_half: int
    spare: int  # uint8 [16, 64]: one vector's or one transposed tile's tail


def encode_pages(
    source: IntArray, destination: IntArray, layout: PageLayout, threads: int | None = None
) -> npt.NDArray[np.uint8]:
    """Encode hot pages at [pages] addresses into payloads at [pages] addresses.

    Returns uint8 [pages]: 0 ok, 1 NaN or infinity, 2 beyond float16's range;
    with 1 or 2 the payload's bytes are unspecified. Zero pages is allowed.
    """
    shape = _shape(layout)
    tasks = len(source) * layout.kv_heads
    flags = np.zeros(tasks, dtype=np.uint8)
    addresses = source.ctypes.data, destination.ctypes.data, flags.ctypes.data

    def span(first: int, end: int) -> None:
        scratch, memory = _scratch(shape)
        _encode_span(*addresses, first, end, shape, slack(shape.d), scratch)
        del memory  # alive until here: the kernel knows only its address

    run_spans(span, tasks, len(source) * layout.payload_bytes, threads)
    pages = np.bitwise_or.reduce(flags.reshape(-1, layout.kv_heads), axis=1)
    return _STATUS_OF_FLAGS[pages]


def decode_pages(
    source: IntArray, layout: PageLayout, target: Target, threads: int | None = None
) -> None:
    """Decode payloads at [pages] addresses into `target`, one after the other."""
    shape = _shape(layout)
    tasks = len(source) * layout.kv_heads

    def span(first: int, end: int) -> None:
        scratch, memory = _scratch(shape)
        _decode_span(source.ctypes.data, first, end, shape, target, scratch)
        del memory

    run_spans(span, tasks, len(source) * layout.payload_bytes, threads)


def _shape(layout: PageLayout) -> _Shape:
    raw = raw_layout(layout)
    return _Shape(
        element_kind(layout.dtype), layout.kv_heads, layout.block_tokens, layout.head_dim,
        round_up(layout.head_dim, v.LANES), layout.group_tokens, raw.keys, raw.values,
        raw.head_bytes, layout.keys, layout.values, layout.key_scale, layout.key_zero,
        layout.value_scale, layout.value_zero, layout.key_error, layout.head_bytes,
    )  # fmt: skip


def _scratch(shape: _Shape) -> tuple[_Scratch, npt.NDArray[np.uint8]]:
    """Return addresses and the memory behind them, which the caller must keep."""
    wide = max(shape.group, shape.padded)
    sizes = [4 * shape.group * shape.padded, shape.group * shape.padded]
    sizes += [4 * wide] * 6 + [2 * wide] * 2 + [v.LANES * 64]
    memory = np.zeros(sum(sizes) + CACHE_LINE_BYTES, dtype=np.uint8)
    start = round_up(memory.ctypes.data, CACHE_LINE_BYTES)
    addresses = [start + sum(sizes[:i]) for i in range(len(sizes))]
    return _Scratch(*addresses), memory


@njit(nogil=True)
def _encode_span(
    source: Any, target: Any, flags: Any, first: Any, end: Any, s: Any, error_slack: Any, w: Any
) -> None:
    sources, targets = as_array(source, end, np.int64), as_array(target, end, np.int64)
    found = as_array(flags, end, np.uint8)
    for task in range(first, end):
        page, head = task // s.heads, task % s.heads
        hot = sources[page] + head * s.hot_head_bytes
        out = targets[page] + head * s.head_bytes
        bits = 0
        for group in range(s.tokens // s.group):
            bits |= _encode_keys(hot, out, group, s, error_slack, w)
            bits |= _encode_values(hot, out, group, s, w)
        _zero_gaps(out, s)
        found[task] = bits


@inner
def _encode_keys(hot: Any, out: Any, group: Any, s: Any, error_slack: Any, w: Any) -> Any:
    row_bytes = 4 * s.padded
    bits = _read_keys(hot + s.hot_keys, group, s, w) | _choose_scales(s.padded, w)
    v.copy_bytes(out + s.key_zero + 2 * group * s.d, w.zero_half, 2 * s.d)
    v.copy_bytes(out + s.key_scale + 2 * group * s.d, w.scale_half, 2 * s.d)
    magic = v.splat(_ROUND)
    for t in range(s.group):
        _prefetch_next(hot + s.hot_keys, out + s.keys, group, t, s)
        total = v.splat(_ZERO)
        for c in range(0, s.padded, 16):
            x = v.load_f32(w.tile + t * row_bytes + 4 * c)
            zero = v.load_f32(w.zero + 4 * c)
            shifted = v.add(v.mul(v.sub(x, zero), v.load_f32(w.inverse + 4 * c)), magic)
            v.store_low_bytes(w.codes + t * s.padded + c, shifted)
            product = v.mul(v.load_f32(w.scale + 4 * c), v.sub(shifted, magic))
            error = v.sub(x, v.add(zero, product))
            total = v.add(total, v.mul(error, error))
        v.write_f32(w.error + 4 * t, v.fold_sum(total))
    _store_key_codes(out + s.keys + group * s.d * s.group, s, w)
    _store_key_error(out + s.key_error + 2 * group * s.group, s, error_slack, w)
    return bits


@inner
def _encode_values(hot: Any, out: Any, group: Any, s: Any, w: Any) -> Any:
    row_bytes = 4 * s.padded
    bits = _read_values(hot + s.hot_values, group, s, w) | _choose_scales(s.group, w)
    v.copy_bytes(out + s.value_zero + 2 * group * s.group, w.zero_half, 2 * s.group)
    v.copy_bytes(out + s.value_scale + 2 * group * s.group, w.scale_half, 2 * s.group)
    magic = v.splat(_ROUND)
    for t in range(s.group):
        _prefetch_next(hot + s.hot_values, out + s.values, group, t, s)
        zero = v.splat(v.read_f32(w.zero + 4 * t))
        inverse = v.splat(v.read_f32(w.inverse + 4 * t))
        for c in range(0, s.padded, 16):
            x = v.load_f32(w.tile + t * row_bytes + 4 * c)
            shifted = v.add(v.mul(v.sub(x, zero), inverse), magic)
            v.store_low_bytes(w.codes + t * s.padded + c, shifted)
    codes = out + s.values + group * s.group * s.d
    if s.d == s.padded:
        v.copy_bytes(codes, w.codes, s.group * s.d)
    else:
        for t in range(s.group):
            v.copy_bytes(codes + t * s.d, w.codes + t * s.padded, s.d)
    return bits


@inner
def _read_keys(part: Any, group: Any, s: Any, w: Any) -> Any:
    """Widen a group into the tile, padded with 0; find each channel's low and high."""
    row_bytes = s.d * _item(s.kind)
    first = part + group * s.group * row_bytes
    zero = v.splat(_ZERO)
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
    return _flags(check)


@inner
def _read_values(part: Any, group: Any, s: Any, w: Any) -> Any:
    """Widen a group into the tile, padded with its own element; find each token's low and high."""
    item = _item(s.kind)
    zero = v.splat(_ZERO)
    check = zero
    whole = s.d // 16 * 16
    for t in range(s.group):
        row = part + (group * s.group + t) * s.d * item
        tile = w.tile + 4 * t * s.padded
        for c in range(0, whole, 16):
            x = load(row + c * item, s.kind)
            check = v.add(check, v.mul(x, zero))
            v.store_f32(tile + 4 * c, x)
        if whole < s.d:
            x = _widened(row, whole, _first_element(row, s, w), s, w)
            check = v.add(check, v.mul(x, zero))
            v.store_f32(tile + 4 * whole, x)
    for t in range(s.group):
        low = v.load_f32(w.tile + 4 * t * s.padded)
        high = low
        for c in range(16, s.padded, 16):
            x = v.load_f32(w.tile + 4 * (t * s.padded + c))
            low, high = v.lesser(x, low), v.greater(x, high)
        v.write_f32(w.low + 4 * t, v.fold_min(low))
        v.write_f32(w.high + 4 * t, v.fold_max(high))
    return _flags(check)


@inlined
def _widened(row: Any, c: Any, pad: Any, s: Any, w: Any) -> Any:
    """Elements c.. of a row as lanes; past the row's end, `pad`."""
    if c + 16 <= s.d:
        return load(row + c * _item(s.kind), s.kind)
    store_all(w.spare, pad, s.kind)
    v.copy_bytes(w.spare, row + c * _item(s.kind), (s.d - c) * _item(s.kind))
    return load(w.spare, s.kind)


@inlined
def _first_element(row: Any, s: Any, w: Any) -> Any:
    v.copy_bytes(w.spare, row, _item(s.kind))
    v.store_f32(w.error, load(w.spare, s.kind))
    return v.splat(v.read_f32(w.error))


@inlined
def _item(kind: Any) -> Any:
    return 4 if kind == FLOAT32 else 2


@inlined
def _flags(check: Any) -> Any:
    # NaN and infinity times 0 are NaN, and stay NaN in the sum.
    return 0 if v.fold_sum(check) == _ZERO else _NOT_FINITE


@inlined
def _prefetch_next(part: Any, codes: Any, group: Any, t: Any, s: Any) -> None:
    """While a group is in the arithmetic, fetch a row of the next and of where it will go.

    Groups are too short for the processor to see the pattern: without this a
    core waits for RAM a third of the time. Past the page's end it does no harm.
    """
    row_bytes = s.d * _item(s.kind)
    row = (group + 1) * s.group + t
    for line in range(0, row_bytes, CACHE_LINE_BYTES):
        v.prefetch_read(part + row * row_bytes + line)
    for line in range(0, s.d, CACHE_LINE_BYTES):
        v.prefetch_write(codes + row * s.d + line)


@inner
def _choose_scales(count: Any, w: Any) -> Any:
    """From low and high make zero, scale and inverse, [count] each, and their halves."""
    nothing, tiny, normal = v.splat(_ZERO), v.splat(_HALF_TINY), v.splat(_NORMAL_MIN)
    one, codes = v.splat(_ONE), v.splat(_CODES)
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
        inverse = v.where_less(nothing, scale, v.div(one, scale), nothing)
        v.store_f32(w.zero + 4 * i, zero)
        v.store_f32(w.scale + 4 * i, scale)
        v.store_f32(w.inverse + 4 * i, inverse)
        v.store_f16(w.zero_half + 2 * i, zero)
        v.store_f16(w.scale_half + 2 * i, scale)
    return _OUT_OF_RANGE if v.fold_max(largest) > _HALF_MAX else 0


@inner
def _store_key_codes(out: Any, s: Any, w: Any) -> None:
    """Transpose codes [group, padded] into out [head_dim, group]."""
    for c in range(0, s.padded, 16):
        last = c + 16 > s.d
        tile = w.spare if last else out + c * s.group
        for t in range(0, s.group, 16):
            v.transpose_16x16(w.codes + t * s.padded + c, s.padded, tile + t, s.group)
        if last:
            v.copy_bytes(out + c * s.group, tile, (s.d - c) * s.group)


@inner
def _store_key_error(out: Any, s: Any, error_slack: Any, w: Any) -> None:
    nothing = v.splat(_ZERO)
    largest = nothing
    for c in range(0, s.padded, 16):
        largest = v.greater(v.load_f32(w.scale + 4 * c), largest)
    least = v.splat(_HALF_TINY) if v.fold_max(largest) > _ZERO else nothing
    raised = v.splat(error_slack)
    for t in range(0, s.group, 16):
        norm = v.mul(v.sqrt(v.load_f32(w.error + 4 * t)), raised)
        v.store_f16(out + 2 * t, v.half_up(v.greater(norm, least)))


@inner
def _zero_gaps(out: Any, s: Any) -> None:
    codes, scales = s.tokens * s.d, 2 * (s.tokens // s.group) * s.d
    for part in (s.keys, s.values):
        v.zero_bytes(out + part + codes, -codes % CACHE_LINE_BYTES)
    for part in (s.key_scale, s.key_zero):
        v.zero_bytes(out + part + scales, -scales % CACHE_LINE_BYTES)
    for part in (s.value_scale, s.value_zero, s.key_error):
        v.zero_bytes(out + part + 2 * s.tokens, -2 * s.tokens % CACHE_LINE_BYTES)


@njit(nogil=True)
def _decode_span(source: Any, first: Any, end: Any, s: Any, target: Any, w: Any) -> None:
    sources = as_array(source, end, np.int64)
    row_bytes = s.d * _item(target.kind)
    for task in range(first, end):
        page, head = task // s.heads, task % s.heads
        payload = sources[page] + head * s.head_bytes
        row = (target.start_token + page * s.tokens) * row_bytes
        keys = target.keys + head * target.keys_head_bytes + row
        values = target.values + head * target.values_head_bytes + row
        for group in range(s.tokens // s.group):
            done = group * s.group * row_bytes
            _decode_keys(payload, keys + done, group, s, target.kind, row_bytes, w)
            _decode_values(payload, values + done, group, s, target.kind, row_bytes, w)


@inner
def _decode_keys(
    payload: Any, out: Any, group: Any, s: Any, kind: Any, row_bytes: Any, w: Any
) -> None:
    v.copy_bytes(w.zero_half, payload + s.key_zero + 2 * group * s.d, 2 * s.d)
    v.copy_bytes(w.scale_half, payload + s.key_scale + 2 * group * s.d, 2 * s.d)
    codes = payload + s.keys + group * s.d * s.group
    for c in range(0, s.padded, 16):
        tile = codes + c * s.group
        if c + 16 > s.d:
            v.copy_bytes(w.spare, tile, (s.d - c) * s.group)
            tile = w.spare
        for t in range(0, s.group, 16):
            v.transpose_16x16(tile + t, s.group, w.codes + t * s.padded + c, s.padded)
    for t in range(s.group):
        for c in range(0, s.padded, 16):
            scale, zero = v.load_f16(w.scale_half + 2 * c), v.load_f16(w.zero_half + 2 * c)
            x = v.add(zero, v.mul(scale, v.load_u8(w.codes + t * s.padded + c)))
            store(out + t * row_bytes, c, s.d, x, kind, w.spare)


@inner
def _decode_values(
    payload: Any, out: Any, group: Any, s: Any, kind: Any, row_bytes: Any, w: Any
) -> None:
    for t in range(0, s.group, 16):
        token = group * s.group + t
        v.store_f32(w.zero + 4 * t, v.load_f16(payload + s.value_zero + 2 * token))
        v.store_f32(w.scale + 4 * t, v.load_f16(payload + s.value_scale + 2 * token))
    codes = payload + s.values + group * s.group * s.d
    for t in range(s.group):
        zero = v.splat(v.read_f32(w.zero + 4 * t))
        scale = v.splat(v.read_f32(w.scale + 4 * t))
        for c in range(0, s.padded, 16):
            code = codes + t * s.d + c
            if c + 16 > s.d:
                v.copy_bytes(w.spare, code, s.d - c)
                code = w.spare
            x = v.add(zero, v.mul(scale, v.load_u8(code)))
            store(out + t * row_bytes, c, s.d, x, kind, w.spare)
