"""The parts of a check, in the order of their weight, each with its share of the nine minutes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tierd.errors import NotFound
from tierd.types import CodecId
from tierd_engine.bench.gpucheck.scale import Scale

Check = Callable[[Scale, Path, dict[str, Any]], dict[str, Any]]
TOTAL_SECONDS = 520.0  # "under nine minutes": ten to end a stuck part, ten for the report


@dataclass(frozen=True, slots=True)
class Part:
    """One check. `seconds`: its limit; less where the whole has less left."""

    name: str
    seconds: float
    check: Check


def _links(scale: Scale, folder: Path, earlier: dict[str, Any]) -> dict[str, Any]:
    from tierd_engine.bench.gpucheck.links import check_links

    return check_links(scale, folder, earlier)


def _kernels(scale: Scale, folder: Path, earlier: dict[str, Any]) -> dict[str, Any]:
    from tierd_engine.bench.gpucheck.kernels import check_kernels

    return check_kernels(scale, folder, earlier)


def _resident(scale: Scale, folder: Path, earlier: dict[str, Any]) -> dict[str, Any]:
    from tierd_engine.bench.gpucheck.resident import check_resident

    return check_resident(scale, folder, earlier)


def _model(scale: Scale, folder: Path, earlier: dict[str, Any]) -> dict[str, Any]:
    from tierd_engine.bench.gpucheck.model import check_model

    return check_model(scale, folder, earlier)


def _cold(scale: Scale, folder: Path, earlier: dict[str, Any]) -> dict[str, Any]:
    from tierd_engine.bench.gpucheck.decoding import check_cold

    return check_cold(scale, folder, earlier)


def _decode(codec: CodecId) -> Check:
    def check(scale: Scale, _: Path, earlier: dict[str, Any]) -> dict[str, Any]:
        from tierd_engine.bench.gpucheck.decoding import check_decode

        return check_decode(scale, earlier, codec)

    return check


def _sanitizer(scale: Scale, folder: Path, _: dict[str, Any]) -> dict[str, Any]:
    """Run the kernels' part at the tiny scale under compute-sanitizer."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        raise NotFound("compute-sanitizer is not on the PATH")
    if scale.is_dry:
        raise NotFound("no GPU: nothing to be watched")
    # What a library asks the driver in vain, as torch does when it starts, is no memory error.
    command = [
        tool, "--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "9",
        sys.executable, "-m", "tierd_engine.bench.gpucheck", str(folder), "--part", "kernels",
        "--tiny",
    ]  # fmt: skip
    # Each tensor is an allocation then: past its end is not inside torch's own.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=_SANITIZER_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise NotFound(f"compute-sanitizer was not through in {_SANITIZER_SECONDS:.0f} s") from None
    return {"code": done.returncode, "said": done.stdout[-2000:], "holds": done.returncode == 0}


_SANITIZER_SECONDS = 60.0
PARTS = (
    Part("links", 40, _links),
    Part("kernels", 90, _kernels),
    Part("decode int8", 110, _decode(CodecId.INT8)),
    Part("resident", 40, _resident),
    Part("model", 90, _model),
    Part("decode k8v4", 90, _decode(CodecId.K8V4)),
    Part("decode raw", 110, _decode(CodecId.RAW)),
    Part("cold", 70, _cold),
    Part("sanitizer", _SANITIZER_SECONDS + 5, _sanitizer),
)
