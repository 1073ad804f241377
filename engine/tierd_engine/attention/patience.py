"""How long the team's threads wait awake: long on a machine of their own, briefly beside others.

A thread that waits awake takes its next job within a microsecond; one that slept
has to be woken, 0.05 to 0.1 ms. Beside a job that wants its core, though, it
keeps that job off, or the one it waits for. Which of the two it is shows in how long
our own threads, ready to run, had to wait for a core that another process had: the kernel
counts that for each thread (/proc/.../schedstat, nanoseconds). More than a share of the time, twice
in a row, and threads wait briefly for a while, longer each time that waiting long is tried in vain.
Once alone is what every machine does now and then: it took a step of 20 ms to 35 for a second.

Results do not depend on it: no kernel's do on how many threads there are.

Invariants:
  where the kernel counts nothing, or the user asked for passive threads, waits are brief
  a look costs two system calls a thread, at most once in WINDOW_SECONDS
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tierd_engine.attention.team import BRIEF_SECONDS, member_ids, set_patience

LONG_SECONDS = 2e-3  # gaps between a step's kernels are below 0.2 ms, between steps about 1 ms
WINDOW_SECONDS = 0.05
# Of one core's time. One equal competitor for one of our cores takes half of it; what wakes up
# now and then on an idle machine takes under 0.02.
DELAY_SHARE_MAX = 0.15
HOLD_SECONDS_MIN, HOLD_SECONDS_MAX = 0.5, 8.0  # a trial of 0.1 s in 8 s costs about 1 %


def held_off_seconds(thread_ids: Sequence[int]) -> float | None:
    """Return for how long other processes held these threads off a core; None if unknown.

    That is for how long they were ready and had none, in sum, less what this process's other
    threads ran: those that read from disk are called for, and take a core for moments. Only
    differences mean something.
    """
    queued_ns = ran_ns = 0
    try:
        for thread_id in thread_ids:
            ran, queued, _ = Path(f"/proc/self/task/{thread_id}/schedstat").read_text().split()
            ran_ns += int(ran)
            queued_ns += int(queued)
    except (OSError, ValueError):
        return None
    return queued_ns / 1e9 - (time.process_time() - ran_ns / 1e9)


class Patience:
    """Looks, at the start of a step, whether others want our cores; used by one thread."""

    def __init__(
        self,
        held_off: Callable[[Sequence[int]], float | None] = held_off_seconds,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._held_off, self._clock = held_off, clock
        self._is_passive = os.environ.get("OMP_WAIT_POLICY", "").upper() == "PASSIVE"
        self._thread_ids: list[int] = []
        self._looked = self._clock()
        self._seen: float | None = None
        self._hold_seconds = HOLD_SECONDS_MIN
        self._brief_until = 0.0
        self._was_held_off = False
        self.is_long = False

    def look(self) -> None:
        """Set how long the team waits, from what has happened since the last look."""
        now = self._clock()
        elapsed = now - self._looked
        if self._is_passive or elapsed < WINDOW_SECONDS:
            return
        thread_ids = [threading.get_native_id(), *member_ids()]
        total = self._held_off(thread_ids)
        before = self._seen if thread_ids == self._thread_ids else None
        self._thread_ids, self._seen, self._looked = thread_ids, total, now
        if total is None:
            self._set(False)
        elif before is not None:
            self._judge(now, (total - before) / elapsed)

    def _judge(self, now: float, share: float) -> None:
        is_held_off = share > DELAY_SHARE_MAX
        again, self._was_held_off = is_held_off and self._was_held_off, is_held_off
        if is_held_off and (again or not self.is_long):
            if self.is_long:  # a trial in vain: the next one comes later
                self._hold_seconds = min(2 * self._hold_seconds, HOLD_SECONDS_MAX)
            self._brief_until = now + self._hold_seconds
            self._set(False)
        elif self.is_long:
            if not is_held_off and now > self._brief_until + self._hold_seconds:
                self._hold_seconds = HOLD_SECONDS_MIN
        elif now >= self._brief_until:
            self._set(True)

    def _set(self, is_long: bool) -> None:
        self.is_long = is_long
        set_patience(LONG_SECONDS if is_long else BRIEF_SECONDS)
