"""`scripts/gpu-check` on the fake device: every part runs, a failure is a line, the rest goes on.

A part runs in this process here, as it does in one of its own on a GPU; one test starts them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.runtime.errors import OutOfResources

from tierd.errors import DeviceFailed, NotFound
from tierd.types import CodecId
from tierd_engine.bench.gpucheck import __main__ as gpucheck
from tierd_engine.bench.gpucheck import kernels, parts
from tierd_engine.bench.gpucheck.decoding import overlap
from tierd_engine.bench.gpucheck.parts import PARTS, TOTAL_SECONDS, Part
from tierd_engine.bench.gpucheck.report import bars
from tierd_engine.bench.gpucheck.scale import DRY

ROOT = Path(__file__).parents[2]


def report(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "gpu-check.json").read_text())
    return found


def test_a_dry_run_runs_every_part_on_the_fake_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = gpucheck.check(tmp_path, PARTS, dry_run=True, launch=gpucheck.here)
    found = report(tmp_path)
    done = found["parts"]
    assert list(done) == [part.name for part in PARTS]
    said = {name: part["said"] for name, part in done.items() if "said" in part}
    assert set(said) == {"sanitizer"} and "skipped" in said["sanitizer"], said
    assert code == 0 and found["device"] == "fake" and found["dry_run"]
    for codec in ("raw", "int8", "k8v4"):
        rows = done[f"decode {codec}"]["result"]["rows"]
        assert [row["plan"] for row in rows] == ["stream", "near", "auto"]
        assert rows[0]["link_bytes_per_step"] > 0 and rows[1]["near_bytes_per_step"] > 0
    assert done["kernels"]["result"]["holds"] and len(done["kernels"]["result"]["rows"]) == 25
    assert done["model"]["result"]["holds"], done["model"]["result"]["rows"]
    assert done["resident"]["result"]["holds"]
    cold = done["cold"]["result"]
    assert cold["cold_pages"] > 0 and cold["device"]["direct"]["units"] > 0
    (disk,) = cold["device"]["cold_paths"]
    assert disk["kind"] == disk["writes"] == "gds"
    assert cold["written"]["direct"]["pages"] > 0
    verdicts = {bar["name"]: bar["verdict"] for bar in found["bars"]}
    assert verdicts["int8 stream, of the PCIe limit"] == "not judged"
    assert verdicts["kernels are the CPU's"] == "holds"
    text = (tmp_path / "gpu-check.md").read_text()
    assert "pages from VRAM to a disk:" in text and " were taken from VRAM, 0 from RAM" in text
    assert "DRY RUN" in text and "not judged" in text and "## decode raw" in text
    assert "DRY RUN" in capsys.readouterr().out


def test_the_script_starts_a_part_in_a_process_of_its_own(tmp_path: Path) -> None:
    environment = {**os.environ, "GPU_PYTHON": sys.executable}
    done = subprocess.run(
        [ROOT / "scripts" / "gpu-check", tmp_path, "--dry-run", "--only", "links"],
        env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert report(tmp_path)["parts"]["links"]["result"]["pcie_up_bytes_per_second"] > 0
    assert "written:" in done.stdout


def fail(error: BaseException) -> Any:
    def check(*_: object) -> dict[str, Any]:
        raise error

    return check


def test_what_is_missing_is_a_line_and_no_failure(tmp_path: Path) -> None:
    parts = [
        Part("links", 5, fail(NotFound("the model is not here"))),
        Part("kernels", 5, fail(ModuleNotFoundError("x", name="cupy"))),
    ]
    parts.append(Part("cold", 5, lambda *_: {"tokens": 1}))
    assert gpucheck.check(tmp_path, parts, dry_run=True, launch=gpucheck.here) == 0
    assert gpucheck.check(tmp_path, parts[:2], dry_run=True, launch=gpucheck.here) == 1
    said = {name: part["said"] for name, part in report(tmp_path)["parts"].items()}
    assert said == {
        "links": "skipped: the model is not here", "kernels": "skipped: cupy is not installed",
    }  # fmt: skip


def test_a_device_that_fails_is_a_failure(tmp_path: Path) -> None:
    parts = [
        Part("cold", 5, lambda *_: {"tokens": 1}),
        Part("decode int8", 5, fail(DeviceFailed("an illegal memory access"))),
    ]
    assert gpucheck.check(tmp_path, parts, dry_run=True, launch=gpucheck.here) == 1
    said = report(tmp_path)["parts"]["decode int8"]["said"]
    assert said == "FAILED: DeviceFailed: an illegal memory access"


def test_a_kernel_that_does_not_compile_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> float:
        raise OutOfResources(300_000, 232_448, "shared memory")

    monkeypatch.setattr(kernels, "_decode", fail)
    monkeypatch.setattr(kernels, "_attend", fail)
    rows = list(kernels._codec_rows(DRY, CodecId.RAW, torch.device("cpu"), 1))
    assert [row["holds"] for row in rows] == [True, True, True, False, False]
    assert "shared memory" in rows[-1]["said"]


def python(folder: Path, script: str) -> str:
    """Write a program that stands in for Python."""
    path = folder / "python"
    path.write_text(f"#!{sys.executable}\n{script}\n")
    path.chmod(0o700)
    return str(path)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("import os; os.abort()", "FAILED: code -6"),
        ("raise RuntimeError('CUDA error')", "FAILED: code 1: RuntimeError: CUDA error"),
        ("import time; time.sleep(60)", "FAILED: stopped after 1 s"),
        # Its own process outlives it and keeps its pipes open: it is ended too.
        ("import os, time\nif os.fork(): os._exit(3)\ntime.sleep(60)", "FAILED: stopped after 1 s"),
    ],
    ids=["crash", "error", "hang", "orphan"],
)
def test_a_part_that_dies_or_hangs_is_ended_and_the_next_one_runs(
    script: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", python(tmp_path, script))
    began = time.monotonic()
    parts = [Part("links", 1, fail(AssertionError())), Part("kernels", 1, fail(AssertionError()))]
    assert gpucheck.check(tmp_path, parts, dry_run=True) == 1
    assert time.monotonic() - began < 20
    done = report(tmp_path)["parts"]
    assert [part["said"].startswith(said) for part in done.values()] == [True, True], done


def test_what_a_part_found_stands_though_it_hangs_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = json.dumps({"result": {"tokens": 7}})
    script = f"import time\nprint({gpucheck._FOUND + found!r}, flush=True)\ntime.sleep(60)"
    monkeypatch.setattr(sys, "executable", python(tmp_path, script))
    part = Part("links", 2, fail(AssertionError()))
    assert gpucheck.in_a_process(part, tmp_path, True, {}, 2) == {"result": {"tokens": 7}}


def test_a_part_that_the_wholes_limit_cuts_short_has_not_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", python(tmp_path, "import time; time.sleep(60)"))
    part = Part("links", 30, fail(AssertionError()))
    done = gpucheck.in_a_process(part, tmp_path, True, {}, 0.5)
    assert "time is up" in done["said"] and "failed" not in done


def test_a_sanitizer_that_is_not_through_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object, timeout: float, **__: object) -> None:
        raise subprocess.TimeoutExpired("compute-sanitizer", timeout)

    monkeypatch.setattr(parts.shutil, "which", lambda name: "/bin/true")
    monkeypatch.setattr(parts.subprocess, "run", run)
    (sanitizer,) = [part for part in PARTS if part.name == "sanitizer"]
    done = gpucheck.here(sanitizer, Path("."), False, {}, 0)
    assert done["said"] == "skipped: compute-sanitizer was not through in 60 s"


@pytest.mark.parametrize("part", ["sanitizer", "resident"])
def test_a_memory_error_and_a_wrong_sum_are_missed_bars(part: str) -> None:
    found = bars({"dry_run": False, "parts": {part: {"result": {"holds": False}}}})
    assert [bar.verdict for bar in found].count("MISSED") == 1


def test_the_whole_has_a_limit_and_parts_beyond_it_are_skipped(tmp_path: Path) -> None:
    def launch(part: Part, *rest: Any) -> dict[str, Any]:
        limits.append(rest[-1])
        return {"result": {}}

    limits: list[float] = []
    gpucheck.check(tmp_path, PARTS, dry_run=True, launch=launch, total_seconds=50.0)
    assert max(limits) <= 50 and len(limits) == len(PARTS)
    gpucheck.check(tmp_path, PARTS, dry_run=True, launch=launch, total_seconds=1.0)
    said = {part["said"] for part in report(tmp_path)["parts"].values()}
    assert said == {"skipped: no time is left"} and TOTAL_SECONDS < 540


def judged(**results: Any) -> dict[str, str]:
    parts = {name.replace("_", " "): {"result": result} for name, result in results.items()}
    return {bar.name: bar.verdict for bar in bars({"dry_run": False, "parts": parts})}


@pytest.mark.parametrize(("of_pcie", "verdict"), [(0.85, "holds"), (0.84, "MISSED")])
def test_the_stream_bar_is_of_the_int8_stream_row(of_pcie: float, verdict: str) -> None:
    rows = [{"plan": "near", "of_pcie_up": 0.0}, {"plan": "stream", "of_pcie_up": of_pcie}]
    found = judged(decode_int8={"rows": rows})
    assert found["int8 stream, of the PCIe limit"] == verdict
    assert found["resident path, x PyTorch's own decode attention"] == "not judged"


@pytest.mark.parametrize(("peak", "verdict"), [(103, "holds"), (104, "MISSED")])
def test_the_vram_bar_adds_weights_hot_and_staging(peak: int, verdict: str) -> None:
    vram = {"peak_bytes": peak, "weights_bytes": 60, "hot_bytes": 30, "staging_bytes": 10}
    found = judged(decode_raw={"vram": vram}, resident={"ratio": 1.2})
    assert found["peak VRAM, raw, of weights + hot + staging"] == verdict
    assert found["resident path, x PyTorch's own decode attention"] == "MISSED"


def test_overlap_is_of_what_copies_and_attention_take_alone() -> None:
    assert overlap(10.0, 4.0, 10.0) == {"hidden_of_copies": 0.4, "hidden_of_possible": 1.0}
    assert overlap(14.0, 4.0, 10.0) == {"hidden_of_copies": 0.0, "hidden_of_possible": 0.0}
    assert overlap(12.0, 4.0, 10.0) == {"hidden_of_copies": 0.2, "hidden_of_possible": 0.5}
