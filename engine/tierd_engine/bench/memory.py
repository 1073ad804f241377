"""Peak memory of a long job beside its KV, and the same job where the KV itself does not fit.

Each job runs in a process of its own: the weights are loaded, and from there
on its peak is counted: hot arena, warm slabs, staging, buffers, the embedded
daemon. Pages that are not hot are warm: all of the KV is in RAM. Warm pages are
mapped twice, by engine and daemon, and are in RAM once, so the peak is one of
the proportional set size. The KV is synthetic: nothing is said about quality.

Then both caches run again under a limit on their address space (`ulimit -v`)
that transformers' own cannot live in; the job over tiers keeps 30 % warm there
and the rest on disk, for both mappings of a warm page count.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tierd.types import CodecId
from tierd.units import format_size
from tierd_engine.bench.machine import describe_machine

BAR = 0.6
# Of the limited job: 5 % hot in bf16 and 30 % warm in int8, mapped twice, are 0.37 of the KV.
_WARM_LIMITED = 0.30
_STEPS = 2
_POLL_SECONDS = 0.05
_LIMIT_OF_KV = 0.6  # what the limited processes may have beyond their weights
_SECONDS_MAX = 1800


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """Bytes beyond the weights at the peak, and what became of both under the limit."""

    context_tokens: int
    kv_bytes: int
    peak_bytes: int
    own_peak_bytes: int
    limit_bytes: int
    tierd_completes: bool
    own_completes: bool

    @property
    def ratio(self) -> float:
        """Of the bf16 KV."""
        return self.peak_bytes / self.kv_bytes

    @property
    def holds(self) -> bool:
        """Whether the bar is met, and the limit told the two apart."""
        return self.ratio <= BAR and self.tierd_completes and not self.own_completes


def bench_memory(context: int, hot: float) -> MemoryRow:
    """Run each cache free, then under the limit."""
    free, own_free = (_run(kind, context, hot, 0) for kind in ("tierd", "own"))
    assert free is not None and own_free is not None, "a job failed without a limit"
    kv_bytes = int(free["kv_bytes"])
    limit = int(_LIMIT_OF_KV * kv_bytes)
    limited, own_limited = (_run(kind, context, hot, limit) for kind in ("tierd", "own"))
    return MemoryRow(
        context, kv_bytes, int(free["peak_bytes"]), int(own_free["peak_bytes"]), limit,
        limited is not None, own_limited is not None,
    )  # fmt: skip


def _run(kind: str, context: int, hot: float, limit_bytes: int) -> dict[str, Any] | None:
    """Run one job in a process of its own; None if it did not live."""
    print(f"{kind} at {context} tokens, limit {limit_bytes}", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", __name__, kind, str(context), str(hot), str(limit_bytes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS_MAX)
    if done.returncode:
        print("\n".join(done.stderr.splitlines()[-1:]), file=sys.stderr)
        return None
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


class PeakMemory:
    """The most memory of this process, polled: proportional set size, each page once."""

    def __init__(self, poll_seconds: float = _POLL_SECONDS) -> None:
        self._poll_seconds = poll_seconds
        self._stop = threading.Event()
        self.most_bytes = 0
        self._thread = threading.Thread(target=self._watch, name="bench-memory", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(self._poll_seconds):
            self.most_bytes = max(self.most_bytes, pss_bytes())

    def end(self) -> int:
        """Stop and return the peak."""
        self._stop.set()
        self._thread.join(_SECONDS_MAX)
        return max(self.most_bytes, pss_bytes())


def pss_bytes() -> int:
    """Return this process's proportional set size."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("/proc/self/smaps_rollup has no Pss")


def _address_space_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmSize:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("/proc/self/status has no VmSize")


def _job(kind: str, context: int, hot: float, limit_bytes: int) -> dict[str, Any]:
    """The body of a measured process."""
    from tierd_engine.bench.runners import BenchModel, TierShares, own_runner, tier_runner
    from tierd_engine.runner import use_all_cores

    use_all_cores()
    shares = TierShares(CodecId.INT8, hot, _WARM_LIMITED if limit_bytes else 1.0)
    bench = BenchModel.load()
    # A step of each first: compiled kernels and libraries' buffers are no part of the KV.
    own_runner(bench, 1).step()
    with tier_runner(bench, shares, 1024, 2048, None) as warm_up:
        warm_up.step()
    before = pss_bytes()
    if limit_bytes:
        most = _address_space_bytes() + limit_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    peak = PeakMemory()
    if kind == "own":
        runner = own_runner(bench, context)
        for _ in range(_STEPS):
            runner.step()
    else:
        with tier_runner(bench, shares, context, context + 64, "/var/tmp") as runner:
            for _ in range(_STEPS):
                runner.step()
    return {
        "peak_bytes": peak.end() - before,
        "kv_bytes": bench.geometry.token_bytes * context,
    }


def print_memory(row: MemoryRow) -> None:
    """Print the row on stdout."""
    print(f"memory, SmolLM2-135M bf16, int8, {row.context_tokens} tokens; {describe_machine()}")
    print(
        f"peak beyond weights: {format_size(row.peak_bytes)} of {format_size(row.kv_bytes)} of KV "
        f"in bf16, ratio {row.ratio:.2f}, limit {BAR}; transformers' own cache "
        f"{format_size(row.own_peak_bytes)}"
    )
    words = {True: "completes", False: "fails"}
    print(
        f"with {format_size(row.limit_bytes)} beyond weights (ulimit -v): tierd "
        f"{words[row.tierd_completes]}, transformers' own cache {words[row.own_completes]} "
        f"{'ok' if row.holds else 'MISSED'}"
    )


def memory_to_dict(row: MemoryRow) -> dict[str, Any]:
    """Return the versioned JSON object."""
    return {
        "version": 1, "benchmark": "memory", "holds": row.holds, "ratio": row.ratio,
        "row": asdict(row),
    }  # fmt: skip


if __name__ == "__main__":
    from tierd_engine.cores import share_cores

    share_cores()
    sys.stdout.write(json.dumps(_job(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]),
                                     int(sys.argv[4]))) + "\n")  # fmt: skip
    sys.stdout.flush()
    os._exit(0)  # a limited process must not fail while it tidies up
