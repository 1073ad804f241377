"""Budgets are bars: hot is never passed, warm and cold that are full are typed errors."""

from __future__ import annotations

import functools
import time
from pathlib import Path

import pytest

from tests.e2e.support import (
    BLOCK_TOKENS,
    CONTEXT,
    MODEL,
    NEW_TOKENS,
    Engine,
    embedded,
    expected,
    model,
    prompt,
)
from tierd.errors import HotBudgetExceeded, StorageFull, TierFull
from tierd.types import Tier
from tierd_engine.attention.plan import PlanMode

FULL_SECONDS = 2.0  # the daemon answers a tenth of it before: a busy machine needs that


@pytest.mark.parametrize("context", [15, 17, 31, 33, 257, 1000])
@pytest.mark.parametrize("hot_blocks", [2, 5])
def test_hot_stays_within_its_budget_at_every_context_prefill_included(
    tmp_path: Path, context: int, hot_blocks: int
) -> None:
    tiny = model(MODEL)
    with (
        embedded(tiny, tmp_path, warm_blocks=4) as daemon,
        Engine(daemon.socket, tiny, hot_blocks=hot_blocks, max_tokens=1100) as job,
    ):
        arena = job.kv.arena
        used: list[int] = []
        job.prefill(prompt(context), lambda tokens: used.append(arena.used_bytes))
        job.steps(2 * BLOCK_TOKENS)
        storage = arena._storage.untyped_storage().nbytes()
        assert max(used) <= arena.peak_bytes <= storage <= arena.budget_bytes
        assert job.tokens == list(expected(MODEL, context))[: 2 * BLOCK_TOKENS]
        arena.check_integrity()


def test_a_step_beyond_the_hot_budget_is_a_typed_error_and_undoes_nothing(tmp_path: Path) -> None:
    tiny = model(MODEL)
    with (
        embedded(tiny, tmp_path, warm_blocks=4) as daemon,
        Engine(daemon.socket, tiny, hot_blocks=3) as job,
    ):
        job.prefill(prompt(CONTEXT))
        with pytest.raises(HotBudgetExceeded, match=f"{4 * BLOCK_TOKENS} tokens at once"):
            job.kv.begin(4 * BLOCK_TOKENS)
        while job.kv.arena.free_slots:
            job.kv.arena.allocate()
        with pytest.raises(HotBudgetExceeded, match="used up"):
            job.kv.arena.allocate()
        assert job.kv.arena.peak_bytes <= job.kv.arena.budget_bytes


def test_a_cold_cap_too_small_is_a_typed_error_in_time_and_what_is_held_stays_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = model(MODEL)
    with (
        embedded(tiny, tmp_path, warm_blocks=4, cold_blocks=5) as daemon,
        Engine(daemon.socket, tiny) as job,
    ):
        # The engine's own deadline is 10 s; a test need not wait for it.
        in_time = functools.partial(job.handle.plan_demotion, deadline_seconds=FULL_SECONDS)
        monkeypatch.setattr(job.handle, "plan_demotion", in_time)
        started = time.monotonic()
        with pytest.raises((TierFull, StorageFull), match="cold"):
            job.prefill(prompt(CONTEXT))
        assert time.monotonic() - started < FULL_SECONDS + 3.0
        tiers = job.client.stats()["tiers"]
        for tier in tiers.values():
            assert tier["peak_bytes"] <= tier["capacity_bytes"]
        # What fits is as good as ever: the part of the prompt that went in is right.
        held = job.kv.position
        assert held >= 8 * BLOCK_TOKENS and job.generator.recomputed_tokens == 0
        job.kv.check_integrity()


def test_full_tiers_serve_again_once_another_session_ends(tmp_path: Path) -> None:
    tiny = model(MODEL)
    with (
        embedded(tiny, tmp_path, warm_blocks=4, cold_blocks=18) as daemon,
        Engine(daemon.socket, tiny) as job,
    ):
        with Engine(daemon.socket, tiny) as other:
            in_time = functools.partial(other.handle.plan_demotion, deadline_seconds=FULL_SECONDS)
            job.prefill(prompt(CONTEXT)[:200])
            other.handle.plan_demotion = in_time  # type: ignore[method-assign]
            with pytest.raises(TierFull):
                other.prefill(prompt(CONTEXT, 2))
        job.prefill(prompt(CONTEXT)[200:])
        job.steps(NEW_TOKENS)
        assert job.tokens == list(expected(MODEL, CONTEXT))


@pytest.mark.parametrize("plan", [PlanMode.NEAR, PlanMode.STREAM])
def test_decoding_over_cold_pages_makes_no_call(tmp_path: Path, plan: PlanMode) -> None:
    tiny = model(MODEL)
    with (
        embedded(tiny, tmp_path, warm_blocks=3) as daemon,
        Engine(daemon.socket, tiny, plan=plan) as job,
    ):
        job.prefill(prompt(CONTEXT))
        job.kv.start_counting()
        calls = job.client.rpc_count
        job.steps(NEW_TOKENS)
        counts = job.kv.counts
        assert counts.steps == NEW_TOKENS and counts.pages[Tier.COLD] > NEW_TOKENS
        assert counts.step_rpcs == 0
        # Calls are made between steps alone: two for each block that goes down.
        assert job.client.rpc_count - calls == counts.room_rpcs <= 3 * NEW_TOKENS // BLOCK_TOKENS
        assert job.tokens == list(expected(MODEL, CONTEXT))
