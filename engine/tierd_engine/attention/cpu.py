"""Attention over encoded pages where they lie in RAM, on the CPU.

Pages are named by absolute addresses, so one call covers pages of many slabs,
with no Python per page. Threads are Numba's (`numba.set_num_threads`); its omp
layer shares one thread pool with PyTorch, and starting it costs about 1 us.

Invariants:
  a calling thread has one workspace; calls from several threads do not meet
  a workspace only grows: a call no larger than an earlier one allocates nothing
"""

from __future__ import annotations

import threading

import numba
import numpy as np
import numpy.typing as npt

from tierd.codec.layout import PageLayout
from tierd.types import CodecId, DType
from tierd_engine.attention import kernel
from tierd_engine.attention.merging import MERGE_SCRATCH_BYTES, merge_function
from tierd_engine.attention.simd import BFLOAT16, FLOAT16, FLOAT32, NARROW, UINT8
from tierd_engine.attention.team import prepare_team, run_team

Float32Array = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]

_RAW_KINDS = {DType.FLOAT32: FLOAT32, DType.BFLOAT16: BFLOAT16, DType.FLOAT16: FLOAT16}

_LAYOUT_FIELDS = (
    "keys", "values", "key_scale", "key_zero", "value_scale", "value_zero", "head_bytes",
    "kv_heads", "head_dim", "group_tokens",
)  # fmt: skip


class _Workspace(threading.local):
    def __init__(self) -> None:
        self.jobs: dict[PageLayout, npt.NDArray[np.void]] = {}
        self.claimed = np.zeros(1, dtype=np.int64)
        self.scratch = np.empty(0, dtype=np.uint8)

    def job_for(self, layout: PageLayout) -> npt.NDArray[np.void]:
        """Return the layout's job, its own fields filled in; the next call reuses it."""
        job = self.jobs.get(layout)
        if job is None:
            job = self.jobs[layout] = np.zeros(1, dtype=kernel.JOB)
            kernel.fill_scratch_fields(job, layout.head_dim, layout.block_tokens)
            for name in _LAYOUT_FIELDS:
                job[name] = getattr(layout, name)
        return job

    def scratch_address(self, size_bytes: int) -> int:
        if self.scratch.size < size_bytes + 64:
            self.scratch = np.empty(size_bytes + 64, dtype=np.uint8)
        return (_address(self.scratch) + 63) // 64 * 64


_workspace = _Workspace()


def _address(array: npt.NDArray[np.generic]) -> int:
    return int(array.__array_interface__["data"][0])


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
    n, heads, _ = q.shape
    pages = len(addresses)
    _check(q, addresses, tokens, layout, out, lse, first_position, query_positions)
    if pages * n == 0:
        return
    workers = numba.get_num_threads()
    job, claimed = _workspace.job_for(layout), _workspace.claimed
    claimed[0] = 0
    job["q"], job["addresses"], job["tokens"] = _address(q), _address(addresses), _address(tokens)
    job["first"] = 0 if first_position is None else _address(first_position)
    job["last"] = 0 if query_positions is None else _address(query_positions)
    job["out"], job["lse"], job["claimed"] = _address(out), _address(lse), _address(claimed)
    job["scratch"] = _workspace.scratch_address(workers * int(job["scratch_bytes"][0]))
    job["pages"], job["heads"], job["share"] = pages, heads, heads // layout.kv_heads
    job["rows"], job["scale"] = n * heads // layout.kv_heads, scale
    # Whole pages are claimed while there are many: eight claims a worker even out a noisy machine.
    job["batch"] = layout.kv_heads if pages >= 8 * workers else 1
    work = kernel.work_address(*_constants(layout, heads, n))
    run_team(work, _address(job), workers)


def _rows_at_once(share: int, n: int) -> int:
    """Query rows a kernel takes at a time, for `share` query heads a KV head.

    At most two answers a model, so at most two compilations: one query, several.
    """
    if n == 1 and share <= kernel.ROWS_MAX:
        return share
    return 3 if -(-share // 3) * 3 < -(-share // 4) * 4 else 4


def prepare(layout: PageLayout, heads: int) -> None:
    """Compile, or load from disk, what decoding with `layout` needs, so that no step waits."""
    for n in (1, 2):
        kernel.work_address(*_constants(layout, heads, n))
    prepare_team()
    merge_function()


def _constants(layout: PageLayout, heads: int, n: int) -> tuple[int, int, int]:
    kind = UINT8 if layout.codec is CodecId.INT8 else _RAW_KINDS[layout.dtype]
    lanes = kernel.WIDE if layout.block_tokens >= kernel.WIDE else NARROW
    return kind, _rows_at_once(heads // layout.kv_heads, n), lanes


def _check(
    q: Float32Array,
    addresses: IntArray,
    tokens: npt.NDArray[np.int32],
    layout: PageLayout,
    out: Float32Array,
    lse: Float32Array,
    first_position: IntArray | None,
    query_positions: IntArray | None,
) -> None:
    n, heads, head_dim = q.shape
    pages = len(addresses)
    assert q.dtype == np.float32 and q.flags.c_contiguous
    assert head_dim == layout.head_dim and heads % layout.kv_heads == 0
    assert addresses.dtype == np.int64 and addresses.flags.c_contiguous
    assert tokens.dtype == np.int32 and tokens.shape == (pages,) and tokens.flags.c_contiguous
    assert out.dtype == np.float32 and out.shape == (pages, n, heads, head_dim)
    assert lse.dtype == np.float32 and lse.shape == (pages, n, heads)
    assert out.flags.c_contiguous and lse.flags.c_contiguous
    assert (first_position is None) == (query_positions is None)
    if first_position is not None and query_positions is not None:
        assert first_position.dtype == np.int64 and first_position.shape == (pages,)
        assert query_positions.dtype == np.int64 and query_positions.shape == (n,)


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
    for array in (o, lse, out_o, out_lse):
        assert array.dtype == np.float32 and array.flags.c_contiguous
    merge_function()(
        _address(o), _address(lse), _address(out_o), _address(out_lse),
        _workspace.scratch_address(MERGE_SCRATCH_BYTES), parts, n * heads, head_dim,
    )  # fmt: skip
