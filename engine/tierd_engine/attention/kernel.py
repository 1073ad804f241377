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
from typing import Any

import numpy as np
from numba import njit, prange

from tierd.codec.intrinsics import as_array
from tierd.units import round_up
from tierd_engine.attention.simd import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    UINT8,
    add,
    add_outer,
    add_products,
    exp2_below,
    fetch_add,
    fma,
    keep_first,
    load,
    load_first,
    max_lanes,
    maximum,
    multiply,
    prefetch,
    splat,
    splat_rows,
    store,
    store_first,
    store_rows,
    store_scalar,
    store_sums,
    sum_lanes,
    zero_rows,
    zeros,
)

ROWS_MAX = 4
WIDE = 64  # lanes of a tile: four AVX-512 registers
NARROW = 16  # for head dims and pages that 64 does not divide
_ELEMENT_BYTES = {UINT8: 1, FLOAT32: 4, BFLOAT16: 2, FLOAT16: 2}
_LINE_BYTES = 64
_AHEAD_BYTES_MAX = 65536  # prefetching further than this runs out of L2
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


@njit
def _folded(job: Any, scratch: Any) -> Any:
    return scratch + ROWS_MAX * job.q_stride


@njit
def _output(job: Any, scratch: Any) -> Any:
    return scratch + 2 * ROWS_MAX * job.q_stride


@njit
def _weights(job: Any, scratch: Any) -> Any:
    return scratch + 3 * ROWS_MAX * job.q_stride


@njit
def _stats(job: Any, scratch: Any) -> Any:
    return _weights(job, scratch) + ROWS_MAX * job.weight_stride


@njit
def _row_offset(job: Any, head: Any, row: Any) -> Any:
    """Index of (query, query head) in [n, heads] for a row of a KV head."""
    share = job.heads // job.kv_heads
    return row // share * job.heads + head * share + row % share


@njit
def _row_count(job: Any) -> Any:
    return job.queries * (job.heads // job.kv_heads)


@njit
def _visible(job: Any, page: Any, row: Any) -> Any:
    """How many tokens of the page a row sees."""
    tokens = np.int64(as_array(job.tokens, job.pages, np.int32)[page])
    if job.first == 0:
        return tokens
    query = row // (job.heads // job.kv_heads)
    first = as_array(job.first, job.pages, np.int64)[page]
    last = as_array(job.last, job.queries, np.int64)[query]
    return max(0, min(tokens, last - first + 1))


@njit
def _load_narrow_f32(address: Any, count: Any) -> Any:
    if count >= NARROW:
        return load(FLOAT32, NARROW, address)
    return load_first(FLOAT32, NARROW, address, count)


@njit
def _load_narrow_f16(address: Any, count: Any) -> Any:
    if count >= NARROW:
        return load(FLOAT16, NARROW, address)
    return load_first(FLOAT16, NARROW, address, count)


@njit
def _load_queries(job: Any, head: Any, row: Any, rows: Any, scratch: Any) -> None:
    """Copy rows of q, scaled, into scratch; rows that are not there are 0."""
    d = job.head_dim
    factor = splat(NARROW, np.float32(job.scale * _LOG2_E))
    for r in range(rows):
        source = job.q + 4 * d * _row_offset(job, head, row + r)
        target = scratch + r * job.q_stride
        for c in range(0, d, NARROW):
            q = zeros(NARROW)
            if row + r < _row_count(job):
                q = multiply(factor, _load_narrow_f32(source + 4 * c, d - c))
            store(q, target + 4 * c)


@njit
def _store_outputs(job: Any, page: Any, head: Any, row: Any, rows: Any, scratch: Any) -> None:
    """Normalise the rows that are there and write them and their lse."""
    d = job.head_dim
    stats = as_array(_stats(job, scratch), (2, NARROW), np.float32)[1]
    for r in range(min(rows, _row_count(job) - row)):
        at = page * job.queries * job.heads + _row_offset(job, head, row + r)
        source = _output(job, scratch) + r * job.q_stride
        target = job.out + 4 * d * at
        is_empty = _visible(job, page, row + r) == 0
        share = splat(NARROW, _ZERO if is_empty else np.float32(1.0) / stats[ROWS_MAX + r])
        for c in range(0, d, NARROW):
            o = zeros(NARROW) if is_empty else multiply(share, load(FLOAT32, NARROW, source + 4 * c))
            if d - c >= NARROW:
                store(o, target + 4 * c)
            else:
                store_first(o, target + 4 * c, d - c)
        top, total = np.float64(stats[r]), np.float64(stats[ROWS_MAX + r])
        lse = -np.inf if is_empty else top * _LN_2 + math.log(total)
        store_scalar(np.float32(lse), job.lse + 4 * at)


@functools.cache
def _make_sum(kind: int, rows: int, lanes: int) -> Any:
    """sum_i w[r][i] matrix[i][0:lanes], for a tile of columns of a row-major matrix.

    `ahead`: where the bytes that will be read next lie, in the same shape.
    """
    lines = -(-lanes * _ELEMENT_BYTES[kind] // _LINE_BYTES)

    @njit
    def weighted_sum(
        matrix: Any, row_bytes: Any, count: Any, weights: Any, stride: Any, initial: Any,
        result: Any, result_stride: Any, ahead: Any,
    ) -> None:  # fmt: skip
        tile = splat_rows(rows, lanes, initial)
        for i in range(count):
            for line in range(lines):
                prefetch(ahead + i * row_bytes + line * _LINE_BYTES)
            tile = add_outer(
                tile, weights + 4 * i, stride, load(kind, lanes, matrix + i * row_bytes)
            )
        store_rows(tile, result, result_stride)

    return weighted_sum


@functools.cache
def _make_tail_sum(kind: int, rows: int) -> Any:
    """As `_make_sum`, for the last columns, fewer than NARROW."""

    @njit
    def tail_sum(
        matrix: Any, row_bytes: Any, count: Any, columns: Any, weights: Any, stride: Any,
        initial: Any, result: Any, result_stride: Any,
    ) -> None:  # fmt: skip
        tile = splat_rows(rows, NARROW, initial)
        for i in range(count):
            row = load_first(kind, NARROW, matrix + i * row_bytes, columns)
            tile = add_outer(tile, weights + 4 * i, stride, row)
        store_rows(tile, result, result_stride)

    return tail_sum


@functools.cache
def _make_scores_int8(rows: int, lanes: int) -> Any:
    code_sum = _make_sum(UINT8, rows, lanes)

    @njit
    def fold(job: Any, base: Any, group: Any, scratch: Any) -> None:
        """folded[r][c] = q[r][c] * scale[c]; initial[r] = q[r]·zero."""
        d = job.head_dim
        scales = base + job.key_scale + 2 * d * group
        offsets = base + job.key_zero + 2 * d * group
        constants = zero_rows(rows, NARROW)
        for c in range(0, d, NARROW):
            scale = _load_narrow_f16(scales + 2 * c, d - c)
            zero = _load_narrow_f16(offsets + 2 * c, d - c)
            constants = add_products(constants, scratch + 4 * c, job.q_stride, zero)
            folded = add_products(zero_rows(rows, NARROW), scratch + 4 * c, job.q_stride, scale)
            store_rows(folded, _folded(job, scratch) + 4 * c, job.q_stride)
        store_sums(constants, _stats(job, scratch), 4)

    @njit
    def scores(job: Any, base: Any, seen: Any, scratch: Any) -> None:
        d, size = job.head_dim, job.group_tokens
        for group in range((seen + size - 1) // size):
            fold(job, base, group, scratch)
            codes = base + job.keys + group * size * d
            result = _weights(job, scratch) + 4 * group * size
            for j in range(0, size, lanes):
                code_sum(
                    codes + j, size, d, _folded(job, scratch), job.q_stride,
                    _stats(job, scratch), result + 4 * j, job.weight_stride,
                    codes + j + (job.values - job.keys),
                )  # fmt: skip

    return scores


@functools.cache
def _make_scores_raw(kind: int, rows: int) -> Any:
    size = _ELEMENT_BYTES[kind]

    @njit
    def scores(job: Any, base: Any, seen: Any, scratch: Any) -> None:
        d = job.head_dim
        whole = d - d % NARROW
        for j in range(seen):
            key = base + job.keys + size * d * j
            for line in range(0, size * d, _LINE_BYTES):
                prefetch(key + line + (job.values - job.keys))
            tile = zero_rows(rows, NARROW)
            for c in range(0, whole, NARROW):
                tile = add_products(
                    tile, scratch + 4 * c, job.q_stride, load(kind, NARROW, key + size * c)
                )
            if whole < d:
                last = load_first(kind, NARROW, key + size * whole, d - whole)
                tile = add_products(tile, scratch + 4 * whole, job.q_stride, last)
            store_sums(tile, _weights(job, scratch) + 4 * j, job.weight_stride)

    return scores


@functools.cache
def _make_softmax(kind: int, rows: int, lanes: int) -> Any:
    """Scores to weights; initial[r] = sum_j w_j zero_j, and w_j *= scale_j, for int8."""

    @njit
    def softmax(job: Any, base: Any, page: Any, row: Any, seen: Any, scratch: Any) -> None:
        stats = as_array(_stats(job, scratch), (2, NARROW), np.float32)
        for r in range(rows):
            weights = _weights(job, scratch) + r * job.weight_stride
            count = _visible(job, page, row + r) if row + r < _row_count(job) else 0
            tops = splat(lanes, _MINUS_INF)
            for j in range(0, seen, lanes):
                s = load(FLOAT32, lanes, weights + 4 * j)
                if j + lanes > count:
                    s = keep_first(s, count - j, _MINUS_INF)
                    store(s, weights + 4 * j)
                tops = maximum(s, tops)
            top = max_lanes(tops) if count > 0 else _ZERO
            totals = zeros(lanes)
            offsets = zeros(lanes)
            for j in range(0, seen, lanes):
                w = exp2_below(load(FLOAT32, lanes, weights + 4 * j), top)
                totals = add(totals, w)
                if kind == UINT8:
                    zero = load(FLOAT16, lanes, base + job.value_zero + 2 * j)
                    scale = load(FLOAT16, lanes, base + job.value_scale + 2 * j)
                    if j + lanes > seen:  # what lies beyond the valid tokens may be NaN
                        zero = keep_first(zero, seen - j, _ZERO)
                        scale = keep_first(scale, seen - j, _ZERO)
                    offsets = fma(w, zero, offsets)
                    w = multiply(w, scale)
                store(w, weights + 4 * j)
            stats[0, r] = sum_lanes(offsets)
            stats[1, r] = top
            stats[1, ROWS_MAX + r] = sum_lanes(totals)

    return softmax


@functools.cache
def _make_values(kind: int, rows: int) -> Any:
    size = _ELEMENT_BYTES[kind]
    wide, narrow = _make_sum(kind, rows, WIDE), _make_sum(kind, rows, NARROW)
    tail = _make_tail_sum(kind, rows)

    @njit
    def values(job: Any, base: Any, seen: Any, ahead: Any, scratch: Any) -> None:
        d, stride = job.head_dim, job.q_stride
        matrix, weights = base + job.values, _weights(job, scratch)
        initial, output = _stats(job, scratch), _output(job, scratch)
        c = 0
        while c + WIDE <= d:
            wide(
                matrix + size * c, size * d, seen, weights, job.weight_stride, initial,
                output + 4 * c, stride, ahead + size * c,
            )  # fmt: skip
            c += WIDE
        while c + NARROW <= d:
            narrow(
                matrix + size * c, size * d, seen, weights, job.weight_stride, initial,
                output + 4 * c, stride, ahead + size * c,
            )  # fmt: skip
            c += NARROW
        if c < d:
            tail(
                matrix + size * c, size * d, seen, d - c, weights, job.weight_stride, initial,
                output + 4 * c, stride,
            )  # fmt: skip

    return values


@functools.cache
def make_attend(kind: int, rows: int, lanes: int) -> Any:
    """Return the compiled driver `attend(jobs, workers)` for one kind of element.

    rows: query rows taken at a time, 1 to ROWS_MAX; lanes: WIDE, or NARROW where
    block_tokens is less than WIDE. `jobs`: a [1] array of JOB.
    """
    is_int8 = kind == UINT8
    scores = _make_scores_int8(rows, lanes) if is_int8 else _make_scores_raw(kind, rows)
    softmax, values = _make_softmax(kind, rows, lanes), _make_values(kind, rows)

    @njit
    def head_address(job: Any, task: Any) -> Any:
        page, head = task // job.kv_heads, task % job.kv_heads
        return as_array(job.addresses, job.pages, np.int64)[page] + head * job.head_bytes

    @njit
    def attend_task(job: Any, task: Any, following: Any, scratch: Any) -> None:
        page, head = task // job.kv_heads, task % job.kv_heads
        base = head_address(job, task)
        ahead = head_address(job, following) + job.keys
        for row in range(0, _row_count(job), rows):
            _load_queries(job, head, row, rows, scratch)
            seen = 0
            for r in range(row, min(row + rows, _row_count(job))):
                seen = max(seen, _visible(job, page, r))
            if seen > 0:
                scores(job, base, seen, scratch)
                softmax(job, base, page, row, seen, scratch)
                values(job, base, seen, ahead, scratch)
            _store_outputs(job, page, head, row, rows, scratch)

    @njit
    def work(job: Any, index: Any) -> None:
        """Claim batches of tasks, one batch early: what comes next is known and prefetched."""
        scratch = job.scratch + index * job.scratch_bytes
        tasks = job.pages * job.kv_heads
        start = fetch_add(job.claimed, job.batch)
        while start < tasks:
            following = fetch_add(job.claimed, job.batch)
            end = min(start + job.batch, tasks)
            for task in range(start, end):
                after = task + 1 if task + 1 < end else following
                attend_task(job, task, after if after < tasks else task, scratch)
            start = following

    @njit(parallel=True, nogil=True)
    def attend(jobs: Any, workers: Any) -> None:
        for index in prange(workers):
            work(jobs[0], index)

    return attend
