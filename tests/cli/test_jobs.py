"""`tierd demo` and `tierd generate`: what reaches the runner, stdout and stderr."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import NotKept
from tierd.cli import checks


def document(tmp_path: Path) -> str:
    path = tmp_path / "document.txt"
    path.write_text("Some text.\n")
    return str(path)


def test_demo_reads_the_language_reference_at_the_asked_context(tierd: Any, world: Any) -> None:
    assert tierd("demo", "--context", "1000", "--hot", "10%", "--codec", "raw").code == 0
    (spec,) = world.specs
    assert spec.document.startswith('The "assert" statement')
    assert (spec.context_tokens, spec.hot, spec.warm, spec.codec) == (1000, "10%", None, "raw")
    assert world.sockets == ["/fake/embedded.sock"]


def test_demo_says_what_is_read_and_asked(tierd: Any, world: Any) -> None:
    outcome = tierd("demo")
    assert f"and is asked: {world.specs[0].prompt}" in outcome.err
    assert "is asked" not in tierd("demo", "--quiet").err


def test_the_answer_streams_on_stdout_and_the_rest_on_stderr(tierd: Any, world: Any) -> None:
    outcome = tierd("demo")
    assert outcome.out.startswith("It asserts.\n")
    assert "prefill: 300 tokens" in outcome.err
    assert "a note" in outcome.err
    assert "asserts" not in outcome.err


def test_the_tables_show_every_tier_and_check(tierd: Any, world: Any) -> None:
    out = tierd("demo").out
    for shown in ("hot", "warm", "cold", "90 demotions", "60 spills", "0 promotions",
                  "300.0 tokens/s", "6.0 tokens/s (3 steps in 0.5 s; 4 tokens",
                  "1,000 of 1,024 bytes", "int8", "O_DIRECT", "digests verified",
                  "hot within its budget", "not run (--verify)"):  # fmt: skip
        assert shown in out, shown


def test_the_device_is_passed_on_and_what_is_not_pinned_is_shown(
    tierd: Any, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "_GPU_PATHS", ("/dev/null",))
    assert tierd("demo", "--device", "cuda").code == 0
    assert world.specs[0].device == "cuda"
    assert "device" not in world.report and "pinned" not in tierd("demo").out
    assert world.specs[1].device == "auto"
    world.report["device"] = {
        "name": "NVIDIA X", "pinned_bytes": 4096, "pageable_bytes": 8192,
        "pageable_reason": "RLIMIT_MEMLOCK is 64 KiB", "streamed_bytes": 1 << 20,
        "near_share": 0.375,
    }  # fmt: skip
    out = tierd("demo").out
    for shown in (
        "NVIDIA X",
        "4.0 KiB pinned, 8.0 KiB NOT",
        "RLIMIT_MEMLOCK",
        "1.0 MiB; the CPU",
        "38%",
    ):
        assert shown in out, shown
    assert tierd("demo", "--device", "tpu").code == 2


def test_hot_on_a_gpu_takes_no_ram(tierd: Any, world: Any) -> None:
    world.hot_bytes, world.device = 1 << 60, "cuda"
    assert tierd("demo").code == 0
    world.device = "cpu"
    assert tierd("demo").code == 2


def test_verification_is_shown(tierd: Any, world: Any) -> None:
    world.report["verify"] = {
        "tokens_identical": False, "first_difference": 17, "kl_mean": 1.65e-5, "kl_p99": 1.3e-4,
        "top1": 0.995,
    }  # fmt: skip
    out = tierd("demo", "--verify").out
    for shown in ("NO", "17", "1.65e-05", "1.30e-04", "99.5%"):
        assert shown in out, shown
    assert world.specs[0].verify is True


def test_a_report_without_sections_still_prints(tierd: Any, world: Any) -> None:
    world.report = {"version": 1, "text": ""}
    assert tierd("demo").code == 0


def test_json_is_one_versioned_object_and_nothing_else(tierd: Any, world: Any) -> None:
    outcome = tierd("demo", "--json")
    assert json.loads(outcome.out) == world.report
    assert outcome.out.count("\n") == 1
    assert outcome.err == ""


def test_json_shows_progress_where_stderr_is_a_terminal(
    tierd: Any, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    outcome = tierd("demo", "--json")
    assert json.loads(outcome.out) == world.report
    assert "prefill: 300 tokens" in outcome.err and "a note" in outcome.err
    assert tierd("demo", "--json", "--quiet").err == ""


def test_quiet_prints_the_text_only(tierd: Any, world: Any) -> None:
    outcome = tierd("demo", "--quiet")
    assert (outcome.out, outcome.err) == ("It asserts.\n", "")


def test_text_that_ends_without_a_newline_gets_one_before_the_tables(
    tierd: Any, world: Any
) -> None:
    world.during_job = lambda events: events.token("And more")
    assert tierd("demo", "--quiet").out == "It asserts.\nAnd more\n"


def test_generate_passes_the_document_whole(tierd: Any, world: Any, tmp_path: Path) -> None:
    outcome = tierd(
        "generate", "--model", "dir", "--document", document(tmp_path), "--prompt", "Why?",
        "--plan", "stream", "--rope-scaling", "yarn:4", "--block-tokens", "64",
    )  # fmt: skip
    assert outcome.code == 0
    (spec,) = world.specs
    assert (spec.model, spec.document, spec.prompt) == ("dir", "Some text.\n", "Why?")
    assert (spec.context_tokens, spec.plan, spec.rope_scaling) == (None, "stream", "yarn:4")
    assert spec.block_tokens == 64


def test_a_running_daemon_is_used_as_it_is(tierd: Any, world: Any) -> None:
    assert tierd("demo", "--daemon", "/run/t.sock").code == 0
    assert world.sockets == ["/run/t.sock", "/run/t.sock"]  # looked at first, then used
    assert world.configs == []


@pytest.mark.parametrize("option", [["--warm", "1GiB"], ["--cold-dir", "/tmp"]])
def test_a_running_daemons_tiers_cannot_be_sized_by_a_job(
    tierd: Any, world: Any, option: list[str]
) -> None:
    outcome = tierd("demo", "--daemon", "/run/t.sock", *option)
    assert outcome.code == 2
    assert option[0] in outcome.err


def test_the_embedded_daemon_gets_the_jobs_sizes(tierd: Any, world: Any, tmp_path: Path) -> None:
    cold = tmp_path / "cold"
    assert tierd("demo", "--cold-dir", str(cold)).code == 0
    (config,) = world.configs
    assert config.warm.budget_bytes == 4096
    assert config.cold.folder == str(cold)
    assert config.cold.ephemeral is True


def test_a_relative_cold_folder_is_the_callers(
    tierd: Any, world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tierd("demo", "--cold-dir", "here")
    assert world.configs[0].cold.folder == str(tmp_path / "here")


def test_the_embedded_daemon_ends_with_a_job_that_fails(tierd: Any, world: Any) -> None:
    def fail(events: object) -> None:
        assert world.daemons_open == 1
        raise OSError("disk on fire")

    world.during_job = fail
    assert tierd("demo").code == 1
    assert world.daemons_open == 0


def test_a_cold_folder_that_is_too_small_is_named_with_what_is_needed(
    tierd: Any, world: Any, tmp_path: Path
) -> None:
    world.cold_needed_bytes = 1 << 60
    outcome = tierd("demo", "--cold-dir", str(tmp_path))
    assert outcome.code == 1
    assert str(tmp_path) in outcome.err
    assert str(1 << 60) in outcome.err
    assert world.sockets == []


@pytest.mark.parametrize(("unguarded_bytes", "helps"), [(8192, True), (1 << 59, False)])
def test_a_folder_too_small_for_the_guard_alone_names_the_way_without_it(
    tierd: Any, world: Any, tmp_path: Path, unguarded_bytes: int, helps: bool
) -> None:
    world.cold_needed_bytes, world.cold_unguarded_bytes = 1 << 60, unguarded_bytes
    err = tierd("demo", "--cold-dir", str(tmp_path)).err
    assert ("--no-guard: it needs 8.0 KiB" in err) == helps
    assert ("--no-guard" in err) == helps


def test_a_cold_folder_that_is_a_file_is_refused(tierd: Any, world: Any, tmp_path: Path) -> None:
    outcome = tierd("demo", "--cold-dir", document(tmp_path))
    assert outcome.code == 1
    assert "document.txt" in outcome.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_unwinds_the_job_with_its_exit_code(tierd: Any, world: Any, number: int) -> None:
    handler = signal.getsignal(number)
    world.during_job = lambda events: os.kill(os.getpid(), number)
    outcome = tierd("demo", "--quiet")
    assert outcome.code == 128 + number
    assert outcome.err == "tierd: interrupted\n"
    assert signal.getsignal(number) is handler


@pytest.mark.parametrize("option", ["--json", "--quiet", None])
def test_a_job_that_could_not_be_kept_still_gives_its_answer(
    tierd: Any, world: Any, tmp_path: Path, option: str | None
) -> None:
    path = document(tmp_path)

    def fail(events: object) -> None:
        raise NotKept(world.report, "the disk is full", 3)

    world.during_job = fail
    job = ["--model", "M", "--document", path, "--prompt", "Why?"]
    words = ["generate", *job, "--daemon", "/s", "--keep"]
    outcome = tierd(*words, *([option] if option else []))
    assert outcome.code == 3 and "the disk is full" in outcome.err
    if option == "--json":
        found = json.loads(outcome.out)
        assert found["text"] == world.report["text"] and found["error"] == "the disk is full"
    else:
        assert "It asserts." in outcome.out
