"""Sizing: percentages, the smallest budgets, and the block size that follows."""

from __future__ import annotations

from typing import Any

import pytest

from tierd.errors import BudgetTooSmall, InvalidArgument, TierFull
from tierd.types import CodecId, DType
from tierd_engine.arena import hot_block_bytes
from tierd_engine.hf import ModelShape
from tierd_engine.jobcheck import check_length
from tierd_engine.sizing import JobSizes, check_daemon_room, size_tiers

SHAPE = ModelShape(30, 9, 3, 64, 8192, "")


def _size(
    context: int, hot: str | None, warm: str | None = "25%", block: int | None = None,
    *, kept: bool = False,
) -> JobSizes:  # fmt: skip
    return size_tiers(
        SHAPE, DType.FLOAT32, CodecId.RAW, context_tokens=context, max_new_tokens=128,
        hot=hot, warm=warm, block_tokens=block, kept=kept,
    )  # fmt: skip


def _stats(warm: int, cold: int, held: int = 0, suspended: int = 0) -> dict[str, Any]:
    return {
        "tiers": {"warm": {"capacity_bytes": warm, "bytes": held},
                  "cold": {"capacity_bytes": cold, "bytes": 0}},
        "sessions": {"running": 0, "idle": 0, "suspended": suspended},
    }  # fmt: skip


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


def test_hot_holds_a_full_block_beside_the_first_and_the_open_one_where_smaller_blocks_do() -> None:
    hot_tokens = [_size(context, "25%").hot_bytes // 46080 for context in (1900, 2900, 3000)]
    blocks = [_size(context, "25%").block_tokens for context in (1900, 2900, 3000)]
    assert blocks == [128, 128, 256]
    assert [tokens // block for tokens, block in zip(hot_tokens, blocks, strict=True)] == [3, 5, 3]


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


@pytest.mark.parametrize("context", [1, 2, 15, 16, 17, 100, 255, 256, 300, 1000, 4096])
@pytest.mark.parametrize("block", [None, 16, 256])
def test_the_default_budgets_work_at_any_length(context: int, block: int | None) -> None:
    sizes = _size(context, None, None, block)
    geometry = SHAPE.geometry(DType.FLOAT32, sizes.block_tokens)
    need = min(2, geometry.blocks_for(sizes.total_tokens))
    assert sizes.hot_budget_bytes >= need * hot_block_bytes(geometry)
    assert sizes.warm_budget_bytes >= sizes.block_slot_bytes


def test_the_default_is_a_quarter_where_that_is_enough() -> None:
    given, default = _size(4096, "25%"), _size(4096, None, None)
    assert default == given


def test_a_refused_budget_names_its_option() -> None:
    with pytest.raises(BudgetTooSmall, match=r"^--hot 1000 is 1000 bytes"):
        _size(4096, "1000")
    with pytest.raises(BudgetTooSmall, match=r"^--warm 0 is 0 bytes"):
        _size(4096, "25%", "0")


@pytest.mark.parametrize("context", [100, 300, 4096])
def test_all_of_it_hot_needs_nothing_below(context: int) -> None:
    sizes = _size(context, "100%", "0")
    assert (sizes.below_bytes, sizes.cold_needed_bytes) == (0, 0)
    assert sizes.hot_bytes == sizes.hot_budget_bytes >= sizes.kv_bytes


def test_hot_allocates_no_more_than_the_job_needs() -> None:
    assert _size(4096, "100GiB").hot_bytes == _size(4096, "100%").hot_bytes


def test_a_block_of_no_tokens_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="block_tokens is 0"):
        _size(4096, "25%", block=0)


def test_a_daemon_that_holds_exactly_the_job_is_enough_and_a_byte_less_is_not() -> None:
    sizes = _size(4096, "25%")
    warm = sizes.block_slot_bytes
    check_daemon_room(sizes, _stats(warm, sizes.below_bytes - warm), resumed=False)
    with pytest.raises(
        BudgetTooSmall, match=r"the job needs .* below .*cold .*--cold-cap"
    ) as raised:
        check_daemon_room(sizes, _stats(warm, sizes.below_bytes - warm - 1), resumed=False)
    assert raised.value.smallest_bytes == sizes.below_bytes


def test_a_daemons_warm_tier_must_hold_a_block() -> None:
    sizes = _size(4096, "25%")
    with pytest.raises(BudgetTooSmall, match="warm tier"):
        check_daemon_room(sizes, _stats(sizes.block_slot_bytes - 1, 1 << 40), resumed=False)


def test_a_daemon_full_of_running_sessions_is_full_and_of_suspended_ones_is_not() -> None:
    sizes = _size(4096, "25%")
    room = 2 * sizes.below_bytes
    held = room - sizes.below_bytes + 1
    with pytest.raises(TierFull, match="try again"):
        check_daemon_room(sizes, _stats(room, 0, held), resumed=False)
    check_daemon_room(sizes, _stats(room, 0, held, suspended=1), resumed=False)
    check_daemon_room(sizes, _stats(room, 0, held), resumed=True)


def test_a_kept_session_needs_room_for_all_its_blocks() -> None:
    kept, dropped = _size(4096, "25%", kept=True), _size(4096, "25%")
    assert kept.below_bytes == 4224 // 256 * kept.block_slot_bytes > dropped.below_bytes
    check_daemon_room(_size(4096, "100%"), _stats(0, 0), resumed=False)


def test_a_context_past_the_trained_length_is_refused_with_the_way_out() -> None:
    check_length(SHAPE.trained_tokens, 8064, 128)
    with pytest.raises(InvalidArgument, match=r"8192.*--rope-scaling"):
        check_length(SHAPE.trained_tokens, 8065, 128)


def test_a_codec_that_cannot_store_the_models_heads_is_refused_before_any_weights() -> None:
    with pytest.raises(InvalidArgument, match=r"k8v4 .*head_dim is 80"):
        size_tiers(
            ModelShape(30, 32, 32, 80, 2048, ""), DType.FLOAT32, CodecId.K8V4,
            context_tokens=1024, max_new_tokens=128, hot="25%", warm="25%", block_tokens=None,
            kept=False,
        )  # fmt: skip


def _mixed(warm: str | None, *, guarded: bool = False, layers: str = "0-9=raw") -> JobSizes:
    return size_tiers(
        SHAPE, DType.FLOAT32, CodecId.INT8, context_tokens=4096, max_new_tokens=128,
        hot="25%", warm=warm, block_tokens=256, codec_layers=layers, guarded=guarded,
    )  # fmt: skip


def test_a_block_of_mixed_codecs_is_the_sum_of_its_layers() -> None:
    plain, mixed, raw = _mixed("25%", layers=""), _mixed("25%"), _mixed("25%", layers="0-29=raw")
    assert plain.below_bytes < mixed.below_bytes < raw.below_bytes
    assert 30 * mixed.below_bytes == 20 * plain.below_bytes + 10 * raw.below_bytes


def test_the_smallest_warm_for_a_block_of_mixed_codecs_works_whatever_slabs_it_makes() -> None:
    with pytest.raises(BudgetTooSmall) as raised:
        _mixed("0%")
    smallest = raised.value.smallest_bytes
    blocks = _mixed("25%").below_bytes * 16 // 17 // 13  # 13 blocks are not hot
    assert smallest >= blocks
    assert _mixed(str(smallest)).warm_budget_bytes == smallest == _mixed("50%").block_slot_bytes


def test_a_guarded_job_has_disk_for_raw_pages_and_the_same_warm() -> None:
    plain, guarded = _mixed("25%", layers=""), _mixed("25%", layers="", guarded=True)
    assert guarded.warm_budget_bytes == plain.warm_budget_bytes
    assert guarded.below_bytes == plain.below_bytes
    raw = _mixed("0.25GiB", layers="0-29=raw").block_slot_bytes
    blocks = 17 - 4 - plain.warm_budget_bytes // raw
    assert guarded.cold_needed_bytes >= blocks * raw > plain.cold_needed_bytes
    unguarded = guarded.cold_unguarded_bytes
    assert unguarded == plain.cold_unguarded_bytes == plain.cold_needed_bytes


def test_a_model_without_rope_is_not_told_to_scale_it() -> None:
    with pytest.raises(InvalidArgument, match=r"shorten them$"):
        check_length(1024, 1000, 100, scales=False)
