"""The merge of partials by log-sum-exp, in index order, so that a run repeats bit for bit."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types

from tierd.codec.intrinsics import as_array
from tierd_engine.attention.compiling import compile_cached, step
from tierd_engine.attention.simd import (
    FLOAT32,
    NARROW,
    Const,
    ConstType,
    add,
    exp2,
    fma,
    load_narrow,
    maximum,
    multiply,
    splat,
    store,
    store_narrow,
    subtract,
    zeros,
)

_FLOAT32 = Const(FLOAT32)
_LOG2_E = np.float32(1.4426950408889634)
MERGE_SCRATCH_BYTES = 3 * 4 * NARROW
_LOWEST = np.float32(-3e38)  # stands for the top of nothing but -inf: their weights are then 0


@step
def _tops(lse: Any, parts: Any, stride: Any, count: Any) -> Any:
    tops = splat(NARROW, _LOWEST)
    for part in range(parts):
        tops = maximum(load_narrow(_FLOAT32, lse + part * stride, count), tops)
    return tops


@step
def _add_row(weight: Any, row: Any, out: Any, d: Any) -> None:
    """out += weight * row"""
    factor = splat(NARROW, weight)
    for c in range(0, d, NARROW):
        total = load_narrow(_FLOAT32, out + 4 * c, d - c)
        value = load_narrow(_FLOAT32, row + 4 * c, d - c)
        store_narrow(fma(factor, value, total), out + 4 * c, d - c)


@step
def _scale_row(weight: Any, out: Any, d: Any) -> None:
    factor = splat(NARROW, weight)
    for c in range(0, d, NARROW):
        total = load_narrow(_FLOAT32, out + 4 * c, d - c)
        store_narrow(multiply(factor, total), out + 4 * c, d - c)


@step
def merge_rows(
    o: Any, lse: Any, out_o: Any, out_lse: Any, scratch: Any, parts: Any, rows: Any, d: Any
) -> None:
    """Addresses of o: [parts, rows, d], lse: [parts, rows], out_o, out_lse; all float32.

    `scratch`: MERGE_SCRATCH_BYTES. A partial of weight 0 is not read: its o may be anything.
    """
    floats = as_array(scratch, (3, NARROW), np.float32)
    for first in range(0, rows, NARROW):
        count = min(NARROW, rows - first)
        tops = _tops(lse + 4 * first, parts, 4 * rows, count)
        totals = zeros(NARROW)
        for row in range(first, first + count):
            as_array(out_o + 4 * d * row, d, np.float32)[:] = np.float32(0.0)
        for part in range(parts):
            at = part * rows + first
            behind = subtract(load_narrow(_FLOAT32, lse + 4 * at, count), tops)
            weights = exp2(multiply(behind, splat(NARROW, _LOG2_E)))
            totals = add(totals, weights)
            store(weights, scratch)
            for r in range(count):
                if floats[0, r] != 0.0:
                    _add_row(floats[0, r], o + 4 * d * (at + r), out_o + 4 * d * (first + r), d)
        store(tops, scratch + 4 * NARROW)
        store(totals, scratch + 8 * NARROW)
        for r in range(count):
            top, total = floats[1, r], floats[2, r]
            is_empty = total == 0.0
            log = -np.inf if is_empty else np.float64(top) + math.log(np.float64(total))
            as_array(out_lse, rows, np.float32)[first + r] = np.float32(log)
            if not is_empty:
                _scale_row(np.float32(1.0) / total, out_o + 4 * d * (first + r), d)


def _merge(
    sources: Any, o: Any, lse: Any, out_o: Any, out_lse: Any, scratch: Any, parts: Any, rows: Any,
    d: Any,
) -> None:  # fmt: skip
    merge_rows(o, lse, out_o, out_lse, scratch, parts, rows, d)


@functools.cache
def merge_function() -> Callable[..., None]:
    """Return the compiled merge without its first argument: see `merge_rows`."""
    constant = Const(0)
    signature = (ConstType(0), *(types.int64,) * 8)
    return functools.partial(compile_cached(_merge, signature, nogil=True).call, constant)
