"""A daemon killed and started again under a job: the same text, and nothing computed anew."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest

from tests.e2e.support import (
    BLOCK_TOKENS,
    MODEL,
    Engine,
    expected,
    model,
    prompt,
    respawning,
)
from tests.engine.support import own_greedy
from tests.wirerig import START_SECONDS, connects, eventually
from tierd.errors import DaemonUnavailable
from tierd.types import Tier
from tierd_engine.attention.plan import PlanMode

CONTEXT = 12 * BLOCK_TOKENS + 5
MAX_TOKENS = 512
SEED = 1
KILLS = 50  # a plan
ROUNDS = 12  # of two jobs, the daemon killed once in each


def test_a_restart_of_the_daemon_costs_no_recomputation(tmp_path: Path) -> None:
    tiny = model(MODEL)
    with respawning(tiny, tmp_path, warm_blocks=6) as (daemon, socket):
        eventually(lambda: connects(socket), START_SECONDS)
        with Engine(socket, tiny, rejoin_seconds=30.0) as job:
            job.prefill(prompt(CONTEXT))
            before = {tier: len(job.pages(tier)) for tier in (Tier.WARM, Tier.COLD)}
            assert min(before.values()) > 0
            daemon.kill()
            eventually(lambda: connects(socket), START_SECONDS)
            job.steps(1)
            after = {tier: len(job.pages(tier)) for tier in (Tier.WARM, Tier.COLD)}
            assert after == before and job.kv.link.rejoins == 1
            job.steps(63)
            assert job.tokens == list(expected(MODEL, CONTEXT))
            assert job.generator.recomputed_tokens == 0
            assert job.client.stats()["engines"] == 1


def engine(socket: str, plan: PlanMode) -> Engine:
    """Return an engine on a daemon that may die while it connects."""
    while True:
        try:
            return Engine(
                socket, model(MODEL), plan=plan, max_tokens=MAX_TOKENS, rejoin_seconds=30.0
            )
        except DaemonUnavailable:
            time.sleep(0.01)


@pytest.mark.parametrize("plan", [PlanMode.NEAR, PlanMode.STREAM])
def test_kills_at_random_moments_change_no_token(tmp_path: Path, plan: PlanMode) -> None:
    tiny, draw = model(MODEL), random.Random(SEED)
    tokens, _ = own_greedy(tiny.model, list(prompt(CONTEXT)), MAX_TOKENS - CONTEXT)
    kills, recomputed, done = 0, 0, threading.Event()
    with respawning(tiny, tmp_path, warm_blocks=6) as (daemon, socket):

        def kill_often() -> None:
            nonlocal kills
            while kills < KILLS and not done.is_set():
                time.sleep(draw.uniform(0.0, 0.4))
                daemon.kill()
                kills += 1

        killer = threading.Thread(target=kill_often)
        eventually(lambda: connects(socket), START_SECONDS)
        killer.start()
        try:
            while killer.is_alive():
                with engine(socket, plan) as job:
                    job.prefill(prompt(CONTEXT))
                    while len(job.tokens) < len(tokens) and killer.is_alive():
                        job.step()
                    assert job.tokens == tokens[: len(job.tokens)], f"seed {SEED}"
                    job.kv.check_integrity()
                    recomputed += job.generator.recomputed_tokens
        finally:
            done.set()
            killer.join(10.0)
    assert kills == KILLS
    assert recomputed == 0, f"seed {SEED}"


@pytest.mark.parametrize("warm_blocks", [3, 6, 10])
def test_two_jobs_that_share_a_small_warm_tier_lose_nothing_to_kills_in_prefill(
    tmp_path: Path, warm_blocks: int
) -> None:
    """One job goes on for a while before the other one has found the next daemon."""
    tiny, draw = model(MODEL), random.Random(SEED + warm_blocks)
    wanted = list(expected(MODEL, CONTEXT))[:4]
    with respawning(tiny, tmp_path, warm_blocks) as (daemon, socket):
        eventually(lambda: connects(socket), START_SECONDS)
        for _ in range(ROUNDS):
            with engine(socket, PlanMode.NEAR) as first, engine(socket, PlanMode.NEAR) as second:
                jobs = {first: 0, second: 0}  # tokens read so far
                timer = threading.Timer(draw.uniform(0.0, 0.2), daemon.kill)
                timer.start()
                while left := [job for job, done in jobs.items() if done < CONTEXT]:
                    job = draw.choice(left)
                    end = jobs[job] + draw.randint(1, CONTEXT // 2)
                    job.prefill(prompt(CONTEXT)[jobs[job] : end])
                    jobs[job] = end
                timer.join(10.0)
                for job in jobs:
                    job.steps(len(wanted))
                    assert job.tokens == wanted, f"seed {SEED}"
                    assert job.generator.recomputed_tokens == 0, f"seed {SEED}"
                    job.kv.check_integrity()


def test_a_suspended_session_goes_on_with_the_same_tokens_after_a_kill(tmp_path: Path) -> None:
    tiny = model(MODEL)
    with respawning(tiny, tmp_path, warm_blocks=6) as (daemon, socket):
        eventually(lambda: connects(socket), START_SECONDS)
        with Engine(socket, tiny) as job:
            job.prefill(prompt(CONTEXT))
            job.steps(20)
            session, tokens = job.suspend(), list(job.tokens)
        daemon.kill()
        eventually(lambda: connects(socket), START_SECONDS)
        with Engine(socket, tiny, resume=session) as job:
            sealed = (CONTEXT + 20) // BLOCK_TOKENS * BLOCK_TOKENS
            assert job.kv.position == sealed, "nothing below the last sealed block is computed anew"
            job.prefill([])
            job.steps(44)
            assert tokens + job.tokens == list(expected(MODEL, CONTEXT))
            assert job.generator.recomputed_tokens == 0


def test_promoted_blocks_outlive_the_daemon_and_are_kept_below_it(tmp_path: Path) -> None:
    tiny = model(MODEL)
    with respawning(tiny, tmp_path, warm_blocks=20) as (daemon, socket):
        eventually(lambda: connects(socket), START_SECONDS)
        with Engine(socket, tiny) as job:
            job.prefill(prompt(CONTEXT))
            job.steps(20)
            session, tokens = job.suspend(), list(job.tokens)
        with Engine(
            socket, tiny, resume=session, hot_blocks=8, rejoin_seconds=30.0, promotes=True
        ) as job:
            assert job.kv.promoted_hot_blocks > 0
            job.prefill([])
            job.steps(2)
            daemon.kill()
            eventually(lambda: connects(socket), START_SECONDS)
            job.steps(42)
            job.kv.check_integrity()
            assert job.kv.link.rejoins == 1 and job.generator.recomputed_tokens == 0
            assert tokens + job.tokens == list(expected(MODEL, CONTEXT))
            session = job.suspend()
        daemon.kill()
        eventually(lambda: connects(socket), START_SECONDS)
        with Engine(socket, tiny, resume=session, hot_blocks=8, promotes=True) as job:
            assert job.kv.position == (CONTEXT + 64) // BLOCK_TOKENS * BLOCK_TOKENS
            job.prefill([])
            assert job.generator.recomputed_tokens == 0
            job.kv.check_integrity()
