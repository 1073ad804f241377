"""`tierd stats`, `sessions` and `hint` against a daemon, as tables and as JSON."""

import json
from typing import Any

import pytest

from tierd.cli import hint
from tierd.errors import DaemonUnavailable, NotFound

STATS = {
    "tiers": {
        "warm": {"pages": 3, "bytes": 300, "capacity_bytes": 4096, "used_bytes": 300,
                 "peak_bytes": 400},
        "cold": {"pages": 5, "bytes": 500, "capacity_bytes": 1 << 30, "used_bytes": 500,
                 "peak_bytes": 500, "device": "O_DIRECT"},
    },
    "spills": 12,
    "hints": {"useful": 2, "late": 0, "wasted": 1, "cancelled": 0},
}  # fmt: skip


def test_stats_show_tiers_moves_and_hints(tierd: Any, world: Any) -> None:
    world.client_stats = STATS
    outcome = tierd("stats", "--daemon", "/run/t.sock")
    assert outcome.code == 0
    for shown in ("warm", "cold", "1.0 GiB", "spills", "12", "hints: useful"):
        assert shown in outcome.out, shown
    assert world.sockets == ["/run/t.sock"]


def test_stats_as_json_are_versioned(tierd: Any, world: Any) -> None:
    world.client_stats = STATS
    outcome = tierd("stats", "--daemon", "/run/t.sock", "--json")
    assert json.loads(outcome.out) == {"version": 1, **STATS}
    assert outcome.err == ""


def test_sessions_are_listed(tierd: Any, world: Any) -> None:
    world.client_sessions = [{"id": "abc", "state": "suspended", "tokens": 512}]
    shown = tierd("sessions", "--daemon", "/run/t.sock").out
    assert "abc" in shown and "suspended" in shown and "512" in shown
    parsed = json.loads(tierd("sessions", "--daemon", "/run/t.sock", "--json").out)
    assert parsed == {"version": 1, "sessions": world.client_sessions}


def test_no_sessions_is_an_empty_table(tierd: Any, world: Any) -> None:
    assert tierd("sessions", "--daemon", "/run/t.sock").code == 0


def test_a_hint_is_kept_open_until_its_deadline(
    tierd: Any, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(hint.time, "sleep", slept.append)
    outcome = tierd(
        "hint", "abc", "--deadline", "250ms", "--confidence", "0.5", "--daemon", "/run/t.sock",
        "--json",
    )  # fmt: skip
    assert json.loads(outcome.out) == {
        "version": 1, "hint_id": 7, "pages": 30, "estimated_seconds": 0.25,
    }  # fmt: skip
    ((session, wish),) = world.hints
    assert session == "abc"
    assert (wish["deadline_seconds"], wish["confidence"]) == (0.25, 0.5)
    assert slept == [0.25]


def test_a_deadline_that_is_no_duration_is_a_usage_error(tierd: Any, world: Any) -> None:
    outcome = tierd("hint", "abc", "--deadline", "soon", "--daemon", "/run/t.sock")
    assert outcome.code == 2
    assert "'soon' is not a duration" in outcome.err


@pytest.mark.parametrize("verb", [["stats"], ["sessions"], ["hint", "abc", "--deadline", "2s"]])
def test_an_absent_daemon_exits_3(tierd: Any, world: Any, verb: list[str]) -> None:
    world.connect_error = DaemonUnavailable("no daemon at /run/t.sock")
    outcome = tierd(*verb, "--daemon", "/run/t.sock", "--json")
    assert (outcome.code, outcome.out) == (3, "")
    assert outcome.err == "tierd: error: no daemon at /run/t.sock\n"


def test_an_unknown_session_exits_5(
    tierd: Any, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.connect_error = NotFound("session abc not found")
    assert tierd("hint", "abc", "--deadline", "2s", "--daemon", "/run/t.sock").code == 5
