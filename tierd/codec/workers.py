"""Spread compiled, GIL-free page work over the CPUs this process may use.

Invariants:
  a share never waits for another share, so a full pool still makes progress
  a call returns only when all its shares have ended: no thread touches pages after it

Plain threads rather than Numba's `parallel=True`: its layers compile for
seconds, spin beside PyTorch's own OpenMP team, and one of them (workqueue, all
that some hosts have) aborts the process when two threads enter it at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import lru_cache
from itertools import pairwise

# Waking a thread costs about 50 us; at 5 GB/s a share of 512 KiB runs for 100 us.
SHARE_BYTES_MIN = 512 * 1024


@lru_cache(maxsize=1)
def _pool(process_id: int) -> ThreadPoolExecutor:
    # Keyed by process: after a fork the parent's threads are not there.
    return ThreadPoolExecutor(max(1, cpu_count() - 1), thread_name_prefix="tierd-codec")


def cpu_count() -> int:
    """Return how many CPUs this process may run on."""
    return len(os.sched_getaffinity(0))


def run_shares(
    body: Callable[[int, int], object], tasks: int, total_bytes: int, threads: int | None = None
) -> None:
    """Call body(first, end) over [0, tasks) in contiguous shares, one on this thread.

    `threads` caps the shares (default: one per CPU). Zero tasks is allowed.
    What a share raises is raised here, after every share has ended. The wait
    needs no deadline: shares only compute on mapped memory, and hold no lock.
    """
    limit = cpu_count() if threads is None else threads
    shares = max(1, min(limit, tasks, total_bytes // SHARE_BYTES_MIN))
    bounds = [tasks * i // shares for i in range(shares + 1)]
    spans = list(pairwise(bounds))
    futures = [_pool(os.getpid()).submit(body, *span) for span in spans[1:]]
    try:
        body(*spans[0])
    finally:
        wait(futures)
    for future in futures:
        future.result()
