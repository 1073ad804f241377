"""Decode pages on the GPU, of any codec: tierd.codec.reference's numbers and no others."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tierd.codec.layout import PageLayout
from tierd.types import DType
from tierd_engine.gpu.codes import GROUP_CHANNELS, key_code_at, value_code_at
from tierd_engine.gpu.elements import (
    EXACT,
    copy_elements,
    page_start,
    store_narrow,
    typed,
    widen_elements,
)
from tierd_engine.gpu.shapes import constants, page_shape

CHANNELS = tl.constexpr(16)  # at a time


@triton.jit
def _half(start: tl.tensor, offset: tl.constexpr, at: tl.tensor, mask: tl.tensor) -> tl.tensor:
    return tl.load(typed(start, offset, tl.float16) + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _decode_group(
    payload: tl.tensor, keys: tl.tensor, values: tl.tensor, group: tl.tensor, S: tl.constexpr,
    TO: tl.constexpr,
) -> None:  # fmt: skip
    """Decode a group's tokens, CHANNELS at a time: x = zero + scale * code, fp8 without zero."""
    t = tl.arange(0, S.tile)
    token = group * S.tile + t
    is_token = t >= 0
    four_bit_values: tl.constexpr = S.codec == "k8v4" or S.codec == "int4"
    for first in range(0, S.d, CHANNELS):
        channel = first + tl.arange(0, CHANNELS)
        inside = channel < S.d
        mask = is_token[:, None] & inside[None, :]
        at = token[:, None] * S.d + channel[None, :]
        row = group * S.d + channel
        codes = key_code_at(payload, token[:, None], channel[None, :], mask, S).to(tl.float32)
        x = _half(payload, S.key_scale, row, inside)[None, :] * codes
        if S.key_zero >= 0:
            x = _half(payload, S.key_zero, row, inside)[None, :] + x
        store_narrow(keys, at, x, mask, TO)
        row = token
        if four_bit_values:
            row = first // GROUP_CHANNELS * S.tokens + token
        codes = value_code_at(payload, token[:, None], channel[None, :], mask, S).to(tl.float32)
        x = _half(payload, S.value_scale, row, is_token)[:, None] * codes
        if S.value_zero >= 0:
            x = _half(payload, S.value_zero, row, is_token)[:, None] + x
        store_narrow(values, at, x, mask, TO)


@triton.jit
def decode_kernel(
    source: tl.tensor, keys_to: tl.tensor, values_to: tl.tensor, to_head_bytes: tl.tensor,
    S: tl.constexpr, TO: tl.constexpr,
) -> None:  # fmt: skip
    """One program: one scale group of one KV head of one page, to rows of dtype TO."""
    page, group = tl.program_id(0), tl.program_id(2)
    head = tl.program_id(1).to(tl.int64)
    payload = page_start(source, page) + head * S.head_bytes
    keys = tl.load(keys_to + page).to(tl.pointer_type(tl.uint8)) + head * to_head_bytes
    values = tl.load(values_to + page).to(tl.pointer_type(tl.uint8)) + head * to_head_bytes
    if S.codec == "raw":
        first, count = group * S.tile * S.d, S.tile * S.d
        if S.dtype == TO:  # bit for bit, NaN included
            copy_elements(payload + S.key_part, keys, first, count, TO)
            copy_elements(payload + S.value_part, values, first, count, TO)
        else:
            widen_elements(payload + S.key_part, keys, first, count, S.dtype)
            widen_elements(payload + S.value_part, values, first, count, S.dtype)
    else:
        _decode_group(payload, keys, values, group, S, TO)


def decode_pages(
    source: torch.Tensor, keys_to: torch.Tensor, values_to: torch.Tensor, to_head_bytes: int,
    layout: PageLayout, dtype: DType,
) -> None:  # fmt: skip
    """Decode payloads to rows of `dtype`: float32, or the layout's own to nearest even.

    source, keys_to, values_to: int64 [pages] on the device: addresses of a payload and of
    where head 0's first key and value go. A head's tokens are contiguous; the next head's are
    `to_head_bytes` after. So a hot page (raw layout) and a stretch of staging are both targets.
    Nothing here waits for the device. Zero pages is allowed.
    """
    assert dtype in (DType.FLOAT32, layout.dtype)
    assert source.dtype == keys_to.dtype == values_to.dtype == torch.int64
    assert source.shape == keys_to.shape == values_to.shape
    shape = page_shape(layout)
    grid = (len(source), layout.kv_heads, layout.block_tokens // shape.tile)
    if len(source):
        decode_kernel[grid](
            source, keys_to, values_to, to_head_bytes, constants(shape), dtype.value, **EXACT
        )
