"""Scores of raw keys: both ways of taking tokens, whichever this processor takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numba import types

from tierd.codec.intrinsics import as_array
from tierd.codec.layout import page_layout
from tierd.types import CodecId, DType, Geometry
from tierd_engine.attention import rawkeys
from tierd_engine.attention.compiling import compile_cached
from tierd_engine.attention.kernel import JOB, make_job
from tierd_engine.attention.simd import BFLOAT16, FLOAT32, ConstType

TOKENS = 32
KINDS = {DType.FLOAT32: FLOAT32, DType.BFLOAT16: BFLOAT16}


def _fours(kind: Any, rows: Any, job_address: Any, base: Any, seen: Any, scratch: Any) -> None:
    rawkeys._by_fours(kind, rows, as_array(job_address, 1, JOB)[0], base, seen, scratch)


def _ones(kind: Any, rows: Any, job_address: Any, base: Any, seen: Any, scratch: Any) -> None:
    rawkeys._one_by_one(kind, rows, as_array(job_address, 1, JOB)[0], base, seen, scratch)


@pytest.mark.parametrize("run", [_fours, _ones])
@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("rows", [1, 3, 4])
def test_scores_are_the_products_of_rows_and_keys(run: Any, dtype: DType, rows: int) -> None:
    constants = ConstType(KINDS[dtype]), ConstType(rows)
    compiled = compile_cached(run, (*constants, *(types.int64,) * 4))
    rng = np.random.default_rng()
    for d in (16, 64, 65, 80, 7):
        layout = page_layout(Geometry(1, 1, d, dtype, TOKENS), CodecId.RAW)
        job = make_job(layout, rows, 1)
        memory = np.full(layout.payload_bytes + 64, 0xFF, np.uint8)  # NaN beyond what is seen
        base = int(memory.ctypes.data) + -memory.ctypes.data % 64
        page = memory[base - memory.ctypes.data :]
        scratch = np.full(int(job["scratch_bytes"][0]) // 4 + 16, np.nan, np.float32)
        at = scratch[-(scratch.ctypes.data // 4) % 16 :]
        q = rng.standard_normal((rows, d)).astype(np.float32)
        for r in range(rows):
            row = at[r * int(job["q_stride"][0]) // 4 :]
            row[: -(-d // 16) * 16] = 0.0
            row[:d] = q[r]
        for seen in (1, 3, 4, 18, 31, 32):
            keys = rng.standard_normal((seen, d)).astype(np.float32)
            bits = keys.view(np.uint32)
            stored = keys if dtype is DType.FLOAT32 else (bits >> 16).astype(np.uint16)
            keys = keys if dtype is DType.FLOAT32 else (bits & 0xFFFF0000).view(np.float32)
            page[layout.keys :][: stored.nbytes] = stored.view(np.uint8).ravel()
            compiled.call(*constants, int(job.ctypes.data), base, seen, int(at.ctypes.data))
            for r in range(rows):
                first = (int(job["weights"][0]) + r * int(job["weight_stride"][0])) // 4
                found = at[first : first + seen].astype(np.float64)
                expected = keys.astype(np.float64) @ q[r]
                np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)
