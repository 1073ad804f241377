"""Standard streams that hold: closed, full, left by their reader, or unable to encode.

What is written to stdout goes through `writing`. A reader that has gone (`| head`)
ends the command quietly, with SIGPIPE's exit code; anything else is one line.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sys
from collections.abc import Iterator
from typing import TextIO

from tierd.cli.exits import FAILED, READER_GONE
from tierd.errors import TierdError


class ReaderGone(Exception):
    """Nobody reads stdout any more."""


class OutputFailed(TierdError):
    """Stdout takes nothing."""


def mend() -> None:
    """Put something under each closed standard stream, so that no file takes its number.

    Characters that a stream cannot encode are written as backslash escapes.
    """
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            # Stdout for reading alone: writing to it must fail, not vanish.
            os.open(os.devnull, os.O_RDWR if fd == 2 else os.O_RDONLY)
    for fd, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            # Open as long as the process is.
            setattr(sys, name, open(fd, mode, encoding="utf-8", closefd=False))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


@contextlib.contextmanager
def writing() -> Iterator[TextIO]:
    """Yield stdout, and flush it. Raises ReaderGone, OutputFailed."""
    try:
        yield sys.stdout
        sys.stdout.flush()
    except BrokenPipeError:
        raise ReaderGone from None
    except OSError as error:
        raise OutputFailed(_failure(error)) from None


def require_stdout() -> None:
    """Raise OutputFailed if stdout is closed: before the work whose result it is to take."""
    try:
        flags = fcntl.fcntl(sys.stdout.fileno(), fcntl.F_GETFL)
    except (OSError, ValueError):  # not a file at all
        return
    if flags & os.O_ACCMODE == os.O_RDONLY:
        raise OutputFailed(_failure(OSError(errno.EBADF, "")))


def warn(message: str) -> None:
    """Write one line to stderr, after the command's name. Where that fails, nobody listens."""
    with contextlib.suppress(OSError):
        print(f"tierd: {message}", file=sys.stderr, flush=True)


def flushed(code: int) -> int:
    """Flush stdout at the command's end and return its exit code, or that of a failure to."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        code = READER_GONE
    except OSError as error:
        if code == 0:
            warn(f"error: {_failure(error)}")
            code = FAILED
    else:
        return code
    mute()
    return code


def mute() -> None:
    """Let what is still in stdout's buffer go nowhere, and without a word at exit."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


def _failure(error: OSError) -> str:
    why = "it is closed" if error.errno == errno.EBADF else error.strerror
    return f"cannot write to standard output: {why}"
