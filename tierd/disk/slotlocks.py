"""Locks on slots of a cold slab's file, that an engine holds while it writes them itself.

    engine    lock → is the daemon that lent them still there? → write → unlock → commit | abort
    daemon    a lent slot that is given back, or a free one after a restart, is lent to nobody
              while a lock stands on it

They are the kernel's open file description locks: the engine's end takes them away, however it
comes, and not before its last write has. So a daemon that was started again knows which slots
an engine of before may still be writing to, though it never heard of their loan: nobody's page
is written over by a write that comes late.

An engine that was stopped before it locked asks after it has: a daemon that has died tells it
not to write. Each writer opens the file itself: a lock belongs to the open file, and goes to
whoever the fd is passed to.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Iterator

# struct flock: type, whence, start, length, pid; pid must be 0.
_FLOCK = struct.Struct("hhqqi4x")
_NOT_FOR_THIS_FILE = (errno.EINVAL, errno.ENOLCK, errno.EOPNOTSUPP, errno.EACCES, errno.EBADF)


def lock_range(fd: int, start: int, size_bytes: int) -> None:
    """Lock bytes of a file that is open for writing. Never waits. Raises OSError."""
    _set(fd, fcntl.F_WRLCK, start, size_bytes)


def unlock_range(fd: int, start: int, size_bytes: int) -> None:
    """Let them go. Raises OSError."""
    _set(fd, fcntl.F_UNLCK, start, size_bytes)


def _set(fd: int, kind: int, start: int, size_bytes: int) -> None:
    flock = _FLOCK.pack(kind, os.SEEK_SET, start, size_bytes, 0)
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, flock)


def locked_ranges(fd: int, start: int, size_bytes: int) -> list[tuple[int, int]]:
    """Return (start, size) of what others have locked of these bytes, in order.

    None on a file system that knows no such locks: nobody can hold one there. Raises OSError.
    """
    try:
        return sorted(_conflicts(fd, start, start + size_bytes))
    except OSError as error:
        if error.errno in _NOT_FOR_THIS_FILE:
            return []
        raise


def _conflicts(fd: int, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges; the kernel names one that is in the way, not the first."""
    left = [(start, end)]
    while left:
        begin, stop = left.pop()
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, begin, stop - begin, 0)
        kind, _, at, size, _ = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked))
        if kind == fcntl.F_UNLCK:
            continue
        first, last = max(at, begin), min(at + size, stop) if size else stop  # 0: to the end
        yield first, last - first
        left += [(a, b) for a, b in ((begin, first), (last, stop)) if a < b]
