"""Open files: whether a process may open enough of them, and whose limit an error comes of.

gRPC ends the process where it finds no fd as it starts, so who starts it asks before. An error
for want of fds names the process whose limit it is: what a daemon says is read beside a job.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Iterator

from tierd.errors import StorageError, TierdError

# gRPC opens 6 (10 for asyncio) and ends the process where it cannot; the first door is one, and an
# engine's epoch page another. What is over is for the page table and the first slabs.
CLIENT_FILES = 16
# 8 of its own and its store's, 9 gRPC's, which ends the process where it finds none; 5 an engine, 2
# a cold slab and 1 a warm one: with fewer no job would come far.
DAEMON_FILES = 40
NONE_LEFT = (errno.EMFILE, errno.ENFILE)


def require_files(count: int, what_for: str) -> None:
    """Raise StorageError unless this process can open `count` more files."""
    held: list[int] = []
    why = ""
    try:
        for _ in range(count):
            held.append(os.eventfd(0))
    except OSError as error:
        if error.errno not in NONE_LEFT:
            raise
        why = why_not_opened(error)
    finally:
        for fd in held:
            os.close(fd)
    if why:  # here: not with the OSError as its context, whose limit is named already
        raise StorageError(f"{what_for} needs {count} more files open: {why}")


def why_not_opened(error: OSError) -> str:
    """Return an error's text, with the limit where one of open files is met."""
    text = error.strerror or str(error)
    if error.errno == errno.EMFILE:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f"{text}: {_this_process()} {limit}; raise its ulimit -n"
    if error.errno == errno.ENFILE:
        return f"{text}: that is this machine's limit; raise fs.file-max"
    return text


@contextlib.contextmanager
def said_by_daemon() -> Iterator[None]:
    """Let an error leave the daemon so that its clients read whose limit it is: the daemon's.

    An OSError for want of files becomes a StorageError.
    """
    try:
        yield
    except TierdError as error:
        error.args = tuple(
            _of_daemon(part) if isinstance(part, str) else part for part in error.args
        )
        raise
    except OSError as error:
        if error.errno not in NONE_LEFT:
            raise
        raise daemon_cannot_open(error) from error


def daemon_cannot_open(error: OSError) -> StorageError:
    """Return what a client is told of an error of the daemon's for want of files."""
    return StorageError(_of_daemon(why_not_opened(error)))


def _of_daemon(text: str) -> str:
    return text.replace(_this_process(), f"the daemon, process {os.getpid()}, may open")


def _this_process() -> str:
    return f"process {os.getpid()} may open"
