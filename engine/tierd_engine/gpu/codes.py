"""Codes of an encoded page as float16, exact: bytes, e4m3 bytes, and 4 bits that stand in lines."""

from __future__ import annotations

import triton
import triton.language as tl

LINE_CODES = tl.constexpr(128)
LINE_BYTES = tl.constexpr(64)
RUN_CODES = tl.constexpr(16)
GROUP_CHANNELS = tl.constexpr(32)  # that share a scale of 4-bit values
TILE_LANES = tl.constexpr(64)  # tokens of a tile of 4-bit keys, channels of a tile of 4-bit values


@triton.jit
def _numbers(codes: tl.tensor) -> tl.tensor:
    """Return whole codes: in the low bits of float16's 1024 they make 1024 + code."""
    return (codes.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True) - 1024.0


@triton.jit
def e4m3_numbers(codes: tl.tensor) -> tl.tensor:
    """Return e4m3's numbers: moved to float16's fields they are 2^-8 of themselves."""
    wide = codes.to(tl.uint16)
    return (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0


@triton.jit
def _bytes(start: tl.tensor, at: tl.tensor, mask: tl.tensor, S: tl.constexpr) -> tl.tensor:
    codes = tl.load(start + at, mask=mask, other=0)
    if S.codec == "fp8":
        return e4m3_numbers(codes)
    else:
        return _numbers(codes)


@triton.jit
def pair_place(at: tl.tensor) -> tl.tensor:
    """Return the byte in lines of the 4-bit codes `at`, which it shares with code `at` + 16.

    Code i of run k is bits 4k to 4k + 3 of word i; k is even for the lower half of a byte.
    """
    line, within = at // LINE_CODES, at % LINE_CODES
    run, word = within // RUN_CODES, within % RUN_CODES
    return line * LINE_BYTES + word * 4 + run // 2


@triton.jit
def _nibbles(start: tl.tensor, at: tl.tensor, mask: tl.tensor) -> tl.tensor:
    pair = tl.load(start + pair_place(at), mask=mask, other=0)
    return _numbers((pair.to(tl.int32) >> (4 * (at // RUN_CODES % 2))) & 15)


@triton.jit
def key_code_index(token: tl.tensor, channel: tl.tensor, S: tl.constexpr) -> tl.tensor:
    """Return which code of a head's keys is a token's channel's; shapes are broadcast."""
    lanes: tl.constexpr = min(TILE_LANES, S.tokens) if S.codec == "int4" else S.tile
    return (token // lanes * S.d + channel) * lanes + token % lanes


@triton.jit
def value_code_index(token: tl.tensor, channel: tl.tensor, S: tl.constexpr) -> tl.tensor:
    """Return which code of a head's values is a token's channel's; shapes are broadcast."""
    if S.codec == "k8v4" or S.codec == "int4":
        first = channel // TILE_LANES * TILE_LANES
        lanes = tl.minimum(S.d - first, TILE_LANES)
        return S.tokens * first + token * lanes + (channel - first)
    else:
        return token * S.d + channel


@triton.jit
def key_code_at(
    head: tl.tensor, token: tl.tensor, channel: tl.tensor, mask: tl.tensor, S: tl.constexpr
) -> tl.tensor:
    """Return codes of keys of these tokens and channels, broadcast; 0 where masked."""
    at = key_code_index(token, channel, S)
    if S.codec == "int4":
        return _nibbles(head + S.key_part, at, mask)
    else:
        return _bytes(head + S.key_part, at, mask, S)


@triton.jit
def value_code_at(
    head: tl.tensor, token: tl.tensor, channel: tl.tensor, mask: tl.tensor, S: tl.constexpr
) -> tl.tensor:
    """Return codes of values of these tokens and channels, broadcast; 0 where masked."""
    at = value_code_index(token, channel, S)
    if S.codec == "k8v4" or S.codec == "int4":
        return _nibbles(head + S.value_part, at, mask)
    else:
        return _bytes(head + S.value_part, at, mask, S)


@triton.jit
def key_codes(head: tl.tensor, token: tl.tensor, S: tl.constexpr) -> tl.tensor:
    """Return the codes [padded, tokens] of keys; 0 beyond head_dim."""
    channel = tl.arange(0, S.padded)
    mask = (channel < S.d)[:, None] & (token >= 0)[None, :]
    return key_code_at(head, token[None, :], channel[:, None], mask, S)


@triton.jit
def value_codes(head: tl.tensor, token: tl.tensor, valid: tl.tensor, S: tl.constexpr) -> tl.tensor:
    """Return the codes [tokens, padded] of values; 0 beyond head_dim and where not valid."""
    channel = tl.arange(0, S.padded)[None, :]
    mask = (channel < S.d) & valid[:, None]
    return value_code_at(head, token[:, None], channel, mask, S)


@triton.jit
def value_halves(
    start: tl.tensor, token: tl.tensor, valid: tl.tensor, S: tl.constexpr
) -> tl.tensor:
    """Return the scales or zeros at `start` of 4-bit values, float32 [tokens, padded]."""
    channel = tl.arange(0, S.padded)[None, :]
    at = channel // GROUP_CHANNELS * S.tokens + token[:, None]
    mask = (channel < S.d) & valid[:, None]
    half = tl.load(start.to(tl.pointer_type(tl.float16)) + at, mask=mask, other=0.0)
    return half.to(tl.float32)
