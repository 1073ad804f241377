"""Spread compiled, GIL-free page work over the CPUs this process may use.

Invariants:
  every span is taken by exactly one thread
  the caller works too, so a full pool still makes progress
  a call returns only when all its spans have ended: no thread touches pages after it

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

# Waking a thread costs about 50 us; at 5 GB/s of payload a span of 512 KiB runs for 100 us.
SPAN_BYTES_MIN = 512 * 1024
SPANS_PER_THREAD = 4  # the last to end keeps the others waiting for a quarter of a share at most


@lru_cache(maxsize=1)
def _pool(process_id: int) -> ThreadPoolExecutor:
    # Keyed by process: after a fork the parent's threads are not there.
    return ThreadPoolExecutor(max(1, cpu_count() - 1), thread_name_prefix="tierd-codec")


def cpu_count() -> int:
    """Return how many CPUs this process may run on."""
    return len(os.sched_getaffinity(0))


def run_spans(
    body: Callable[[int, int], object], tasks: int, total_bytes: int, threads: int | None = None
) -> None:
    """Call body(first, end) for contiguous spans that cover [0, tasks), this thread's included.

    `threads` caps the threads (default: one per CPU). Zero tasks is allowed.
    What a span raises is raised here, after every running span has ended. That
    wait needs no deadline: spans only compute on mapped memory, and hold no lock.
    """
    count = max(1, min(tasks, total_bytes // SPAN_BYTES_MIN))
    workers = min(cpu_count() if threads is None else threads, count)
    # Several spans a thread: one that shares its CPU with others takes fewer.
    count = min(count, workers * SPANS_PER_THREAD)
    spans = iter(list(pairwise(tasks * i // count for i in range(count + 1))))

    def drain() -> None:
        for span in spans:  # next() on a list's iterator is atomic
            body(*span)

    helpers = [_pool(os.getpid()).submit(drain) for _ in range(workers - 1)]
    try:
        drain()
    finally:
        started = [helper for helper in helpers if not helper.cancel()]
        wait(started)
    for helper in started:
        helper.result()
