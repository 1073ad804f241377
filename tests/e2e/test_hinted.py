"""Hints: a suspended session's cold pages are warm by the deadline, and the outcome is counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.support import (
    CONTEXT,
    MODEL,
    NEW_TOKENS,
    Engine,
    embedded,
    expected,
    model,
    prompt,
)
from tests.wirerig import eventually
from tierd.client import Client
from tierd.errors import NotFound

DEADLINE_SECONDS = 2.0
DONE_BEFORE = 10
NEVER_IN_TIME_SECONDS = 1e-6
OUTCOMES = ("useful", "late", "wasted", "cancelled")


def outcomes(client: Client) -> dict[str, int]:
    """Return the counts of settled hints."""
    hints = client.stats()["hints"]
    return {name: hints[name] for name in OUTCOMES if hints[name]}


def suspend_session(socket: str, context: int, steps: int = 0) -> tuple[str, list[int]]:
    """Leave a suspended session; return its id and the tokens it made."""
    with Engine(socket, model(MODEL)) as job:
        job.prefill(prompt(context))
        job.steps(steps)
        return job.suspend(), job.tokens


def press(socket: str, context: int = 500) -> None:
    """Run another session, so that what is suspended goes to disk; then it ends."""
    with Engine(socket, model(MODEL), max_tokens=context) as job:
        job.prefill(prompt(context, 9))


def test_a_hinted_session_is_warm_by_the_deadline_and_resumes_with_the_same_tokens(
    tmp_path: Path,
) -> None:
    with (
        embedded(model(MODEL), tmp_path, warm_blocks=28) as daemon,
        Client.connect(daemon.socket, kind="tool") as tool,
    ):
        session, tokens = suspend_session(daemon.socket, CONTEXT, DONE_BEFORE)
        press(daemon.socket)
        cold_pages = tool.session(session)["cold_pages"]
        assert cold_pages > 0
        ticket = tool.hint(session, deadline_seconds=DEADLINE_SECONDS)
        assert ticket["pages"] == cold_pages
        assert 0.0 < ticket["estimated_seconds"] < DEADLINE_SECONDS
        eventually(lambda: tool.session(session)["cold_pages"] == 0, DEADLINE_SECONDS)
        assert tool.stats()["promotions"] == cold_pages
        with Engine(daemon.socket, model(MODEL), resume=session) as job:
            job.prefill([])
            job.steps(NEW_TOKENS - DONE_BEFORE)
            assert tokens + job.tokens == list(expected(MODEL, CONTEXT))
        assert outcomes(tool) == {"useful": 1}


def test_late_wasted_and_cancelled_hints_are_each_counted(tmp_path: Path) -> None:
    with (
        embedded(model(MODEL), tmp_path, warm_blocks=10) as daemon,
        Client.connect(daemon.socket, kind="tool") as tool,
    ):
        late, wasted, cancelled = (
            suspend_session(daemon.socket, context)[0] for context in (70, 71, 72)
        )
        press(daemon.socket)
        assert all(tool.session(session)["cold_pages"] for session in (late, wasted, cancelled))

        tool.hint(late, deadline_seconds=NEVER_IN_TIME_SECONDS)
        eventually(lambda: outcomes(tool) == {"late": 1})

        tool.hint(wasted, deadline_seconds=60.0)
        tool.close_session(wasted)
        assert outcomes(tool) == {"late": 1, "wasted": 1}

        ticket = tool.hint(cancelled, deadline_seconds=60.0)
        tool.cancel_hint(ticket["hint_id"])
        assert outcomes(tool) == {"late": 1, "wasted": 1, "cancelled": 1}
        with pytest.raises(NotFound):
            tool.cancel_hint(ticket["hint_id"])
        assert tool.stats()["hints"]["open"] == 0


def test_a_resume_before_the_pages_have_arrived_is_late_and_still_right(tmp_path: Path) -> None:
    with (
        embedded(model(MODEL), tmp_path, warm_blocks=5) as daemon,
        Client.connect(daemon.socket, kind="tool") as tool,
    ):
        session, tokens = suspend_session(daemon.socket, CONTEXT, DONE_BEFORE)
        # Warm never has room for all of it, so the hint cannot be met.
        assert tool.hint(session, deadline_seconds=DEADLINE_SECONDS)["pages"] > 0
        with Engine(daemon.socket, model(MODEL), resume=session) as job:
            job.prefill([])
            job.steps(NEW_TOKENS - DONE_BEFORE)
            assert tokens + job.tokens == list(expected(MODEL, CONTEXT))
        assert outcomes(tool) == {"late": 1}
