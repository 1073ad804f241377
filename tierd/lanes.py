"""Lanes: a few daemon threads that do blocking disk work for the event loop.

concurrent.futures was rejected: at exit it joins its threads, and one that
hangs in a dead disk's read would hang the process with it.

Invariants:
  at most `count` pieces of work run; at most `ahead` more are begun and not yet reported
  each piece is reported exactly once, on the loop's thread
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Protocol

# Four I/Os of 4 MiB keep an NVMe queue busy. As many lanes again have one ready when it wants one:
# they hash and pack meanwhile, one at a time, for they hold the interpreter's lock. On a disk that
# answers after a fixed time (3.5 GB/s, 4 at a time) pages of 108 KiB spill over 6 lanes at 0.80 to
# 0.87 of its rate, over 8 at 0.87 to 0.93.
LANES = 8
# Pieces that wait for a lane, so that a lane need not wait for the event loop: with none, a lane
# of a fast disk stood idle for a quarter of its time; cold reads gained 12 to 15 % by two.
AHEAD = 2


class Lanes(Protocol):
    """Somewhere to run blocking work. A fake runs it when the test says so."""

    def free(self) -> int:
        """Return how many pieces may be begun now."""
        ...

    def begin(self, work: Callable[[], None], report: Callable[[], None]) -> None:
        """Run `work` in a thread, then `report` on the loop's thread, also if it raised."""
        ...

    def stop(self) -> None:
        """Begin no more; threads end after what was begun, or with the loop. Does not wait."""
        ...


_Piece = tuple[Callable[[], None], Callable[[], None]]


class ThreadLanes:
    """Lanes of the running event loop. Work that raises ends its thread, loudly: it is a bug."""

    def __init__(self, count: int = LANES, ahead: int = AHEAD) -> None:
        self._loop = asyncio.get_running_loop()
        self._pieces: queue.SimpleQueue[_Piece | None] = queue.SimpleQueue()
        self._free = count + ahead
        self._threads = [
            threading.Thread(target=self._work, name=f"tierd-lane-{i}", daemon=True)
            for i in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def free(self) -> int:
        """Return how many pieces may be begun now."""
        return self._free

    def begin(self, work: Callable[[], None], report: Callable[[], None]) -> None:
        """Run `work` in a thread, then `report` on the loop's thread, also if it raised."""
        assert self._free > 0, "no lane is free"
        self._free -= 1
        self._pieces.put((work, report))

    def stop(self) -> None:
        """Begin no more; threads end after what was begun, or with the loop. Does not wait."""
        self._free = 0
        for _ in self._threads:
            self._pieces.put(None)

    def _work(self) -> None:
        while (piece := self._pieces.get()) is not None:
            work, report = piece
            if self._loop.is_closed():  # a disk hung while the daemon ended: it is closed by now
                return
            try:
                work()
            finally:
                self._tell(report)

    def _tell(self, report: Callable[[], None]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._report, report)

    def _report(self, report: Callable[[], None]) -> None:
        self._free += 1
        report()
