"""The daemon killed or stopped under a job: right tokens or a typed error in time, never a hang."""

from __future__ import annotations

import functools
import signal
import threading
import time
from pathlib import Path

import pytest

from tests.e2e.support import (
    BLOCK_TOKENS,
    MODEL,
    NEW_TOKENS,
    Engine,
    expected,
    model,
    prompt,
    served,
)
from tierd.errors import DaemonUnavailable, DeadlineExceeded
from tierd.types import Tier
from tierd_engine.attention.plan import PlanMode

CONTEXT = 18 * BLOCK_TOKENS + 1  # the open block has room for 15 more tokens
NOTICED_SECONDS = 2.0


@pytest.mark.parametrize("plan", [PlanMode.NEAR, PlanMode.STREAM])
def test_a_job_goes_on_with_what_it_has_and_ends_typed_when_it_needs_the_dead_daemon(
    tmp_path: Path, plan: PlanMode
) -> None:
    tiny = model(MODEL)
    tokens = list(expected(MODEL, CONTEXT))
    with served(tiny, tmp_path, warm_blocks=4) as (daemon, socket):
        with Engine(socket, tiny, plan=plan) as job:
            job.prefill(prompt(CONTEXT))
            job.steps(3)
            daemon.kill()
            daemon.wait(timeout=5.0)
            job.kv.start_counting()
            job.steps(12)  # hot, warm and cold are read without the daemon
            assert job.tokens == tokens[:15]
            assert min(job.kv.counts.pages.values()) > 0, job.kv.counts.pages
            started = time.monotonic()
            with pytest.raises(
                DaemonUnavailable, match=r"tierd\.sock is gone, and no next one came"
            ):
                job.step()  # needs a new block, and so a demotion
            assert time.monotonic() - started < NOTICED_SECONDS
            assert job.tokens == tokens[:16]
            job.kv.check_integrity()
            assert job.pages(Tier.WARM) and job.pages(Tier.COLD), "what was published still is"
            started = time.monotonic()
        assert time.monotonic() - started < NOTICED_SECONDS, "closing waits for nobody"


def test_a_daemon_killed_during_prefill_is_a_typed_error(tmp_path: Path) -> None:
    tiny = model(MODEL)
    with served(tiny, tmp_path, warm_blocks=4) as (daemon, socket), Engine(socket, tiny) as job:
        killed_at: list[float] = []

        def advanced(tokens: int) -> None:
            if tokens >= 150 and not killed_at:
                daemon.kill()
                daemon.wait(timeout=5.0)
                killed_at.append(time.monotonic())

        with pytest.raises(DaemonUnavailable):
            job.prefill(prompt(CONTEXT), advanced)
        assert time.monotonic() - killed_at[0] < NOTICED_SECONDS
        job.kv.check_integrity()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("delay_seconds", [0.02, 0.15])
def test_a_daemon_that_ends_at_any_moment_never_gives_a_wrong_token(
    tmp_path: Path, delay_seconds: float, how: signal.Signals
) -> None:
    tiny = model(MODEL)
    tokens = list(expected(MODEL, CONTEXT))
    with served(tiny, tmp_path, warm_blocks=4) as (daemon, socket), Engine(socket, tiny) as job:
        job.prefill(prompt(CONTEXT))
        timer = threading.Timer(delay_seconds, daemon.send_signal, [how])
        timer.start()
        started = time.monotonic()
        with pytest.raises(DaemonUnavailable):
            for _ in range(NEW_TOKENS):
                job.step()
            daemon.wait(timeout=5.0)
            job.client.stats()
        assert time.monotonic() - started < 10.0
        assert job.tokens == tokens[: len(job.tokens)]
        assert len(job.tokens) > 0


def test_a_daemon_that_stands_still_for_less_than_the_job_waits_costs_time_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = model(MODEL)
    with (
        served(tiny, tmp_path, warm_blocks=64) as (daemon, socket),
        Engine(socket, tiny, hot_blocks=3, rejoin_seconds=30.0) as job,
    ):
        in_time = functools.partial(job.handle.plan_demotion, deadline_seconds=0.5)
        monkeypatch.setattr(job.handle, "plan_demotion", in_time)
        wake = threading.Timer(2.0, daemon.send_signal, [signal.SIGCONT])
        daemon.send_signal(signal.SIGSTOP)
        wake.start()
        try:
            started = time.monotonic()
            job.prefill(prompt(CONTEXT))
            assert time.monotonic() - started > 1.0
        finally:
            wake.join(timeout=5.0)
        job.steps(NEW_TOKENS)
        assert job.tokens == list(expected(MODEL, CONTEXT))


@pytest.mark.parametrize("hot_blocks", [2, 3])
def test_a_stopped_daemon_is_a_deadline_and_the_job_goes_on_once_it_wakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hot_blocks: int
) -> None:
    tiny = model(MODEL)
    with (
        served(tiny, tmp_path, warm_blocks=4) as (daemon, socket),
        Engine(socket, tiny, hot_blocks=hot_blocks) as job,
    ):
        job.prefill(prompt(CONTEXT))
        job.steps(15)
        # The engine's own deadline is 10 s; a test need not wait for it.
        in_time = functools.partial(job.handle.plan_demotion, deadline_seconds=0.5)
        monkeypatch.setattr(job.handle, "plan_demotion", in_time)
        daemon.send_signal(signal.SIGSTOP)
        try:
            started = time.monotonic()
            with pytest.raises(DeadlineExceeded):
                job.step()
            assert time.monotonic() - started < NOTICED_SECONDS
        finally:
            daemon.send_signal(signal.SIGCONT)
        job.tokens.pop()  # chosen, but not fed: the same step is made again
        job.generator.token_ids.pop()
        job.steps(NEW_TOKENS - 15)
        assert job.tokens == list(expected(MODEL, CONTEXT))
