"""A team of threads that run one compiled worker: the only parallel loop of the kernels.

It is compiled once, for all kernels. With Numba's omp layer the threads are
those of the libgomp that PyTorch has loaded too: one pool, warm from the
model's own operators (about 1 us a call; the workqueue layer took 30 to 70).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import prange, types
from numba.extending import intrinsic

from tierd_engine.attention.compiling import compile_cached
from tierd_engine.attention.simd import Const, ConstType

_SOURCES = Const(0)

# Numba's workqueue layer, all that some hosts have, aborts the process when two threads are in
# it. A wait for this lock ends when the other call's computation does, and takes no core.
_one_team = threading.Lock()


@intrinsic
def _call_work(typingctx: Any, function: Any, job: Any, index: Any) -> Any:
    """Call the compiled worker at address `function` with a job's address and its own index."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(64)
        const = ir.IntType(8).as_pointer()
        work = ir.FunctionType(ir.VoidType(), [const, const, const, word, word])
        nothing = [ir.Constant(const, None)] * 3  # its three Consts: a type is all they are
        builder.call(builder.inttoptr(args[0], work.as_pointer()), [*nothing, args[1], args[2]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


def _run_team(sources: Any, function: Any, job: Any, workers: Any) -> None:
    for index in prange(workers):
        _call_work(function, job, index)


@functools.cache
def _compiled() -> Callable[..., None]:
    signature = (ConstType(0), types.int64, types.int64, types.int64)
    return compile_cached(_run_team, signature, parallel=True, nogil=True).call


def prepare_team() -> None:
    """Compile the loop, or load it from disk."""
    _compiled()


def run_team(work_address: int, job_address: int, workers: int) -> None:
    """Run the worker `workers` times, with the job's address and 0, 1, ...; wait for all."""
    run = _compiled()
    with _one_team:
        run(_SOURCES, work_address, job_address, workers)
