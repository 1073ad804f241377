"""Sealed memfds: shared memory that cannot leak, shrink, or be promised and not be there.

Invariants:
  a memfd's size is sealed before its fd is passed on, so no mapping of it can fault
  its pages are allocated before `create_memfd` returns
  a Mapping is unmapped exactly once, by its owner
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os

from tierd.errors import StorageError, TierFull
from tierd.units import format_size

_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def create_memfd(name: str, size_bytes: int, *, others_read_only: bool = False) -> int:
    """Return the fd of a zeroed memfd of `size_bytes`, really allocated, its size sealed.

    With `others_read_only` the caller must map it writable first, then call
    `seal_future_write`. Raises TierFull when the host has no memory for it.
    """
    fd = -1
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, size_bytes)
        os.posix_fallocate(fd, 0, size_bytes)
        seals = _SIZE_SEALS if others_read_only else _SIZE_SEALS | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
            raise TierFull(f"the host has no {format_size(size_bytes)} of memory left") from error
        raise StorageError(f"memfd {name}: {error.strerror}") from error
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
    """Owner of one mmap of an fd. `address` and `buffer` are valid until `close`.

    The fd is not owned: close it whenever you like.
    """

    def __init__(self, fd: int, size_bytes: int, *, writable: bool) -> None:
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        try:
            self._map: mmap.mmap | None = mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, access)
        except (OSError, ValueError) as error:
            raise StorageError(f"cannot map {format_size(size_bytes)}: {error}") from error
        self.size_bytes = size_bytes
        self.writable = writable
        self._buffer: memoryview | None = memoryview(self._map)
        self._address = _address_of(self._buffer)

    @property
    def buffer(self) -> memoryview:
        """The mapped bytes. Slices of it must be released before `close`."""
        assert self._buffer is not None, "mapping is closed"
        return self._buffer

    @property
    def address(self) -> int:
        """Absolute address of the first byte."""
        assert self._buffer is not None, "mapping is closed"
        return self._address

    def discard(self) -> None:
        """Give the memory back to the host now, whoever else maps it; they then read zeros."""
        assert self._map is not None, "mapping is closed"
        with contextlib.suppress(OSError):  # locked memory goes with its last mapping instead
            self._map.madvise(mmap.MADV_REMOVE)

    def close(self) -> None:
        """Unmap. Idempotent. Where a slice is still held, the last holder unmaps."""
        if self._map is None or self._buffer is None:
            return
        # Where somebody still holds a slice, unmapping under it would crash the process.
        with contextlib.suppress(BufferError):
            self._buffer.release()
            self._map.close()
        self._map = self._buffer = None

    def __enter__(self) -> Mapping:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _address_of(buffer: memoryview) -> int:
    if not buffer.readonly:
        return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    import numpy as np

    return int(np.frombuffer(buffer, dtype=np.uint8).ctypes.data)
