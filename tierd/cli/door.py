"""The command's door: signals are heard and the standard streams hold before anything is loaded.

Where memory is too short even to load the command, or to say in words what failed, that is a
line: it is made beforehand, and takes no module that is not there yet.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Sequence

from tierd.memorywords import says_shortage

_NO_ROOM = (
    b"tierd: error: out of memory: the command cannot be loaded; raise ulimit -v, or free some\n"
)
_FAILED = 1  # as in exits.py, which may be what cannot be loaded


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. `argv` None: the process's own, its last thing."""
    is_usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if argv is None and is_usual and threading.current_thread() is threading.main_thread():
        # A second Ctrl-C while the process ends has nobody left to raise anything at.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        return _main(argv)
    except MemoryError:
        pass  # nothing of it is kept: what it held may be what the line needs
    except (ImportError, SystemError) as error:
        # A library's file that cannot be mapped; an error that Python itself had no room to make.
        if not says_shortage(str(error)):
            raise
    with contextlib.suppress(OSError):  # nobody listens
        os.write(2, _NO_ROOM)
    return _FAILED


def _main(argv: Sequence[str] | None) -> int:
    from tierd.cli import exits, interrupts, streams

    with interrupts.watched():
        with interrupts.at_once():
            streams.mend()
            from tierd.cli.app import run

        try:
            return streams.flushed(run(argv))
        except KeyboardInterrupt:  # in the last moment: everything is done but the flush
            streams.warn("interrupted")
            return interrupts.exit_code() or exits.INTERRUPTED
