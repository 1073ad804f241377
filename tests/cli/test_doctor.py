"""`tierd doctor`: each finding has a fix, and the exit code says the worst."""

import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

import pytest

from tierd.cli import doctor
from tierd.memory import regions


def checks(outcome: Any) -> dict[str, dict[str, str]]:
    return {check["name"]: check for check in json.loads(outcome.out)["checks"]}


def test_a_folder_that_cannot_be_made_fails(tierd: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "below"
    outcome = tierd("doctor", "--cold-dir", str(folder), "--json")
    assert outcome.code == 1
    assert checks(outcome)[f"cold folder {folder}"]["health"] == "failed"


def test_a_socket_path_too_long_fails_and_says_the_limit(tierd: Any, tmp_path: Path) -> None:
    long = "/tmp/" + "x" * 120
    outcome = tierd("doctor", "--cold-dir", str(tmp_path), "--daemon", long, "--json")
    assert outcome.code == 1
    assert "107" in checks(outcome)["settings"]["found"]


def test_a_warm_tier_larger_than_memory_is_degraded(
    tierd: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIERD_WARM__BUDGET_BYTES", "900TiB")
    outcome = tierd("doctor", "--cold-dir", str(tmp_path), "--json")
    assert checks(outcome)["memory"]["health"] == "degraded"


def test_a_folder_without_direct_io_is_degraded(
    tierd: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_writes_direct", lambda path: False)
    monkeypatch.setattr(doctor, "PACKAGES", {})
    outcome = tierd("doctor", "--cold-dir", str(tmp_path), "--daemon", "/tmp/x.sock", "--json")
    assert outcome.code == 4
    assert checks(outcome)["direct I/O"]["health"] == "degraded"


def test_a_kernel_without_huge_pages_on_request_is_degraded(
    tierd: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fds = len(os.listdir("/proc/self/fd"))
    assert checks(tierd("doctor", "--cold-dir", str(tmp_path), "--json"))["huge pages"]["found"]
    monkeypatch.setattr(regions, "make_huge", lambda fd, size_bytes: False)
    outcome = tierd("doctor", "--cold-dir", str(tmp_path), "--json")
    found = checks(outcome)["huge pages"]
    assert found["health"] == "degraded" and "6.1" in found["fix"]
    assert len(os.listdir("/proc/self/fd")) == fds


def test_too_few_open_files_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    for most, health in ((30, "failed"), (4096, "ok"), (resource.RLIM_INFINITY, "ok")):
        monkeypatch.setattr(resource, "getrlimit", lambda _, most=most: (20, most))
        found = doctor._check_open_files()
        assert found.health == health, found
        assert ("raise ulimit -n" in found.fix) == (health == "failed")


def test_a_missing_package_names_its_extra() -> None:
    finding = doctor._check_package("no-such-package-at-all", "engine")
    assert finding.health is doctor.Health.DEGRADED
    assert finding.fix == "pip install 'tierd[engine]'"


def test_whatever_is_not_ok_has_a_fix(tierd: Any, tmp_path: Path) -> None:
    outcome = tierd("doctor", "--cold-dir", str(tmp_path), "--daemon", "/tmp/x.sock", "--json")
    assert all(check["fix"] for check in checks(outcome).values() if check["health"] != "ok")


@pytest.mark.parametrize(
    ("script", "found", "health"),
    [
        ('print(\'{"kind": "gds", "reason": ""}\')', "gds: read past RAM", "ok"),
        (
            'print(\'{"kind": "gds", "reason": "", "writes": "gds", "writes_reason": ""}\')',
            "gds: read past RAM, counted by nvidia-fs; written past RAM too",
            "ok",
        ),
        (
            'print(\'{"kind": "gds", "reason": "", "writes": "compat", "writes_reason": "w"}\')',
            "gds: read past RAM, counted by nvidia-fs; written through RAM (compat: w)",
            "ok",
        ),
        ('print(\'{"kind": "compat", "reason": "r"}\')', "compat: r", "degraded"),
        ("import os; os.abort()", "posix: the probe ended with code -6", "degraded"),
        ("import time; time.sleep(30)", "posix: the probe did not end within 0.3 s", "degraded"),
        ("print('?')", "posix: the probe failed", "degraded"),
    ],
)
def test_the_path_to_vram_is_what_a_read_in_its_own_process_found(
    script: str, found: str, health: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell = tmp_path / "python"
    shell.write_text(f"#!{sys.executable}\n{script}\n")
    shell.chmod(0o700)
    monkeypatch.setattr(doctor, "NVIDIA", tmp_path)
    monkeypatch.setattr(doctor, "PROBE_SECONDS_MAX", 0.3 if "sleep" in script else 30.0)
    monkeypatch.setattr(sys, "executable", str(shell))
    finding = doctor._check_path_to_vram(tmp_path)
    assert finding.found.startswith(found) and finding.health == health
    assert bool(finding.fix) == (health != "ok")


def test_without_a_gpu_the_path_is_posix(tmp_path: Path) -> None:
    if doctor.NVIDIA.exists():
        pytest.skip("there is a GPU here")
    finding = doctor._check_path_to_vram(tmp_path)
    assert finding.found == "posix (no GPU)" and finding.health == "ok"


def test_the_probes_process_says_what_is_missing(tmp_path: Path) -> None:
    from tierd_engine.device.probemain import probe_on_cuda

    found = probe_on_cuda(tmp_path)
    if found.kind == "posix":
        assert found.reason
