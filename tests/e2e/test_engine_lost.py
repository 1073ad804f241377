"""Engines in processes of their own: one killed leaves nothing, one that suspends leaves its KV."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np

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
from tests.wirerig import eventually, process
from tierd.client import Client
from tierd.types import Tier

FREED_SECONDS = 2.0
DONE_BEFORE = 10  # tokens made before the suspension


def held(tool: Client) -> tuple[Any, ...]:
    """Return what a daemon holds for engines and sessions."""
    stats = tool.stats()
    tiers = [stats["tiers"][tier] for tier in ("warm", "cold")]
    return (
        len(tool.sessions()), stats["engines"], stats["demotions_open"], stats["moves_open"],
        *((tier["pages"], tier["bytes"], tier["used_bytes"], tier["reserved_slots"])
          for tier in tiers),
    )  # fmt: skip


def engine_script(socket: str, work: str) -> list[str]:
    """Return a command that runs `work` with an engine `job` on a daemon."""
    lines = [
        "import torch, numba",
        "torch.set_num_threads(1); numba.set_num_threads(1)",
        "from tests.e2e.support import *",
        f"job = Engine({socket!r}, model({MODEL}), max_tokens=4000)",
        work,
    ]
    return [sys.executable, "-c", "\n".join(lines)]


def test_an_engine_killed_during_prefill_leaves_nothing_within_two_seconds(tmp_path: Path) -> None:
    tiny = model(MODEL)
    work = "job.prefill(prompt(3900), lambda tokens: print(tokens, flush=True))"
    with (
        embedded(tiny, tmp_path, warm_blocks=12) as daemon,
        Client.connect(daemon.socket, kind="tool") as tool,
        Engine(daemon.socket, model(OTHER_MODEL)) as other,
    ):
        other.prefill(prompt(30))  # all of it is hot, so the pressure to come moves nothing of it
        before = held(tool)
        with process(engine_script(daemon.socket, work)) as engine:
            assert engine.stdout is not None
            while int(engine.stdout.readline()) < 500:
                pass
            during = held(tool)
            assert during[:2] == (2, 2) and during[-1][0] > 0, "it has pages on disk"
            engine.send_signal(signal.SIGKILL)
            eventually(lambda: held(tool) == before, FREED_SECONDS)
        other.steps(NEW_TOKENS)
        assert other.tokens == list(expected(OTHER_MODEL, 30))


def test_a_session_suspended_by_one_process_is_resumed_by_another(tmp_path: Path) -> None:
    tiny = model(MODEL)
    work = (
        f"job.prefill(prompt({CONTEXT})); job.steps({DONE_BEFORE}); print(job.suspend())\n"
        "print(*job.tokens)"
    )
    with (
        embedded(tiny, tmp_path, warm_blocks=4) as daemon,
        Client.connect(daemon.socket, kind="tool") as tool,
    ):
        with process(engine_script(daemon.socket, work)) as engine:
            out, _ = engine.communicate(timeout=60.0)
            assert engine.returncode == 0
        session, made = out.decode().splitlines()
        eventually(lambda: tool.stats()["engines"] == 0)
        assert tool.session(session)["state"] == "suspended"
        with Engine(daemon.socket, tiny, resume=session) as job:
            sealed = (CONTEXT + DONE_BEFORE) // 16
            assert job.handle.sealed_blocks == sealed and job.kv.position == sealed * 16
            assert len(job.pages(Tier.COLD)) > 0
            assert np.array_equal(job.handle.token_ids[:CONTEXT], prompt(CONTEXT))
            job.prefill([])  # the tokens past the last sealed block
            job.steps(NEW_TOKENS - DONE_BEFORE)
            tokens = [int(token) for token in made.split()] + job.tokens
        assert tokens == list(expected(MODEL, CONTEXT))
