"""Sealed memfds: shared memory that cannot leak, shrink, or be promised and not be there.

Invariants:
  a memfd's size is sealed before its fd is passed on, so no mapping of it can fault
  its pages are allocated before `create_memfd` returns
  a Mapping is unmapped exactly once, by its owner
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os

from tierd.errors import StorageError, TierFull
from tierd.memory import regions
from tierd.openfiles import why_not_opened
from tierd.units import format_size

_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def create_memfd(name: str, size_bytes: int, *, others_read_only: bool = False) -> int:
    """Return the fd of a zeroed memfd of `size_bytes`, really allocated, its size sealed.

    Where the kernel has huge pages for it, it has them.
    With `others_read_only` the caller must map it writable first, then call
    `seal_future_write`. Raises TierFull when the host has no memory for it.
    """
    fd = -1
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, size_bytes)
        regions.make_huge(fd, size_bytes)
        os.posix_fallocate(fd, 0, size_bytes)
        seals = _SIZE_SEALS if others_read_only else _SIZE_SEALS | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
            raise TierFull(f"the host has no {format_size(size_bytes)} of memory left") from error
        raise StorageError(f"memfd {name}: {why_not_opened(error)}") from error
    return fd


def seal_future_write(fd: int) -> None:
    """Let no new writable mapping be made: who gets this fd can only read. Seals the seals."""
    # F_SEAL_FUTURE_WRITE is 0x10 in linux/fcntl.h; Python 3.11's fcntl does not name it.
    future_write = getattr(fcntl, "F_SEAL_FUTURE_WRITE", 0x10)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, future_write | fcntl.F_SEAL_SEAL)


def is_sealed_memfd(fd: int, size_bytes: int) -> bool:
    """Return whether `fd` is a memfd of exactly this size that nobody can shrink."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:  # no memfd
        return False
    return seals & _SIZE_SEALS == _SIZE_SEALS and os.fstat(fd).st_size == size_bytes


class Mapping:
    """Owner of one shared mapping of an fd. `address` and `buffer` are valid until `close`.

    One of HUGE_PAGE_BYTES or more lies so that a memfd's huge pages are huge in it too.
    The fd is not owned: close it whenever you like.
    """

    def __init__(self, fd: int, size_bytes: int, *, writable: bool) -> None:
        try:
            if os.fstat(fd).st_size < size_bytes:  # reading past a file's end is a SIGBUS
                raise OSError(errno.EINVAL, "that is more than there is")
            self._address, buffer = regions.map_shared(fd, size_bytes, writable=writable)
        except OSError as error:
            raise StorageError(f"cannot map {format_size(size_bytes)}: {error.strerror}") from error
        self._buffer: memoryview | None = buffer
        self.size_bytes = size_bytes
        self.writable = writable

    @property
    def buffer(self) -> memoryview:
        """The mapped bytes. Who still holds a slice after `close` unmaps."""
        assert self._buffer is not None, "mapping is closed"
        return self._buffer

    @property
    def address(self) -> int:
        """Absolute address of the first byte."""
        assert self._buffer is not None, "mapping is closed"
        return self._address

    def discard(self) -> None:
        """Give the memory back to the host now, whoever else maps it; they then read zeros."""
        assert self._buffer is not None, "mapping is closed"
        # Locked memory stays, and goes with its last mapping instead.
        regions.discard(self._address, self.size_bytes)

    def close(self) -> None:
        """Unmap. Idempotent. Where a slice is still held, the last holder unmaps."""
        if self._buffer is not None:
            with contextlib.suppress(BufferError):  # somebody's array lies on the whole of it
                self._buffer.release()
        self._buffer = None

    def __enter__(self) -> Mapping:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
