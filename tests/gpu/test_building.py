"""Every kernel compiles for GPUs that are not here, and none spills its registers.

Builds run in a process of their own: this one interprets kernels. `scripts/gpu-compile` does the
same for other models, and for several queries.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

SPILLING = """
import dataclasses, json
from tierd_engine.gpu import building
kernels = {kernel.name: kernel for kernel in building.kernels_of(building.MODELS[0])}
kernel = kernels["encode int8"]
starved = dataclasses.replace(kernel, options={**kernel.options, "maxnreg": 32})
build = building.build(starved, 90)
print(json.dumps([build.is_spilled, build.registers]))
"""


def run(*arguments: str) -> list[Any]:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, *arguments], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_kernel_of_llama_compiles_for_both_gpus_without_spills() -> None:
    builds = run("-m", "tierd_engine.gpu.building", "--model", "Llama-3", "--quick", "--json")
    print(*builds, sep="\n")
    kernels = {build["kernel"].split(",")[0] for build in builds}
    each = ("encode {}", "decode {} to bfloat16", "decode {} to float32", "attend {}")
    codecs = ("raw", "int8", "k8v4", "int4", "fp8")
    assert kernels == {form.format(codec) for form in each for codec in codecs} | {
        "merge", "digest", "xxh3 sums", "xxh3 chain",
    }  # fmt: skip
    for capability in (80, 90):
        assert {
            b["kernel"].split(",")[0] for b in builds if b["capability"] == capability
        } == kernels
    for build in builds:
        assert build["cubin_bytes"] > 0 and build["registers"] > 0
        assert build["spill_bytes"] == build["stack_bytes"] == 0, build
        is_exact = build["kernel"].split()[0] in ("encode", "decode", "digest", "xxh3")
        assert build["must_be_exact"] == is_exact
        assert bool(build["loose"]) != is_exact, build  # attention may, and does, fuse and flush


def test_a_build_that_spills_is_seen() -> None:
    ((is_spilled, registers),) = run("-c", SPILLING)
    assert is_spilled and registers <= 32
