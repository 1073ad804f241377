"""Interrupts held back: for the few moments in which one would lose what a user asked to keep."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Let SIGINT, SIGTERM and SIGHUP wait until the block has ended; then they do what they do.

    What is done inside must end by itself, soon. Signals that are ignored stay so.
    Outside of the main thread, where signals do not arrive, this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []

    def hold(signum: int, frame: FrameType | None) -> None:
        arrived.append(signum)

    before = {}
    try:
        for number in ENDING_SIGNALS:
            handler = signal.getsignal(number)
            if handler not in (signal.SIG_IGN, None):  # None: not installed from Python
                before[number] = handler
                signal.signal(number, hold)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if arrived:
            signal.raise_signal(arrived[0])
