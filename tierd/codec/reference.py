"""The codecs in plain NumPy: the definition of every byte of a page.

The kernels must give these bytes and no others; a codec for a GPU will be held
to them too. Every step is one IEEE float32 operation in a stated order, so that
no machine has room to differ:

    x        the element widened to float32 (exact)
    low, high  min and max of x over the scale group; below 2^-126 counts as 0,
             so that a thread that flushes subnormals gives the same bytes
    zero     low rounded DOWN to float16
    scale    (high - zero) / m rounded UP to float16; m is 255, of 4-bit codes 15
    code     round half to even of (x - zero) * (1 / scale); 0 where scale is 0
    decoded  zero + scale * code (the product is exact: 11 bits times 8 bits)

and for fp8, where a byte is a sign, 4 bits of exponent and 3 of mantissa (e4m3,
no infinity, largest 448; the two patterns that mean NaN are never written):

    scale    max(-low, high) / 448 rounded UP to float16
    code     the byte whose number is nearest to x * (1 / scale), ties to the even
             byte; a zero keeps x's sign. Where scale is 0 the product is 0
    decoded  scale * number (exact: 11 bits times 4 bits)

Rounding zero down and scale up keeps every element inside the codes' range: no
code is clipped and the error is at most scale / 2 wherever the channel's
offset lies. To nearest, a channel far from 0 would lose up to half a float16
step of its offset, many codes wide.

key_error of a token is the L2 norm of x - decoded over head_dim, an upper
bound: squares are summed in 16 lanes (channel c in lane c mod 16, c rising),
lanes are folded 8, 4, 2, 1, the root is raised by the worst rounding of all
that and then rounded UP to float16. Where any channel of the group has a
scale, it is at least 2^-24, so that a square below float32's range is covered.

Bytes of the payload that belong to no part are zero: equal pages have equal digests.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tierd.codec.layout import LINE_CODES, TILE_LANES, PageLayout, page_layout
from tierd.types import CodecId, DType, Geometry
from tierd.units import round_up

U8Array = npt.NDArray[np.uint8]
Float32Array = npt.NDArray[np.float32]

STATUS_OK = 0
STATUS_NOT_FINITE = 1
STATUS_OUT_OF_RANGE = 2

LANES = 16
HALF_MAX = np.float32(65504.0)
E4M3_MAX = np.float32(448.0)
_NORMAL_MIN = np.float32(2.0**-126)
_HALF_TINY = np.float32(2.0**-24)
_FOUR_BIT_VALUES = (CodecId.K8V4, CodecId.INT4)
_STORED = {DType.FLOAT32: np.float32, DType.BFLOAT16: np.uint16, DType.FLOAT16: np.uint16}


def encode_page(hot: U8Array, layout: PageLayout) -> tuple[U8Array, int]:
    """Return (payload [payload_bytes], status) of one hot page.

    hot: [payload_bytes of the raw layout]. With a status other than 0 the
    payload means nothing.
    """
    raw = raw_layout(layout)
    payload = np.zeros(layout.payload_bytes, dtype=np.uint8)
    status = STATUS_OK
    for head in range(layout.kv_heads):
        source = hot[head * raw.head_bytes : (head + 1) * raw.head_bytes]
        target = payload[head * layout.head_bytes : (head + 1) * layout.head_bytes]
        if layout.codec is CodecId.RAW:
            for part in (raw.keys, raw.values):
                size = _elements(layout) * layout.dtype.itemsize
                target[part : part + size] = source[part : part + size]
            continue
        keys, values = (_widened(source, part, layout) for part in (raw.keys, raw.values))
        found = max(_status(keys), _status(values), key=(0, 2, 1).index)
        status = max(status, found, key=(0, 2, 1).index)
        if found == STATUS_OK:
            _encode_head(keys, values, target, layout)
    return payload, status


def decode_page(payload: U8Array, layout: PageLayout) -> tuple[Float32Array, Float32Array]:
    """Return float32 keys and values, [kv_heads, block_tokens, head_dim] each."""
    keys, values = [], []
    for head in range(layout.kv_heads):
        source = payload[head * layout.head_bytes : (head + 1) * layout.head_bytes]
        if layout.codec is CodecId.RAW:
            keys.append(_widened(source, layout.keys, layout))
            values.append(_widened(source, layout.values, layout))
        else:
            keys.append(_decode_keys(source, layout))
            values.append(_decode_values(source, layout))
    return np.stack(keys), np.stack(values)


def raw_layout(layout: PageLayout) -> PageLayout:
    """Return the hot (raw) layout of the same geometry; a page does not know its layers."""
    geometry = Geometry(1, layout.kv_heads, layout.head_dim, layout.dtype, layout.block_tokens)
    return page_layout(geometry, CodecId.RAW)


def narrowed(values: Float32Array, dtype: DType) -> npt.NDArray[np.float32 | np.uint16]:
    """Return values in the model dtype, to nearest even; 2-byte dtypes as uint16 bits.

    A decoded value may pass float16's ends by less than a step: it becomes the end.
    """
    if dtype is DType.FLOAT32:
        return values
    if dtype is DType.FLOAT16:
        return np.clip(values, -HALF_MAX, HALF_MAX).astype(np.float16).view(np.uint16)
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _elements(layout: PageLayout) -> int:
    return layout.block_tokens * layout.head_dim


def _widened(head: U8Array, part: int, layout: PageLayout) -> Float32Array:
    size = _elements(layout) * layout.dtype.itemsize
    stored = head[part : part + size].view(_STORED[layout.dtype])
    if layout.dtype is DType.BFLOAT16:
        wide = (stored.astype(np.uint32) << 16).view(np.float32)
    elif layout.dtype is DType.FLOAT16:
        wide = stored.view(np.float16).astype(np.float32)
    else:
        wide = stored
    return wide.reshape(layout.block_tokens, layout.head_dim)


def _status(x: Float32Array) -> int:
    if not np.isfinite(x).all():
        return STATUS_NOT_FINITE
    return STATUS_OUT_OF_RANGE if (np.abs(x) > HALF_MAX).any() else STATUS_OK


def _half_down(x: Float32Array) -> npt.NDArray[np.float16]:
    half = x.astype(np.float16)
    return np.where(half.astype(np.float32) > x, np.nextafter(half, np.float16(-np.inf)), half)


def _half_up(x: Float32Array) -> npt.NDArray[np.float16]:
    half = x.astype(np.float16)
    return np.where(half.astype(np.float32) < x, np.nextafter(half, np.float16(np.inf)), half)


class _Coded(NamedTuple):
    """zero and scale with a length of 1 along the axis they span; codes and decoded as x."""

    zero: npt.NDArray[np.float16] | None
    scale: npt.NDArray[np.float16]
    codes: U8Array
    decoded: Float32Array


def _ends(x: Float32Array, axis: int) -> tuple[Float32Array, Float32Array]:
    low, high = x.min(axis, keepdims=True), x.max(axis, keepdims=True)
    zero = np.float32(0)
    low = np.where(np.abs(low) < _NORMAL_MIN, zero, low)
    return low, np.where(np.abs(high) < _NORMAL_MIN, zero, high)


def _scale_of(span: Float32Array, codes_max: np.float32) -> npt.NDArray[np.float16]:
    step = np.maximum(span / codes_max, _HALF_TINY)
    return _half_up(np.where(span > 0, step, np.float32(0)))


def _inverse(scale: npt.NDArray[np.float16]) -> Float32Array:
    safe = np.where(scale > 0, scale, np.float16(1)).astype(np.float32)
    return np.where(scale > 0, np.float32(1) / safe, np.float32(0))


def _code_steps(x: Float32Array, axis: int, codes_max: int) -> _Coded:
    """Code x in equal steps from `zero`, one scale along `axis`."""
    low, high = _ends(x, axis)
    zero = _half_down(low)
    wide_zero = zero.astype(np.float32)
    scale = _scale_of(high - wide_zero, np.float32(codes_max))
    codes = np.rint((x - wide_zero) * _inverse(scale))
    decoded = wide_zero + scale.astype(np.float32) * codes
    return _Coded(zero, scale, codes.astype(np.uint8), decoded)


def _code_e4m3(x: Float32Array, axis: int) -> _Coded:
    low, high = _ends(x, axis)
    scale = _scale_of(np.maximum(-low, high), E4M3_MAX)
    with np.errstate(under="ignore"):
        y = x * _inverse(scale)
    codes = e4m3_codes(y)
    return _Coded(None, scale, codes, scale.astype(np.float32) * e4m3_numbers(codes))


def e4m3_numbers(codes: U8Array) -> Float32Array:
    """Return what bytes mean as e4m3, the NaN patterns as 480."""
    exponent, mantissa = (codes >> 3) & 15, (codes & 7).astype(np.float64)
    normal = (8 + mantissa) * 2.0 ** (exponent.astype(np.float64) - 10)
    size = np.where(exponent > 0, normal, mantissa * 2.0**-9)
    return np.where(codes & 0x80, -size, size).astype(np.float32)


def e4m3_codes(y: Float32Array) -> U8Array:
    """Return the nearest bytes to numbers of at most 464: there rounding passes 448."""
    numbers = e4m3_numbers(np.arange(0x7F, dtype=np.uint8)).astype(np.float64)
    size = np.abs(y).astype(np.float64)
    above = np.minimum(np.searchsorted(numbers, size), 0x7E)
    below = np.maximum(above - 1, 0)
    up, down = numbers[above] - size, size - numbers[below]
    is_up = (up < down) | ((up == down) & (above % 2 == 0))
    codes: U8Array = (np.where(is_up, above, below) + 128 * np.signbit(y)).astype(np.uint8)
    return codes


def _code_keys(keys: Float32Array, layout: PageLayout) -> _Coded:
    """Code keys [groups, group_tokens, head_dim] per channel."""
    if layout.codec is CodecId.FP8:
        return _code_e4m3(keys, axis=1)
    return _code_steps(keys, 1, 15 if layout.codec is CodecId.INT4 else 255)


def _code_values(values: Float32Array, layout: PageLayout) -> _Coded:
    """Code values [block_tokens, groups, value_group] per token and group."""
    if layout.codec is CodecId.FP8:
        return _code_e4m3(values, axis=2)
    return _code_steps(values, 2, 15 if layout.codec in _FOUR_BIT_VALUES else 255)


def _encode_head(
    keys: Float32Array, values: Float32Array, target: U8Array, layout: PageLayout
) -> None:
    d = layout.head_dim
    grouped = keys.reshape(-1, layout.group_tokens, d)
    zero, scale, codes, decoded = _code_keys(grouped, layout)
    if layout.codec is CodecId.INT4:
        by_tile = codes.reshape(-1, _tile_tokens(layout), d).swapaxes(1, 2)
        _put(target, layout.keys, pack_lines(by_tile))
    else:
        _put(target, layout.keys, np.ascontiguousarray(codes.swapaxes(1, 2)))
    _put(target, layout.key_scale, scale)
    if zero is not None:
        _put(target, layout.key_zero, zero)
    _put(target, layout.key_error, _key_error(grouped - decoded, scale))
    by_group = values.reshape(layout.block_tokens, -1, layout.value_group)
    zero, scale, codes, _ = _code_values(by_group, layout)
    if layout.codec not in _FOUR_BIT_VALUES:
        _put(target, layout.values, codes)
    else:
        flat = codes.reshape(layout.block_tokens, d)
        tiles = [pack_lines(flat[:, c : c + TILE_LANES]) for c in range(0, d, TILE_LANES)]
        _put(target, layout.values, np.concatenate(tiles))
    _put(target, layout.value_scale, scale[:, :, 0].T)
    if zero is not None:
        _put(target, layout.value_zero, zero[:, :, 0].T)


def _tile_tokens(layout: PageLayout) -> int:
    return min(TILE_LANES, layout.block_tokens)


def pack_lines(codes: U8Array) -> npt.NDArray[np.uint32]:
    """Return lines [lines, 16 words] of 4-bit codes of any shape, taken row-major."""
    runs = np.ascontiguousarray(codes).reshape(-1, LINE_CODES // LANES, LANES).astype(np.uint32)
    shifts = 4 * np.arange(LINE_CODES // LANES, dtype=np.uint32)
    words: npt.NDArray[np.uint32] = (runs << shifts[:, None]).sum(axis=1, dtype=np.uint32)
    return words


def unpack_lines(packed: U8Array) -> U8Array:
    """Return the codes, flat, of bytes that are whole lines."""
    words = packed.view(np.uint32).reshape(-1, 1, LANES)
    shifts = 4 * np.arange(LINE_CODES // LANES, dtype=np.uint32)
    return ((words >> shifts[:, None]) & 15).astype(np.uint8).reshape(-1)


def _key_error(error: Float32Array, scale: npt.NDArray[np.float16]) -> npt.NDArray[np.float16]:
    """error: [groups, group_tokens, head_dim]; scale: [groups, 1, head_dim]."""
    groups, tokens, d = error.shape
    squares = np.zeros((groups, tokens, round_up(d, LANES)), dtype=np.float32)
    with np.errstate(under="ignore"):
        squares[:, :, :d] = error * error
    lanes = np.zeros((groups, tokens, LANES), dtype=np.float32)
    for start in range(0, squares.shape[2], LANES):
        lanes = lanes + squares[:, :, start : start + LANES]
    while lanes.shape[2] > 1:
        half = lanes.shape[2] // 2
        lanes = lanes[:, :, :half] + lanes[:, :, half:]
    norm = np.sqrt(lanes[:, :, 0]) * slack(d)
    least = np.where((scale > 0).any(2), _HALF_TINY, np.float32(0))
    return _half_up(np.maximum(norm, least))


def slack(head_dim: int) -> np.float32:
    """Return the factor that covers every float32 rounding in a key_error (Higham 2002, 3.1).

    Each of at most head_dim + 8 roundings raises or lowers the sum by 2^-24 of it at most.
    """
    return np.float32(1 + (head_dim + 8) * 2.0**-24)


def _decode_keys(head: U8Array, layout: PageLayout) -> Float32Array:
    d, group = layout.head_dim, layout.group_tokens
    codes = head[layout.keys : layout.keys + layout.part_bytes[0]]
    if layout.codec is CodecId.INT4:
        tiles = unpack_lines(codes).reshape(-1, d, _tile_tokens(layout))
        codes = tiles.swapaxes(1, 2).reshape(-1, group, d)
    else:
        codes = codes.reshape(-1, d, group).swapaxes(1, 2)
    scale = _halves(head, layout.key_scale, layout.part_bytes[2]).reshape(-1, 1, d)
    if layout.codec is CodecId.FP8:
        decoded = scale * e4m3_numbers(codes)
    else:
        zero = _halves(head, layout.key_zero, layout.part_bytes[3]).reshape(-1, 1, d)
        decoded = zero + scale * codes.astype(np.float32)
    return decoded.reshape(layout.block_tokens, d)


def _decode_values(head: U8Array, layout: PageLayout) -> Float32Array:
    tokens, d = layout.block_tokens, layout.head_dim
    codes = head[layout.values : layout.values + layout.part_bytes[1]]
    if layout.codec in _FOUR_BIT_VALUES:
        codes = unpack_lines(codes)
        starts = range(0, d, TILE_LANES)
        tiles = [codes[tokens * c : tokens * (c + TILE_LANES)].reshape(tokens, -1) for c in starts]
        codes = np.concatenate(tiles, axis=1)
    by_group = codes.reshape(tokens, -1, layout.value_group)
    scale = _halves(head, layout.value_scale, layout.part_bytes[4]).reshape(-1, tokens).T[..., None]
    if layout.codec is CodecId.FP8:
        decoded = scale * e4m3_numbers(by_group)
    else:
        zero = _halves(head, layout.value_zero, layout.part_bytes[5]).reshape(-1, tokens)
        decoded = zero.T[..., None] + scale * by_group.astype(np.float32)
    return decoded.reshape(tokens, d)


def _halves(head: U8Array, part: int, size_bytes: int) -> Float32Array:
    return head[part : part + size_bytes].view(np.float16).astype(np.float32)


def _put(target: U8Array, part: int, array: npt.NDArray[np.generic]) -> None:
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    target[part : part + flat.size] = flat
