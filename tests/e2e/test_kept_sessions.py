"""Kept sessions: a resumed job answers as one that read all of it; a failed one loses nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.support import MODEL, embedded, model
from tierd.client import Client
from tierd.daemon import EmbeddedDaemon
from tierd.errors import (
    BudgetTooSmall,
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    StorageError,
    StorageFull,
    TierdError,
    TierFull,
)
from tierd.handle import SessionHandle
from tierd_engine import runner
from tierd_engine.report import NotDropped, NotKept
from tierd_engine.runner import JobSpec, prepare_job, run_job

TEXT = "The quick brown fox jumps over the lazy dog. " * 8


class Events:
    """Listens to a job, and may end it: `at[name]` is called at the event of that name."""

    def __init__(self, **at: Callable[[], None]) -> None:
        self.at = at
        self.notes: list[str] = []
        self.prefill: tuple[int, int] = (0, 0)

    def _heard(self, event: str) -> None:
        self.at.get(event, lambda: None)()

    def working(self, what: str) -> None:
        self._heard(what.split()[0])

    def prefill_started(self, total_tokens: int, held_tokens: int = 0) -> None:
        self.prefill = (total_tokens, held_tokens)

    def prefill_advanced(self, done_tokens: int) -> None:
        self._heard("prefill")

    def token(self, text: str) -> None:
        self._heard("token")

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[EmbeddedDaemon]:
    """Yield a daemon with room for some sessions."""
    with embedded(model(MODEL), tmp_path, warm_blocks=10) as daemon:
        yield daemon


@pytest.fixture
def spec(folder: Path) -> JobSpec:
    """Return a job that is kept."""
    return JobSpec(str(folder), TEXT, "Why?", max_new_tokens=8, ignore_eos=True, keep=True,
                   block_tokens=16, codec="raw")  # fmt: skip


def run(spec: JobSpec, socket: str, events: Events | None = None) -> dict[str, Any]:
    """Run a job and return its report."""
    job = prepare_job(spec, socket)
    return run_job(job, socket=socket, events=events or Events()).to_dict()


def next_question(spec: JobSpec, session: str, **more: Any) -> JobSpec:
    """Return a job that resumes a session."""
    return replace(spec, document="", prompt="More?", keep=False, resume=session,
                   block_tokens=None, codec=None, **more)  # fmt: skip


def rows(socket: str) -> list[dict[str, Any]]:
    """Return the daemon's sessions, without how long they were unused."""
    with Client.connect(socket, kind="tool") as tool:
        found = tool.sessions()
    return [{**row, "unused_seconds": 0, "warm_pages": 0, "cold_pages": 0} for row in found]


def test_a_resumed_session_is_kept_again_with_its_answer_unless_dropped(
    spec: JobSpec, daemon: EmbeddedDaemon
) -> None:
    first = run(spec, daemon.socket)
    session = first["session"]["id"]
    (before,) = rows(daemon.socket)
    events = Events()
    second = run(next_question(spec, session), daemon.socket, events)
    (after,) = rows(daemon.socket)
    assert second["session"] == {"id": session, "kept": True}
    assert after["id"] == session and after["state"] == "suspended"
    assert after["tokens"] > before["tokens"]
    total, held = events.prefill
    assert held == before["sealed_blocks"] * 16
    assert second["prefill"]["tokens"] == total - held
    third = run(next_question(spec, session, drop=True), daemon.socket)
    assert third["session"]["kept"] is False
    assert rows(daemon.socket) == []


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (TierFull("no room"), "stays as it was kept before this job"),
        (StorageFull("no space"), "stays as it was kept before this job"),
        (StorageError("the folder was removed"), "is as it was before this job"),
        (DeadlineExceeded("no answer"), ""),
    ],
)
def test_an_answer_is_not_lost_with_its_session(
    spec: JobSpec, daemon: EmbeddedDaemon, monkeypatch: pytest.MonkeyPatch,
    error: TierdError, says: str,
) -> None:  # fmt: skip
    first = run(spec, daemon.socket)
    session = first["session"]["id"]
    before, waits = rows(daemon.socket), []

    def refuse(handle: SessionHandle, *_: object, wait_seconds: float = 0.0) -> None:
        waits.append(wait_seconds)
        raise error

    events = Events()
    with monkeypatch.context() as patch, pytest.raises(NotKept, match=str(error)) as not_kept:
        patch.setattr(SessionHandle, "suspend", refuse)
        run(replace(next_question(spec, session), rejoin_seconds=21.0), daemon.socket, events)
    found = not_kept.value.report.to_dict()
    assert waits == [21.0], "a daemon that stands still is waited for"
    assert not_kept.value.exit_code == error.exit_code
    assert found["session"] == {"id": session, "kept": False}
    assert rows(daemon.socket) == before
    told = " ".join(events.notes)
    assert ("may be kept now" in told) == ("kept as it was" in told) == (not says)
    assert str(not_kept.value).endswith(says) and "room" not in str(not_kept.value).split(". ")[1:]
    assert run(next_question(spec, session), daemon.socket)["text"] == found["text"]


@pytest.mark.parametrize("error", [StorageFull("it stays"), DeadlineExceeded("gone, or not")])
def test_an_answer_is_not_lost_with_a_drop_that_is_refused(
    spec: JobSpec, daemon: EmbeddedDaemon, monkeypatch: pytest.MonkeyPatch, error: TierdError
) -> None:
    session = run(spec, daemon.socket)["session"]["id"]
    before = rows(daemon.socket)

    def refuse(handle: SessionHandle) -> None:
        raise error

    events = Events()
    with monkeypatch.context() as patch, pytest.raises(NotDropped, match=str(error)) as refused:
        patch.setattr(SessionHandle, "discard", refuse)
        run(next_question(spec, session, drop=True), daemon.socket, events)
    found = refused.value.report.to_dict()
    assert refused.value.exit_code == error.exit_code and found["text"]
    assert found["session"] == {"id": session, "kept": True}
    assert rows(daemon.socket) == before
    assert not any("kept as it was" in note for note in events.notes)
    run(next_question(spec, session, drop=True), daemon.socket)
    assert rows(daemon.socket) == []


def kill(number: int) -> Callable[[], None]:
    """Return what sends this process a signal."""
    return lambda: os.kill(os.getpid(), number)


def fail() -> None:
    """Fail as a disk does."""
    raise StorageError("the disk is gone")


@pytest.mark.parametrize(
    ("event", "drop"),
    [("loading", False), ("compiling", False), ("prefill", False), ("prefill", True),
     ("token", False), ("verifying", False)],
)  # fmt: skip
@pytest.mark.parametrize("how", [fail, kill(signal.SIGINT)], ids=["fails", "interrupted"])
def test_a_session_whose_next_job_fails_or_is_interrupted_is_kept_as_it_was(
    spec: JobSpec, daemon: EmbeddedDaemon, how: Callable[[], None], event: str, drop: bool
) -> None:
    session = run(spec, daemon.socket)["session"]["id"]
    before = rows(daemon.socket)
    job = next_question(spec, session, drop=drop, verify=True)
    events = Events(**{event: how})
    with pytest.raises((StorageError, KeyboardInterrupt)):
        run(job, daemon.socket, events)
    assert rows(daemon.socket) == before
    if event != "loading":
        assert events.notes[-1] == f"session {session} is kept as it was"
    straight = run(replace(job, verify=False), daemon.socket)
    assert straight["text"] == run_fresh_copy(spec, daemon, drop=drop)


def run_fresh_copy(spec: JobSpec, daemon: EmbeddedDaemon, *, drop: bool) -> str:
    """Return what a session that nothing happened to answers."""
    session = run(spec, daemon.socket)["session"]["id"]
    text: str = run(next_question(spec, session, drop=drop), daemon.socket)["text"]
    return text


def test_a_resume_that_leads_to_no_session_object_gives_it_back(
    spec: JobSpec, daemon: EmbeddedDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = run(spec, daemon.socket)["session"]["id"]
    before = rows(daemon.socket)

    def refuse(*args: Any) -> None:
        raise BudgetTooSmall("no")

    monkeypatch.setattr(runner, "SessionKV", refuse)
    with pytest.raises(BudgetTooSmall):
        run(next_question(spec, session), daemon.socket)
    assert rows(daemon.socket) == before


def test_a_session_that_lost_a_page_meanwhile_is_kept_up_to_it(
    spec: JobSpec, daemon: EmbeddedDaemon
) -> None:
    session = run(spec, daemon.socket)["session"]["id"]
    (before,) = rows(daemon.socket)
    job = prepare_job(next_question(spec, session), daemon.socket)
    with pytest.raises(StorageError):  # noqa: SIM117
        with runner._owned_session(job, daemon.socket, Events()) as (_, handle):
            handle.truncate(5)  # as the engine does when it finds block 5 damaged
            fail()
    (after,) = rows(daemon.socket)
    assert (after["state"], after["tokens"]) == ("suspended", before["tokens"])
    assert after["sealed_blocks"] == 5
    resumed = run(next_question(spec, session), daemon.socket)
    lost = before["sealed_blocks"] - 5
    assert lost > 0 and resumed["checks"]["damaged_or_lost_blocks"] == lost
    assert resumed["checks"]["recomputed_tokens"] == lost * 16
    assert resumed["text"] == run_fresh_copy(spec, daemon, drop=False)
    again = run(next_question(spec, session), daemon.socket)
    assert again["checks"]["damaged_or_lost_blocks"] == 0 == again["checks"]["recomputed_tokens"]


def test_a_session_of_another_dtype_is_resumed_in_its_own(
    spec: JobSpec, daemon: EmbeddedDaemon
) -> None:
    session = run(replace(spec, dtype="bfloat16"), daemon.socket)["session"]["id"]
    with pytest.raises(InvalidArgument, match="was made with --dtype bfloat16"):
        run(next_question(spec, session, dtype="float32"), daemon.socket)
    assert run(next_question(spec, session), daemon.socket)["dtype"] == "bfloat16"


def test_a_session_of_another_model_or_rope_says_which_differs(
    spec: JobSpec, daemon: EmbeddedDaemon, folder: Path, tmp_path: Path
) -> None:
    import transformers as tf

    session = run(spec, daemon.socket)["session"]["id"]
    with pytest.raises(InvalidArgument, match="was made without --rope-scaling"):
        run(next_question(spec, session, rope_scaling="linear:2"), daemon.socket)
    other = tmp_path / "other"
    other.mkdir()
    for file in folder.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    net = tf.AutoModelForCausalLM.from_pretrained(folder)
    with_noise = net.get_input_embeddings().weight
    with_noise.data += 0.5
    net.save_pretrained(other)
    with pytest.raises(InvalidArgument, match=r"with another model than .*other, or with other"):
        run(next_question(spec, session, model=str(other)), daemon.socket)
    net.config.num_hidden_layers = 3
    tf.LlamaForCausalLM(net.config).save_pretrained(other)
    with pytest.raises(InvalidArgument, match=r"that has 2 layers, .*other has 3"):
        run(next_question(spec, session, model=str(other)), daemon.socket)


def test_a_session_that_is_not_there_is_not_found(spec: JobSpec, daemon: EmbeddedDaemon) -> None:
    with pytest.raises(NotFound):
        run(next_question(spec, "00000000000000ab"), daemon.socket)
    with pytest.raises(InvalidArgument, match="only from the daemon that keeps it"):
        prepare_job(next_question(spec, "00000000000000ab"))


def test_a_job_too_large_for_the_daemon_is_refused_before_it_begins(
    spec: JobSpec, tmp_path: Path
) -> None:
    with (
        embedded(model(MODEL), tmp_path, warm_blocks=4, cold_blocks=8) as daemon,
        pytest.raises(BudgetTooSmall, match=r"the job needs .*; the daemon has .*cold"),
    ):
        prepare_job(spec, daemon.socket)


def test_the_report_of_a_shared_daemon_has_its_budgets_and_no_figure_of_other_jobs(
    spec: JobSpec, daemon: EmbeddedDaemon
) -> None:
    report = run(spec, daemon.socket)
    with Client.connect(daemon.socket, kind="tool") as tool:
        tiers = tool.stats()["tiers"]
    assert report["warm"]["budget_bytes"] == tiers["warm"]["capacity_bytes"]
    assert report["cold"]["budget_bytes"] == tiers["cold"]["capacity_bytes"]
    assert report["daemon"]["warm"]["peak_bytes"] <= tiers["warm"]["peak_bytes"]
    assert report["warm"]["peak_bytes"] is None
    assert report["warm"]["spills"] is not None and report["cold"]["written"]["pages"] > 0
    # The second job counts its own spills alone, and none while another engine is there.
    with Client.connect(daemon.socket):
        beside = run(spec, daemon.socket)
    assert beside["warm"]["spills"] is None
