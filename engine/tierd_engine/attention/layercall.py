"""One layer's attention as one call: pages of several layouts, one after the other, then the merge.

A decode step asks of a layer what the last one asked: the same pages, where the plan found
them. So all of a call that a step does not change is written down once a plan, and a step
says only where q stands and where the answer goes.

A worker that is done with the pages of one layout goes on to the next without waiting for the
others. The last one to end merges, in index order, and makes the call ready to run again. Cold
pages come last: a job that takes them by itself (attention/arriving.py) waits for them there.

Invariants:
  between runs every claimed word and the count of ended workers is 0
  what a record points at is kept by its call, or by the plan that the call was made for
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from numba import types

from tierd.codec.intrinsics import as_array
from tierd.codec.layout import PageLayout
from tierd.units import CACHE_LINE_BYTES, round_up
from tierd_engine.attention import kernel
from tierd_engine.attention.arriving import arrives, gives_back
from tierd_engine.attention.atomics import add_word, store_word
from tierd_engine.attention.compiling import compile_cached
from tierd_engine.attention.merging import MERGE_SCRATCH_BYTES, merge_rows
from tierd_engine.attention.simd import (
    ConstType,
    element_bytes,
    load_int64,
    load_scalar,
    store_rounded,
)
from tierd_engine.attention.team import Reads, call_work, run_team, workers_for
from tierd_engine.attention.works import work_of

IntArray = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]

_LINE_WORDS = CACHE_LINE_BYTES // 8
_PART_BYTES = 24  # of `segments`: a worker's address, its job's, its claimed word's
_FIELDS = (
    "out", "workers", "pool", "number", "segments", "count", "ended", "o", "lse", "merged",
    "merged_lse", "scratch", "parts", "rows", "head_dim",
)  # fmt: skip
_CALL = np.dtype([(name, np.int64) for name in _FIELDS])
_Q_OFFSET = 8 * kernel.CALL_FIELDS.index("q")
_ADDRESS, _PER_RUN = struct.Struct("=q"), struct.Struct("=4q")  # a call's first fields


@dataclass(frozen=True, slots=True)
class Segment:
    """Pages of one layout, as `attend_pages` takes them: with `causal` (first positions, [pages],
    and query positions, [n]), a query sees the tokens up to its own; else all valid ones."""

    layout: PageLayout
    addresses: IntArray
    tokens: npt.NDArray[np.int32]
    causal: tuple[IntArray, IntArray] | None = None


class CallScratch:
    """Scratch that calls share, as no two run at a time: it stays in the caches."""

    def __init__(self) -> None:
        self._bytes = np.empty(0, dtype=np.uint8)

    def take(self, size_bytes: int) -> npt.NDArray[np.uint8]:
        """Return at least so many bytes; what was returned before stays good for who keeps it."""
        if self._bytes.size < size_bytes:
            self._bytes = np.empty(size_bytes, dtype=np.uint8)
        return self._bytes


class LayerCall:
    """Attention of `n` queries of `heads` heads over segments, again and again.

    The partials go to o [parts, n, heads, head_dim] and lse [parts, n, heads], in the segments'
    order. With `merges` a run also writes the merged o; else the caller does, who may add more.
    Where q and out are is each run's own; the arrays named here may change their contents.
    `kind`: of the elements of q and out, FLOAT32 or BFLOAT16. `brought`: addresses of a segment
    that the caller writes before each run, for they differ from run to run; None: of none.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        heads: int,
        n: int,
        scale: float,
        o: Float32Array,
        lse: Float32Array,
        scratch: CallScratch,
        *,
        kind: int,
        merges: bool,
        brought: IntArray | None = None,
    ) -> None:
        self.scale, self.kind, self.merges, self.brought = scale, kind, merges, brought
        self.parts = sum(len(segment.addresses) for segment in segments)
        segments = [segment for segment in segments if len(segment.addresses)]
        count, threads = len(segments), numba.get_num_threads()
        self.size_bytes = sum(len(s.addresses) * s.layout.payload_bytes for s in segments)
        words = np.zeros((count + 1, _LINE_WORDS), dtype=np.int64)
        jobs = np.zeros(max(1, count), dtype=kernel.JOB)
        table = np.zeros((max(1, count), _PART_BYTES // 8), dtype=np.int64)
        part = 0
        for i, segment in enumerate(segments):
            end = part + len(segment.addresses)
            jobs[i] = kernel.make_job(segment.layout, heads, n, kind)[0]
            _fill(jobs[i], segment, o[part:end], lse[part:end], threads)
            jobs[i]["scale"], jobs[i]["claimed"] = scale, words[i].ctypes.data
            place = jobs.ctypes.data + i * kernel.JOB.itemsize
            table[i] = work_of(segment.layout, heads, n), place, words[i].ctypes.data
            part = end
        # A worker's scratch lies at its index times this, whichever segment it is at.
        worker_bytes = int(jobs["scratch_bytes"].max())
        jobs["scratch_bytes"] = worker_bytes
        memory = scratch.take(threads * worker_bytes + MERGE_SCRATCH_BYTES + CACHE_LINE_BYTES)
        start = round_up(memory.ctypes.data, CACHE_LINE_BYTES)
        jobs["scratch"] = start
        merged = np.empty(o.shape[1:], dtype=np.float32)
        merged_lse = np.empty((n, heads), dtype=np.float32)
        self._call = np.zeros(1, dtype=_CALL)
        self._call[0] = (
            0, 0, 0, 0, table.ctypes.data, count, words[count].ctypes.data, o.ctypes.data,
            lse.ctypes.data, merged.ctypes.data, merged_lse.ctypes.data,
            start + threads * worker_bytes, self.parts if merges else -1, n * heads, o.shape[-1],
        )  # fmt: skip
        self._work, self._address = _work_address(kind), int(self._call.ctypes.data)
        # A step writes these some dozens of times: NumPy takes ten times as long.
        self._jobs_bytes, self._call_bytes = (
            jobs.view(np.uint8).data,
            self._call.view(np.uint8).data,
        )
        self._queries_at = [i * kernel.JOB.itemsize + _Q_OFFSET for i in range(len(jobs))]
        first = segments[0] if segments else None
        self._reads = Reads(first.addresses, first.layout.payload_bytes) if first else None
        self._kept = segments, words, jobs, table, memory, merged, merged_lse, o, lse
        self._threads = threads

    def run(self, q_address: int, out_address: int) -> None:
        """Attend from q [n, heads, head_dim], and where it merges, write out, as q.

        Both contiguous, by address. Where it does not, out is not looked at.
        """
        workers = min(workers_for(self.size_bytes), self._threads)
        self.bind(q_address, out_address, workers)
        if self._reads is None:
            run_team(self._work, self._address, 1)
        else:
            run_team(self._work, self._address, workers, self._reads)

    def bind(
        self, q_address: int, out_address: int, workers: int, pool: int = 0, number: int = 0
    ) -> tuple[int, int]:
        """Say where q and out are, and how many workers, at most those there are threads, run it.

        `pool`: the address of a cold pool's words, whose unit `number` stands at `brought` once it
        is there, and is given back. 0: it is there. Returns the addresses of the worker and of its
        job, for a caller that has them run.
        """
        for at in self._queries_at:
            _ADDRESS.pack_into(self._jobs_bytes, at, q_address)
        _PER_RUN.pack_into(self._call_bytes, 0, out_address, workers, pool, number)
        return self._work, self._address


def _fill(job: Any, segment: Segment, o: Float32Array, lse: Float32Array, threads: int) -> None:
    """Fill in the fields of a call that `LayerCall` runs, but those of a run."""
    pages = len(segment.addresses)
    arrays: dict[str, npt.NDArray[Any]] = {
        "addresses": segment.addresses,
        "tokens": segment.tokens,
        "out": o,
        "lse": lse,
    }
    if segment.causal is not None:
        arrays["first"], arrays["last"] = segment.causal
    for name, array in arrays.items():
        assert array.flags.c_contiguous
        job[name] = array.ctypes.data
    assert segment.addresses.dtype == np.int64 and segment.tokens.dtype == np.int32
    assert segment.tokens.shape == (pages,), f"{segment.tokens.shape=} {pages=}"
    # Whole pages are claimed while there are many: eight a worker even out a noisy machine.
    job["pages"], job["batch"] = pages, job["kv_heads"] if pages >= 8 * threads else 1


def _work(kind: Any, _b: Any, _c: Any, call_address: Any, index: Any) -> None:
    call = as_array(call_address, 1, _CALL)[0]
    for i in range(call.count):
        if call.pool != 0 and i + 1 == call.count and not arrives(call.pool, call.number, index):
            break
        at = call.segments + _PART_BYTES * i
        call_work(load_int64(at), load_int64(at + 8), index)
    if add_word(call.ended, 1) + 1 < call.workers:
        return
    store_word(call.ended, 0)
    for i in range(call.count):
        store_word(load_int64(call.segments + _PART_BYTES * i + 16), 0)
    if call.pool != 0:
        gives_back(call.pool)
    if call.parts >= 0:
        merge_rows(
            call.o, call.lse, call.merged, call.merged_lse, call.scratch, call.parts, call.rows,
            call.head_dim,
        )  # fmt: skip
        for i in range(call.rows * call.head_dim):
            value = load_scalar(call.merged + 4 * i)
            store_rounded(kind, value, call.out + element_bytes(kind) * i)


@functools.cache
def _work_address(kind: int) -> int:
    constants = (ConstType(kind),) * 3
    return compile_cached(_work, (*constants, types.int64, types.int64), nogil=True).address


def prepare_calls(kind: int) -> None:
    """Compile, or load from disk, what every call with such q needs."""
    _work_address(kind)
