"""A few rows times a matrix of weights, on the team: what a decode step does outside attention.

Each output is one dot product, by one thread in a fixed order with float32 sums,
so results do not depend on how many threads there are. Weights are read once for
up to ROWS_MAX rows at a time. Weights are of the rows' dtype, or int8 with a float32
scale an output, which multiplies the sum. PyTorch's own product of one row of bfloat16 reads
weights at 8 to 10 GB/s a thread where a plain sum reads at 20 to 30.

A job is the products of the same rows by one matrix or by several: what one call of the team does
saves what it costs, some 10 us, for each of the others. Its records are written by its caller, and
read by workers while it runs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types

from tierd.codec.intrinsics import as_array
from tierd.units import CACHE_LINE_BYTES, round_up
from tierd_engine.attention.compiling import compile_cached, step
from tierd_engine.attention.simd import (
    BFLOAT16,
    FLOAT32,
    INT8,
    NARROW,
    ConstType,
    element_bytes,
    fetch_add,
    load,
    load_first,
    load_narrow,
    load_scalar,
    number,
    prefetch_lines,
    store,
    store_rounded,
)
from tierd_engine.attention.tile import add_products, store_sums, zero_rows

ROWS_MAX = 4
WIDE = 64  # lanes of a sum: four AVX-512 registers
# As far as memory delivers within its own delay. What a core asks for by itself ends with a page.
_AHEAD_BYTES = 8192
_CLAIM_BYTES = 32768  # of weights: long enough to stream, short enough to even threads out

PRODUCT_FIELDS = (
    "x", "out", "rows", "claimed", "scratch", "weights", "scales", "bias", "width", "outputs",
    "batch", "scratch_bytes",
)  # fmt: skip
PRODUCT = np.dtype([(name, np.int64) for name in PRODUCT_FIELDS])
JOB = np.dtype([("count", np.int64), ("products", np.int64)])  # how many, and their address
_SUMS = CACHE_LINE_BYTES * 2  # at a scratch's start: 8 floats of wide sums, 8 of narrow ones


def make_products(width: int, outputs: Sequence[int], weight_bytes: int) -> npt.NDArray[np.void]:
    """Return a [n] array of PRODUCT for n weights [outputs, width] of `weight_bytes` an element."""
    products = np.zeros(len(outputs), dtype=PRODUCT)
    products["width"], products["outputs"] = width, outputs
    products["batch"] = max(1, _CLAIM_BYTES // (width * weight_bytes))
    products["scratch_bytes"] = _SUMS + 4 * ROWS_MAX * round_up(width, NARROW)
    return products


def make_job(products: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
    """Return a [1] array of JOB for products, which stay the caller's to keep."""
    job = np.zeros(1, dtype=JOB)
    job["count"], job["products"] = len(products), products.ctypes.data
    return job


@step
def _widen(kind: Any, rows: Any, job: Any, row: Any, x: Any, stride: Any) -> None:
    """Copy `rows` rows of x from row `row` on, as float32, to `x`; those not there are 0."""
    size, n = element_bytes(kind), job.width
    for r in range(number(rows)):
        source = job.x + size * n * min(row + r, job.rows - 1)
        for c in range(0, n, NARROW):
            store(load_narrow(kind, source + size * c, n - c), x + r * stride + 4 * c)


@step
def _dot(
    kind: Any, rows: Any, job: Any, weights: Any, ahead: Any, sums: Any, x: Any, stride: Any
) -> None:
    """sums[r], and sums[8 + r]: the parts of x[r]·weights in wide and in narrow vectors.

    `ahead`: how far behind each weight stands what is to be asked for meanwhile, in bytes.
    """
    size, n = element_bytes(kind), job.width
    wide = zero_rows(rows, WIDE)
    c = 0
    while c + WIDE <= n:
        soon = weights + ahead + size * c
        prefetch_lines(soon, soon + size * WIDE)
        wide = add_products(wide, x + 4 * c, stride, load(kind, WIDE, weights + size * c))
        c += WIDE
    store_sums(wide, sums, 4)
    narrow = zero_rows(rows, NARROW)
    while c + NARROW <= n:
        narrow = add_products(narrow, x + 4 * c, stride, load(kind, NARROW, weights + size * c))
        c += NARROW
    if c < n:
        last = load_first(kind, NARROW, weights + size * c, n - c)
        narrow = add_products(narrow, x + 4 * c, stride, last)
    store_sums(narrow, sums + 32, 4)


@step
def _finished(kind: Any, job: Any, output: Any, value: Any) -> Any:
    """The output for a sum: scaled, and with its bias, where there are such."""
    if number(kind) == INT8:
        value = value * load_scalar(job.scales + 4 * output)
    if job.bias == 0:
        return value
    return value + load_scalar(job.bias + 4 * output)


@step
def _share(kind: Any, rows: Any, x_kind: Any, job: Any, index: Any) -> None:
    """Claim batches of a product's outputs."""
    sums = job.scratch + index * job.scratch_bytes
    x, stride = sums + _SUMS, job.scratch_bytes - _SUMS
    stride //= ROWS_MAX
    row_bytes, out_bytes = element_bytes(kind) * job.width, element_bytes(x_kind)
    is_wide = False
    start = fetch_add(job.claimed, job.batch)
    while start < job.outputs:
        end = min(start + job.batch, job.outputs)
        following = fetch_add(job.claimed, job.batch)
        jump = row_bytes * (following - end) if following < job.outputs else 0
        for row in range(0, job.rows, number(rows)):
            if not is_wide or job.rows > number(rows):
                _widen(x_kind, rows, job, row, x, stride)
                is_wide = True
            for output in range(start, end):
                ahead = _AHEAD_BYTES
                if row_bytes * (end - output) <= _AHEAD_BYTES:
                    ahead += jump
                weights = job.weights + row_bytes * output
                _dot(kind, rows, job, weights, ahead, sums, x, stride)
                for r in range(min(number(rows), job.rows - row)):
                    value = load_scalar(sums + 4 * r) + load_scalar(sums + 32 + 4 * r)
                    value = _finished(kind, job, output, value)
                    at = job.out + out_bytes * ((row + r) * job.outputs + output)
                    store_rounded(x_kind, value, at)
        start = following


def _work(kind: Any, rows: Any, x_kind: Any, job_address: Any, index: Any) -> None:
    """Share in each product. `kind`: of weights; `x_kind`: of the rows and the outputs."""
    job = as_array(job_address, 1, JOB)[0]
    products = as_array(job.products, job.count, PRODUCT)
    for i in range(job.count):
        _share(kind, rows, x_kind, products[i], index)


@functools.cache
def product_address(kind: int, rows: int, x_kind: int) -> int:
    """Return the address of the compiled worker for weights of `kind`, `rows` (1 or ROWS_MAX)."""
    assert x_kind in (FLOAT32, BFLOAT16) and kind in (x_kind, INT8) and rows in (1, ROWS_MAX)
    constants = [ConstType(value) for value in (kind, rows, x_kind)]
    return compile_cached(_work, (*constants, types.int64, types.int64), nogil=True).address
