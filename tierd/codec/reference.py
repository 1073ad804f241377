"""The int8 and raw codecs in plain NumPy: the definition of every byte of a page.

The kernels in `int8` and `raw` must give these bytes and no others; a codec
for a GPU will be held to them too. Every step is one IEEE float32 operation
in a stated order, so that no machine has room to differ:

    x        the element widened to float32 (exact)
    low, high  min and max of x over the scale group; below 2^-126 counts as 0,
             so that a thread that flushes subnormals gives the same bytes
    zero     low rounded DOWN to float16
    scale    (high - zero) / 255 rounded UP to float16
    code     round half to even of (x - zero) * (1 / scale); 0 where scale is 0
    decoded  zero + scale * code (the product is exact: 11 bits times 8 bits)

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

import numpy as np
import numpy.typing as npt

from tierd.codec.layout import PageLayout, page_layout
from tierd.types import CodecId, DType, Geometry
from tierd.units import round_up

U8Array = npt.NDArray[np.uint8]
Float32Array = npt.NDArray[np.float32]

STATUS_OK = 0
STATUS_NOT_FINITE = 1
STATUS_OUT_OF_RANGE = 2

LANES = 16
HALF_MAX = np.float32(65504.0)
_NORMAL_MIN = np.float32(2.0**-126)
_HALF_TINY = np.float32(2.0**-24)
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
            _encode_int8_head(keys, values, target, layout)
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
            keys.append(_decode_int8_keys(source, layout))
            values.append(_decode_int8_values(source, layout))
    return np.stack(keys), np.stack(values)


def raw_layout(layout: PageLayout) -> PageLayout:
    """Return the hot (raw) layout of the same geometry; a page does not know its layers."""
    geometry = Geometry(1, layout.kv_heads, layout.head_dim, layout.dtype, layout.block_tokens)
    return page_layout(geometry, CodecId.RAW)


def narrowed(values: Float32Array, dtype: DType) -> npt.NDArray[np.float32 | np.uint16]:
    """Return values in the model dtype, to nearest even; 2-byte dtypes as uint16 bits.

    A decoded value may pass float16's largest by less than scale / 2: it becomes the largest.
    """
    if dtype is DType.FLOAT32:
        return values
    if dtype is DType.FLOAT16:
        return np.minimum(values, HALF_MAX).astype(np.float16).view(np.uint16)
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


def _scales(
    x: Float32Array, axis: int
) -> tuple[npt.NDArray[np.float16], npt.NDArray[np.float16], U8Array, Float32Array]:
    """Return (zero, scale, codes, decoded) of x with one scale along `axis`."""
    low, high = x.min(axis, keepdims=True), x.max(axis, keepdims=True)
    low = np.where(np.abs(low) < _NORMAL_MIN, np.float32(0), low)
    high = np.where(np.abs(high) < _NORMAL_MIN, np.float32(0), high)
    zero = _half_down(low)
    wide_zero = zero.astype(np.float32)
    span = high - wide_zero
    step = np.maximum(span / np.float32(255), _HALF_TINY)
    scale = _half_up(np.where(span > 0, step, np.float32(0)))
    wide_scale = scale.astype(np.float32)
    inverse = np.where(scale > 0, np.float32(1) / np.where(scale > 0, wide_scale, 1), 0)
    codes = np.rint((x - wide_zero) * inverse.astype(np.float32))
    decoded = wide_zero + wide_scale * codes
    return zero, scale, codes.astype(np.uint8), decoded


def _encode_int8_head(
    keys: Float32Array, values: Float32Array, target: U8Array, layout: PageLayout
) -> None:
    d, group = layout.head_dim, layout.group_tokens
    grouped = keys.reshape(-1, group, d)
    zero, scale, codes, decoded = _scales(grouped, axis=1)
    _put(target, layout.keys, np.ascontiguousarray(codes.swapaxes(1, 2)))
    _put(target, layout.key_zero, zero)
    _put(target, layout.key_scale, scale)
    _put(target, layout.key_error, _key_error(grouped - decoded, scale))
    zero, scale, codes, _ = _scales(values, axis=1)
    _put(target, layout.values, codes)
    _put(target, layout.value_zero, zero)
    _put(target, layout.value_scale, scale)


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


def _decode_int8_keys(head: U8Array, layout: PageLayout) -> Float32Array:
    d, group = layout.head_dim, layout.group_tokens
    codes = head[layout.keys : layout.keys + _elements(layout)].reshape(-1, d, group)
    zero, scale = (
        _halves(head, part, layout.block_tokens // group * d).reshape(-1, 1, d)
        for part in (layout.key_zero, layout.key_scale)
    )
    decoded = zero + scale * codes.swapaxes(1, 2).astype(np.float32)
    return decoded.reshape(layout.block_tokens, d)


def _decode_int8_values(head: U8Array, layout: PageLayout) -> Float32Array:
    tokens = layout.block_tokens
    codes = head[layout.values : layout.values + _elements(layout)].reshape(tokens, -1)
    zero, scale = (
        _halves(head, part, tokens)[:, None] for part in (layout.value_zero, layout.value_scale)
    )
    return zero + scale * codes.astype(np.float32)


def _halves(head: U8Array, part: int, count: int) -> Float32Array:
    return head[part : part + 2 * count].view(np.float16).astype(np.float32)


def _put(target: U8Array, part: int, array: npt.NDArray[np.generic]) -> None:
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    target[part : part + flat.size] = flat
