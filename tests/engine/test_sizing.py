"""Sizing: percentages, the smallest budgets, and the block size that follows."""

from __future__ import annotations

import pytest

from tierd.errors import BudgetTooSmall, InvalidArgument
from tierd.types import CodecId, DType
from tierd_engine.arena import hot_block_bytes
from tierd_engine.hf import ModelShape
from tierd_engine.sizing import JobSizes, check_length, size_tiers

SHAPE = ModelShape(30, 9, 3, 64, 8192, "")


def _size(context: int, hot: str, warm: str = "25%", block: int | None = None) -> JobSizes:
    return size_tiers(
        SHAPE, DType.FLOAT32, CodecId.RAW, context_tokens=context, max_new_tokens=128,
        hot=hot, warm=warm, block_tokens=block,
    )  # fmt: skip


@pytest.mark.parametrize("context", [255, 256, 257, 300, 1000, 4096, 8000])
@pytest.mark.parametrize("hot", ["25%", "10%"])
def test_a_share_of_the_kv_holds_at_least_two_blocks(context: int, hot: str) -> None:
    sizes = _size(context, hot)
    geometry = SHAPE.geometry(DType.FLOAT32, sizes.block_tokens)
    assert 2 * hot_block_bytes(geometry) <= sizes.hot_budget_bytes
    assert sizes.hot_budget_bytes <= sizes.kv_bytes * float(hot[:-1]) / 100
    assert sizes.cold_needed_bytes > 0


def test_large_budgets_use_the_default_block() -> None:
    assert _size(4096, "25%").block_tokens == 256
    assert _size(4096, "10%").block_tokens == 128


def test_a_hot_budget_too_small_names_the_smallest_and_the_smallest_works() -> None:
    with pytest.raises(BudgetTooSmall) as raised:
        _size(4096, "1000")
    smallest = raised.value.smallest_bytes
    assert str(smallest) in str(raised.value)
    assert _size(4096, str(smallest)).block_tokens == 16
    with pytest.raises(BudgetTooSmall):
        _size(4096, str(smallest - 1))


def test_an_explicit_block_size_is_kept_or_refused() -> None:
    assert _size(4096, "25%", block=64).block_tokens == 64
    with pytest.raises(BudgetTooSmall, match="of 256 tokens"):
        _size(4096, "10%", block=256)


def test_a_warm_budget_too_small_names_the_smallest_and_the_smallest_works() -> None:
    with pytest.raises(BudgetTooSmall) as raised:
        _size(4096, "25%", "0%")
    assert _size(4096, "25%", str(raised.value.smallest_bytes)).cold_needed_bytes > 0


def test_all_hot_needs_neither_warm_nor_cold() -> None:
    sizes = _size(300, "100MiB", "0%")
    assert sizes.cold_needed_bytes == 0


def test_a_context_past_the_trained_length_is_refused_with_the_way_out() -> None:
    check_length(SHAPE, 8064, 128)
    with pytest.raises(InvalidArgument, match=r"8192.*--rope-scaling"):
        check_length(SHAPE, 8065, 128)
