"""`tierd serve` as a process: it answers, is read by the other verbs, and ends on SIGTERM."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

START_SECONDS = 20.0


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """Yield the socket of a running daemon, and its process."""
    socket = str(tmp_path / "run" / "t.sock")
    process = subprocess.Popen(
        [sys.executable, "-m", "tierd.cli", "serve", "--socket", socket, "--warm", "16MiB",
         "--cold-dir", str(tmp_path / "cold"), "--cold-cap", "64MiB"],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield socket, process
    finally:
        process.kill()
        process.communicate(timeout=10)


def stats_when_up(tierd: Any, socket: str) -> dict[str, Any]:
    deadline = time.monotonic() + START_SECONDS
    while True:
        outcome = tierd("stats", "--daemon", socket, "--json")
        if outcome.code == 0:
            answer: dict[str, Any] = json.loads(outcome.out)
            return answer
        assert outcome.code == 3, outcome.err
        assert time.monotonic() < deadline, outcome.err
        time.sleep(0.1)


def test_a_daemon_is_read_and_ends_cleanly(tierd: Any, served: Any) -> None:
    socket, process = served
    stats = stats_when_up(tierd, socket)
    assert stats["version"] == 1
    assert stats["tiers"]["warm"]["capacity_bytes"] == 16 << 20
    # The cap counts the journal too.
    assert 56 << 20 < stats["tiers"]["cold"]["capacity_bytes"] < 64 << 20
    sessions = tierd("sessions", "--daemon", socket, "--json")
    assert json.loads(sessions.out) == {"version": 1, "sessions": []}
    unknown = tierd("hint", "00000000000000ab", "--deadline", "1s", "--daemon", socket)
    assert unknown.code == 5
    assert unknown.err.count("\n") == 1

    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=10) == 0
    assert not Path(socket).exists()


def test_a_home_that_cannot_be_written_names_the_way_out(
    tierd: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    outcome = tierd("serve", "--socket", str(tmp_path / "t.sock"))
    assert outcome.code == 1
    assert "name another with --cold-dir" in outcome.err and outcome.err.count("\n") == 1


def test_a_daemon_that_cannot_start_says_why_in_one_line(tierd: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    outcome = tierd(
        "serve", "--socket", str(tmp_path / "t.sock"), "--cold-dir", str(tmp_path / "file")
    )
    assert outcome.code == 1
    assert outcome.err.count("\n") == 1
    assert outcome.err.startswith("tierd: error: ")


def test_a_socket_that_is_taken_is_refused_before_a_folder_is_made(
    tierd: Any, served: Any, tmp_path: Path
) -> None:
    socket, _ = served
    stats_when_up(tierd, socket)
    other = tmp_path / "other"
    outcome = tierd("serve", "--socket", socket, "--cold-dir", str(other))
    assert outcome.code == 2 and "another daemon serves" in outcome.err
    assert not other.exists()


def test_a_small_cold_cap_is_nothing_to_warn_of(tierd: Any, served: Any) -> None:
    socket, process = served
    stats_when_up(tierd, socket)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=10)
    events = [json.loads(line) for line in err.splitlines()]
    assert events and not [event for event in events if event["level"] == "warning"]


@pytest.mark.parametrize("names", [["notes.txt"], ["a", "b", "c", "d"], ["journal/notes.txt"]])
def test_a_folder_of_others_is_refused_and_left_as_it_was(
    tierd: Any, tmp_path: Path, names: list[str]
) -> None:
    folder = tmp_path / "theirs"
    for name in [*names, "other"]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    before = sorted((path, path.stat().st_mtime_ns) for path in folder.rglob("*"))
    outcome = tierd("serve", "--socket", str(tmp_path / "t.sock"), "--cold-dir", str(folder))
    assert outcome.code == 1 and outcome.err.count("\n") == 1
    assert "holds other files" in outcome.err and "name an empty folder" in outcome.err
    assert sorted((path, path.stat().st_mtime_ns) for path in folder.rglob("*")) == before


@pytest.mark.parametrize("limit", [6, 18])
def test_too_few_files_are_one_line_of_each_command(served: Any, tierd: Any, limit: int) -> None:
    socket, _ = served
    stats_when_up(tierd, socket)
    for arguments in (
        ["sessions", "--daemon", socket],
        ["stats", "--daemon", socket],
        ["hint", "00000000000000ab", "--deadline", "1s", "--daemon", socket],
        ["serve", "--socket", f"{socket}2", "--cold-dir", str(Path(socket).parent / "cold")],
    ):
        done = subprocess.run(
            ["sh", "-c", f'ulimit -n {limit}; exec "$@"', "sh", sys.executable, "-m", "tierd.cli",
             *arguments],
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 1, (arguments, done.stderr)
        assert done.stderr.count("\n") == 1 and done.stderr.startswith("tierd: error: ")
        assert f"may open {limit}" in done.stderr and "raise its ulimit -n" in done.stderr
        assert "more files open" in done.stderr
