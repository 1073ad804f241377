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
from tierd_engine.attention.simd import BFLOAT16, FLOAT16, FLOAT32, UINT8

Float32Array = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]

_RAW_KINDS = {DType.FLOAT32: FLOAT32, DType.BFLOAT16: BFLOAT16, DType.FLOAT16: FLOAT16}


class _Workspace(threading.local):
    def __init__(self) -> None:
        self.job = np.zeros(1, dtype=kernel.JOB)
        self.claimed = np.zeros(1, dtype=np.int64)
        self.scratch = np.empty(0, dtype=np.uint8)

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
    n, heads, head_dim = q.shape
    pages = len(addresses)
    _check(q, addresses, tokens, layout, out, lse, first_position, query_positions)
    if pages * n == 0:
        return
    workers = numba.get_num_threads()
    kind = UINT8 if layout.codec is CodecId.INT8 else _RAW_KINDS[layout.dtype]
    rows = min(kernel.ROWS_MAX, n * heads // layout.kv_heads)
    lanes = kernel.WIDE if layout.block_tokens >= kernel.WIDE else kernel.NARROW
    q_stride, weight_stride, scratch_bytes = kernel.strides(head_dim, layout.block_tokens)
    job, claimed = _workspace.job, _workspace.claimed
    claimed[0] = 0
    # Whole pages are claimed while there are many: eight claims a worker even out a noisy machine.
    batch = layout.kv_heads if pages >= 8 * workers else 1
    job[0] = (
        _address(q), _address(addresses), _address(tokens),
        0 if first_position is None else _address(first_position),
        0 if query_positions is None else _address(query_positions),
        _address(out), _address(lse), _workspace.scratch_address(workers * scratch_bytes),
        _address(claimed), pages, n, heads, layout.kv_heads, head_dim,
        layout.keys, layout.values, layout.key_scale, layout.key_zero,
        layout.value_scale, layout.value_zero, layout.group_tokens, layout.head_bytes,
        scratch_bytes, q_stride, weight_stride, batch, scale,
    )  # fmt: skip
    kernel.attend_function(kind, rows, lanes)(job, workers)


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
