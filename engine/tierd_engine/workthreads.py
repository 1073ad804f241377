"""Threads for work that may hang in a dead disk: daemons, that nobody joins.

Not an executor of concurrent.futures: at exit that joins its threads, and one stuck in the
kernel would hang the process. Who submits waits for the future, with a limit of its own.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future

from tierd.errors import TierdError

# What these threads do needs little; the usual 8 MiB each would count under `ulimit -v`.
STACK_BYTES = 1 << 20


def start_threads(
    work: Callable[[], None], count: int, name: str, stack_bytes: int = STACK_BYTES
) -> list[threading.Thread]:
    """Return `count` daemon threads that do `work`, or as many as the host gives.

    Raises TierdError where it gives none.
    """
    threads: list[threading.Thread] = []
    usual_bytes = threading.stack_size(stack_bytes)
    try:
        for i in range(count):
            thread = threading.Thread(target=work, name=f"{name}-{i}", daemon=True)
            thread.start()
            threads.append(thread)
    except RuntimeError as error:
        if not threads:
            raise TierdError(f"the host gives no more threads (ulimit -u): {error}") from error
    finally:
        threading.stack_size(usual_bytes)
    return threads


class WorkThreads:
    """`count` threads, or as many as there are.

    Errors other than `expected` end their thread too: they are bugs.
    """

    def __init__(
        self, count: int, name: str, expected: type[Exception], stack_bytes: int = STACK_BYTES
    ) -> None:
        self._queue: queue.SimpleQueue[tuple[Callable[[], None], Future[None]] | None]
        self._queue = queue.SimpleQueue()
        self._expected = expected
        self._count = len(start_threads(self._work, count, name, stack_bytes))

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
