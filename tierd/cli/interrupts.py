"""Interrupts: Ctrl-C, SIGTERM and SIGHUP end a command alike, with 128 + the signal's number.

They are raised as KeyboardInterrupt in the main thread, so that whatever is held is
given back. One that a library swallowed is raised again at the next `check`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LINE = "tierd: interrupted\n"


class _Watch:
    """What has arrived since the command began."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self.at_once = False

    def arrive(self, signum: int, frame: FrameType | None) -> None:
        self.signum = signum
        if self.at_once:
            # Not through a stream's buffer: this may have interrupted a write to it.
            with contextlib.suppress(OSError):
                os.write(2, LINE.encode())
            os._exit(128 + signum)
        raise KeyboardInterrupt


_watch = _Watch()


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Watch the signals meanwhile. One that was ignored before (nohup) stays so."""
    _watch.signum, _watch.at_once = None, False
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {}
    try:
        for number in SIGNALS:
            handler = signal.getsignal(number)
            if handler not in (signal.SIG_IGN, None):  # None: not installed from Python
                before[number] = handler
                signal.signal(number, _watch.arrive)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def at_once() -> Iterator[None]:
    """End the process at once on a signal: for imports, which hold nothing and can swallow it."""
    check()
    _watch.at_once = True
    try:
        yield
    finally:
        _watch.at_once = False


def exit_code() -> int | None:
    """Return the exit code that the first of the signals asks for; None if none came."""
    return None if _watch.signum is None else 128 + _watch.signum


def check() -> None:
    """Raise KeyboardInterrupt if a signal came: it may have been swallowed."""
    if _watch.signum is not None:
        raise KeyboardInterrupt
