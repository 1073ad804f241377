"""Codec fp8: e4m3, keys scaled per channel over a group of tokens, values per token.

For a GPU that reads e4m3 as it stands; a CPU widens it by way of float16.

Bytes are those of `reference`, which defines each step.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tierd.codec import vector as v
from tierd.codec.elements import inner, store
from tierd.codec.int8 import store_value_codes
from tierd.codec.reference import E4M3_MAX
from tierd.codec.tiles import (
    ZERO,
    choose_sizes,
    item_bytes,
    load_scales,
    prefetch_row,
    read_keys,
    read_values,
    store_key_error,
    transpose_codes,
    untranspose_codes,
)

_LARGEST = np.float32(E4M3_MAX)


@inner
def encode_head(hot: Any, out: Any, s: Any, w: Any) -> Any:
    """Write every part of one KV head of a page at `out`; returns the flags."""
    bits = 0
    for group in range(s.tokens // s.group):
        bits |= _encode_keys(hot, out, group, s, w)
        bits |= _encode_values(hot, out, group, s, w)
    return bits


@inner
def _encode_keys(hot: Any, out: Any, group: Any, s: Any, w: Any) -> Any:
    row_bytes = 4 * s.padded
    bits = read_keys(hot + s.hot_keys, group, s, w) | choose_sizes(s.padded, _LARGEST, w)
    v.copy_bytes(out + s.key_scale + 2 * group * s.d, w.scale_half, 2 * s.d)
    for t in range(s.group):
        prefetch_row(hot + s.hot_keys, out + s.keys, (group + 1) * s.group + t, s.d, s)
        total = v.splat(ZERO)
        for c in range(0, s.padded, 16):
            x = v.load_f32(w.tile + t * row_bytes + 4 * c)
            code = w.codes + t * s.padded + c
            v.store_e4m3(code, v.mul(x, v.load_f32(w.inverse + 4 * c)))
            error = v.sub(x, v.mul(v.load_f32(w.scale + 4 * c), v.load_e4m3(code)))
            total = v.add(total, v.mul(error, error))
        v.write_f32(w.error + 4 * t, v.fold_sum(total))
    store_key_error(out + s.key_error + 2 * group * s.group, s, w)
    transpose_codes(out + s.keys + group * s.d * s.group, s.group, s, w)
    return bits


@inner
def _encode_values(hot: Any, out: Any, group: Any, s: Any, w: Any) -> Any:
    row_bytes = 4 * s.padded
    bits = read_values(hot + s.hot_values, group, s, w) | choose_sizes(s.group, _LARGEST, w)
    v.copy_bytes(out + s.value_scale + 2 * group * s.group, w.scale_half, 2 * s.group)
    for t in range(s.group):
        prefetch_row(hot + s.hot_values, out + s.values, (group + 1) * s.group + t, s.d, s)
        inverse = v.splat(v.read_f32(w.inverse + 4 * t))
        for c in range(0, s.padded, 16):
            x = v.load_f32(w.tile + t * row_bytes + 4 * c)
            v.store_e4m3(w.codes + t * s.padded + c, v.mul(x, inverse))
    store_value_codes(out + s.values + group * s.group * s.d, s, w)
    return bits


@inner
def decode_head(payload: Any, keys: Any, values: Any, s: Any, kind: Any, w: Any) -> None:
    """Write all tokens' rows of one KV head of a page."""
    group_bytes = s.group * s.d * item_bytes(kind)
    for group in range(s.tokens // s.group):
        _decode_keys(payload, keys + group * group_bytes, group, s, kind, w)
        _decode_values(payload, values + group * group_bytes, group, s, kind, w)


@inner
def _decode_keys(payload: Any, out: Any, group: Any, s: Any, kind: Any, w: Any) -> None:
    row_bytes = s.d * item_bytes(kind)
    load_scales(payload, s.key_scale, group, s, w.scale_half)
    untranspose_codes(payload + s.keys + group * s.d * s.group, s.group, s, w)
    for t in range(s.group):
        for c in range(0, s.padded, 16):
            scale = v.load_f16(w.scale_half + 2 * c)
            x = v.mul(scale, v.load_e4m3(w.codes + t * s.padded + c))
            store(out + t * row_bytes, c, s.d, x, kind, w.spare)


@inner
def _decode_values(payload: Any, out: Any, group: Any, s: Any, kind: Any, w: Any) -> None:
    row_bytes = s.d * item_bytes(kind)
    for t in range(0, s.group, 16):
        token = group * s.group + t
        v.store_f32(w.scale + 4 * t, v.load_f16(payload + s.value_scale + 2 * token))
    codes = payload + s.values + group * s.group * s.d
    for t in range(s.group):
        scale = v.splat(v.read_f32(w.scale + 4 * t))
        for c in range(0, s.padded, 16):
            code = codes + t * s.d + c
            if c + 16 > s.d:
                v.copy_bytes(w.spare, code, s.d - c)
                code = w.spare
            x = v.mul(scale, v.load_e4m3(code))
            store(out + t * row_bytes, c, s.d, x, kind, w.spare)
