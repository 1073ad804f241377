"""Keys and values of 4 bits, in lines: what the kernels of k8v4 and int4 are made of.

Keys go by tiles of up to 64 tokens (`layout`), which hold one or two scale
groups; values by runs of 16 tokens, so that the least of 32 channels is found
for 16 tokens at once. head_dim is a multiple of 32: no tile has a tail.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tierd.codec import vector as v
from tierd.codec.elements import inlined, inner, load, store_all
from tierd.codec.int8 import store_key_rows
from tierd.codec.layout import LINE_CODES, TILE_LANES, VALUE_GROUP_CHANNELS
from tierd.codec.tiles import (
    ROUND,
    ZERO,
    choose_scales,
    code_keys,
    flags_of,
    item_bytes,
    load_scales,
    prefetch_row,
    transpose_codes,
    untranspose_codes,
)
from tierd.units import CACHE_LINE_BYTES

RUN_TOKENS = v.LANES
_CODES = np.float32(15)
_RUNS = LINE_CODES // v.LANES  # runs of 16 codes a line
_AHEAD_TOKENS = 64


@inner
def encode_keys(hot: Any, out: Any, tile: Any, s: Any, w: Any) -> Any:
    """Encode a tile of keys, a scale for each channel and group; returns the flags."""
    groups = s.tile_tokens // s.group
    bits = 0
    for i in range(groups):
        bits |= code_keys(hot, out, tile * groups + i, s, _CODES, w)
        transpose_codes(w.wide + i * s.group, s.tile_tokens, s, w)
    lines = out + s.keys + tile * s.d * s.tile_tokens // 2
    for line in range(s.d * s.tile_tokens // LINE_CODES):
        words = v.splat(ZERO)
        for run in range(_RUNS):
            at = w.wide + line * LINE_CODES + run * v.LANES
            words = v.push_nibble(words, v.load_byte_bits(at))
        v.store_f32(lines + line * CACHE_LINE_BYTES, words)
    return bits


@inner
def decode_keys(payload: Any, out: Any, tile: Any, s: Any, kind: Any, w: Any) -> None:
    """Decode a tile of keys to rows at `out`."""
    lines = payload + s.keys + tile * s.d * s.tile_tokens // 2
    magic = v.splat(ROUND)
    for line in range(s.d * s.tile_tokens // LINE_CODES):
        words = v.load_f32(lines + line * CACHE_LINE_BYTES)
        for run in range(_RUNS):
            at = w.wide + line * LINE_CODES + run * v.LANES
            v.store_low_bytes(at, v.add(v.nibble(words, run), magic))
    groups = s.tile_tokens // s.group
    for i in range(groups):
        load_scales(payload, s.key_zero, tile * groups + i, s, w.zero_half)
        load_scales(payload, s.key_scale, tile * groups + i, s, w.scale_half)
        untranspose_codes(w.wide + i * s.group, s.tile_tokens, s, w)
        store_key_rows(out + i * s.group * s.d * item_bytes(kind), s, kind, w)


@inner
def encode_values(hot: Any, out: Any, run: Any, s: Any, w: Any) -> Any:
    """Encode a run of values, a scale for each token and 32 channels; returns the flags."""
    bits = _read_values(hot + s.hot_values, run, s, w)
    bits |= choose_scales(s.d // VALUE_GROUP_CHANNELS * RUN_TOKENS, _CODES, w)
    for group in range(s.d // VALUE_GROUP_CHANNELS):
        at = 2 * (group * s.tokens + run * RUN_TOKENS)
        v.copy_bytes(out + s.value_zero + at, w.zero_half + 2 * group * RUN_TOKENS, 2 * RUN_TOKENS)
        v.copy_bytes(
            out + s.value_scale + at, w.scale_half + 2 * group * RUN_TOKENS, 2 * RUN_TOKENS
        )
    for t in range(RUN_TOKENS):
        row = run * RUN_TOKENS + t + _AHEAD_TOKENS
        prefetch_row(hot + s.hot_values, out + s.values, row, s.d // 2, s)
    c = 0
    while c + TILE_LANES <= s.d:
        _pack_values(out, run, c, TILE_LANES, s, w)
        c += TILE_LANES
    if c < s.d:
        _pack_values(out, run, c, VALUE_GROUP_CHANNELS, s, w)
    return bits


@inner
def _read_values(part: Any, run: Any, s: Any, w: Any) -> Any:
    """Widen a run into the tile; find low and high, [channel groups, RUN_TOKENS]."""
    item = item_bytes(s.kind)
    first = part + run * RUN_TOKENS * s.d * item
    zero = v.splat(ZERO)
    check = zero
    for group in range(s.d // VALUE_GROUP_CHANNELS):
        c = group * VALUE_GROUP_CHANNELS
        for t in range(RUN_TOKENS):
            row = first + (t * s.d + c) * item
            x, y = load(row, s.kind), load(row + 16 * item, s.kind)
            check = v.add(check, v.add(v.mul(x, zero), v.mul(y, zero)))
            v.store_f32(w.tile + 4 * (t * s.d + c), x)
            v.store_f32(w.tile + 4 * (t * s.d + c + 16), y)
            v.store_f32(w.lows + 4 * v.LANES * t, v.lesser(x, y))
            v.store_f32(w.highs + 4 * v.LANES * t, v.greater(x, y))
        v.store_f32(w.low + 4 * group * RUN_TOKENS, v.fold_rows_min(w.lows))
        v.store_f32(w.high + 4 * group * RUN_TOKENS, v.fold_rows_max(w.highs))
    return flags_of(check)


@inlined
def _run_lines(part: Any, run: Any, c: Any, lanes: Any, s: Any) -> Any:
    """Where a run's lines begin in the tile of `lanes` channels from c on."""
    return part + (c * s.tokens + run * RUN_TOKENS * lanes) // 2


@inlined
def _pack_values(out: Any, run: Any, c: Any, lanes: Any, s: Any, w: Any) -> None:
    lines = _run_lines(out + s.values, run, c, lanes, s)
    runs = lanes // v.LANES  # of 16 channels each, for one token
    magic = v.splat(ROUND)
    for line in range(RUN_TOKENS // (_RUNS // runs)):
        words = v.splat(ZERO)
        for i in range(_RUNS):
            t, channel = line * (_RUNS // runs) + i // runs, c + i % runs * v.LANES
            at = 4 * (channel // VALUE_GROUP_CHANNELS * RUN_TOKENS + t)
            zero, inverse = v.splat(v.read_f32(w.zero + at)), v.splat(v.read_f32(w.inverse + at))
            x = v.load_f32(w.tile + 4 * (t * s.d + channel))
            words = v.push_nibble(words, v.add(v.mul(v.sub(x, zero), inverse), magic))
        v.store_f32(lines + line * CACHE_LINE_BYTES, words)


@inner
def decode_values(payload: Any, out: Any, run: Any, s: Any, kind: Any, w: Any) -> None:
    """Decode a run of values to rows at `out`."""
    for group in range(s.d // VALUE_GROUP_CHANNELS):
        at = 2 * (group * s.tokens + run * RUN_TOKENS)
        v.store_f32(w.zero + 4 * group * RUN_TOKENS, v.load_f16(payload + s.value_zero + at))
        v.store_f32(w.scale + 4 * group * RUN_TOKENS, v.load_f16(payload + s.value_scale + at))
    c = 0
    while c + TILE_LANES <= s.d:
        _unpack_values(payload, out, run, c, TILE_LANES, s, kind, w)
        c += TILE_LANES
    if c < s.d:
        _unpack_values(payload, out, run, c, VALUE_GROUP_CHANNELS, s, kind, w)


@inlined
def _unpack_values(
    payload: Any, out: Any, run: Any, c: Any, lanes: Any, s: Any, kind: Any, w: Any
) -> None:
    item = item_bytes(kind)
    lines = _run_lines(payload + s.values, run, c, lanes, s)
    runs = lanes // v.LANES
    for line in range(RUN_TOKENS // (_RUNS // runs)):
        words = v.load_f32(lines + line * CACHE_LINE_BYTES)
        for i in range(_RUNS):
            t, channel = line * (_RUNS // runs) + i // runs, c + i % runs * v.LANES
            at = 4 * (channel // VALUE_GROUP_CHANNELS * RUN_TOKENS + t)
            scale = v.splat(v.read_f32(w.scale + at))
            x = v.add(v.splat(v.read_f32(w.zero + at)), v.mul(scale, v.nibble(words, i)))
            store_all(out + (t * s.d + channel) * item, x, kind)
