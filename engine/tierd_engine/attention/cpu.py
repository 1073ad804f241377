"""Attention over encoded pages where they lie in RAM, on the CPU.

Pages are named by absolute addresses, so one call covers pages of many slabs,
with no Python per page. Threads are our team's, as many as `numba.set_num_threads` says.

Invariants:
  a calling thread has one workspace; calls from several threads do not meet
  a workspace only grows: a call no larger than an earlier one allocates nothing
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from tierd.codec.layout import PageLayout
from tierd.units import CACHE_LINE_BYTES, round_up
from tierd_engine.attention import kernel
from tierd_engine.attention.merging import MERGE_SCRATCH_BYTES, merge_function
from tierd_engine.attention.team import Reads, prepare_team, run_team, workers_for
from tierd_engine.attention.works import work_of

Float32Array = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]

_F32, _I32, _I64 = (np.dtype(kind) for kind in (np.float32, np.int32, np.int64))
_CALL_FIELDS = len(kernel.CALL_FIELDS)
_JOBS_MAX = 128  # 3 layouts of a model, 1 to 16 queries; a caller that makes more starts again


class _Job:
    """What calls with one layout, number of heads and number of queries have in common."""

    def __init__(self, layout: PageLayout, heads: int, n: int) -> None:
        assert heads % layout.kv_heads == 0
        self.layout = layout  # also keeps its id from being another's
        self.record = kernel.make_job(layout, heads, n)
        self.address = _address(self.record)
        self.call_fields = self.record.view(np.int64)[:_CALL_FIELDS]
        self.scratch_bytes = int(self.record["scratch_bytes"][0])
        self.work_address = work_of(layout, heads, n)


class _Workspace(threading.local):
    def __init__(self) -> None:
        self.jobs: dict[tuple[int, int, int], _Job] = {}
        self.claimed = np.zeros(1, dtype=np.int64)
        self.claimed_address = _address(self.claimed)
        self.scratch = np.empty(0, dtype=np.uint8)

    def job_for(self, layout: PageLayout, heads: int, n: int) -> _Job:
        # By identity: hashing a layout's fields takes longer than the rest of a call.
        key = (id(layout), heads, n)
        job = self.jobs.get(key)
        if job is None:
            if len(self.jobs) >= _JOBS_MAX:
                self.jobs.clear()
            job = self.jobs[key] = _Job(layout, heads, n)
        return job

    def scratch_address(self, size_bytes: int) -> int:
        if self.scratch.size < size_bytes + CACHE_LINE_BYTES:
            self.scratch = np.empty(size_bytes + CACHE_LINE_BYTES, dtype=np.uint8)
        return round_up(_address(self.scratch), CACHE_LINE_BYTES)


def _address(array: npt.NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


_workspace = _Workspace()


def attend_pages(
    q: Float32Array,
    addresses: IntArray,
    tokens: npt.NDArray[np.int32],
    layout: PageLayout,
    scale: float,
    out: Float32Array,
    lse: Float32Array,
    first_position: IntArray | None = None,
    query_positions: IntArray | None = None,
) -> None:
    """Write each page's partial attention to `out` and `lse`. Zero pages is allowed.

    q: [n, heads, head_dim]; addresses: [pages] of payloads, mapped and readable
    throughout; tokens: [pages] valid tokens of each page; out: [pages, n, heads,
    head_dim], normalised per page; lse: [pages, n, heads], natural logarithm.
    All arrays C-contiguous. With positions, query i sees token j of page p iff
    first_position[p] + j <= query_positions[i]; without, all valid tokens. A page
    of which a query sees no token gives o = 0, lse = -inf.
    """
    n, heads, head_dim = q.shape
    pages = len(addresses)
    assert head_dim == layout.head_dim
    assert tokens.shape == (pages,)
    assert out.shape == (pages, n, heads, head_dim) and lse.shape == (pages, n, heads)
    first = last = 0
    if first_position is not None and query_positions is not None:
        assert first_position.shape == (pages,) and query_positions.shape == (n,)
        first, last = _checked(first_position, _I64), _checked(query_positions, _I64)
    else:
        assert first_position is query_positions is None
    if pages * n == 0:
        return
    workers = workers_for(pages * layout.payload_bytes)
    job = _workspace.job_for(layout, heads, n)
    _workspace.claimed[0] = 0
    job.call_fields[:] = (
        _checked(q, _F32), _checked(addresses, _I64), _checked(tokens, _I32), first, last,
        _checked(out, _F32), _checked(lse, _F32),
        _workspace.scratch_address(workers * job.scratch_bytes), _workspace.claimed_address,
        # Whole pages are claimed while there are many: eight a worker even out a noisy machine.
        pages, layout.kv_heads if pages >= 8 * workers else 1,
    )  # fmt: skip
    job.record["scale"] = scale
    reads = Reads(addresses, layout.payload_bytes)
    run_team(job.work_address, job.address, workers, reads)


def _checked(array: npt.NDArray[Any], dtype: np.dtype[Any]) -> int:
    """Return the address of an array that compiled code may take as `dtype`, contiguous."""
    assert array.dtype == dtype and array.flags.c_contiguous
    return _address(array)


def prepare(layout: PageLayout, heads: int) -> None:
    """Compile, or load from disk, what decoding with `layout` needs, so that no step waits."""
    for n in (1, 2):
        work_of(layout, heads, n)
    prepare_team()
    merge_function()


def merge_partials(
    o: Float32Array, lse: Float32Array, out_o: Float32Array, out_lse: Float32Array
) -> None:
    """Merge `parts` partials in index order into out_o and out_lse.

    o: [parts, n, heads, head_dim]; lse: [parts, n, heads]; out_o: [n, heads,
    head_dim]; out_lse: [n, heads]. An lse of -inf marks an empty partial; if all
    are, so is the result. Zero parts is allowed.
    """
    parts, n, heads, head_dim = o.shape
    assert lse.shape == (parts, n, heads)
    assert out_o.shape == (n, heads, head_dim) and out_lse.shape == (n, heads)
    merge_function()(
        _checked(o, _F32), _checked(lse, _F32), _checked(out_o, _F32), _checked(out_lse, _F32),
        _workspace.scratch_address(MERGE_SCRATCH_BYTES), parts, n * heads, head_dim,
    )  # fmt: skip
