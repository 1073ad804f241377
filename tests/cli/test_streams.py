"""Standard streams that are closed, full, left or narrow: one line, or quiet; never a traceback."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tierd.cli.streams import ReaderGone
from tierd.cli.terminal import JobDisplay

TIERD = f"{sys.executable} -m tierd.cli"
ROOT = Path(__file__).parent.parent.parent
# A verb that prints a lot, without a daemon.
VERB = "config show --origin"


def shell(line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a line of bash in which the last command's exit code is the line's."""
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", line],
        cwd=ROOT, capture_output=True, text=True, timeout=30,
        env={**os.environ, **environment},
    )  # fmt: skip


@pytest.mark.parametrize("verb", ["--version", "--help", VERB, f"{VERB} --json"])
def test_a_closed_stdout_is_one_line(verb: str) -> None:
    done = shell(f"{TIERD} {verb} >&-")
    assert done.returncode == 1
    assert done.stderr == "tierd: error: cannot write to standard output: it is closed\n"


@pytest.mark.parametrize("verb", ["--version", "--help", VERB, f"{VERB} --json"])
def test_a_full_stdout_is_one_line(verb: str) -> None:
    done = shell(f"{TIERD} {verb} >/dev/full")
    assert done.returncode == 1
    assert done.stderr == (
        "tierd: error: cannot write to standard output: No space left on device\n"
    )


@pytest.mark.parametrize("verb", ["--help", VERB, f"{VERB} --json"])
def test_a_reader_that_left_ends_the_command_quietly_like_sigpipe(verb: str) -> None:
    # The pipe's reader is gone before the first byte is written.
    done = shell(f"{TIERD} {verb} | true; exit ${{PIPESTATUS[0]}}")
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("closed", ["2>&-", "2>/dev/full"])
def test_a_stderr_that_takes_nothing_changes_no_exit_code_and_no_output(closed: str) -> None:
    done = shell(f"{TIERD} nonsense {closed}")
    assert (done.returncode, done.stdout) == (2, "")


def test_a_closed_stdin_is_an_empty_document() -> None:
    done = shell(f"{TIERD} generate --model m --prompt p --document - <&-")
    assert (done.returncode, done.stderr) == (2, "tierd: error: document stdin is empty\n")


def test_an_ascii_stdout_gets_tables_and_json_it_can_hold() -> None:
    ascii_only = {"PYTHONIOENCODING": "ascii", "TIERD_COLD__FOLDER": "/tmp/grüße"}
    done = shell(f"{TIERD} {VERB}", **ascii_only)
    assert done.returncode == 0 and done.stdout.isascii()
    assert r"gr\xfc\xdfe" in done.stdout
    done = shell(f"{TIERD} {VERB} --json", **ascii_only)
    assert json.loads(done.stdout)["settings"]["cold.folder"]["value"] == "/tmp/grüße"


def test_a_stray_byte_in_a_name_reaches_stdout_and_stderr_as_an_escape() -> None:
    done = shell(f"TIERD_COLD__FOLDER=$'/tmp/\\xff' {TIERD} {VERB}")
    assert done.returncode == 0 and r"/tmp/\udcff" in done.stdout
    done = shell(f"{TIERD} generate --model m --prompt p --document $'\\xff'")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert r"\udcff not found" in done.stderr


def test_a_job_with_a_closed_stdout_does_not_begin(world: Any, tierd: Any) -> None:
    # In this process stdout is the test's own; a stream for reading alone stands for a closed one.
    with open(os.devnull, encoding="utf-8") as closed, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", closed)
        outcome = tierd("demo", "--quiet")
    assert outcome.code == 1
    assert "standard output: it is closed" in outcome.err
    assert world.specs == []


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (BrokenPipeError(32, "Broken pipe"), 141, ""),
        (OSError(28, "No space left on device"), 1,
         "tierd: error: cannot write to standard output: No space left on device\n"),
    ],
)  # fmt: skip
def test_an_answer_that_cannot_be_written_ends_the_job(
    world: Any, tierd: Any, monkeypatch: pytest.MonkeyPatch, error: OSError, code: int, line: str
) -> None:
    def refuse(text: str) -> int:
        raise error

    monkeypatch.setattr(sys.stdout, "write", refuse)
    outcome = tierd("demo", "--quiet")
    assert (outcome.code, outcome.err) == (code, line)
    assert world.daemons_open == 0


def test_what_is_noted_while_a_job_ends_for_its_output_is_heard(capsys: Any) -> None:
    def refuse(text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")

    with pytest.raises(ReaderGone), JobDisplay(stream_text=True, quiet=False) as display:
        display.token("a line that goes")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys.stdout, "write", refuse)
            try:
                display.token(" on")
            finally:
                display.note("the session is kept")
    assert "the session is kept" in capsys.readouterr().err
