"""The command line as a user meets it: bad input is one line on stderr and the right exit code."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.support import MODEL, TRAINED_TOKENS, model, served
from tests.wirerig import eventually
from tierd.client import Client
from tierd_engine.runner import JobSpec, prepare_job

ROOT = Path(__file__).parent.parent.parent
STARTED_SECONDS = 40.0  # torch, transformers and the kernels, loaded on a busy machine
ENDED_SECONDS = 10.0
TEXT = "The quick brown fox jumps over the lazy dog. " * 8


@pytest.fixture
def document(tmp_path: Path) -> Path:
    """Return a document of 360 tokens."""
    path = tmp_path / "document.txt"
    path.write_text(TEXT)
    return path


def generate(folder: Path, document: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """Run `tierd generate` on a document."""
    arguments = ["generate", "--model", str(folder), "--document", str(document),
                 "--prompt", "Why?", "--max-new-tokens", "8", "--ignore-eos", *more]  # fmt: skip
    return run(arguments)


def run(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "tierd.cli", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


@contextmanager
def process(arguments: Sequence[str], socket: str) -> Iterator[subprocess.Popen[str]]:
    """Run the command on a daemon, in a process that is killed at the end."""
    job = subprocess.Popen(
        [sys.executable, "-m", "tierd.cli", *arguments, "--daemon", socket],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield job
    finally:
        job.kill()
        job.communicate(timeout=10.0)


def the_line(done: subprocess.CompletedProcess[str], code: int) -> str:
    """Return the one line of a refusal, after checking that it is one."""
    assert done.returncode == code, (done.returncode, done.stderr)
    assert done.stdout == ""
    # On a slow machine a line of progress comes first, each ten seconds.
    lines = [line for line in done.stderr.splitlines(True) if not line.endswith(" so far\n")]
    (line,) = lines
    assert line.startswith("tierd: error: ")
    return line


def test_a_document_that_is_missing_empty_or_no_text_is_refused(
    folder: Path, tmp_path: Path
) -> None:
    empty, binary = tmp_path / "empty.txt", tmp_path / "binary.txt"
    empty.write_text(" \n")
    binary.write_bytes(b"caf\xe9 au lait")
    assert "not found" in the_line(generate(folder, tmp_path / "absent.txt"), 2)
    assert "empty" in the_line(generate(folder, empty), 2)
    assert "not UTF-8" in the_line(generate(folder, binary), 2)


def test_a_context_beyond_the_trained_length_names_the_way_out(
    folder: Path, tmp_path: Path
) -> None:
    long = tmp_path / "long.txt"
    long.write_text(TEXT * 12)
    line = the_line(generate(folder, long), 2)
    assert str(TRAINED_TOKENS) in line and "--rope-scaling" in line
    spec = JobSpec(str(folder), TEXT * 12, "Why?", rope_scaling="linear:2", max_new_tokens=8)
    assert prepare_job(spec).sizes.total_tokens > TRAINED_TOKENS


def test_a_hot_budget_too_small_names_the_smallest_and_the_smallest_works(
    folder: Path, document: Path
) -> None:
    line = the_line(generate(folder, document, "--hot", "1000"), 2)
    named = re.search(r"smallest that works is (\d+) bytes", line)
    assert named is not None, line
    done = generate(folder, document, "--hot", named[1], "--codec", "raw", "--verify", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["verify"]["tokens_identical"] is True
    assert report["hot"]["peak_bytes"] <= report["hot"]["budget_bytes"] == int(named[1])
    assert report["decode"]["rpc_per_step"] == 0


def test_a_cold_folder_that_cannot_be_used_is_named(folder: Path, document: Path) -> None:
    line = the_line(generate(folder, document, "--cold-dir", str(document)), 1)
    assert str(document) in line


def test_a_daemon_that_is_not_there_is_named(folder: Path, document: Path, tmp_path: Path) -> None:
    socket = str(tmp_path / "absent.sock")
    assert socket in the_line(generate(folder, document, "--quiet", "--daemon", socket), 3)
    assert socket in the_line(run(["stats", "--daemon", socket]), 3)


def test_a_job_whose_daemon_is_killed_ends_with_one_line_in_time(
    folder: Path, tmp_path: Path
) -> None:
    long = tmp_path / "long.txt"
    long.write_text(TEXT * 10)
    arguments = ["generate", "--model", str(folder), "--document", str(long), "--prompt", "Why?",
                 "--codec", "raw", "--hot", "1%", "--quiet", "--rejoin", "500ms"]  # fmt: skip
    with (
        served(model(MODEL), tmp_path, warm_blocks=20) as (daemon, socket),
        Client.connect(socket, kind="tool") as tool,
        process(arguments, socket) as job,
    ):
        eventually(lambda: tool.stats()["demotions"] > 20, STARTED_SECONDS)
        daemon.kill()
        out, err = job.communicate(timeout=ENDED_SECONDS)
    assert job.returncode == 3
    assert out == "" and err.count("\n") == 1, err
    assert socket in err
