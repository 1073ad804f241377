"""Several sessions in one daemon, with too little warm for all: each gives its own tokens."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path

from tests.e2e.support import (
    CONTEXT,
    MODEL,
    NEW_TOKENS,
    OTHER_MODEL,
    Engine,
    embedded,
    expected,
    model,
    prompt,
)
from tierd.types import Tier
from tierd_engine.attention.plan import PlanMode

PIECE_TOKENS = 40
# (model, seed of its prompt, plan): two of one model, two of another.
JOBS = [
    (MODEL, 1, PlanMode.NEAR),
    (OTHER_MODEL, 2, PlanMode.STREAM),
    (MODEL, 3, PlanMode.STREAM),
    (OTHER_MODEL, 4, PlanMode.NEAR),
]


def test_four_sessions_of_two_models_step_by_step_do_not_mix(tmp_path: Path) -> None:
    with embedded(model(MODEL), tmp_path, warm_blocks=10) as daemon, ExitStack() as stack:
        jobs = [
            stack.enter_context(Engine(daemon.socket, model(seed), plan=plan))
            for seed, _, plan in JOBS
        ]
        for start in range(0, CONTEXT, PIECE_TOKENS):
            for job, (_, text, _) in zip(jobs, JOBS, strict=True):
                job.prefill(prompt(CONTEXT, text)[start : start + PIECE_TOKENS])
        assert jobs[0].client.stats()["sessions"]["running"] == len(JOBS)
        for _ in range(NEW_TOKENS):
            for job in jobs:
                job.step()
        for job, (seed, text, _) in zip(jobs, JOBS, strict=True):
            assert job.tokens == list(expected(seed, CONTEXT, text)), (seed, text)
            assert job.kv.counts.pages[Tier.COLD] > 0
            assert job.kv.counts.step_rpcs == 0
            job.kv.check_integrity()
        stats = jobs[0].client.stats()
        assert stats["corrupt"] == stats["misses"] == 0


def test_two_sessions_at_the_same_time_do_not_mix(tmp_path: Path) -> None:
    pairs = [(MODEL, 1), (OTHER_MODEL, 2)]
    wanted = {seed: list(expected(seed, CONTEXT, text)) for seed, text in pairs}
    made: dict[int, list[int]] = {}
    with embedded(model(MODEL), tmp_path, warm_blocks=6) as daemon:

        def work(seed: int, text: int) -> None:
            with Engine(daemon.socket, model(seed)) as job:
                job.prefill(prompt(CONTEXT, text))
                job.steps(NEW_TOKENS)
                made[seed] = job.tokens

        threads = [threading.Thread(target=work, args=pair) for pair in pairs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60.0)
    assert made == wanted
