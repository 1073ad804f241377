"""The fused kernel: attention of a few query rows over one KV head of one page.

Query rows are the (query, query head) pairs that share a KV head. They are
taken 1 to 4 at a time: as many as keep a tile of accumulators, 64 lanes each,
in registers. One pass over the keys gives the scores, one over the values the
output; encoded bytes are widened in registers and never stored.

    int8  key = zero_c + scale_c code_jc    score_j = q·zero + sum_c (q_c scale_c) code_jc
          value = zero_j + scale_j code_jc  o_c = sum_j w_j zero_j + sum_j (w_j scale_j) code_jc
    raw   one dot product a token for the scores; the same sum for the values

Scores are in base 2 (log2 e is folded into q); lse leaves as natural logarithm.
A task (page, KV head) is computed by one thread in a fixed order, so results do
not depend on how many threads there are or on which of them ran it.

A kernel is made once per (kind of element, rows) and compiled on first use.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba import prange, types

from tierd.codec.intrinsics import as_array
from tierd.units import round_up
from tierd_engine.attention.compiling import compile_cached, step
from tierd_engine.attention.simd import (
    FLOAT16,
    FLOAT32,
    NARROW,
    UINT8,
    Const,
    ConstType,
    add,
    add_outer,
    add_products,
    element_bytes,
    exp2,
    fetch_add,
    fma,
    keep_first,
    load,
    load_first,
    load_narrow,
    max_lanes,
    maximum,
    multiply,
    number,
    prefetch,
    splat,
    splat_rows,
    store,
    store_narrow,
    store_rows,
    store_scalar,
    store_sums,
    subtract,
    sum_lanes,
    zero_rows,
    zeros,
)

ROWS_MAX = 4
WIDE = 64  # lanes of a tile: four AVX-512 registers
_WIDE, _NARROW = Const(WIDE), Const(NARROW)
_UINT8, _FLOAT16, _FLOAT32 = Const(UINT8), Const(FLOAT16), Const(FLOAT32)
_LINE_BYTES = 64
_LOG2_E = np.float32(1.4426950408889634)
_LN_2 = 0.6931471805599453
_MINUS_INF = np.float32(-np.inf)
_ZERO = np.float32(0.0)

# One call's arguments. Addresses are absolute; offsets, inside a head, in bytes.
_FIELDS = (
    "q", "addresses", "tokens", "first", "last", "out", "lse", "scratch", "claimed",
    "pages", "queries", "heads", "kv_heads", "head_dim",
    "keys", "values", "key_scale", "key_zero", "value_scale", "value_zero",
    "group_tokens", "head_bytes", "scratch_bytes", "q_stride", "weight_stride", "batch",
)  # fmt: skip
JOB = np.dtype([(name, np.int64) for name in _FIELDS] + [("scale", np.float64)])

# A worker's scratch: q, q folded with the key scales, output: 4 rows of q_stride bytes each;
# then weights: 4 rows of weight_stride; then four floats each of: initial, top, total.
_STATS_BYTES = 64


def strides(head_dim: int, block_tokens: int) -> tuple[int, int, int]:
    """Return q_stride, weight_stride and scratch_bytes of a job, in bytes."""
    q_stride = 4 * round_up(head_dim, WIDE)
    weight_stride = 4 * round_up(block_tokens, WIDE)
    return q_stride, weight_stride, ROWS_MAX * (3 * q_stride + weight_stride) + 2 * _STATS_BYTES


@step
def _folded(job: Any, scratch: Any) -> Any:
    return scratch + ROWS_MAX * job.q_stride


@step
def _output(job: Any, scratch: Any) -> Any:
    return scratch + 2 * ROWS_MAX * job.q_stride


@step
def _weights(job: Any, scratch: Any) -> Any:
    return scratch + 3 * ROWS_MAX * job.q_stride


@step
def _stats(job: Any, scratch: Any) -> Any:
    return _weights(job, scratch) + ROWS_MAX * job.weight_stride


@step
def _row_offset(job: Any, head: Any, row: Any) -> Any:
    """Index of (query, query head) in [n, heads] for a row of a KV head."""
    share = job.heads // job.kv_heads
    return row // share * job.heads + head * share + row % share


@step
def _row_count(job: Any) -> Any:
    return job.queries * (job.heads // job.kv_heads)


@step
def _visible(job: Any, page: Any, row: Any) -> Any:
    """How many tokens of the page a row sees."""
    tokens = np.int64(as_array(job.tokens, job.pages, np.int32)[page])
    if job.first == 0:
        return tokens
    query = row // (job.heads // job.kv_heads)
    first = as_array(job.first, job.pages, np.int64)[page]
    last = as_array(job.last, job.queries, np.int64)[query]
    return max(0, min(tokens, last - first + 1))


@step
def _load_queries(rows: Any, job: Any, head: Any, row: Any, scratch: Any) -> None:
    """Copy rows of q, scaled, into scratch; rows that are not there are 0."""
    d = job.head_dim
    factor = splat(NARROW, np.float32(job.scale * _LOG2_E))
    for r in range(number(rows)):
        source = job.q + 4 * d * _row_offset(job, head, row + r)
        target = scratch + r * job.q_stride
        for c in range(0, d, NARROW):
            q = zeros(NARROW)
            if row + r < _row_count(job):
                q = multiply(factor, load_narrow(_FLOAT32, source + 4 * c, d - c))
            store(q, target + 4 * c)


@step
def _store_outputs(rows: Any, job: Any, page: Any, head: Any, row: Any, scratch: Any) -> None:
    """Normalise the rows that are there and write them and their lse."""
    d = job.head_dim
    stats = as_array(_stats(job, scratch), (2, NARROW), np.float32)[1]
    for r in range(min(number(rows), _row_count(job) - row)):
        at = page * job.queries * job.heads + _row_offset(job, head, row + r)
        source = _output(job, scratch) + r * job.q_stride
        target = job.out + 4 * d * at
        is_empty = _visible(job, page, row + r) == 0
        share = splat(NARROW, _ZERO if is_empty else np.float32(1.0) / stats[ROWS_MAX + r])
        for c in range(0, d, NARROW):
            o = zeros(NARROW)
            if not is_empty:
                o = multiply(share, load(FLOAT32, NARROW, source + 4 * c))
            store_narrow(o, target + 4 * c, d - c)
        top, total = np.float64(stats[r]), np.float64(stats[ROWS_MAX + r])
        lse = -np.inf if is_empty else top * _LN_2 + math.log(total)
        store_scalar(np.float32(lse), job.lse + 4 * at)


@step
def _weighted_sum(
    kind: Any, rows: Any, lanes: Any, matrix: Any, row_bytes: Any, count: Any, weights: Any,
    stride: Any, initial: Any, result: Any, result_stride: Any, ahead: Any,
) -> None:  # fmt: skip
    """result[r] = initial[r] + sum_i w[r][i] matrix[i][0:lanes], for a row-major matrix.

    `ahead`: where the bytes that will be read next lie, in the same shape.
    """
    tile = splat_rows(rows, lanes, initial)
    lines = (number(lanes) * element_bytes(kind) + _LINE_BYTES - 1) // _LINE_BYTES
    for i in range(count):
        for line in range(lines):
            prefetch(ahead + i * row_bytes + line * _LINE_BYTES)
        tile = add_outer(tile, weights + 4 * i, stride, load(kind, lanes, matrix + i * row_bytes))
    store_rows(tile, result, result_stride)


@step
def _weighted_tail(
    kind: Any, rows: Any, columns: Any, matrix: Any, row_bytes: Any, count: Any, weights: Any,
    stride: Any, initial: Any, result: Any, result_stride: Any,
) -> None:  # fmt: skip
    """As `_weighted_sum`, for the last columns, fewer than NARROW."""
    tile = splat_rows(rows, NARROW, initial)
    for i in range(count):
        row = load_first(kind, NARROW, matrix + i * row_bytes, columns)
        tile = add_outer(tile, weights + 4 * i, stride, row)
    store_rows(tile, result, result_stride)


@step
def _fold(rows: Any, job: Any, base: Any, group: Any, scratch: Any) -> None:
    """folded[r][c] = q[r][c] * scale[c]; initial[r] = q[r]·zero; for a group of int8 keys."""
    d = job.head_dim
    scales = base + job.key_scale + 2 * d * group
    offsets = base + job.key_zero + 2 * d * group
    constants = zero_rows(rows, NARROW)
    for c in range(0, d, NARROW):
        scale = load_narrow(_FLOAT16, scales + 2 * c, d - c)
        zero = load_narrow(_FLOAT16, offsets + 2 * c, d - c)
        constants = add_products(constants, scratch + 4 * c, job.q_stride, zero)
        folded = add_products(zero_rows(rows, NARROW), scratch + 4 * c, job.q_stride, scale)
        store_rows(folded, _folded(job, scratch) + 4 * c, job.q_stride)
    store_sums(constants, _stats(job, scratch), 4)


@step
def _scores_int8(rows: Any, lanes: Any, job: Any, base: Any, seen: Any, scratch: Any) -> None:
    d, size = job.head_dim, job.group_tokens
    for group in range((seen + size - 1) // size):
        _fold(rows, job, base, group, scratch)
        codes = base + job.keys + group * size * d
        result = _weights(job, scratch) + 4 * group * size
        for j in range(0, size, number(lanes)):
            _weighted_sum(
                _UINT8, rows, lanes, codes + j, size, d, _folded(job, scratch), job.q_stride,
                _stats(job, scratch), result + 4 * j, job.weight_stride,
                codes + j + (job.values - job.keys),
            )  # fmt: skip


@step
def _scores_raw(kind: Any, rows: Any, job: Any, base: Any, seen: Any, scratch: Any) -> None:
    d, size = job.head_dim, element_bytes(kind)
    whole = d - d % NARROW
    for j in range(seen):
        key = base + job.keys + size * d * j
        for line in range(0, size * d, _LINE_BYTES):
            prefetch(key + line + (job.values - job.keys))
        tile = zero_rows(rows, NARROW)
        for c in range(0, whole, NARROW):
            k = load(kind, NARROW, key + size * c)
            tile = add_products(tile, scratch + 4 * c, job.q_stride, k)
        if whole < d:
            last = load_first(kind, NARROW, key + size * whole, d - whole)
            tile = add_products(tile, scratch + 4 * whole, job.q_stride, last)
        store_sums(tile, _weights(job, scratch) + 4 * j, job.weight_stride)


@step
def _softmax(
    kind: Any, rows: Any, lanes: Any, job: Any, base: Any, page: Any, row: Any, seen: Any,
    scratch: Any,
) -> None:  # fmt: skip
    """Scores to weights; for int8 initial[r] = sum_j w_j zero_j, then w_j *= scale_j."""
    stats = as_array(_stats(job, scratch), (2, NARROW), np.float32)
    for r in range(number(rows)):
        weights = _weights(job, scratch) + r * job.weight_stride
        count = _visible(job, page, row + r) if row + r < _row_count(job) else 0
        tops = splat(lanes, _MINUS_INF)
        for j in range(0, seen, number(lanes)):
            s = load(FLOAT32, lanes, weights + 4 * j)
            if j + number(lanes) > count:
                s = keep_first(s, count - j, _MINUS_INF)
                store(s, weights + 4 * j)
            tops = maximum(s, tops)
        top = max_lanes(tops) if count > 0 else _ZERO
        totals = zeros(lanes)
        offsets = zeros(lanes)
        for j in range(0, seen, number(lanes)):
            w = exp2(subtract(load(FLOAT32, lanes, weights + 4 * j), splat(lanes, top)))
            totals = add(totals, w)
            if number(kind) == UINT8:
                zero = load(FLOAT16, lanes, base + job.value_zero + 2 * j)
                scale = load(FLOAT16, lanes, base + job.value_scale + 2 * j)
                if j + number(lanes) > seen:  # what lies beyond the valid tokens may be NaN
                    zero = keep_first(zero, seen - j, _ZERO)
                    scale = keep_first(scale, seen - j, _ZERO)
                offsets = fma(w, zero, offsets)
                w = multiply(w, scale)
            store(w, weights + 4 * j)
        stats[0, r] = sum_lanes(offsets)
        stats[1, r] = top
        stats[1, ROWS_MAX + r] = sum_lanes(totals)


@step
def _values(
    kind: Any, rows: Any, job: Any, base: Any, seen: Any, ahead: Any, scratch: Any
) -> None:
    d, size = job.head_dim, element_bytes(kind)
    weights, stride = _weights(job, scratch), job.weight_stride
    c = 0
    while c + WIDE <= d:
        _weighted_sum(
            kind, rows, _WIDE, base + job.values + size * c, size * d, seen, weights, stride,
            _stats(job, scratch), _output(job, scratch) + 4 * c, job.q_stride, ahead + size * c,
        )  # fmt: skip
        c += WIDE
    while c + NARROW <= d:
        _weighted_sum(
            kind, rows, _NARROW, base + job.values + size * c, size * d, seen, weights, stride,
            _stats(job, scratch), _output(job, scratch) + 4 * c, job.q_stride, ahead + size * c,
        )  # fmt: skip
        c += NARROW
    if c < d:
        _weighted_tail(
            kind, rows, d - c, base + job.values + size * c, size * d, seen, weights, stride,
            _stats(job, scratch), _output(job, scratch) + 4 * c, job.q_stride,
        )  # fmt: skip


@step
def _head_address(job: Any, task: Any) -> Any:
    page, head = task // job.kv_heads, task % job.kv_heads
    return as_array(job.addresses, job.pages, np.int64)[page] + head * job.head_bytes


@step
def _attend_task(
    kind: Any, rows: Any, lanes: Any, job: Any, task: Any, following: Any, scratch: Any
) -> None:
    page, head = task // job.kv_heads, task % job.kv_heads
    base = _head_address(job, task)
    ahead = _head_address(job, following) + job.keys
    for row in range(0, _row_count(job), number(rows)):
        _load_queries(rows, job, head, row, scratch)
        seen = 0
        for r in range(row, min(row + number(rows), _row_count(job))):
            seen = max(seen, _visible(job, page, r))
        if seen > 0:
            if number(kind) == UINT8:
                _scores_int8(rows, lanes, job, base, seen, scratch)
            else:
                _scores_raw(kind, rows, job, base, seen, scratch)
            _softmax(kind, rows, lanes, job, base, page, row, seen, scratch)
            _values(kind, rows, job, base, seen, ahead, scratch)
        _store_outputs(rows, job, page, head, row, scratch)


@step
def _work(kind: Any, rows: Any, lanes: Any, job: Any, index: Any) -> None:
    """Claim batches of tasks, one batch early: what comes next is known and prefetched."""
    scratch = job.scratch + index * job.scratch_bytes
    tasks = job.pages * job.kv_heads
    start = fetch_add(job.claimed, job.batch)
    while start < tasks:
        following = fetch_add(job.claimed, job.batch)
        end = min(start + job.batch, tasks)
        for task in range(start, end):
            after = task + 1 if task + 1 < end else following
            _attend_task(kind, rows, lanes, job, task, after if after < tasks else task, scratch)
        start = following


def _attend(kind: Any, rows: Any, lanes: Any, jobs: Any, workers: Any) -> None:
    for index in prange(workers):
        _work(kind, rows, lanes, jobs[0], index)


@functools.cache
def attend_function(kind: int, rows: int, lanes: int) -> Callable[..., None]:
    """Return the compiled `attend(jobs, workers)` for these constants; `jobs`: [1] of JOB.

    Compiling takes seconds the first time on a machine, then the code is loaded from disk.
    """
    constants = [ConstType(value) for value in (kind, rows, lanes)]
    signature = (*constants, numba.typeof(np.zeros(1, dtype=JOB)), types.int64)
    entry = compile_cached(_attend, signature, parallel=True, nogil=True)
    return functools.partial(entry, Const(kind), Const(rows), Const(lanes))
