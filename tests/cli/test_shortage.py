"""Under a limit of address space each verb that a user meets first says so, in a line."""

import json
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tierd.cli import doctor, job, shortage
from tierd.errors import InvalidArgument
from tierd.units import GIB, MIB

ROOT = Path(__file__).parent.parent.parent


def run_within(limit_bytes: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process that may map so much."""

    def lower() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))

    return subprocess.run(
        [sys.executable, "-m", "tierd.cli", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=60, preexec_fn=lower,
    )  # fmt: skip


@pytest.mark.parametrize("mib", [42, 46, 64, 128])
def test_doctor_where_little_can_be_mapped_is_findings_or_a_line(mib: int, tmp_path: Path) -> None:
    done = run_within(mib * MIB, "doctor", "--cold-dir", str(tmp_path))
    assert done.returncode == 1, done.stderr
    if done.stdout:
        assert done.stderr == ""
        (said,) = [line for line in done.stdout.splitlines() if "address space" in line]
        assert "failed" in said and f"{mib}.0 MiB" in said and "raise ulimit -v" in said
        assert "cold folder" in done.stdout, "each probe is a line"
    else:
        assert done.stderr.count("\n") == 1 and "Traceback" not in done.stderr
        assert "ulimit -v" in done.stderr


def test_doctor_says_how_far_a_limit_of_address_space_goes(tmp_path: Path) -> None:
    arguments = ["doctor", "--cold-dir", str(tmp_path), "--json"]
    for limit_bytes, health in ((1 * GIB, "failed"), (8 * GIB, "degraded")):
        done = run_within(limit_bytes, *arguments)
        checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
        assert checks["address space"]["health"] == health
        assert "ulimit -v" in checks["address space"]["fix"]
        assert f"cold folder {tmp_path}" in checks and "direct I/O" in checks


SHORT = [
    MemoryError(),
    OSError(12, "Cannot allocate memory"),
    OSError(24, "Too many open files"),
    RuntimeError("can't start new thread"),
    ImportError("lib.so: failed to map segment from shared object"),
]


@pytest.mark.parametrize("error", SHORT, ids=repr)
@pytest.mark.parametrize(
    "probe",
    [
        "_check_package", "_check_address_space", "_check_memfd", "_check_huge_pages",
        "_check_pidfd", "_check_memlock", "_check_settings", "_check_memory", "_writes_direct",
        "_check_path_to_vram",
    ],
)  # fmt: skip
def test_a_probe_that_cannot_be_made_is_a_line_and_the_others_go_on(
    tierd: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, probe: str, error: Exception
) -> None:
    def fail(*arguments: object) -> None:
        raise error

    monkeypatch.setattr(doctor, probe, fail)
    outcome = tierd("doctor", "--cold-dir", str(tmp_path), "--daemon", "/tmp/x.sock", "--json")
    found = json.loads(outcome.out)["checks"]
    failed = [check for check in found if check["health"] == "failed"]
    assert outcome.code == 1 and outcome.err == ""
    assert failed and all(check["found"] and check["fix"] for check in failed)
    assert len(failed) == (len(doctor.PACKAGES) if probe == "_check_package" else 1)
    assert len(found) >= len(doctor.PACKAGES) + 6


def test_a_bug_in_a_probe_keeps_its_traceback(
    tierd: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(doctor, "_check_memfd", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        tierd("doctor", "--cold-dir", str(tmp_path))


def test_a_folder_whose_disk_does_not_answer_is_a_line(
    tierd: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    answers = threading.Event()
    monkeypatch.setattr(doctor, "FOLDER_SECONDS_MAX", 0.05)
    monkeypatch.setattr(doctor, "_writes_direct", lambda path: answers.wait(30.0))
    outcome = tierd("doctor", "--cold-dir", str(tmp_path), "--daemon", "/tmp/x.sock", "--json")
    answers.set()
    (failed,) = [c for c in json.loads(outcome.out)["checks"] if c["health"] == "failed"]
    assert "did not answer within 0.05 s" in failed["found"] and "--cold-dir" in failed["fix"]


def test_findings_are_lines_where_the_table_cannot_be_drawn(
    tierd: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise ImportError("failed to map segment from shared object")

    monkeypatch.setattr(doctor, "print_table", fail)
    outcome = tierd("doctor", "--cold-dir", str(tmp_path), "--daemon", "/tmp/x.sock")
    assert outcome.err == "" and f"ok  cold folder {tmp_path}" in outcome.out


@pytest.mark.parametrize("mib", [64, 300, 1000, 1500, 2000])
@pytest.mark.parametrize("verb", ["demo", "generate"])
def test_a_job_that_may_map_too_little_is_a_line_that_names_the_limit(
    verb: str, mib: int, tmp_path: Path
) -> None:
    (tmp_path / "d.txt").write_text("Some text.\n")
    own = ["--model", "SmolLM2-135M-Instruct", "--document", str(tmp_path / "d.txt")]
    done = run_within(mib * MIB, verb, *[*own, "--prompt", "?"] * (verb == "generate"), "--quiet")
    assert done.returncode in (1, 2) and done.stdout == ""
    assert done.stderr.startswith("tierd: error: ") and done.stderr.count("\n") == 1
    assert "ulimit -v" in done.stderr
    if mib > 100:
        assert done.returncode == 2 and "needs about 3.0 GiB of address space" in done.stderr


@pytest.mark.parametrize("mib", [64, 100, 200, 600])
def test_a_daemon_that_may_map_too_little_is_a_line_that_names_the_limit(
    mib: int, tmp_path: Path
) -> None:
    folder, socket = str(tmp_path / "cold"), str(tmp_path / "tierd.sock")
    done = run_within(
        mib * MIB, "serve", "--warm", "64MiB", "--cold-dir", folder, "--socket", socket
    )
    assert done.returncode in (1, 2) and done.stdout == ""
    assert done.stderr.startswith("tierd: error: ") and done.stderr.count("\n") == 1
    assert "ulimit -v" in done.stderr
    if mib > 100:
        assert done.returncode == 2 and "needs about 914.0 MiB of address space" in done.stderr


def test_model_and_tiers_count_beside_what_every_job_maps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 4096)
    sizes = SimpleNamespace(warm_budget_bytes=8192)
    prepared: Any = SimpleNamespace(folder=tmp_path, shared=False, sizes=sizes)
    needed = shortage.JOB_ADDRESS_BYTES + 4096 + 1024 + 8192
    for module in (shortage, job):
        monkeypatch.setattr(module, "address_limit", lambda: needed - 1)
    assert job._address_bytes(prepared, 1024) == needed
    shortage.require_address_space(needed - 1, "the job")
    assert capsys.readouterr().err == ""
    shortage.require_address_space(needed, "the job")
    assert "the job needs about 3.0 GiB of address space; the pro" in capsys.readouterr().err
    with pytest.raises(InvalidArgument, match=r"needs about 4.5 GiB .*: raise ulimit -v"):
        shortage.require_address_space(needed * 3 // 2, "the job")
    prepared.shared = True
    assert job._address_bytes(prepared, 1024) == needed - 8192, "warm is the daemon's"
