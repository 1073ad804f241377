"""Prefill over tiers against the float64 operator: decode interpreted, PyTorch's attention."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.engine.attention.pages import Pages, make_pages, poison_beyond
from tests.gpu.coding import each_codec
from tierd.types import CodecId, DType, Geometry
from tierd_engine.arena import TORCH_DTYPES
from tierd_engine.attention.operator import Partial, attend_reference
from tierd_engine.gpu.prefill import PrefillStaging, Run, attend_many, attend_rows

BLOCK = 16
CPU = torch.device("cpu")
DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available()


class Case:
    """A chunk of queries and its own tokens, after pages of several codecs; prints its seed."""

    def __init__(
        self, kv_heads: int, share: int, head_dim: int, dtype: DType, n: int,
        runs: list[tuple[CodecId, tuple[int, ...]]],
    ) -> None:  # fmt: skip
        self.seed = int(np.random.default_rng().integers(2**32))
        print(f"seed {self.seed}")  # shown if the test fails
        rng = np.random.default_rng(self.seed)
        self.geometry = Geometry(1, kv_heads, head_dim, dtype, BLOCK)
        self.scale = head_dim**-0.5
        self.q, self.own_keys, self.own_values = (
            torch.tensor(rng.standard_normal((heads, n, head_dim)).astype("f4")).to(
                TORCH_DTYPES[dtype]
            )
            for heads in (kv_heads * share, kv_heads, kv_heads)
        )
        self.pages: list[Pages] = []
        self.tokens = [tokens for _, tokens in runs]
        for codec, tokens in runs:
            pages = make_pages(rng, len(tokens), kv_heads, head_dim, BLOCK, codec, dtype)
            poison_beyond(pages, np.array(tokens, np.int32))
            self.pages.append(pages)

    def runs(self) -> Iterator[Run]:
        for pages, tokens in zip(self.pages, self.tokens, strict=True):
            addresses = torch.tensor(pages.addresses)
            yield Run(pages.layout, addresses, tokens)
            addresses.fill_(0)  # lent until the next run is asked for, and no longer

    def attend(self, dtype: DType, capacity_blocks: int) -> Partial:
        token_bytes = 2 * self.geometry.kv_heads * self.geometry.head_dim * dtype.itemsize
        budget_bytes = capacity_blocks * BLOCK * token_bytes
        staging = PrefillStaging(self.geometry, CPU, dtype, budget_bytes)
        assert staging.capacity_tokens == max(capacity_blocks, 1) * BLOCK
        assert staging.total_bytes == staging.capacity_tokens * token_bytes
        for part in (staging.keys, staging.values):
            part.fill_(torch.nan)
        result = attend_many(
            self.q, self.own_keys, self.own_values, self.runs(), staging, self.scale
        )
        assert result.o.dtype == result.lse.dtype == torch.float32
        return Partial(result.o.double().numpy(), result.lse.double().numpy())

    def expected(self) -> Partial:
        """Of every token that is counted, [heads, n, head_dim] as prefill has it."""
        q, keys, values = (x.double().numpy() for x in (self.q, self.own_keys, self.own_values))
        n, past = q.shape[1], 0
        for pages, tokens in zip(self.pages, self.tokens, strict=True):
            for page, count in enumerate(tokens):
                keys = np.concatenate([pages.keys[page, :, :count], keys], axis=1)
                values = np.concatenate([pages.values[page, :, :count], values], axis=1)
                past += count
        visible = np.arange(past + n)[None, :] <= past + np.arange(n)[:, None]
        found = attend_reference(q.swapaxes(0, 1), keys, values, self.scale, visible)
        return Partial(found.o.swapaxes(0, 1), found.lse.T)


def assert_close(found: Partial, expected: Partial, atol: float = 2e-5) -> None:
    np.testing.assert_allclose(found.o, expected.o, atol=atol)
    np.testing.assert_allclose(found.lse, expected.lse, atol=atol)


@pytest.mark.parametrize(
    ("kv_heads", "share", "head_dim", "dtype"),
    [(2, 4, 128, DType.BFLOAT16), (1, 7, 128, DType.BFLOAT16), (3, 3, 64, DType.FLOAT32)],
    ids=["Llama-3", "Qwen2", "SmolLM2"],
)
def test_a_chunk_over_all_tiers_gives_the_whole_attention(
    kv_heads: int, share: int, head_dim: int, dtype: DType
) -> None:
    runs = [
        (CodecId.RAW, (16, 16, 5)),
        (CodecId.INT8, (16, 16, 16)),
        (CodecId.K8V4, (16,)),
        (CodecId.INT4, (16, 16)),
    ]
    case = Case(kv_heads, share, head_dim, dtype, 21, runs)
    assert_close(case.attend(DType.FLOAT32, 3), case.expected())


@each_codec
@pytest.mark.parametrize("capacity_blocks", [1, 2, 100])
def test_every_codec_through_staging_of_any_size(codec: CodecId, capacity_blocks: int) -> None:
    case = Case(1, 2, 32, DType.FLOAT16, 7, [(codec, (16,) * 5)])
    assert_close(case.attend(DType.FLOAT32, capacity_blocks), case.expected())


@each_codec
def test_blocks_that_are_not_full_count_only_their_tokens(codec: CodecId) -> None:
    case = Case(1, 2, 32, DType.FLOAT16, 3, [(codec, (16, 3, 3, 0, 16, 16, 1)), (codec, (0, 9))])
    for capacity_blocks in (1, 3, 10):
        assert_close(case.attend(DType.FLOAT32, capacity_blocks), case.expected())


def test_a_chunk_with_nothing_before_it_sees_its_own_tokens_alone() -> None:
    for runs in ([], [(CodecId.INT8, ())], [(CodecId.INT8, (0, 0))]):
        case = Case(2, 2, 20, DType.FLOAT16, 33, runs)
        assert_close(case.attend(DType.FLOAT32, 2), case.expected())


def test_in_the_models_dtype_the_error_is_that_dtypes_and_does_not_grow_with_the_runs() -> None:
    case = Case(1, 4, 64, DType.BFLOAT16, 20, [(CodecId.INT8, (16,) * 12)])
    expected = case.expected()
    step = 2.0**-9
    largest = max(np.abs(pages.values).max() for pages in case.pages)
    for capacity_blocks in (1, 12):
        found = case.attend(DType.BFLOAT16, capacity_blocks)
        # Keys and values come rounded, so do q·k's factors, p and o: a few steps of the largest.
        np.testing.assert_allclose(found.o, expected.o, atol=6 * step * largest)
        np.testing.assert_allclose(found.lse, expected.lse, atol=0.05)


class _Largest(TorchDispatchMode):
    """Notes the largest tensor that any operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple) else (result,):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes())
        return result


def test_memory_does_not_grow_with_the_context() -> None:
    seen = []
    for pages in (2, 20):
        case = Case(1, 2, 32, DType.FLOAT16, 40, [(CodecId.INT8, (16,) * pages)])
        with _Largest() as largest:
            case.attend(DType.FLOAT32, 2)
        seen.append(largest.elements)
    assert seen[0] == seen[1] > 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("n", "m", "d"), [(33, 33, 64), (5, 70, 128), (1, 300, 20)])
def test_o_and_lse_of_pytorchs_attention_are_float32_and_to_the_base_e(
    device: str, dtype: torch.dtype, n: int, m: int, d: int
) -> None:
    q, keys, values = (torch.randn(3, rows, d).to(dtype) for rows in (n, m, m))
    is_causal = n == m
    o, lse = attend_rows(*(x.to(device) for x in (q, keys, values)), 0.2, is_causal=is_causal)
    assert o.dtype == lse.dtype == torch.float32 and lse.shape == (3, n)
    wide = [x.double().numpy() for x in (q, keys, values)]
    visible = np.arange(m)[None, :] <= np.arange(n)[:, None] if is_causal else None
    expected = attend_reference(wide[0].swapaxes(0, 1), *wide[1:], 0.2, visible)
    tolerance = 2e-5 if dtype == torch.float32 else 0.03
    np.testing.assert_allclose(o.cpu().numpy(), expected.o.swapaxes(0, 1), atol=tolerance)
    np.testing.assert_allclose(lse.cpu().numpy(), expected.lse.T, atol=min(tolerance, 2e-3))
