"""Encode pages on the GPU, with any codec: tierd.codec.reference's bytes and no others."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tierd.codec.layout import PageLayout
from tierd_engine.gpu.codes import (
    GROUP_CHANNELS,
    RUN_CODES,
    e4m3_numbers,
    key_code_index,
    pair_place,
    value_code_index,
)
from tierd_engine.gpu.coding import (
    e4m3_codes,
    e4m3_scale,
    folded,
    low_byte,
    paired,
    shifted_codes,
    zero_and_scale,
)
from tierd_engine.gpu.elements import (
    EXACT,
    HALF_TINY,
    ROUND,
    copy_elements,
    half_up,
    load_wide,
    magnitude_bits,
    page_start,
    severity_of,
    typed,
)
from tierd_engine.gpu.shapes import constants, page_shape

CHANNELS = tl.constexpr(16)  # of keys at a time: the lanes of key_error's sum
ROWS = tl.constexpr(16)  # of values at a time: one thread then holds few of them
# Left to itself, ptxas keeps k8v4 to 128 registers on sm_90, and spills three for it.
ENCODE = {**EXACT, "maxnreg": 168}


@triton.jit
def _store_key_nibbles(
    codes: tl.tensor, out: tl.tensor, group: tl.tensor, first: tl.tensor, S: tl.constexpr
) -> None:
    """Store codes [tile, CHANNELS] of 4 bits; a byte is of two runs of 16 tokens."""
    t = tl.arange(0, RUN_CODES)
    if S.tile == RUN_CODES:  # a run is all of a channel: the other is the next channel's
        pairs = paired(tl.reshape(codes, [RUN_CODES, CHANNELS // 2, 2]), 2)
        channel = first + 2 * tl.arange(0, CHANNELS // 2)
    else:
        pairs = paired(tl.reshape(codes, [2, RUN_CODES, CHANNELS]), 0)
        channel = first + tl.arange(0, CHANNELS)
    at = key_code_index((group * S.tile + t)[:, None], channel[None, :], S)
    mask = (t >= 0)[:, None] & (channel < S.d)[None, :]
    tl.store(typed(out, S.key_part, tl.uint8) + pair_place(at), pairs, mask=mask)


@triton.jit
def _encode_keys(hot: tl.tensor, out: tl.tensor, group: tl.tensor, S: tl.constexpr) -> tl.tensor:
    """Encode a group of keys; returns the pattern of the largest magnitude."""
    t = tl.arange(0, S.tile)
    token = group * S.tile + t
    squares = tl.zeros([S.tile, CHANNELS], tl.float32)
    largest_scale = tl.zeros([CHANNELS], tl.float32)
    worst = tl.zeros([CHANNELS], tl.int32)
    for first in range(0, S.d, CHANNELS):
        channel = first + tl.arange(0, CHANNELS)
        inside = channel < S.d
        at = token[:, None] * S.d + channel[None, :]
        x = load_wide(hot, S.hot_keys, at, inside[None, :], S.dtype)
        worst = tl.maximum(worst, tl.max(magnitude_bits(x), axis=0))
        low, high = tl.min(x, axis=0), tl.max(x, axis=0)
        row = group * S.d + channel
        if S.codec == "fp8":
            scale = e4m3_scale(low, high)
            wide_scale = scale.to(tl.float32)[None, :]
            codes = e4m3_codes(x, wide_scale)
            error = x - wide_scale * e4m3_numbers(codes).to(tl.float32)
        else:
            zero, scale = zero_and_scale(low, high, 15.0 if S.codec == "int4" else 255.0)
            wide_scale, wide_zero = scale.to(tl.float32)[None, :], zero.to(tl.float32)[None, :]
            shifted = shifted_codes(x, wide_zero, wide_scale)
            codes = low_byte(shifted)
            error = x - (wide_zero + wide_scale * (shifted - ROUND))
            tl.store(typed(out, S.key_zero, tl.float16) + row, zero, mask=inside)
        squares += error * error
        largest_scale = tl.maximum(largest_scale, scale.to(tl.float32))
        tl.store(typed(out, S.key_scale, tl.float16) + row, scale, mask=inside)
        if S.codec == "int4":
            _store_key_nibbles(codes, out, group, first, S)
        else:
            to = typed(out, S.key_part, tl.uint8) + row[None, :] * S.tile + t[:, None]
            tl.store(to, codes, mask=inside[None, :])
    norm = tl.sqrt_rn(folded(squares, S.tile)) * S.slack
    least = tl.where(tl.max(largest_scale, axis=0) > 0, HALF_TINY, 0.0)
    tl.store(typed(out, S.key_error, tl.float16) + token, half_up(tl.maximum(norm, least)))
    return tl.max(worst, axis=0)


@triton.jit
def _encode_value_rows(
    hot: tl.tensor, out: tl.tensor, token: tl.tensor, S: tl.constexpr
) -> tl.tensor:
    """Encode ROWS tokens' values of 8 bits; returns the pattern of each one's largest magnitude."""
    channel = tl.arange(0, S.padded)
    inside = (channel < S.d)[None, :]
    at = token[:, None] * S.d + channel[None, :]
    x = load_wide(hot, S.hot_values, at, inside, S.dtype)
    low = tl.min(tl.where(inside, x, float("inf")), axis=1)
    high = tl.max(tl.where(inside, x, float("-inf")), axis=1)
    if S.codec == "fp8":
        scale = e4m3_scale(low, high)
        codes = e4m3_codes(x, scale.to(tl.float32)[:, None])
    else:
        zero, scale = zero_and_scale(low, high, 255.0)
        wide_zero, wide_scale = zero.to(tl.float32)[:, None], scale.to(tl.float32)[:, None]
        codes = low_byte(shifted_codes(x, wide_zero, wide_scale))
        tl.store(typed(out, S.value_zero, tl.float16) + token, zero)
    tl.store(typed(out, S.value_scale, tl.float16) + token, scale)
    tl.store(typed(out, S.value_part, tl.uint8) + at, codes, mask=inside)
    return tl.max(magnitude_bits(x), axis=1)


@triton.jit
def _encode_value_nibbles(
    hot: tl.tensor, out: tl.tensor, token: tl.tensor, S: tl.constexpr
) -> tl.tensor:
    """Encode ROWS tokens' values of 4 bits; a byte is of two runs of 16 channels."""
    worst = tl.zeros([ROWS], tl.int32)
    run = tl.arange(0, RUN_CODES)
    for first in range(0, S.d, GROUP_CHANNELS):
        at = token[:, None] * S.d + (first + tl.arange(0, GROUP_CHANNELS))[None, :]
        x = load_wide(hot, S.hot_values, at, at >= 0, S.dtype)
        worst = tl.maximum(worst, tl.max(magnitude_bits(x), axis=1))
        zero, scale = zero_and_scale(tl.min(x, axis=1), tl.max(x, axis=1), 15.0)
        wide_zero, wide_scale = zero.to(tl.float32)[:, None], scale.to(tl.float32)[:, None]
        codes = low_byte(shifted_codes(x, wide_zero, wide_scale))
        pairs = paired(tl.reshape(codes, [ROWS, 2, RUN_CODES]), 1)
        place = pair_place(value_code_index(token[:, None], (first + run)[None, :], S))
        tl.store(typed(out, S.value_part, tl.uint8) + place, pairs)
        row = first // GROUP_CHANNELS * S.tokens + token
        tl.store(typed(out, S.value_scale, tl.float16) + row, scale)
        tl.store(typed(out, S.value_zero, tl.float16) + row, zero)
    return worst


@triton.jit
def _encode_values(hot: tl.tensor, out: tl.tensor, group: tl.tensor, S: tl.constexpr) -> tl.tensor:
    """Encode the values of a group's tokens; returns the pattern of the largest magnitude."""
    worst = tl.zeros([ROWS], tl.int32)
    for first in range(0, S.tile, ROWS):
        token = group * S.tile + first + tl.arange(0, ROWS)
        if S.codec == "k8v4" or S.codec == "int4":
            worst = tl.maximum(worst, _encode_value_nibbles(hot, out, token, S))
        else:
            worst = tl.maximum(worst, _encode_value_rows(hot, out, token, S))
    return tl.max(worst, axis=0)


@triton.jit
def encode_kernel(
    source: tl.tensor, destination: tl.tensor, severity: tl.tensor, S: tl.constexpr
) -> None:
    """One program: one scale group of one KV head of one page. severity: int32 [pages], risen."""
    page, group = tl.program_id(0), tl.program_id(2)
    head = tl.program_id(1).to(tl.int64)
    hot = page_start(source, page) + head * S.hot_head_bytes
    out = page_start(destination, page) + head * S.head_bytes
    if S.codec == "raw":  # it stores anything, NaN included
        first, count = group * S.tile * S.d, S.tile * S.d
        copy_elements(hot + S.hot_keys, out + S.key_part, first, count, S.dtype)
        copy_elements(hot + S.hot_values, out + S.value_part, first, count, S.dtype)
    else:
        keys_worst = _encode_keys(hot, out, group, S)
        values_worst = _encode_values(hot, out, group, S)
        found = severity_of(tl.maximum(keys_worst, values_worst))
        if found > 0:
            tl.atomic_max(severity + page, found, sem="relaxed")
    if group == 0:
        byte = tl.arange(0, 64)
        for i in tl.static_range(len(S.gaps)):
            tl.store(out + S.gaps[i][0] + byte, tl.zeros([64], tl.uint8), mask=byte < S.gaps[i][1])


def encode_pages(
    source: torch.Tensor, destination: torch.Tensor, layout: PageLayout
) -> torch.Tensor:
    """Encode hot pages into payloads of `layout`; returns a status each, int32 [pages].

    source, destination: int64 [pages] on the device: addresses of hot pages (the raw layout)
    and of payload_bytes each, 64-byte aligned, which stay valid until the stream has passed.
    Status as tierd.codec.encode_pages: 0 encoded, 1 NaN or infinity, 2 beyond float16's
    range; then that payload's bytes are unspecified. Codec raw always gives 0. Nothing here
    waits for the device. Zero pages is allowed.
    """
    assert source.dtype == destination.dtype == torch.int64 and source.shape == destination.shape
    severity = torch.zeros(len(source), dtype=torch.int32, device=source.device)
    shape = page_shape(layout)
    grid = (len(source), layout.kv_heads, layout.block_tokens // shape.tile)
    if len(source):
        encode_kernel[grid](source, destination, severity, constants(shape), **ENCODE)
    return (3 - severity) % 3  # severities 0, 1, 2 are statuses 0, 2, 1
