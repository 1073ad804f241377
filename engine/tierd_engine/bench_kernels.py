"""Attention kernels beside this machine's read bandwidth, in one run, alternating.

Figures are GB/s of encoded bytes. The limit is the faster of two ways to read
the same bytes with the same threads: PyTorch's sum over the whole buffer, and a
sum page by page in the order in which attention visits them. Pages lie as a
decoding engine finds them: in shared memory, a layer's pages a model's depth
apart. Data is synthetic: right for throughput only.
"""

from __future__ import annotations

import mmap
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch
from numba import types

from tierd.codec.intrinsics import as_array
from tierd.codec.layout import HEADER_BYTES, page_layout
from tierd.types import CodecId, DType, Geometry
from tierd_engine.attention.compiling import compile_cached
from tierd_engine.attention.cpu import attend_pages, merge_partials, prepare
from tierd_engine.attention.kernel import JOB, WIDE
from tierd_engine.attention.simd import (
    FLOAT32,
    ConstType,
    add,
    fetch_add,
    load,
    prefetch,
    store_scalar,
    sum_lanes,
    zeros,
)
from tierd_engine.attention.team import run_team
from tierd_engine.bench.machine import describe_machine

READ_RATIO_MIN = 0.5  # the bar: attention over int8 pages at half of what memory gives

_BARRED = (CodecId.INT8, CodecId.RAW)
_BUFFER_BYTES = 256 * 2**20  # several times any last-level cache
_LAYERS = 30
_ROUNDS = 9
_PAUSE_SECONDS = 0.02  # lets PyTorch's and Numba's common threads stop spinning
_READ_AHEAD_BYTES = 8192
_STRIP_BYTES = 1024


@dataclass(frozen=True, slots=True)
class AttentionRow:
    """One measured figure; `ratio` is to the read bandwidth of the same run."""

    name: str
    bytes_per_second: float
    limit_bytes_per_second: float

    @property
    def ratio(self) -> float:
        """Achieved ÷ limit."""
        return self.bytes_per_second / self.limit_bytes_per_second


@dataclass(frozen=True, slots=True)
class Shape:
    """A case: codec and dtype of the pages, KV heads, query heads each, head_dim, queries."""

    codec: CodecId
    dtype: DType
    kv_heads: int
    share: int
    head_dim: int
    queries: int = 1

    @property
    def name(self) -> str:
        """`int8 3x3x64`: KV heads, query heads each, head_dim; then the queries if several."""
        kind = self.codec.name.lower()
        if self.codec is CodecId.RAW:
            kind += f" {self.dtype}"
        text = f"{kind} {self.kv_heads}x{self.share}x{self.head_dim}"
        return text if self.queries == 1 else f"{text}, {self.queries} queries"


SHAPES = (
    Shape(CodecId.INT8, DType.BFLOAT16, 3, 3, 64),
    Shape(CodecId.INT8, DType.BFLOAT16, 8, 4, 128),
    Shape(CodecId.INT8, DType.BFLOAT16, 3, 3, 64, queries=6),
    Shape(CodecId.K8V4, DType.BFLOAT16, 3, 3, 64),
    Shape(CodecId.K8V4, DType.BFLOAT16, 8, 4, 128),
    Shape(CodecId.INT4, DType.BFLOAT16, 3, 3, 64),
    Shape(CodecId.INT4, DType.BFLOAT16, 8, 4, 128),
    Shape(CodecId.FP8, DType.BFLOAT16, 3, 3, 64),
    Shape(CodecId.RAW, DType.BFLOAT16, 3, 3, 64),
    Shape(CodecId.RAW, DType.FLOAT32, 3, 3, 64),
)


class _Case:
    """One shape over the whole buffer: one call of `attend`, partials merged."""

    def __init__(self, shape: Shape, buffer: npt.NDArray[np.uint8]) -> None:
        geometry = Geometry(_LAYERS, shape.kv_heads, shape.head_dim, shape.dtype)
        self.layout = page_layout(geometry, shape.codec)
        slots = len(buffer) // self.layout.slot_bytes // _LAYERS * _LAYERS
        order = np.arange(slots, dtype=np.int64).reshape(-1, _LAYERS).T.ravel()
        base = buffer.ctypes.data + HEADER_BYTES
        self.addresses = base + order * self.layout.slot_bytes
        self.tokens = np.full(slots, geometry.block_tokens, dtype=np.int32)
        heads, d, n = shape.kv_heads * shape.share, shape.head_dim, shape.queries
        self.q = np.random.default_rng(0).standard_normal((n, heads, d)).astype(np.float32)
        self.o, self.lse = _empty(slots, n, heads, d), _empty(slots, n, heads)
        self.out_o, self.out_lse = _empty(n, heads, d), _empty(n, heads)
        self.total_bytes = slots * self.layout.payload_bytes

    def attend(self) -> None:
        attend_pages(
            self.q, self.addresses, self.tokens, self.layout, 0.125, self.o, self.lse
        )  # fmt: skip
        merge_partials(self.o, self.lse, self.out_o, self.out_lse)


def _empty(*shape: int) -> npt.NDArray[np.float32]:
    return np.empty(shape, dtype=np.float32)


def _read(kind: Any, rows: Any, lanes: Any, job_address: Any, index: Any) -> None:
    """A worker that only reads: the limit of what attention can do."""
    job = as_array(job_address, 1, JOB)[0]
    total = zeros(WIDE)
    page = fetch_add(job.claimed, 1)
    while page < job.pages:
        address = as_array(job.addresses, job.pages, np.int64)[page]
        for at in range(address, address + job.head_bytes - _STRIP_BYTES, _STRIP_BYTES):
            for line in range(0, _STRIP_BYTES, 64):
                prefetch(at + _READ_AHEAD_BYTES + line)
            for strip in range(0, _STRIP_BYTES, 4 * WIDE):
                total = add(total, load(FLOAT32, WIDE, at + strip))
        page = fetch_add(job.claimed, 1)
    store_scalar(sum_lanes(total), job.scratch + 64 * index)


def _make_reader(addresses: npt.NDArray[np.int64], page_bytes: int) -> Callable[[], None]:
    constants = [ConstType(number) for number in (0, 0, 0)]
    signature = (*constants, types.int64, types.int64)
    work = compile_cached(_read, signature, nogil=True).address
    workers = numba.get_num_threads()
    job, claimed = np.zeros(1, dtype=JOB), np.zeros(1, dtype=np.int64)
    sums = np.zeros(16 * workers, dtype=np.float32)
    job["addresses"], job["pages"] = addresses.ctypes.data, len(addresses)
    job["head_bytes"], job["scratch"] = page_bytes, sums.ctypes.data
    job["claimed"] = claimed.ctypes.data

    def read() -> None:
        claimed[0] = 0
        run_team(work, job.ctypes.data, workers)

    return read


def benchmark_attention() -> list[AttentionRow]:
    """Measure every shape; print each with limit and ratio; return the rows."""
    threads = torch.get_num_threads()
    numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
    torch.set_num_threads(threads)  # Numba, starting up, sets the OpenMP of both to all cores
    region = mmap.mmap(-1, _BUFFER_BYTES)
    buffer = np.frombuffer(region, dtype=np.uint8)
    buffer[:] = 0x2F  # as float16 0.11, as bfloat16 and float32 1.6e-10: ordinary numbers
    cases = {shape.name: _Case(shape, buffer) for shape in SHAPES}
    compile_seconds = sum(
        _seconds(lambda case=case: prepare(case.layout, case.q.shape[1]))  # type: ignore[misc]
        for case in cases.values()
    )
    whole = torch.from_numpy(buffer.view(np.float64))
    first = next(iter(cases.values()))
    reader = _make_reader(first.addresses, first.layout.payload_bytes)
    actions: dict[str, Callable[[], object]] = {
        "read, torch": lambda: whole.sum(),
        "read, page by page": reader,
        **{name: case.attend for name, case in cases.items()},
    }
    sizes = {name: case.total_bytes for name, case in cases.items()}
    sizes |= {"read, torch": len(buffer), "read, page by page": first.total_bytes}
    times: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(_ROUNDS + 1):  # the first warms up
        for name, action in actions.items():
            times[name].append(_seconds(action))
    speeds = {name: sizes[name] / statistics.median(times[name][1:]) for name in actions}
    limit = max(speed for name, speed in speeds.items() if name.startswith("read"))
    rows = [AttentionRow(name, speed, limit) for name, speed in speeds.items()]
    _print(rows, compile_seconds)
    return rows


def _print(rows: list[AttentionRow], compile_seconds: float) -> None:
    write = sys.stdout.write
    # Several queries a page are bound by arithmetic: no bar.
    barred = {
        s.name for s in SHAPES
        if s.dtype is DType.BFLOAT16 and s.codec in _BARRED and s.queries == 1
    }  # fmt: skip
    write(f"attention: {describe_machine()}\n")
    write(f"{'GB/s of encoded bytes':<30}{'figure':>8}{'limit':>8}{'ratio':>8}\n")
    for row in rows:
        figure, limit = row.bytes_per_second / 1e9, row.limit_bytes_per_second / 1e9
        verdict = ""
        if row.name in barred:
            held = "holds" if row.ratio >= READ_RATIO_MIN else "MISSED"
            verdict = f"  bar {READ_RATIO_MIN} {held}"
        write(f"{row.name:<30}{figure:>8.2f}{limit:>8.2f}{row.ratio:>8.2f}{verdict}\n")
    write(f"kernels compiled or loaded from disk: {compile_seconds:.1f} s\n")


def _seconds(action: Callable[[], object]) -> float:
    time.sleep(_PAUSE_SECONDS)
    start = time.perf_counter()
    action()
    return time.perf_counter() - start
