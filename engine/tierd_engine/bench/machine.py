"""What this machine can do: memory bandwidth, measured in the same run as the figure beside it."""

from __future__ import annotations

import ctypes
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

_BUFFER_BYTES = 512 * 2**20  # far larger than any last-level cache
_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class MemoryBandwidth:
    """Bytes per second of a plain sum (read) and of a plain copy (bytes copied)."""

    read_bytes_per_second: float
    copy_bytes_per_second: float


def measure_memory() -> MemoryBandwidth:
    """Measure read and copy bandwidth with torch on all its threads (median of 5)."""
    source = torch.ones(_BUFFER_BYTES // 8, dtype=torch.float64)
    target = torch.empty_like(source)
    reads, copies = [], []
    for _ in range(_ROUNDS):
        reads.append(_timed(lambda: source.sum()))
        copies.append(_timed(lambda: target.copy_(source)))
    return MemoryBandwidth(
        _BUFFER_BYTES / statistics.median(reads), _BUFFER_BYTES / statistics.median(copies)
    )


def _timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"/proc/self/status has no {name}")


def rss_bytes() -> int:
    """Return this process's resident bytes. A page that is mapped twice counts twice."""
    return _status_bytes("VmRSS")


def peak_rss_bytes() -> int:
    """Return the most resident bytes since `reset_peak_rss`, or since the process began."""
    return _status_bytes("VmHWM")


def reset_peak_rss() -> int:
    """Measure peaks from here on; return the resident bytes now, what was freed given back."""
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return rss_bytes()


def load_average() -> float:
    """Return the machine's load over the last minute."""
    return os.getloadavg()[0]


def describe_machine() -> str:
    """Return one line: processor, cores, torch threads, date."""
    name = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            name = line.partition(":")[2].strip()
            break
    cores = len(os.sched_getaffinity(0))
    return f"{name}, {cores} cores, {torch.get_num_threads()} threads, {time.strftime('%Y-%m-%d')}"
