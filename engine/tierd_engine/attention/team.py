"""A team of threads that run one compiled worker: the only parallel loop of the kernels.

It is compiled once, for all kernels. With Numba's omp layer the threads are
those of the libgomp that PyTorch has loaded too: one pool, warm from the
model's own operators (about 1 us a call; the workqueue layer took 30 to 70).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from numba import prange, types

from tierd_engine.attention.compiling import compile_cached
from tierd_engine.attention.simd import Const, ConstType, call_work


def _run_team(sources: Any, function: Any, job: Any, workers: Any) -> None:
    for index in prange(workers):
        call_work(function, job, index)


@functools.cache
def team_function() -> Callable[..., None]:
    """Return `run(worker's address, job's address, workers)`; it returns when all have."""
    signature = (ConstType(0), types.int64, types.int64, types.int64)
    compiled = compile_cached(_run_team, signature, parallel=True, nogil=True)
    return functools.partial(compiled.call, Const(0))
