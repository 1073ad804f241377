"""Attention over hot and encoded pages on the GPU, interpreted, against the float64 operator."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from tests.engine.attention.pages import Pages, make_pages, poison_beyond
from tierd.types import CodecId, DType
from tierd_engine.arena import TORCH_DTYPES
from tierd_engine.attention.operator import Partial, attend_reference
from tierd_engine.gpu.attending import attend_pages
from tierd_engine.gpu.merging import merge_partials

CODECS = (CodecId.RAW, CodecId.INT8, CodecId.K8V4, CodecId.INT4, CodecId.FP8)
FOUR_BIT = (CodecId.K8V4, CodecId.INT4)  # of heads of a multiple of 32 channels
each_codec = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name.lower())


@dataclass(frozen=True)
class Model:
    kv_heads: int
    share: int
    head_dim: int
    dtype: DType

    @property
    def heads(self) -> int:
        return self.kv_heads * self.share


MODELS = {
    "Llama-3": Model(8, 4, 128, DType.BFLOAT16),
    "Qwen2": Model(4, 7, 128, DType.BFLOAT16),
    "SmolLM2": Model(3, 3, 64, DType.FLOAT32),
    "odd": Model(2, 1, 20, DType.FLOAT16),
    "wide": Model(1, 3, 96, DType.FLOAT16),
}


class Case:
    """Random pages with ragged tails, poisoned beyond them, and queries; prints its seed."""

    def __init__(
        self, model: Model, codec: CodecId, block: int, n: int, tokens: tuple[int, ...]
    ) -> None:
        self.seed = int(np.random.default_rng().integers(2**32))
        rng = np.random.default_rng(self.seed)
        print(f"seed {self.seed}")  # shown if the test fails
        self.model, self.n = model, n
        pages = len(tokens)
        self.pages: Pages = make_pages(
            rng, pages, model.kv_heads, model.head_dim, block, codec, model.dtype
        )
        self.tokens = np.array(tokens, np.int32)
        poison_beyond(self.pages, self.tokens)
        q = rng.standard_normal((n, model.heads, model.head_dim)).astype("f4")
        self.q = torch.tensor(q).to(TORCH_DTYPES[model.dtype])
        self.scale = model.head_dim**-0.5

    def attend(
        self, pages_each: int, firsts: np.ndarray | None = None, positions: np.ndarray | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        model = self.model
        parts = -(-len(self.tokens) // pages_each)
        o = torch.full((parts, self.n, model.heads, model.head_dim), torch.nan)
        lse = torch.full((parts, self.n, model.heads), torch.nan)
        attend_pages(
            self.q, torch.tensor(self.pages.addresses), torch.tensor(self.tokens),
            self.pages.layout, self.scale, o, lse,
            None if firsts is None else torch.tensor(firsts),
            None if positions is None else torch.tensor(positions), pages_each=pages_each,
        )  # fmt: skip
        return o, lse

    def expected(
        self, pages: slice, firsts: np.ndarray | None = None, positions: np.ndarray | None = None
    ) -> Partial:
        """The partial of these pages' tokens together."""
        block = self.pages.layout.block_tokens
        tokens = np.arange(block)
        is_valid = tokens[None, :] < self.tokens[pages, None]
        visible = np.broadcast_to(is_valid.reshape(-1), (self.n, is_valid.size))
        if firsts is not None and positions is not None:
            at = (firsts[pages, None] + tokens[None, :]).reshape(-1)
            visible = visible & (at[None, :] <= positions[:, None])
        keys, values = (
            array[pages].swapaxes(0, 1).reshape(self.model.kv_heads, -1, self.model.head_dim)
            for array in (self.pages.keys, self.pages.values)
        )
        q = self.q.to(torch.float64).numpy()
        return attend_reference(q, keys, values, self.scale, visible)


def assert_close(o: torch.Tensor, lse: torch.Tensor, expected: Partial) -> None:
    np.testing.assert_allclose(o.numpy(), expected.o, atol=1e-5)
    np.testing.assert_allclose(lse.numpy(), expected.lse, atol=1e-5)


CASES = [
    pytest.param(model, codec, id=f"{name}-{codec.name.lower()}")
    for name, model in MODELS.items()
    for codec in CODECS
    if codec not in FOUR_BIT or model.head_dim % 32 == 0
]


@pytest.mark.parametrize(("model", "codec"), CASES)
def test_every_run_of_pages_gives_its_partial(model: Model, codec: CodecId) -> None:
    case = Case(model, codec, 64, 1, (64, 37, 0))
    for pages_each in (1, 2):
        o, lse = case.attend(pages_each)
        for part in range(len(o)):
            pages = slice(part * pages_each, (part + 1) * pages_each)
            assert_close(o[part], lse[part], case.expected(pages))


@each_codec
@pytest.mark.parametrize("block", [16, 256])
def test_blocks_smaller_and_larger_than_a_key_group(codec: CodecId, block: int) -> None:
    case = Case(MODELS["SmolLM2"], codec, block, 1, (block, block - 3))
    o, lse = case.attend(2)
    assert_close(o[0], lse[0], case.expected(slice(None)))


@each_codec
@pytest.mark.parametrize("name", ["Qwen2", "wide"])
def test_several_queries_see_what_stands_before_them(codec: CodecId, name: str) -> None:
    n = 11
    case = Case(MODELS[name], codec, 16, n, (16, 16, 9))
    firsts = np.array([0, 160, 176])
    positions = np.arange(174, 174 + n)  # the first sees nothing of the last page
    positions[3] = -1  # sees nothing at all
    o, lse = case.attend(1, firsts, positions)
    for part in range(3):
        wanted = case.expected(slice(part, part + 1), firsts, positions)
        assert_close(o[part], lse[part], wanted)
    assert torch.isneginf(lse[:, 3]).all() and (o[:, 3] == 0).all()


@each_codec
def test_more_rows_than_one_program_takes(codec: CodecId) -> None:
    case = Case(Model(1, 7, 32, DType.BFLOAT16), codec, 16, 16, (16,))  # 112 rows
    o, lse = case.attend(1)
    assert_close(o[0], lse[0], case.expected(slice(None)))


@each_codec
def test_scores_far_from_zero_keep_their_differences(codec: CodecId) -> None:
    case = Case(MODELS["SmolLM2"], codec, 64, 1, (64, 64))
    case.scale = 20.0
    o, lse = case.attend(1)
    for part in (0, 1):
        wanted = case.expected(slice(part, part + 1))
        np.testing.assert_allclose(lse[part].numpy(), wanted.lse, rtol=2e-6, atol=1e-3)
        np.testing.assert_allclose(o[part].numpy(), wanted.o, atol=5e-3)


@each_codec
def test_partials_of_runs_merge_to_the_whole(codec: CodecId) -> None:
    case = Case(MODELS["SmolLM2"], codec, 64, 2, (64, 64, 64, 64, 13))
    o, lse = case.attend(2)
    out, out_lse = torch.full(o.shape[1:], torch.nan), torch.full(lse.shape[1:], torch.nan)
    merge_partials(o, lse, out, out_lse)
    assert_close(out, out_lse, case.expected(slice(None)))


def test_no_pages_is_no_work() -> None:
    none, tokens = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int32)
    o, lse = torch.empty(0, 1, 2, 32), torch.empty(0, 1, 2)
    q = torch.zeros(1, 2, 32, dtype=torch.bfloat16)
    rng = np.random.default_rng(0)
    for codec in CODECS:
        layout = make_pages(rng, 1, 1, 32, 16, codec).layout
        attend_pages(q, none, tokens, layout, 1.0, o, lse)
