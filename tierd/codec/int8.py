"""Codec int8: keys per channel over a group of tokens, values per token; Numba kernels.

Bytes are those of `reference`, which defines each step.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tierd.codec import vector as v
from tierd.codec.elements import inner, store
from tierd.codec.tiles import (
    ROUND,
    choose_scales,
    code_keys,
    item_bytes,
    load_scales,
    prefetch_row,
    read_values,
    transpose_codes,
    untranspose_codes,
)

_CODES = np.float32(255)


@inner
def encode_head(hot: Any, out: Any, s: Any, w: Any) -> Any:
    """Write every part of one KV head of a page at `out`; returns the flags."""
    bits = 0
    for group in range(s.tokens // s.group):
        bits |= encode_keys(hot, out, group, s, w)
        bits |= _encode_values(hot, out, group, s, w)
    return bits


@inner
def encode_keys(hot: Any, out: Any, group: Any, s: Any, w: Any) -> Any:
    """Encode a group of keys, 8 bits each; returns the flags."""
    bits = code_keys(hot, out, group, s, _CODES, w)
    transpose_codes(out + s.keys + group * s.d * s.group, s.group, s, w)
    return bits


@inner
def _encode_values(hot: Any, out: Any, group: Any, s: Any, w: Any) -> Any:
    row_bytes = 4 * s.padded
    bits = read_values(hot + s.hot_values, group, s, w) | choose_scales(s.group, _CODES, w)
    v.copy_bytes(out + s.value_zero + 2 * group * s.group, w.zero_half, 2 * s.group)
    v.copy_bytes(out + s.value_scale + 2 * group * s.group, w.scale_half, 2 * s.group)
    magic = v.splat(ROUND)
    place = out + s.values + group * s.group * s.d
    codes = place if s.d == s.padded else w.codes  # a row that is padded goes by scratch
    for t in range(s.group):
        prefetch_row(hot + s.hot_values, out + s.values, (group + 1) * s.group + t, s.d, s)
        zero = v.splat(v.read_f32(w.zero + 4 * t))
        inverse = v.splat(v.read_f32(w.inverse + 4 * t))
        for c in range(0, s.padded, 16):
            x = v.load_f32(w.tile + t * row_bytes + 4 * c)
            shifted = v.add(v.mul(v.sub(x, zero), inverse), magic)
            v.store_low_bytes(codes + t * s.padded + c, shifted)
    if s.d != s.padded:
        store_value_codes(place, s, w)
    return bits


@inner
def store_value_codes(out: Any, s: Any, w: Any) -> None:
    """Copy w.codes [group, padded] to out [group, head_dim]."""
    if s.d == s.padded:
        v.copy_bytes(out, w.codes, s.group * s.d)
    else:
        for t in range(s.group):
            v.copy_bytes(out + t * s.d, w.codes + t * s.padded, s.d)


@inner
def decode_head(payload: Any, keys: Any, values: Any, s: Any, kind: Any, w: Any) -> None:
    """Write all tokens' rows of one KV head of a page."""
    group_bytes = s.group * s.d * item_bytes(kind)
    for group in range(s.tokens // s.group):
        decode_keys(payload, keys + group * group_bytes, group, s, kind, w)
        _decode_values(payload, values + group * group_bytes, group, s, kind, w)


@inner
def decode_keys(payload: Any, out: Any, group: Any, s: Any, kind: Any, w: Any) -> None:
    """Decode a group of keys of 8 bits each to rows at `out`."""
    load_scales(payload, s.key_zero, group, s, w.zero_half)
    load_scales(payload, s.key_scale, group, s, w.scale_half)
    untranspose_codes(payload + s.keys + group * s.d * s.group, s.group, s, w)
    store_key_rows(out, s, kind, w)


@inner
def store_key_rows(out: Any, s: Any, kind: Any, w: Any) -> None:
    """Decode w.codes [group, padded] with the scales and zeros in scratch to rows at `out`."""
    row_bytes = s.d * item_bytes(kind)
    for t in range(s.group):
        for c in range(0, s.padded, 16):
            scale, zero = v.load_f16(w.scale_half + 2 * c), v.load_f16(w.zero_half + 2 * c)
            x = v.add(zero, v.mul(scale, v.load_u8(w.codes + t * s.padded + c)))
            store(out + t * row_bytes, c, s.d, x, kind, w.spare)


@inner
def _decode_values(payload: Any, out: Any, group: Any, s: Any, kind: Any, w: Any) -> None:
    row_bytes = s.d * item_bytes(kind)
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
