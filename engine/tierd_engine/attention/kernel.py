"""The fused kernel: attention of a few query rows over one KV head of one page.

Query rows are the (query, query head) pairs that share a KV head. They are
taken 1 to 4 at a time: as many as keep a tile of accumulators, 64 lanes each,
in registers. One pass over the keys gives the scores, one over the values the
output; encoded bytes are widened in registers and never stored.

    int8   key = zero_c + scale_c code_jc    score_j = q·zero + sum_c (q_c scale_c) code_jc
           value = zero_j + scale_j code_jc  o_c = sum_j w_j zero_j + sum_j (w_j scale_j) code_jc
    fp8    the same, without zeros
    4 bit  the same sums over lines of codes: `fourbit`
    dot    the sums over int8 codes as integers, where the processor can: `bytedot`
    raw    one dot product a token for the scores; the same sum for the values

Scores are in base 2 (log2 e is folded into q); lse leaves as natural logarithm.
A task (page, KV head) is computed by one thread in a fixed order, so results do
not depend on how many threads there are or on which of them ran it.

A kernel is made once per (kind of page, rows, lanes) and compiled on first use. Kinds of
page are the elements' own, two more for pages with 4-bit parts, and those by integers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types
from numba.extending import overload

from tierd.codec.intrinsics import as_array
from tierd.codec.layout import PageLayout
from tierd.units import CACHE_LINE_BYTES, round_up
from tierd_engine.attention import bytedot, fourbit, rawkeys
from tierd_engine.attention.compiling import STEP, compile_cached, inlined, step
from tierd_engine.attention.fetching import fetch_more, fetch_rest, start_fetching
from tierd_engine.attention.simd import (
    BFLOAT16,
    E4M3,
    E4M3_UNIT,
    FLOAT16,
    FLOAT32,
    NARROW,
    UINT8,
    Const,
    ConstType,
    add,
    element_bytes,
    exp2,
    fetch_add,
    fetch_ahead,
    fma,
    keep_first,
    load,
    load_first,
    load_int32,
    load_int64,
    load_narrow,
    load_scalar,
    max_lanes,
    maximum,
    multiply,
    number,
    prefetch_lines,
    splat,
    store,
    store_narrow,
    store_scalar,
    subtract,
    sum_lanes,
    zeros,
)
from tierd_engine.attention.tile import (
    add_outer,
    add_products,
    splat_rows,
    store_rows,
    store_sums,
    zero_rows,
)

ROWS_MAX = 4
WIDE = 64  # lanes of a tile: four AVX-512 registers
_WIDE, _NARROW = Const(WIDE), Const(NARROW)
_UINT8, _FLOAT16, _FLOAT32 = Const(UINT8), Const(FLOAT16), Const(FLOAT32)
_BFLOAT16 = Const(BFLOAT16)
# Kinds of pages beside those of elements; DOT: 8-bit codes are summed as integers.
K8V4, INT4, UINT8_DOT, K8V4_DOT = 16, 17, 18, 19
AHEAD_BYTES_MAX = 16384  # how far ahead to prefetch: measured best of 4 to 32 KiB; L1 holds 48
_LOG2_E = np.float32(1.4426950408889634)
_LN_2 = 0.6931471805599453
_MINUS_INF = np.float32(-np.inf)
_E4M3_UNIT = np.float32(E4M3_UNIT)
_ZERO = np.float32(0.0)

# One call's arguments. The first two lines change with each call: absolute addresses, then
# counts. The third says where the parts of a worker's scratch stand, the fourth where those of
# a head do, both in bytes.
CALL_FIELDS = (
    "q", "addresses", "tokens", "first", "last", "out", "lse", "scratch", "claimed",
    "pages", "batch",
)  # fmt: skip
_FIELDS = (
    *CALL_FIELDS, "heads", "kv_heads", "share", "rows", "head_dim", "block_tokens",
    "group_tokens", "q_kind", "ahead", "folded", "output", "weights", "scaled", "stats", "cursor",
    "q_stride", "weight_stride", "scratch_bytes",
    "keys", "values", "key_scale", "key_zero", "value_scale", "value_zero", "key_error",
    "head_bytes",
)  # fmt: skip
JOB = np.dtype([(name, np.int64) for name in _FIELDS] + [("scale", np.float64)])
_LAYOUT_FIELDS = (
    *_FIELDS[_FIELDS.index("keys") :], "kv_heads", "head_dim", "block_tokens", "group_tokens",
)  # fmt: skip
# Stats: eight floats of initial, four each of top and total; a line more for `bytedot`.
_TOPS, _TOTALS = 32, 48


def make_job(layout: PageLayout, heads: int, n: int, q_kind: int = FLOAT32) -> npt.NDArray[np.void]:
    """Return a [1] array of JOB for n queries, filled in but for CALL_FIELDS and scale.

    `q_kind`: of the queries' elements, FLOAT32 or BFLOAT16.

    A worker's scratch holds ROWS_MAX rows each of q, of output and of weights, and twice
    as many of q folded with key scales and of weights scaled: 4-bit codes have two scales a row,
    and 8-bit keys summed as integers have the next group's beside this one's.
    """
    job = np.zeros(1, dtype=JOB)
    for name in _LAYOUT_FIELDS:
        job[name] = getattr(layout, name)
    share = heads // layout.kv_heads
    job["heads"], job["share"], job["rows"] = heads, share, n * share
    job["q_kind"] = q_kind
    # No further than a part is long: what is read next begins at the next part's start.
    job["ahead"] = min(AHEAD_BYTES_MAX, *layout.part_bytes[:2])
    q_stride = 4 * round_up(layout.head_dim, WIDE)
    weight_stride = 4 * round_up(layout.block_tokens, WIDE)
    job["q_stride"], job["weight_stride"] = q_stride, weight_stride
    job["folded"] = ROWS_MAX * q_stride
    job["output"] = job["folded"] + 2 * ROWS_MAX * q_stride
    job["weights"] = job["output"] + ROWS_MAX * q_stride
    job["scaled"] = job["weights"] + ROWS_MAX * weight_stride
    job["stats"] = job["scaled"] + 2 * ROWS_MAX * weight_stride
    job["cursor"] = job["stats"] + 2 * CACHE_LINE_BYTES
    job["scratch_bytes"] = job["cursor"] + CACHE_LINE_BYTES
    return job


@step
def _row_offset(job: Any, head: Any, row: Any) -> Any:
    """Index of (query, query head) in [n, heads] for a row of a KV head."""
    return row // job.share * job.heads + head * job.share + row % job.share


@step
def _visible(job: Any, page: Any, row: Any) -> Any:
    """How many tokens of the page a row sees."""
    tokens = load_int32(job.tokens + 4 * page)
    if job.first == 0:
        return tokens
    first, last = load_int64(job.first + 8 * page), load_int64(job.last + 8 * (row // job.share))
    return max(0, min(tokens, last - first + 1))


@inlined
def _is_dot(kind: Any) -> Any:
    return number(kind) == UINT8_DOT or number(kind) == K8V4_DOT


@inlined
def _fetch_more(kind: Any, job: Any, scratch: Any, lines: Any) -> None:
    if _is_dot(kind):
        fetch_more(scratch + job.cursor, lines)


@step
def _start_fetching(kind: Any, job: Any, following: Any, is_last: Any, scratch: Any) -> None:
    """Let the last rows of a task ask for the next one, but for what 4-bit values ask for."""
    start = following if number(kind) == UINT8_DOT else following + job.ahead
    end = following + job.key_error if is_last else start
    start_fetching(start, end, scratch + job.cursor)


@step
def _load_queries(kind: Any, rows: Any, job: Any, head: Any, row: Any, scratch: Any) -> None:
    """Copy rows of q, scaled, into scratch; rows that are not there are 0."""
    d = job.head_dim
    factor = splat(NARROW, np.float32(job.scale * _LOG2_E))
    for r in range(number(rows)):
        size = 2 if job.q_kind == BFLOAT16 else 4
        source = job.q + size * d * _row_offset(job, head, row + r)
        target = scratch + r * job.q_stride
        for c in range(0, d, NARROW):
            _fetch_more(kind, job, scratch, 1)
            q = zeros(NARROW)
            if row + r < job.rows:
                if size == 2:
                    q = load_narrow(_BFLOAT16, source + 2 * c, d - c)
                else:
                    q = load_narrow(_FLOAT32, source + 4 * c, d - c)
                q = multiply(factor, q)
            store(q, target + 4 * c)


@step
def _store_outputs(
    kind: Any, rows: Any, job: Any, page: Any, head: Any, row: Any, scratch: Any
) -> None:
    """Normalise the rows that are there and write them and their lse."""
    d = job.head_dim
    for r in range(min(number(rows), job.rows - row)):
        at = page * job.rows * job.kv_heads + _row_offset(job, head, row + r)
        source = scratch + job.output + r * job.q_stride
        target = job.out + 4 * d * at
        is_empty = _visible(job, page, row + r) == 0
        total = load_scalar(scratch + job.stats + _TOTALS + 4 * r)
        share = splat(NARROW, np.float32(1.0) / total)
        for c in range(0, d, NARROW):
            _fetch_more(kind, job, scratch, 1)
            o = zeros(NARROW)
            if not is_empty:
                o = multiply(share, load(FLOAT32, NARROW, source + 4 * c))
            store_narrow(o, target + 4 * c, d - c)
        top = np.float64(load_scalar(scratch + job.stats + _TOPS + 4 * r))
        lse = -np.inf if is_empty else top * _LN_2 + math.log(np.float64(total))
        store_scalar(np.float32(lse), job.lse + 4 * at)


@step
def _weighted_sum(
    kind: Any, rows: Any, lanes: Any, ahead: Any, matrix: Any, row_bytes: Any, count: Any,
    weights: Any, stride: Any, initial: Any, result: Any, result_stride: Any, part_end: Any,
    next_part: Any,
) -> None:  # fmt: skip
    """result[r] = initial[r] + sum_i w[r][i] matrix[i][0:lanes], for a row-major matrix.

    The matrix is within a part of a page that ends at `part_end`; what is read next begins at
    `next_part`.
    """
    tile = splat_rows(rows, lanes, initial)
    size = number(lanes) * element_bytes(kind)
    for i in range(count):
        row = matrix + i * row_bytes
        fetch_ahead(row, ahead, part_end, next_part, size)
        tile = add_outer(tile, weights + 4 * i, stride, load(kind, lanes, row))
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
def _fold(kind: Any, rows: Any, job: Any, base: Any, group: Any, scratch: Any) -> None:
    """folded[r][c] = q[r][c] * scale[c]; initial[r] = q[r]·zero; for a group of 8-bit keys."""
    d = job.head_dim
    scales = base + job.key_scale + 2 * d * group
    offsets = base + job.key_zero + 2 * d * group
    constants = zero_rows(rows, NARROW)
    for c in range(0, d, NARROW):
        scale = load_narrow(_FLOAT16, scales + 2 * c, d - c)
        if number(kind) == E4M3:
            scale = multiply(scale, splat(NARROW, _E4M3_UNIT))
        else:
            zero = load_narrow(_FLOAT16, offsets + 2 * c, d - c)
            constants = add_products(constants, scratch + 4 * c, job.q_stride, zero)
        folded = add_products(zero_rows(rows, NARROW), scratch + 4 * c, job.q_stride, scale)
        store_rows(folded, scratch + job.folded + 4 * c, job.q_stride)
    store_sums(constants, scratch + job.stats, 4)


@step
def _scores_8_bit(
    kind: Any, rows: Any, lanes: Any, job: Any, base: Any, seen: Any, scratch: Any
) -> None:
    d, size = job.head_dim, job.group_tokens
    for group in range((seen + size - 1) // size):
        _fold(kind, rows, job, base, group, scratch)
        codes = base + job.keys + group * size * d
        result = scratch + job.weights + 4 * group * size
        for j in range(0, size, number(lanes)):
            _weighted_sum(
                kind, rows, lanes, job.ahead, codes + j, size, d, scratch + job.folded,
                job.q_stride, scratch + job.stats, result + 4 * j, job.weight_stride,
                base + job.values, base + job.values,
            )  # fmt: skip


@step
def _softmax(
    kind: Any, rows: Any, lanes: Any, job: Any, base: Any, page: Any, row: Any, seen: Any,
    scratch: Any,
) -> None:  # fmt: skip
    """Scores to weights; for 8-bit values initial[r] = sum_j w_j zero_j, then w_j *= scale_j."""
    for r in range(number(rows)):
        weights = scratch + job.weights + r * job.weight_stride
        count = _visible(job, page, row + r) if row + r < job.rows else 0
        tops = splat(lanes, _MINUS_INF)
        for j in range(0, seen, number(lanes)):
            _fetch_more(kind, job, scratch, 1)
            s = load(FLOAT32, lanes, weights + 4 * j)
            if j + number(lanes) > count:
                s = keep_first(s, count - j, _MINUS_INF)
                store(s, weights + 4 * j)
            tops = maximum(s, tops)
        top = max_lanes(tops) if count > 0 else _ZERO
        totals = zeros(lanes)
        offsets = zeros(lanes)
        for j in range(0, seen, number(lanes)):
            _fetch_more(kind, job, scratch, 4)
            w = exp2(subtract(load(FLOAT32, lanes, weights + 4 * j), splat(lanes, top)))
            totals = add(totals, w)
            if number(kind) == UINT8 or number(kind) == E4M3:
                scale = load(FLOAT16, lanes, base + job.value_scale + 2 * j)
                if j + number(lanes) > seen:  # what lies beyond the valid tokens may be NaN
                    scale = keep_first(scale, seen - j, _ZERO)
                if number(kind) == E4M3:
                    scale = multiply(scale, splat(lanes, _E4M3_UNIT))
                else:
                    zero = load(FLOAT16, lanes, base + job.value_zero + 2 * j)
                    if j + number(lanes) > seen:
                        zero = keep_first(zero, seen - j, _ZERO)
                    offsets = fma(w, zero, offsets)
                w = multiply(w, scale)
            store(w, weights + 4 * j)
        stats = scratch + job.stats + 4 * r
        store_scalar(sum_lanes(offsets), stats)
        store_scalar(top, stats + _TOPS)
        store_scalar(sum_lanes(totals), stats + _TOTALS)


@step
def _values_by_row(
    kind: Any, rows: Any, job: Any, base: Any, seen: Any, following: Any, scratch: Any
) -> None:
    d, size = job.head_dim, element_bytes(kind)
    weights, stride = scratch + job.weights, job.weight_stride
    values_end = base + job.head_bytes
    if number(kind) == UINT8 or number(kind) == E4M3:
        values_end = base + job.key_scale
        prefetch_lines(following + job.key_scale, following + job.head_bytes)
    c = 0
    while c + WIDE <= d:
        _weighted_sum(
            kind, rows, _WIDE, job.ahead, base + job.values + size * c, size * d, seen,
            weights, stride, scratch + job.stats, scratch + job.output + 4 * c, job.q_stride,
            values_end, following + job.keys,
        )  # fmt: skip
        c += WIDE
    while c + NARROW <= d:
        _weighted_sum(
            kind, rows, _NARROW, job.ahead, base + job.values + size * c, size * d, seen,
            weights, stride, scratch + job.stats, scratch + job.output + 4 * c, job.q_stride,
            values_end, following + job.keys,
        )  # fmt: skip
        c += NARROW
    if c < d:
        _weighted_tail(
            kind, rows, d - c, base + job.values + size * c, size * d, seen, weights, stride,
            scratch + job.stats, scratch + job.output + 4 * c, job.q_stride,
        )  # fmt: skip


def _scores(kind: Any, rows: Any, lanes: Any, job: Any, base: Any, seen: Any, scratch: Any) -> None:
    """Write q·k of the first `seen` tokens, at least, to the rows of weights."""
    raise NotImplementedError("which steps a kind takes is chosen when its kernel is compiled")


# Not strict: an implementation without annotations would count as another signature.
@overload(_scores, jit_options=STEP, strict=False)
def _choose_scores(
    kind: Any, rows: Any, lanes: Any, job: Any, base: Any, seen: Any, scratch: Any
) -> Callable[..., None]:
    if kind.value == INT4:
        return lambda kind, rows, lanes, job, base, seen, scratch: fourbit.scores(
            rows, lanes, job, base, seen, scratch
        )
    if kind.value in (UINT8_DOT, K8V4_DOT):
        return lambda kind, rows, lanes, job, base, seen, scratch: bytedot.scores(
            rows, job, base, seen, scratch
        )
    if kind.value == K8V4:
        return lambda kind, rows, lanes, job, base, seen, scratch: _scores_8_bit(
            _UINT8, rows, lanes, job, base, seen, scratch
        )
    if kind.value in (UINT8, E4M3):
        return _scores_8_bit.py_func  # type: ignore[no-any-return]
    return lambda kind, rows, lanes, job, base, seen, scratch: rawkeys.scores(
        kind, rows, job, base, seen, scratch
    )


def _values(
    kind: Any, rows: Any, job: Any, base: Any, seen: Any, following: Any, scratch: Any
) -> None:
    """Write the weighted sum of the first `seen` tokens' values to the rows of output."""
    raise NotImplementedError("which steps a kind takes is chosen when its kernel is compiled")


@overload(_values, jit_options=STEP, strict=False)
def _choose_values(
    kind: Any, rows: Any, job: Any, base: Any, seen: Any, following: Any, scratch: Any
) -> Callable[..., None]:
    if kind.value == UINT8_DOT:
        return lambda kind, rows, job, base, seen, following, scratch: bytedot.values(
            rows, job, base, seen, scratch
        )
    if kind.value in (K8V4, K8V4_DOT, INT4):
        return lambda kind, rows, job, base, seen, following, scratch: fourbit.values(
            rows, job, base, seen, following, scratch
        )
    return _values_by_row.py_func  # type: ignore[no-any-return]


@step
def _head_address(job: Any, task: Any) -> Any:
    page, head = task // job.kv_heads, task % job.kv_heads
    return load_int64(job.addresses + 8 * page) + head * job.head_bytes


@step
def _attend_task(
    kind: Any, rows: Any, lanes: Any, job: Any, task: Any, following: Any, scratch: Any
) -> None:
    page, head = task // job.kv_heads, task % job.kv_heads
    base = _head_address(job, task)
    following_base = _head_address(job, following)
    for row in range(0, job.rows, number(rows)):
        is_last = row + number(rows) >= job.rows
        if _is_dot(kind):
            _start_fetching(kind, job, following_base, is_last, scratch)
        _load_queries(kind, rows, job, head, row, scratch)
        seen = 0
        for r in range(row, min(row + number(rows), job.rows)):
            seen = max(seen, _visible(job, page, r))
        if seen > 0:
            _scores(kind, rows, lanes, job, base, seen, scratch)
            _softmax(kind, rows, lanes, job, base, page, row, seen, scratch)
            _values(kind, rows, job, base, seen, following_base if is_last else base, scratch)
        _store_outputs(kind, rows, job, page, head, row, scratch)
        if _is_dot(kind):
            fetch_rest(scratch + job.cursor)


def _work(kind: Any, rows: Any, lanes: Any, job_address: Any, index: Any) -> None:
    """Claim batches of tasks, one batch early: what comes next is known and prefetched."""
    job = as_array(job_address, 1, JOB)[0]
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


@functools.cache
def work_address(kind: int, rows: int, lanes: int) -> int:
    """Return the address of the compiled worker for these constants, for `run_team`.

    Compiling takes seconds the first time on a machine, then the code is loaded from disk.
    """
    constants = [ConstType(value) for value in (kind, rows, lanes)]
    return compile_cached(_work, (*constants, types.int64, types.int64), nogil=True).address
