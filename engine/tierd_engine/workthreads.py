"""Threads for work that may hang in a dead disk: daemons, that nobody joins.

Not an executor of concurrent.futures: at exit that joins its threads, and one stuck in the
kernel would hang the process. Who submits waits for the future, with a limit of its own.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future


class WorkThreads:
    """`count` threads. Errors other than `expected` end their thread too: they are bugs."""

    def __init__(self, count: int, name: str, expected: type[Exception]) -> None:
        self._queue: queue.SimpleQueue[tuple[Callable[[], None], Future[None]] | None]
        self._queue = queue.SimpleQueue()
        self._count, self._expected = count, expected
        for i in range(count):
            threading.Thread(target=self._work, name=f"{name}-{i}", daemon=True).start()

    def submit(self, work: Callable[[], None]) -> Future[None]:
        """Return the future of `work`, which starts when a thread is free."""
        future: Future[None] = Future()
        self._queue.put((work, future))
        return future

    def stop(self) -> None:
        """Let each thread end after its work. One that is stuck is left to end by itself."""
        for _ in range(self._count):
            self._queue.put(None)

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            work, future = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                work()
            except BaseException as error:
                future.set_exception(error)
                if not isinstance(error, self._expected):
                    raise
            else:
                future.set_result(None)
