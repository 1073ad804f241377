"""attend_pages against the float64 reference, on fresh random inputs and poisoned outputs."""

from __future__ import annotations

import ctypes
import mmap
import threading
import tracemalloc
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import pytest

from tests.engine.attention.pages import Pages, make_pages, poison_beyond
from tierd.codec.layout import page_layout
from tierd.types import CodecId, DType, Geometry
from tierd_engine.attention.cpu import attend_pages
from tierd_engine.attention.operator import attend_reference

INT8, RAW = CodecId.INT8, CodecId.RAW
K8V4, INT4, FP8 = CodecId.K8V4, CodecId.INT4, CodecId.FP8
HEAD_DIMS = (16, 20, 33, 48, 64, 80, 96, 112, 128)
FOUR_BIT_HEAD_DIMS = (32, 64, 96, 128, 160)
TOLERANCE = 2e-5  # float32 sums of at most 256 terms near 1


@dataclass
class Case:
    """One call's inputs; outputs start as NaN, with guard elements behind them."""

    pages: Pages
    q: Any
    tokens: Any
    first: Any
    last: Any

    def run(self) -> tuple[Any, Any]:
        n, heads, d = self.q.shape
        shape = (len(self.tokens), n, heads)
        out_memory = np.full(int(np.prod(shape)) * d + 16, np.nan, dtype=np.float32)
        lse_memory = np.full(int(np.prod(shape)) + 16, np.nan, dtype=np.float32)
        out = out_memory[:-16].reshape(*shape, d)
        lse = lse_memory[:-16].reshape(shape)
        attend_pages(
            self.q, self.pages.addresses, self.tokens, self.pages.layout, self.scale, out, lse,
            self.first, self.last,
        )  # fmt: skip
        assert np.isnan(out_memory[-16:]).all() and np.isnan(lse_memory[-16:]).all()
        return out, lse

    @property
    def scale(self) -> float:
        return float(self.q.shape[2] ** -0.5)

    def check(self) -> None:
        out, lse = self.run()
        for page, count in enumerate(self.tokens):
            visible = None
            if self.first is not None:
                positions = self.first[page] + np.arange(count)
                visible = positions[None, :] <= self.last[:, None]
            expected = attend_reference(
                self.q, self.pages.keys[page][:, :count], self.pages.values[page][:, :count],
                self.scale, visible,
            )  # fmt: skip
            np.testing.assert_allclose(out[page], expected.o, atol=TOLERANCE, rtol=0)
            np.testing.assert_allclose(lse[page], expected.lse, atol=TOLERANCE, rtol=1e-6)


def draw_full(
    rng: np.random.Generator, codec: CodecId, n: int, kv_heads: int, share: int, d: int
) -> Case:
    """Return a case of three full pages, nothing masked."""
    pages = make_pages(rng, 3, kv_heads, d, 64, codec, DType.BFLOAT16)
    q = rng.standard_normal((n, kv_heads * share, d)).astype(np.float32)
    return Case(pages, q, np.full(3, 64, dtype=np.int32), None, None)


def draw(
    rng: np.random.Generator, codec: CodecId, dtype: DType, n: int, kv_heads: int, share: int,
    d: int, block: int, count: int = 3,
) -> Case:  # fmt: skip
    """Return a case of `count` ragged pages, half of the time causal."""
    pages = make_pages(rng, count, kv_heads, d, block, codec, dtype)
    tokens = rng.integers(0, block + 1, count).astype(np.int32)
    tokens[rng.integers(count)] = block
    poison_beyond(pages, tokens)
    q = rng.standard_normal((n, kv_heads * share, d)).astype(np.float32)
    first = last = None
    if rng.random() < 0.5:
        first = np.arange(count, dtype=np.int64) * block
        last = rng.integers(-1, count * block, n).astype(np.int64)
    return Case(pages, q, tokens, first, last)


# Each row compiles one kernel: kind of element, rows at a time (1 query: heads a KV head), lanes.
KERNELS = [
    (INT8, DType.BFLOAT16, 1, (1,), (64, 128, 256)),
    (INT8, DType.FLOAT32, 1, (2,), (64, 128, 256)),
    (INT8, DType.BFLOAT16, 1, (3, 5, 6), (64, 128, 256)),
    (INT8, DType.FLOAT16, 16, (1, 2, 4, 7, 8), (64, 128, 256)),
    (INT8, DType.BFLOAT16, 16, (1, 2, 4), (16, 32)),
    (RAW, DType.BFLOAT16, 16, (3, 5, 6), (64, 128, 256)),
    (RAW, DType.BFLOAT16, 1, (1,), (16, 32)),
    (RAW, DType.FLOAT32, 16, (1, 2, 4, 7, 8), (64, 128, 256)),
    (RAW, DType.FLOAT32, 16, (3, 5, 6), (16, 32)),
    (RAW, DType.FLOAT16, 1, (2,), (64, 128, 256)),
    (K8V4, DType.BFLOAT16, 1, (3, 5, 6), (64, 128, 256)),
    (K8V4, DType.BFLOAT16, 16, (1, 2, 4, 7, 8), (16, 32)),
    (INT4, DType.BFLOAT16, 1, (3, 5, 6), (64, 128, 256)),
    (INT4, DType.FLOAT16, 16, (1, 2, 4, 7, 8), (64, 128)),
    (INT4, DType.FLOAT32, 1, (1,), (32,)),
    (INT4, DType.BFLOAT16, 16, (1, 2, 4), (16,)),
    (FP8, DType.BFLOAT16, 1, (3, 5, 6), (64, 128, 256)),
    (FP8, DType.BFLOAT16, 16, (1, 2, 4), (16, 32)),
]


@pytest.mark.parametrize("codec, dtype, queries_max, shares, blocks", KERNELS)
def test_matches_the_reference(
    codec: CodecId, dtype: DType, queries_max: int, shares: tuple[int, ...],
    blocks: tuple[int, ...],
) -> None:  # fmt: skip
    seed = int(np.random.default_rng().integers(2**31))
    rng = np.random.default_rng(seed)
    for d in FOUR_BIT_HEAD_DIMS if codec in (K8V4, INT4) else HEAD_DIMS:
        for share in shares:
            n = 1 if queries_max == 1 else int(rng.integers(2, queries_max + 1))
            kv_heads, block = int(rng.integers(1, 9)), int(rng.choice(blocks))
            case = draw(rng, codec, dtype, n, kv_heads, share, d, block)
            try:
                case.check()
            except AssertionError as error:
                raise AssertionError(
                    f"seed {seed}: d {d}, share {share}, n {n}, kv_heads {kv_heads}, block {block}"
                ) from error


def test_many_pages_do_not_depend_on_the_number_of_threads() -> None:
    rng = np.random.default_rng()
    for codec in (INT8, RAW, K8V4, INT4, FP8):
        for n, count in ((1, 3), (1, 40), (5, 40))[: 3 if codec in (INT8, RAW) else 2]:
            case = draw(rng, codec, DType.BFLOAT16, n, 3, 3, 64, 64, count)
            results = []
            try:
                for threads in (1, min(2, numba.config.NUMBA_NUM_THREADS), 1):
                    numba.set_num_threads(threads)
                    results.append(case.run())
            finally:
                numba.set_num_threads(numba.config.NUMBA_NUM_THREADS)
            for out, lse in results[1:]:
                assert out.tobytes() == results[0][0].tobytes()
                assert lse.tobytes() == results[0][1].tobytes()


def test_calls_from_two_threads_do_not_meet() -> None:
    rng = np.random.default_rng()
    cases = [draw(rng, INT8, DType.BFLOAT16, 1, 3, 3, 64, 64, 20 + i) for i in range(2)]
    expected = [case.run() for case in cases]
    failures: list[int] = []

    def repeat(i: int) -> None:
        for _ in range(50):
            out, lse = cases[i].run()
            if out.tobytes() != expected[i][0].tobytes():
                failures.append(i)
            if lse.tobytes() != expected[i][1].tobytes():
                failures.append(i)

    threads = [threading.Thread(target=repeat, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30.0)
    assert not any(thread.is_alive() for thread in threads)
    assert failures == []


def test_a_page_of_which_nothing_is_seen_is_empty() -> None:
    rng = np.random.default_rng()
    case = draw_full(rng, RAW, 2, 2, 3, 20)
    case.first = np.array([0, 64, 128], dtype=np.int64)
    case.last = np.array([70, 10], dtype=np.int64)
    case.tokens[1] = 0
    out, lse = case.run()
    for page, query in ((1, 0), (1, 1), (2, 0), (2, 1)):
        assert (out[page, query] == 0.0).all()
        assert np.isneginf(lse[page, query]).all()
    assert np.isfinite(lse[0]).all()


def test_no_pages_and_no_queries_are_allowed() -> None:
    layout = page_layout(Geometry(1, 2, 64, DType.BFLOAT16, 64), INT8)
    for n, count in ((1, 0), (0, 2)):
        attend_pages(
            np.empty((n, 6, 64), np.float32), np.zeros(count, np.int64), np.zeros(count, np.int32),
            layout, 0.125, np.empty((count, n, 6, 64), np.float32),
            np.empty((count, n, 6), np.float32),
        )  # fmt: skip


def test_scores_far_apart_pick_one_token_and_do_not_overflow() -> None:
    rng = np.random.default_rng()
    case = draw(rng, RAW, DType.FLOAT32, 4, 2, 4, 64, 64)
    case.q *= 3000.0
    case.first = case.last = None
    out, lse = case.run()
    for page, count in enumerate(case.tokens):
        expected = attend_reference(
            case.q, case.pages.keys[page][:, :count], case.pages.values[page][:, :count], case.scale
        )
        # Scores are sums of parts near 1e4, exact to 1e-3 in float32, however small the sum is;
        # so are the weights, relatively.
        np.testing.assert_allclose(lse[page], expected.lse, rtol=1e-5, atol=2e-3)
        np.testing.assert_allclose(out[page], expected.o, atol=2e-2)


def test_nan_in_a_query_shows_in_its_rows_and_no_others() -> None:
    rng = np.random.default_rng()
    for codec in (INT8, RAW, K8V4, INT4, FP8):
        case = draw_full(rng, codec, 1, 2, 3, 64)
        case.q[0, 1, 5] = np.nan
        out, lse = case.run()
        assert np.isnan(out[:, 0, 1]).all() and np.isnan(lse[:, 0, 1]).all()
        others = [head for head in range(6) if head != 1]
        assert np.isfinite(out[:, 0, others]).all() and np.isfinite(lse[:, 0, others]).all()


def test_nothing_is_read_beyond_the_end_of_a_page() -> None:
    rng = np.random.default_rng()
    odd = ((DType.FLOAT32, 20), (DType.FLOAT16, 33), (DType.BFLOAT16, 80))
    cases = [(codec, *shape) for codec in (RAW, INT8) for shape in odd]
    cases += [(codec, DType.BFLOAT16, d) for codec in (K8V4, INT4, FP8) for d in (32, 96)]
    for codec, dtype, d in cases:
        pages = make_pages(rng, 1, 1, d, 64, codec, dtype)
        layout = pages.layout
        room = -(-layout.payload_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        region = mmap.mmap(-1, room + mmap.PAGESIZE)
        view = np.frombuffer(region, dtype=np.uint8)
        start = int(pages.addresses[0]) - pages.memory.ctypes.data
        payload = pages.memory[start : start + layout.payload_bytes]
        view[room - layout.payload_bytes : room] = payload
        fence = ctypes.c_void_p(view.ctypes.data + room)
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.mprotect(fence, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
        pages.addresses[0] = view.ctypes.data + room - layout.payload_bytes
        q = rng.standard_normal((1, 2 if codec in (RAW, INT8) else 3, d)).astype(np.float32)
        Case(pages, q, np.array([64], np.int32), None, None).check()


def test_a_second_call_allocates_nothing() -> None:
    rng = np.random.default_rng()
    case = draw(rng, INT8, DType.BFLOAT16, 1, 3, 3, 64, 64, 8)
    out = np.empty((8, 1, 9, 64), dtype=np.float32)
    lse = np.empty((8, 1, 9), dtype=np.float32)
    pages = case.pages

    def call() -> None:
        attend_pages(case.q, pages.addresses, case.tokens, pages.layout, 0.125, out, lse)

    call()
    tracemalloc.start()
    try:
        call()
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        call()
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 1024  # a few Python ints, no array
    assert peak - before < 8192
