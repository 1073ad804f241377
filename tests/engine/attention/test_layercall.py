"""A layer's call: the bits of its parts by themselves, run after run, on any number of threads."""

from __future__ import annotations

import numba
import numpy as np
import pytest
import torch

from tests.engine.attention.pages import make_pages
from tierd.types import CodecId
from tierd_engine.attention.cpu import attend_pages, merge_partials
from tierd_engine.attention.layercall import CallScratch, LayerCall, Segment
from tierd_engine.attention.operator import attend_reference
from tierd_engine.attention.simd import BFLOAT16, FLOAT32

KV_HEADS, SHARE, HEAD_DIM, BLOCK = 2, 3, 64, 64
HEADS, SCALE = KV_HEADS * SHARE, HEAD_DIM**-0.5
KINDS = {FLOAT32: torch.float32, BFLOAT16: torch.bfloat16}
GUARD = 16


class Case:
    """Raw pages, the last of them half full, and encoded ones, with outputs of NaN."""

    def __init__(self, rng: np.random.Generator, codecs: list[CodecId], n: int) -> None:
        counts = [3, *rng.integers(1, 20, len(codecs) - 1).tolist()] if codecs else []
        self.pages = [
            make_pages(rng, count, KV_HEADS, HEAD_DIM, BLOCK, codec)
            for codec, count in zip(codecs, counts, strict=True)
        ]
        self.tokens = [np.full(count, BLOCK, dtype=np.int32) for count in counts]
        if codecs:
            self.tokens[0][-1] = BLOCK // 2
        self.parts, self.n = sum(counts), n
        self.first = np.array([0, 10, 20], dtype=np.int64) * BLOCK
        self.positions = 20 * BLOCK + BLOCK // 2 - n + np.arange(n, dtype=np.int64)
        self.o = np.full((self.parts, n, HEADS, HEAD_DIM), np.nan, dtype=np.float32)
        self.lse = np.full((self.parts, n, HEADS), np.nan, dtype=np.float32)

    def segments(self) -> list[Segment]:
        causal = (self.first, self.positions) if self.n > 1 else None
        return [
            Segment(pages.layout, pages.addresses, tokens, causal if i == 0 else None)
            for i, (pages, tokens) in enumerate(zip(self.pages, self.tokens, strict=True))
        ]

    def call(self, kind: int, *, merges: bool = True) -> LayerCall:
        return LayerCall(
            self.segments(), HEADS, self.n, SCALE, self.o, self.lse, CallScratch(), kind=kind,
            merges=merges,
        )  # fmt: skip

    def apart(self, q: np.ndarray) -> np.ndarray:
        """Return the merged o of the same pages, layout by layout."""
        o, lse = np.full_like(self.o, np.nan), np.full_like(self.lse, np.nan)
        start = 0
        for part in self.segments():
            end = start + len(part.addresses)
            causal = part.causal or (None, None)
            attend_pages(
                q, part.addresses, part.tokens, part.layout, SCALE, o[start:end], lse[start:end],
                *causal,
            )  # fmt: skip
            start = end
        out = np.full((self.n, HEADS, HEAD_DIM), np.nan, dtype=np.float32)
        merge_partials(o, lse, out, np.empty((self.n, HEADS), dtype=np.float32))
        return out


def draw_q(rng: np.random.Generator, n: int, kind: int) -> torch.Tensor:
    q = rng.standard_normal((n, HEADS, HEAD_DIM)).astype(np.float32)
    return torch.from_numpy(q).to(KINDS[kind])


def run(call: LayerCall, q: torch.Tensor) -> torch.Tensor:
    """Run a call into an output of NaN that nothing may be written beyond."""
    memory = torch.full((q.numel() + GUARD,), torch.nan, dtype=q.dtype)
    call.run(q.data_ptr(), memory.data_ptr())
    assert torch.isnan(memory[-GUARD:]).all()
    return memory[:-GUARD].view(q.shape)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 2, 5, 16])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_runs_give_the_bits_of_the_parts_one_by_one(kind: int, n: int, threads: int) -> None:
    rng = np.random.default_rng()
    case = Case(rng, [CodecId.RAW, CodecId.INT8, CodecId.K8V4], n)
    before = numba.get_num_threads()
    try:
        numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
        call = case.call(kind)
        for _ in range(3):  # a run leaves the call ready for the next
            q = draw_q(rng, n, kind)
            case.o.fill(np.nan)
            case.lse.fill(np.nan)
            out = run(call, q)
            expected = torch.from_numpy(case.apart(q.float().numpy())).to(q.dtype)
            assert torch.equal(out, expected)
    finally:
        numba.set_num_threads(before)


def test_the_tokens_of_a_page_may_grow_between_runs() -> None:
    rng = np.random.default_rng()
    case = Case(rng, [CodecId.RAW, CodecId.INT8], 1)
    call = case.call(FLOAT32)
    for count in (1, 7, BLOCK):
        case.tokens[0][-1] = count
        q = draw_q(rng, 1, FLOAT32)
        expected = attend_reference(q.numpy(), *_seen(case), SCALE)
        np.testing.assert_allclose(run(call, q).numpy(), expected.o, atol=2e-5, rtol=0)


def _seen(case: Case) -> tuple[np.ndarray, np.ndarray]:
    def joined(side: str) -> np.ndarray:
        rows = [
            getattr(pages, side)[page][:, :count]
            for pages, tokens in zip(case.pages, case.tokens, strict=True)
            for page, count in enumerate(tokens)
        ]
        return np.concatenate(rows, axis=1)

    return joined("keys"), joined("values")


def test_a_call_that_does_not_merge_leaves_the_partials_and_no_output() -> None:
    rng = np.random.default_rng()
    case = Case(rng, [CodecId.RAW, CodecId.INT4], 1)
    q = draw_q(rng, 1, FLOAT32)
    out = run(case.call(FLOAT32, merges=False), q)
    assert torch.isnan(out).all()
    merged = np.empty(q.shape, dtype=np.float32)
    merge_partials(case.o, case.lse, merged, np.empty((1, HEADS), dtype=np.float32))
    np.testing.assert_array_equal(merged, case.apart(q.numpy()))


def test_no_pages_at_all_give_zeros() -> None:
    case = Case(np.random.default_rng(), [], 1)
    assert torch.equal(run(case.call(FLOAT32), draw_q(np.random.default_rng(), 1, FLOAT32)),
                       torch.zeros(1, HEADS, HEAD_DIM))  # fmt: skip


def test_calls_share_scratch_that_grows() -> None:
    scratch = CallScratch()
    small = scratch.take(10)
    assert scratch.take(5) is small
    assert scratch.take(20).size >= 20
    small[:] = 1  # what was given stays good
