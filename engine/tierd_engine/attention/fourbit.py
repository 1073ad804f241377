"""Steps of the kernel over 4-bit parts: lines of codes, scales that change within a row.

A matrix of codes is [channels, tokens] for keys and [tokens, channels] for values;
either way 32 columns share a scale, so a row of 64 has two weights, w0 and w1:

    result_c = initial_h + sum_i w_ih (1 + code_ic / 16)     h = 0 or 1 by column

A code c is read as the float32 1 + c / 16, which costs a shift, a mask and no
conversion: scales are taken times 16, and 16 scale is taken off each zero.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tierd.codec.layout import LINE_CODES, TILE_LANES, VALUE_GROUP_CHANNELS
from tierd_engine.attention.compiling import step
from tierd_engine.attention.simd import (
    FLOAT16,
    NARROW,
    Const,
    fetch_ahead,
    keep_first,
    load,
    multiply,
    number,
    prefetch,
    splat,
    subtract,
)
from tierd_engine.attention.tile import (
    LINE_BYTES,
    NIBBLE_UNIT,
    add_line,
    add_products,
    halves,
    splat_halves,
    store_halves,
    store_rows,
    store_sums,
    zero_rows,
)

_FLOAT16 = Const(FLOAT16)
_WHOLE, _HALF = Const(TILE_LANES), Const(VALUE_GROUP_CHANNELS)
_UNIT, _ZERO = np.float32(NIBBLE_UNIT), np.float32(0.0)


@step
def _sum_lines(
    rows: Any, lanes: Any, job: Any, lines: Any, count: Any, weights: Any, stride: Any,
    initial: Any, result: Any, result_stride: Any, part_end: Any, next_part: Any,
    scales: Any, scales_end: Any,
) -> None:  # fmt: skip
    """The sum above over `count` lines; w_rh are at weights + (r * halves + h) * stride.

    With each line, one from `scales` on is prefetched: all at once they would wait for each other.
    """
    tile = splat_halves(rows, lanes, initial)
    for i in range(count):
        line = lines + LINE_BYTES * i
        fetch_ahead(line, job.ahead, part_end, next_part, LINE_BYTES)
        if scales + LINE_BYTES * i < scales_end:
            prefetch(scales + LINE_BYTES * i)
        tile = add_line(lanes, tile, weights + 4 * (LINE_CODES // number(lanes)) * i, stride, line)
    store_halves(lanes, tile, result, result_stride)


@step
def _fold(rows: Any, lanes: Any, job: Any, base: Any, group: Any, half: Any, scratch: Any) -> None:
    """folded = 16 q scale; initial = q·(zero - 16 scale); for one half of a tile of keys."""
    d, count = job.head_dim, halves(lanes)
    scales, zeros_at = base + job.key_scale + 2 * d * group, base + job.key_zero + 2 * d * group
    folded = scratch + job.folded + half * job.q_stride
    constants = zero_rows(rows, NARROW)
    unit = splat(NARROW, _UNIT)
    for c in range(0, d, NARROW):
        scale = multiply(unit, load(_FLOAT16, NARROW, scales + 2 * c))
        zero = subtract(load(_FLOAT16, NARROW, zeros_at + 2 * c), scale)
        constants = add_products(constants, scratch + 4 * c, job.q_stride, zero)
        products = add_products(zero_rows(rows, NARROW), scratch + 4 * c, job.q_stride, scale)
        store_rows(products, folded + 4 * c, count * job.q_stride)
    store_sums(constants, scratch + job.stats + 4 * half, 4 * count)


@step
def scores(rows: Any, lanes: Any, job: Any, base: Any, seen: Any, scratch: Any) -> None:
    """Scores of keys of 4 bits, a tile of `lanes` tokens at a time."""
    d, count = job.head_dim, halves(lanes)
    tile_bytes = d * number(lanes) // 2
    for tile in range((seen + number(lanes) - 1) // number(lanes)):
        for half in range(count):
            _fold(rows, lanes, job, base, tile * count + half, half, scratch)
        _sum_lines(
            rows, lanes, job, base + job.keys + tile * tile_bytes, tile_bytes // LINE_BYTES,
            scratch + job.folded, job.q_stride, scratch + job.stats,
            scratch + job.weights + 4 * number(lanes) * tile, job.weight_stride,
            base + job.values, base + job.values, 0, 0,
        )  # fmt: skip


@step
def _scale_weights(
    rows: Any, lanes: Any, job: Any, base: Any, channel: Any, seen: Any, scratch: Any
) -> None:
    """scaled = 16 w scale, initial = w·(zero - 16 scale), a half for 32 channels each."""
    count, stride = halves(lanes), job.weight_stride
    unit = splat(NARROW, _UNIT)
    for half in range(count):
        at = 2 * job.block_tokens * (channel // VALUE_GROUP_CHANNELS + half)
        scaled = scratch + job.scaled + half * stride
        constants = zero_rows(rows, NARROW)
        for j in range(0, seen, NARROW):
            scale = multiply(unit, load(_FLOAT16, NARROW, base + job.value_scale + at + 2 * j))
            zero = subtract(load(_FLOAT16, NARROW, base + job.value_zero + at + 2 * j), scale)
            if j + NARROW > seen:  # what lies beyond the valid tokens may be NaN
                zero, scale = keep_first(zero, seen - j, _ZERO), keep_first(scale, seen - j, _ZERO)
            weights = scratch + job.weights + 4 * j
            constants = add_products(constants, weights, stride, zero)
            products = add_products(zero_rows(rows, NARROW), weights, stride, scale)
            store_rows(products, scaled + 4 * j, count * stride)
        store_sums(constants, scratch + job.stats + 4 * half, 4 * count)


@step
def _sum_values(
    rows: Any, lanes: Any, job: Any, base: Any, channel: Any, seen: Any, following: Any,
    scratch: Any,
) -> None:  # fmt: skip
    _scale_weights(rows, lanes, job, base, channel, seen, scratch)
    tokens_a_line = LINE_CODES // number(lanes)
    before = channel * job.block_tokens // 2
    _sum_lines(
        rows, lanes, job, base + job.values + before,
        (seen + tokens_a_line - 1) // tokens_a_line, scratch + job.scaled, job.weight_stride,
        scratch + job.stats, scratch + job.output + 4 * channel, job.q_stride,
        base + job.key_scale, following + job.keys,
        following + job.key_scale + before, following + job.head_bytes,
    )  # fmt: skip


@step
def values(rows: Any, job: Any, base: Any, seen: Any, following: Any, scratch: Any) -> None:
    """Output rows from values of 4 bits; prefetches the scales at `following`."""
    c = 0
    while c + TILE_LANES <= job.head_dim:
        _sum_values(rows, _WHOLE, job, base, c, seen, following, scratch)
        c += TILE_LANES
    if c < job.head_dim:
        _sum_values(rows, _HALF, job, base, c, seen, following, scratch)
