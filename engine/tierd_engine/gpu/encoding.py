"""Encode and decode pages as int8, on the GPU: tierd.codec.reference's bytes and no others."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tierd.codec.layout import PageLayout
from tierd.errors import InvalidArgument
from tierd.types import CodecId, DType
from tierd_engine.gpu.elements import (
    EXACT,
    HALF_TINY,
    NORMAL_MIN,
    ROUND,
    half_down,
    half_up,
    load_wide,
    magnitude_bits,
    page_start,
    severity_of,
    store_narrow,
    typed,
)
from tierd_engine.gpu.shapes import page_shape

CHANNELS = tl.constexpr(16)  # of keys at a time: the lanes of key_error's sum
ROWS = tl.constexpr(16)  # of values at a time: one thread then holds few of them


@triton.jit
def _zero_and_scale(low: tl.tensor, high: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return zero and scale, float16, of scale groups with these ends."""
    low = tl.where(tl.abs(low) < NORMAL_MIN, 0.0, low)
    high = tl.where(tl.abs(high) < NORMAL_MIN, 0.0, high)
    zero = half_down(low)
    span = high - zero.to(tl.float32)
    step = tl.maximum(tl.div_rn(span, 255.0), HALF_TINY)
    return zero, half_up(tl.where(span > 0, step, 0.0))


@triton.jit
def _shifted_codes(x: tl.tensor, zero: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """Return 2^23 + code: the code is in the low byte, and the float less 2^23."""
    is_flat = scale == 0
    inverse = tl.where(is_flat, 0.0, tl.div_rn(1.0, tl.where(is_flat, 1.0, scale)))
    return (x - zero) * inverse + ROUND


@triton.jit
def _low_byte(shifted: tl.tensor) -> tl.tensor:
    return (shifted.to(tl.int32, bitcast=True) & 0xFF).to(tl.uint8)


@triton.jit
def _folded(lanes: tl.tensor, TOKENS: tl.constexpr) -> tl.tensor:
    """Return the sums of [TOKENS, 16], lanes folded 8, 4, 2, 1: the order is the reference's."""
    lanes = tl.sum(tl.reshape(lanes, [TOKENS, 2, 8]), axis=1)
    lanes = tl.sum(tl.reshape(lanes, [TOKENS, 2, 4]), axis=1)
    lanes = tl.sum(tl.reshape(lanes, [TOKENS, 2, 2]), axis=1)
    return tl.sum(lanes, axis=1)


@triton.jit
def _encode_keys(hot: tl.tensor, out: tl.tensor, group: tl.tensor, S: tl.constexpr) -> tl.tensor:
    """Encode a group of keys; returns the pattern of the largest magnitude."""
    t = tl.arange(0, S.tile)
    token = group * S.tile + t
    lane = tl.arange(0, CHANNELS)
    squares = tl.zeros([S.tile, CHANNELS], tl.float32)
    largest_scale = tl.zeros([CHANNELS], tl.float32)
    worst = tl.zeros([CHANNELS], tl.int32)
    for first in range(0, S.d, CHANNELS):
        channel = first + lane
        inside = channel < S.d
        at = token[:, None] * S.d + channel[None, :]
        x = load_wide(hot, S.hot_keys, at, inside[None, :], S.dtype)
        worst = tl.maximum(worst, tl.max(magnitude_bits(x), axis=0))
        zero, scale = _zero_and_scale(tl.min(x, axis=0), tl.max(x, axis=0))
        wide_zero, wide_scale = zero.to(tl.float32)[None, :], scale.to(tl.float32)[None, :]
        shifted = _shifted_codes(x, wide_zero, wide_scale)
        error = x - (wide_zero + wide_scale * (shifted - ROUND))
        squares += error * error
        largest_scale = tl.maximum(largest_scale, scale.to(tl.float32))
        row = group * S.d + channel
        codes = typed(out, S.key_part, tl.uint8) + row[None, :] * S.tile + t[:, None]
        tl.store(codes, _low_byte(shifted), mask=inside[None, :])
        tl.store(typed(out, S.key_scale, tl.float16) + row, scale, mask=inside)
        tl.store(typed(out, S.key_zero, tl.float16) + row, zero, mask=inside)
    norm = tl.sqrt_rn(_folded(squares, S.tile)) * S.slack
    least = tl.where(tl.max(largest_scale, axis=0) > 0, HALF_TINY, 0.0)
    tl.store(typed(out, S.key_error, tl.float16) + token, half_up(tl.maximum(norm, least)))
    return tl.max(worst, axis=0)


@triton.jit
def _encode_values(hot: tl.tensor, out: tl.tensor, group: tl.tensor, S: tl.constexpr) -> tl.tensor:
    """Encode the values of a group's tokens; returns the pattern of the largest magnitude."""
    channel = tl.arange(0, S.padded)
    inside = (channel < S.d)[None, :]
    worst = tl.zeros([ROWS], tl.int32)
    for first in range(0, S.tile, ROWS):
        token = group * S.tile + first + tl.arange(0, ROWS)
        at = token[:, None] * S.d + channel[None, :]
        x = load_wide(hot, S.hot_values, at, inside, S.dtype)
        worst = tl.maximum(worst, tl.max(magnitude_bits(x), axis=1))
        low = tl.min(tl.where(inside, x, float("inf")), axis=1)
        high = tl.max(tl.where(inside, x, float("-inf")), axis=1)
        zero, scale = _zero_and_scale(low, high)
        shifted = _shifted_codes(x, zero.to(tl.float32)[:, None], scale.to(tl.float32)[:, None])
        tl.store(typed(out, S.value_part, tl.uint8) + at, _low_byte(shifted), mask=inside)
        tl.store(typed(out, S.value_scale, tl.float16) + token, scale)
        tl.store(typed(out, S.value_zero, tl.float16) + token, zero)
    return tl.max(worst, axis=0)


@triton.jit
def encode_int8_kernel(
    source: tl.tensor, destination: tl.tensor, severity: tl.tensor, S: tl.constexpr
) -> None:
    """One program: one scale group of one KV head of one page. severity: int32 [pages], risen."""
    page, group = tl.program_id(0), tl.program_id(2)
    head = tl.program_id(1).to(tl.int64)
    hot = page_start(source, page) + head * S.hot_head_bytes
    out = page_start(destination, page) + head * S.head_bytes
    keys_worst = _encode_keys(hot, out, group, S)
    values_worst = _encode_values(hot, out, group, S)
    found = severity_of(tl.maximum(keys_worst, values_worst))
    if found > 0:
        tl.atomic_max(severity + page, found, sem="relaxed")
    if group == 0:
        byte = tl.arange(0, 64)
        for i in tl.static_range(len(S.gaps)):
            tl.store(out + S.gaps[i][0] + byte, tl.zeros([64], tl.uint8), mask=byte < S.gaps[i][1])


@triton.jit
def decode_int8_kernel(
    source: tl.tensor, keys_to: tl.tensor, values_to: tl.tensor, to_head_bytes: tl.tensor,
    S: tl.constexpr, TO: tl.constexpr,
) -> None:  # fmt: skip
    """One program: one scale group of one KV head of one page, to rows of dtype TO."""
    page, group = tl.program_id(0), tl.program_id(2)
    head = tl.program_id(1).to(tl.int64)
    payload = page_start(source, page) + head * S.head_bytes
    keys = tl.load(keys_to + page).to(tl.pointer_type(tl.uint8)) + head * to_head_bytes
    values = tl.load(values_to + page).to(tl.pointer_type(tl.uint8)) + head * to_head_bytes
    t = tl.arange(0, S.tile)
    token = group * S.tile + t
    lane = tl.arange(0, CHANNELS)
    scale = tl.load(typed(payload, S.value_scale, tl.float16) + token).to(tl.float32)
    zero = tl.load(typed(payload, S.value_zero, tl.float16) + token).to(tl.float32)
    for first in range(0, S.d, CHANNELS):
        channel = first + lane
        inside = channel < S.d
        mask = inside[None, :] & (t >= 0)[:, None]
        at = token[:, None] * S.d + channel[None, :]
        row = group * S.d + channel
        codes = tl.load(typed(payload, S.value_part, tl.uint8) + at, mask=mask, other=0)
        x = zero[:, None] + scale[:, None] * codes.to(tl.float32)
        store_narrow(values, at, x, mask, TO)
        codes_at = row[None, :] * S.tile + t[:, None]
        codes = tl.load(typed(payload, S.key_part, tl.uint8) + codes_at, mask=mask, other=0)
        key_scale = tl.load(typed(payload, S.key_scale, tl.float16) + row, mask=inside, other=0.0)
        key_zero = tl.load(typed(payload, S.key_zero, tl.float16) + row, mask=inside, other=0.0)
        wide_zero = key_zero.to(tl.float32)[None, :]
        x = wide_zero + key_scale.to(tl.float32)[None, :] * codes.to(tl.float32)
        store_narrow(keys, at, x, mask, TO)


def encode_pages(
    source: torch.Tensor, destination: torch.Tensor, layout: PageLayout
) -> torch.Tensor:
    """Encode hot pages into payloads of `layout`; returns a status each, int32 [pages].

    source, destination: int64 [pages] on the device: addresses of hot pages (the raw layout)
    and of payload_bytes each, 64-byte aligned, which stay valid until the stream has passed.
    Status as tierd.codec.encode_pages: 0 encoded, 1 NaN or infinity, 2 beyond float16's
    range; then that payload's bytes are unspecified. Nothing here waits for the device.
    Raises InvalidArgument for another codec than int8. Zero pages is allowed.
    """
    _require_int8(layout)
    assert source.dtype == destination.dtype == torch.int64 and source.shape == destination.shape
    severity = torch.zeros(len(source), dtype=torch.int32, device=source.device)
    shape = page_shape(layout)
    grid = (len(source), layout.kv_heads, layout.block_tokens // shape.tile)
    if len(source):
        encode_int8_kernel[grid](source, destination, severity, shape, **EXACT)
    return (3 - severity) % 3  # severities 0, 1, 2 are statuses 0, 2, 1


def decode_pages(
    source: torch.Tensor, keys_to: torch.Tensor, values_to: torch.Tensor, to_head_bytes: int,
    layout: PageLayout, dtype: DType,
) -> None:  # fmt: skip
    """Decode payloads to rows of `dtype`: float32, or the layout's own to nearest even.

    source, keys_to, values_to: int64 [pages] on the device: addresses of a payload and of
    where head 0's first key and value go. A head's tokens are contiguous; the next head's are
    `to_head_bytes` after. So a hot page (raw layout) and a stretch of staging are both targets.
    Raises InvalidArgument for another codec than int8. Zero pages is allowed.
    """
    _require_int8(layout)
    assert dtype in (DType.FLOAT32, layout.dtype)
    assert source.dtype == keys_to.dtype == values_to.dtype == torch.int64
    assert source.shape == keys_to.shape == values_to.shape
    shape = page_shape(layout)
    grid = (len(source), layout.kv_heads, layout.block_tokens // shape.tile)
    if len(source):
        decode_int8_kernel[grid](
            source, keys_to, values_to, to_head_bytes, shape, dtype.value, **EXACT
        )


def _require_int8(layout: PageLayout) -> None:
    if layout.codec is not CodecId.INT8:
        raise InvalidArgument(f"the GPU encodes and decodes int8, not {layout.codec.name.lower()}")
