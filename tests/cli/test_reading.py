"""`tierd stats`, `sessions` and `hint` against a daemon, as tables and as JSON."""

import json
from typing import Any

import pytest

from tierd.cli import hint
from tierd.errors import DaemonUnavailable, NotFound
from tierd.types import digest8

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


def test_cold_copies_of_warm_pages_are_told_apart_from_cold_pages(tierd: Any, world: Any) -> None:
    cold = {**STATS["tiers"]["cold"], "bytes": 3 << 20, "backup_pages": 7, "backup_bytes": 2 << 20}
    world.client_stats = {**STATS, "tiers": {**STATS["tiers"], "cold": cold}}
    out = tierd("stats", "--daemon", "/run/t.sock").out
    lines = [line.split() for line in out.splitlines() if "cold" in line]
    assert lines[0][:4] == ["cold", "5", "1.0", "MiB"]
    assert lines[1] == ["cold,", "copies", "of", "warm", "7", "2.0", "MiB"]


def test_what_fails_just_now_is_shown(tierd: Any, world: Any) -> None:
    assert "Troubles" not in _stats_with(tierd, world, {})
    shown = _stats_with(tierd, world, {"disk": "no space left", "manifest": "no\x1b[31m room"})
    assert "Troubles" in shown and "no space left" in shown and "\x1b" not in shown


def _stats_with(tierd: Any, world: Any, troubles: dict[str, str]) -> str:
    world.client_stats = {**STATS, "troubles": troubles}
    return str(tierd("stats", "--daemon", "/run/t.sock").out)


def test_stats_as_json_are_versioned(tierd: Any, world: Any) -> None:
    world.client_stats = STATS
    outcome = tierd("stats", "--daemon", "/run/t.sock", "--json")
    assert json.loads(outcome.out) == {"version": 1, **STATS}
    assert outcome.err == ""


def test_sessions_are_listed(tierd: Any, world: Any) -> None:
    world.client_sessions = [{"id": "0000000000000abc", "state": "suspended", "tokens": 512}]
    shown = tierd("sessions", "--daemon", "/run/t.sock").out
    assert "0000000000000abc" in shown and "suspended" in shown and "512" in shown
    parsed = json.loads(tierd("sessions", "--daemon", "/run/t.sock", "--json").out)
    (row,) = parsed.pop("sessions")
    assert parsed == {"version": 1}
    # What stands for it in the daemon's log, which names nobody's session.
    assert row.pop("log_id") == digest8("0000000000000abc")
    assert [row] == world.client_sessions


def test_sessions_say_what_fails_in_the_daemon_that_lists_them(tierd: Any, world: Any) -> None:
    world.client_sessions = [{"id": "0000000000000abc", "state": "suspended", "tokens": 512}]
    world.client_stats = {**STATS, "troubles": {"ledger": "the cold folder was removed"}}
    outcome = tierd("sessions", "--daemon", "/run/t.sock", "--json")
    assert json.loads(outcome.out)["sessions"][0]["id"] == "0000000000000abc"
    assert "ledger fails: the cold folder was removed; a restart may find less" in outcome.err
    world.client_stats = {**STATS, "troubles": {"folder": "it was removed"}}
    outcome = tierd("sessions", "--daemon", "/run/t.sock", "--json")
    assert outcome.err == "tierd: the daemon's folder fails: it was removed\n"
    world.client_sessions = [{**ROW, "kept": False}]
    shown = tierd("sessions", "--daemon", "/run/t.sock").out
    assert "not for sure: its folder fails" in shown and "ends with" not in shown
    world.client_stats = {**STATS, "troubles": {}}
    assert tierd("sessions", "--daemon", "/run/t.sock").err == ""


ROW = {
    "id": "0000000000000abc", "state": "suspended", "kept": True, "ram_only_blocks": 0,
    "removed_blocks": 0, "codec": "int4",
    "page_codecs": ["int4"] * 4, "block_tokens": 256, "tokens": 1030, "sealed_blocks": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, "  int4  "),
        ({"page_codecs": []}, "  int4  "),
        ({"page_codecs": ["int4", "k8v4", "int4", "raw"]}, "int4 (2 layers higher)"),
        ({"codec": "int4,layers:1=k8v4", "page_codecs": ["int8", "k8v4"]},
         "int4,layers:1=k8v4 (1 layer higher)"),
        ({}, "  yes  "),
        ({"tokens": 1025}, "  yes  "),
        ({"kept": False, "ram_only_blocks": 3}, "not kept: 3 blocks only in RAM"),
        ({"kept": False}, "not kept: ends with the daemon"),
        ({"sealed_blocks": 1}, "in part: 3 blocks to be computed anew"),
        ({"removed_blocks": 1}, "in part: all but 1 block, whose files are gone"),
        ({"state": "running", "kept": False}, "running   -  "),
    ],
)  # fmt: skip
def test_a_session_is_shown_as_it_is_stored_and_as_it_is_kept(
    tierd: Any, world: Any, change: dict[str, Any], words: str
) -> None:
    world.client_sessions = [{**ROW, **change}]
    assert words in tierd("sessions", "--daemon", "/run/t.sock").out


def test_what_a_resume_computes_anew_is_in_json_too(tierd: Any, world: Any) -> None:
    world.client_sessions = [ROW, {**ROW, "sealed_blocks": 1}]
    rows = json.loads(tierd("sessions", "--daemon", "/run/t.sock", "--json").out)["sessions"]
    assert [row["lost_blocks"] for row in rows] == [0, 3]


def test_a_session_is_dropped_only_with_yes_and_only_if_suspended(tierd: Any, world: Any) -> None:
    world.client_sessions = [
        {"id": "0000000000000abc", "state": "suspended", "tokens": 512},
        {"id": "0000000000000def", "state": "running", "tokens": 0},
    ]
    outcome = tierd("sessions", "--daemon", "/run/t.sock", "--drop", "0000000000000abc")
    assert outcome.code == 2 and "512 tokens" in outcome.err and "--yes" in outcome.err
    outcome = tierd("sessions", "--daemon", "/run/t.sock", "--drop", "0000000000000def", "--yes")
    assert outcome.code == 2 and "running" in outcome.err
    assert world.closed == []
    outcome = tierd("sessions", "--daemon", "/run/t.sock", "--drop", "0000000000000abc", "--yes")
    assert outcome.code == 0 and world.closed == ["0000000000000abc"]
    assert tierd("sessions", "--daemon", "/run/t.sock", "--yes").code == 2


def test_no_sessions_are_said_to_be_none(tierd: Any, world: Any) -> None:
    outcome = tierd("sessions", "--daemon", "/run/t.sock")
    assert (outcome.code, outcome.out) == (0, "no sessions\n")


def test_what_a_session_does_not_have_is_a_dash_and_seconds_have_their_unit(
    tierd: Any, world: Any
) -> None:
    world.client_sessions = [{"id": "0000000000000abc", "state": "running", "engine": None,
                              "unused_seconds": 1.25}]  # fmt: skip
    shown = tierd("sessions", "--daemon", "/run/t.sock").out
    assert "None" not in shown and "1.2 s" in shown


def test_tables_have_no_trailing_spaces(tierd: Any, world: Any) -> None:
    world.client_stats = STATS
    for line in tierd("stats", "--daemon", "/run/t.sock").out.splitlines():
        assert line == line.rstrip()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--deadline", "0"], "--deadline 0 must be more than 0 s and at most 3600 s"),
        (["--deadline", "2h"], "at most 3600 s"),
        (["--deadline", "2s", "--priority", "99999999999"], "--priority"),
        (["--deadline", "2s", "--first-token", "512"], "session 0000000000000abc has 512 tokens"),
        (["--deadline", "2s", "--first-token", "9", "--last-token", "8"], "comes before"),
    ],
)
def test_a_hint_that_cannot_help_is_refused(
    tierd: Any, world: Any, more: list[str], words: str
) -> None:
    world.client_sessions = [{"id": "0000000000000abc", "state": "suspended", "tokens": 512}]
    outcome = tierd("hint", "0000000000000abc", *more, "--daemon", "/run/t.sock")
    assert outcome.code == 2
    assert words in outcome.err and outcome.err.count("\n") == 1
    assert world.hints == []


def test_a_hint_is_kept_open_until_its_deadline(
    tierd: Any, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    world.client_sessions = [{"id": "0000000000000abc", "state": "suspended", "tokens": 512}]
    monkeypatch.setattr(hint.time, "sleep", slept.append)
    outcome = tierd(
        "hint", "0000000000000abc", "--deadline", "250ms", "--confidence", "0.5", "--json",
        "--daemon", "/run/t.sock",
    )  # fmt: skip
    assert json.loads(outcome.out) == {
        "version": 1, "hint_id": 7, "pages": 30, "moving": 30, "estimated_seconds": 0.25,
    }  # fmt: skip
    ((session, wish),) = world.hints
    assert session == "0000000000000abc"
    assert (wish["deadline_seconds"], wish["confidence"]) == (0.25, 0.5)
    assert slept == [0.25]


def test_a_hint_says_which_of_its_pages_will_not_come_up_and_why(
    tierd: Any, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.client_sessions = [{"id": "0000000000000abc", "state": "suspended", "tokens": 512}]
    monkeypatch.setattr(hint.time, "sleep", lambda seconds: None)
    outcome = tierd("hint", "0000000000000abc", "--deadline", "1s", "--daemon", "/run/t.sock")
    assert "will not come up" not in outcome.err
    world.ticket = {"left_cold": 1200, "why": "warm is full"}
    outcome = tierd("hint", "0000000000000abc", "--deadline", "1s", "--daemon", "/run/t.sock")
    assert outcome.err == "tierd: about 1,200 pages will not come up: warm is full\n"
    assert "left cold" in outcome.out and "1200" in outcome.out


@pytest.mark.parametrize(
    ("ticket", "words"),
    [
        ({"pages": 0}, "nothing has to move, no page is cold"),
        ({"pages": 30, "left_cold": 30, "why": "full"}, "nothing will move, there is no room"),
    ],
)
def test_a_hint_of_which_nothing_moves_says_so_and_estimates_nothing(
    tierd: Any, world: Any, monkeypatch: pytest.MonkeyPatch, ticket: dict[str, Any], words: str
) -> None:
    world.client_sessions = [{"id": "0000000000000abc", "state": "suspended", "tokens": 512}]
    world.ticket = {"moving": 0, "estimated_seconds": None, **ticket}
    monkeypatch.setattr(hint.time, "sleep", lambda seconds: None)
    command = ["hint", "0000000000000abc", "--deadline", "1s", "--daemon", "/run/t.sock"]
    outcome = tierd(*command)
    assert words in outcome.out and "None" not in outcome.out
    found = json.loads(tierd(*command, "--json").out)
    assert found["moving"] == 0 and found["estimated_seconds"] is None


def test_a_deadline_that_is_no_duration_is_a_usage_error(tierd: Any, world: Any) -> None:
    outcome = tierd("hint", "0000000000000abc", "--deadline", "soon", "--daemon", "/run/t.sock")
    assert outcome.code == 2
    assert "'soon' is not a duration" in outcome.err


@pytest.mark.parametrize(
    "verb", [["stats"], ["sessions"], ["hint", "0000000000000abc", "--deadline", "2s"]]
)
def test_an_absent_daemon_exits_3(tierd: Any, world: Any, verb: list[str]) -> None:
    world.connect_error = DaemonUnavailable("no daemon at /run/t.sock")
    outcome = tierd(*verb, "--daemon", "/run/t.sock", "--json")
    assert (outcome.code, outcome.out) == (3, "")
    assert outcome.err == "tierd: error: no daemon at /run/t.sock\n"


def test_an_unknown_session_exits_5(
    tierd: Any, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.connect_error = NotFound("session abc not found")
    assert (
        tierd("hint", "0000000000000abc", "--deadline", "2s", "--daemon", "/run/t.sock").code == 5
    )
