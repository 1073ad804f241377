"""`scripts/gpu-check FOLDER`: every part in a process of its own, bounded; a report in FOLDER.

Invariants:
  the whole takes TOTAL_SECONDS and the writing of a report, whatever hangs
  a part that fails, is missing something, or is stopped leaves one line, and the rest goes on
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tierd.errors import (
    BudgetTooSmall,
    DeviceUnavailable,
    HotBudgetExceeded,
    NotFound,
    TierdError,
    TierFull,
)
from tierd_engine.bench.gpucheck.parts import PARTS, TOTAL_SECONDS, Part
from tierd_engine.bench.gpucheck.report import DRY_LINE, bars, write_report
from tierd_engine.bench.gpucheck.scale import DRY, REAL

_FOUND = "gpu-check-found: "  # before a part's JSON, the last line of its stdout
# What a machine lacks, and no fault of what is checked.
_MISSING = (NotFound, DeviceUnavailable, BudgetTooSmall, HotBudgetExceeded, TierFull)
_PART_SECONDS_MIN = 5.0  # less is not worth a start of torch
Launch = Callable[[Part, Path, bool, dict[str, Any], float], dict[str, Any]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a check; return 0 if nothing failed and every judged bar holds."""
    parser = argparse.ArgumentParser(prog="scripts/gpu-check", description=__doc__)
    parser.add_argument("folder", type=Path, help="of the report; its disk is the one measured")
    parser.add_argument("--dry-run", action="store_true", help="tiny, on the fake device")
    parser.add_argument("--only", nargs="+", metavar="PART", help="these parts")
    parser.add_argument("--part", help=argparse.SUPPRESS)  # run one here: what a process is given
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.part is not None:
        return _run_here(options)
    names = [part.name for part in PARTS]
    unknown = set(options.only or ()) - set(names)
    if unknown:
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    chosen = [part for part in PARTS if part.name in (options.only or names)]
    return check(options.folder, chosen, dry_run=options.dry_run)


def check(
    folder: Path, parts: Sequence[Part], *, dry_run: bool, launch: Launch | None = None,
    total_seconds: float = TOTAL_SECONDS,
) -> int:  # fmt: skip
    """Run parts one after the other, write the report after each, print the bars."""
    launch = launch or in_a_process
    began = time.monotonic()
    found: dict[str, Any] = {
        "version": 1, "dry_run": dry_run, "date": time.strftime("%Y-%m-%d"),
        "machine": _machine(), "device": "unknown", "parts": {},
    }  # fmt: skip
    if dry_run:
        _say(DRY_LINE)
    for part in parts:
        left = total_seconds - (time.monotonic() - began)
        at = time.monotonic()
        if left < _PART_SECONDS_MIN:
            done: dict[str, Any] = {"said": "skipped: no time is left"}
        else:
            results = {name: p.get("result") or {} for name, p in found["parts"].items()}
            done = launch(part, folder, dry_run, results, min(part.seconds, left))
        found["parts"][part.name] = {**done, "seconds": time.monotonic() - at}
        found["device"] = (done.get("result") or {}).get("device", found["device"])
        if not isinstance(found["device"], str):
            found["device"] = found["device"]["name"]
        _say(f"{part.name}: {done.get('said') or 'done'} ({time.monotonic() - at:.0f} s)")
        write_report(folder, found)
    listed = bars(found)
    for bar in listed:
        figure = "" if bar.figure is None else f" {bar.figure:.3g}"
        _say(f"{bar.verdict}: {bar.name}{figure} ({bar.limit})")
    _say(f"written: {folder / 'gpu-check.md'}, {folder / 'gpu-check.json'}")
    if not any(part.get("result") for part in found["parts"].values()):
        _say("nothing was measured")
        return 1
    failed = [name for name, part in found["parts"].items() if part.get("failed")]
    return 1 if failed or any(bar.holds is False for bar in listed) else 0


def _say(line: str) -> None:
    print(f"gpu-check: {line}", flush=True)


def _machine() -> str:
    from tierd_engine.bench.machine import describe_machine

    return describe_machine()


def in_a_process(
    part: Part, folder: Path, dry_run: bool, earlier: dict[str, Any], seconds: float
) -> dict[str, Any]:
    """Run a part in a process group of its own and end it after `seconds`."""
    command = [
        sys.executable,
        "-m",
        "tierd_engine.bench.gpucheck",
        str(folder),
        "--part",
        part.name,
    ]
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    if dry_run:
        command.append("--dry-run")
        environment["TRITON_INTERPRET"] = "1"
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    is_late, out, errors = False, "", ""
    try:
        out, errors = process.communicate(json.dumps(earlier), timeout=seconds)
    except subprocess.TimeoutExpired:
        is_late = True
    finally:
        rest = _end(process)
    out, errors = rest if is_late else (out, errors)
    for line in reversed(out.splitlines()):
        if line.startswith(_FOUND):  # who hangs after it has said so has hung in a driver's end
            done: dict[str, Any] = json.loads(line.removeprefix(_FOUND))
            return done
    if is_late and seconds < part.seconds:
        return {"said": f"stopped after {seconds:.0f} s: the whole's time is up"}
    if is_late:
        return {"said": f"FAILED: stopped after {seconds:.0f} s", "failed": True}
    last = (errors.strip().splitlines() or ["it said nothing"])[-1]
    return {"said": f"FAILED: code {process.returncode}: {last[:300]}", "failed": True}


def _end(process: subprocess.Popen[str]) -> tuple[str, str]:
    """End what is left of a part, its own processes too; return what it said that was not read."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        return process.communicate(timeout=10)
    except subprocess.TimeoutExpired:
        return "", ""  # stuck in the driver: it holds no pipe that is waited for
    except ValueError:  # all was read
        return "", ""


def here(
    part: Part, folder: Path, dry_run: bool, earlier: dict[str, Any], _: float
) -> dict[str, Any]:
    """Run a part in this process. What is missing here is a line, not a failure."""
    try:
        return {"result": part.check(DRY if dry_run else REAL, folder, earlier)}
    except ModuleNotFoundError as error:
        return {"said": f"skipped: {error.name} is not installed"}
    except _MISSING as error:
        return {"said": f"skipped: {error}", "error": type(error).__name__}
    except TierdError as error:  # a device that failed, a page that was damaged
        kind = type(error).__name__
        return {"said": f"FAILED: {kind}: {error}", "error": kind, "failed": True}


def _run_here(options: argparse.Namespace) -> int:
    part = next(part for part in PARTS if part.name == options.part)
    earlier = {} if sys.stdin.isatty() or options.tiny else json.loads(sys.stdin.read() or "{}")
    if options.tiny:  # the kernels on a GPU, at the size of a dry run
        from dataclasses import replace

        result = part.check(replace(DRY, is_dry=False), options.folder, earlier)
        return 0 if result.get("holds", True) else 1
    done = here(part, options.folder, options.dry_run, earlier, part.seconds)
    print(_FOUND + json.dumps(done), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
