"""Disk ports: what the cold tier asks of a disk, and who answers.

    PosixDisk    a folder: preallocated files, O_DIRECT where the file system allows
    MemoryDisk   bytes in this process, with faults on demand: the fake for tests

Whole reads and writes, or a typed error: short I/O is continued, the end of a
file is an error. Offsets, lengths and addresses are multiples of 4 KiB. The
fault-injecting simulated disk and io_uring would stand here too.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from tierd.errors import NotFound, StorageError, StorageFull
from tierd.units import SECTOR_BYTES, format_size

_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)
_SLAB_SUFFIX = ".slab"


class DiskPort(Protocol):
    """Named, preallocated files. `handle` is what `create` returned."""

    @property
    def direct(self) -> bool:
        """Whether I/O bypasses the page cache."""

    def create(self, name: str, size_bytes: int) -> int:
        """Make a file, its blocks allocated. Raises StorageFull, StorageError."""

    def read_into(self, handle: int, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset`. Raises StorageError."""

    def write(self, handle: int, offset: int, buffers: Sequence[memoryview]) -> None:
        """Write all buffers, one after the other, at `offset`. Raises StorageFull, StorageError."""

    def reader_fd(self, handle: int) -> int:
        """Return an fd for reading alone, the disk's; -1 where there is none."""

    def delete(self, handle: int) -> None:
        """Close and remove a file."""

    def free_bytes(self) -> int:
        """Return the bytes that may still be allocated."""

    def describe(self) -> str:
        """Return one line for people: where, and how I/O is done."""

    def close(self) -> None:
        """Close everything. Idempotent."""


class PosixDisk:
    """A folder on a file system.

    `ephemeral`: files have no name, so that nothing can outlive the process
    and any number of processes can share the folder. Otherwise the folder has
    one owner at a time (flock on LOCK), and files left by an earlier run are
    removed at start: until the journal exists they cannot be trusted.
    """

    def __init__(self, folder: str, *, ephemeral: bool) -> None:
        self.folder, self.ephemeral = folder, ephemeral
        self._files: dict[int, tuple[str, int]] = {}  # handle -> (name or "", reader fd)
        self._lock_fd = self._dir_fd = -1
        with self._errors():
            os.makedirs(folder, mode=0o700, exist_ok=True)
            self._dir_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if not ephemeral:
                self._lock()
                self._remove_leftovers()
            self.direct = self._probe()
        except BaseException:
            self.close()
            raise

    def _errors(self, doing: str = "") -> AbstractContextManager[None]:
        return _storage_errors(f"cold folder {self.folder}{doing}")

    def _lock(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with self._errors():
            self._lock_fd = os.open("LOCK", flags, 0o600, dir_fd=self._dir_fd)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(self._lock_fd, 32, 0).decode(errors="replace").strip() or "unknown"
            raise StorageError(
                f"cold folder {self.folder} is in use by process {holder}"
            ) from None
        os.ftruncate(self._lock_fd, 0)
        os.pwrite(self._lock_fd, f"{os.getpid()}\n".encode(), 0)

    def _probe(self) -> bool:
        """Return whether this file system takes O_DIRECT, by trying."""
        with self._errors():
            probe = self._open_unnamed(0)
        try:
            os.close(os.open(f"/proc/self/fd/{probe}", os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC))
        except OSError:
            return False
        finally:
            os.close(probe)
        return True

    def _open_unnamed(self, flags: int) -> int:
        """Return the fd of a new file that has no name. Raises OSError."""
        flags |= os.O_RDWR | os.O_CLOEXEC
        try:
            return os.open(".", flags | os.O_TMPFILE, 0o600, dir_fd=self._dir_fd)
        except OSError as error:
            if error.errno not in _NO_TMPFILE:
                raise
        name = f".{os.getpid()}-{secrets.token_hex(8)}"
        fd = os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=self._dir_fd)
        os.unlink(name, dir_fd=self._dir_fd)
        return fd

    def _remove_leftovers(self) -> None:
        for entry in os.listdir(self._dir_fd):
            if entry.endswith(_SLAB_SUFFIX):
                status = os.stat(entry, dir_fd=self._dir_fd, follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    with self._errors():
                        os.unlink(entry, dir_fd=self._dir_fd)

    def create(self, name: str, size_bytes: int) -> int:
        """Make a file of `size_bytes`, allocated. Raises StorageFull, StorageError."""
        flags = os.O_CLOEXEC | (os.O_DIRECT if self.direct else 0)
        file_name = "" if self.ephemeral else name + _SLAB_SUFFIX
        with self._errors():
            if self.ephemeral:
                handle = self._open_unnamed(flags)
            else:
                named = flags | os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
                handle = os.open(file_name, named, 0o600, dir_fd=self._dir_fd)
        self._files[handle] = (file_name, -1)
        try:
            with self._errors(f", a slab of {format_size(size_bytes)}"):
                os.posix_fallocate(handle, 0, size_bytes)
                reader = os.open(f"/proc/self/fd/{handle}", flags | os.O_RDONLY)
        except StorageError:
            self.delete(handle)
            raise
        self._files[handle] = (file_name, reader)
        return handle

    def read_into(self, handle: int, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset`. Raises StorageError."""
        with self._errors(", read"):
            _read_all(handle, offset, buffer)

    def write(self, handle: int, offset: int, buffers: Sequence[memoryview]) -> None:
        """Write all buffers at `offset`. Raises StorageFull, StorageError."""
        with self._errors(", write"):
            _write_all(handle, offset, buffers)

    def reader_fd(self, handle: int) -> int:
        """Return an fd opened for reading alone; it stays the disk's."""
        return self._files[handle][1]

    def delete(self, handle: int) -> None:
        """Close and remove a file; its blocks are free at once, whoever still has it open."""
        name, reader = self._files.pop(handle)
        with contextlib.suppress(OSError):  # a failing disk must not keep us from closing
            os.ftruncate(handle, 0)
        os.close(handle)
        if reader >= 0:
            os.close(reader)
        if name:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self._dir_fd)

    def free_bytes(self) -> int:
        """Return the bytes that this user may still allocate."""
        status = os.fstatvfs(self._dir_fd)
        return status.f_bavail * status.f_frsize

    def describe(self) -> str:
        """Return one line for people."""
        how = "O_DIRECT" if self.direct else "buffered: the file system refuses O_DIRECT"
        return f"posix, {how}"

    def close(self) -> None:
        """Delete the files, release the lock. Idempotent."""
        for handle in list(self._files):
            self.delete(handle)
        for fd in (self._lock_fd, self._dir_fd):
            if fd >= 0:
                os.close(fd)
        self._lock_fd = self._dir_fd = -1

    def __enter__(self) -> PosixDisk:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _read_all(handle: int, offset: int, buffer: memoryview) -> None:
    done = 0
    while done < len(buffer):
        got = os.preadv(handle, [buffer[done:]], offset + done)
        if got == 0:
            raise StorageError(f"the file ends at {offset + done}, before the page does")
        done += got


def _write_all(handle: int, offset: int, buffers: Sequence[memoryview]) -> None:
    left = list(buffers)
    while left:
        wrote = os.pwritev(handle, left, offset)
        if wrote == 0:
            raise StorageError("the disk took no bytes")
        offset += wrote
        while left and wrote >= len(left[0]):
            wrote -= len(left.pop(0))
        if wrote:
            left[0] = left[0][wrote:]


@contextlib.contextmanager
def _storage_errors(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        kind = StorageFull if error.errno in _FULL else StorageError
        raise kind(f"{what}: {error.strerror}") from error


class MemoryDisk:
    """A disk in memory. Faults: `fail` is called with (operation, count) before each one."""

    def __init__(
        self, capacity_bytes: int = 2**40, fail: Callable[[str, int], None] | None = None
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.files: dict[int, bytearray] = {}
        self.operations = 0
        self.direct = False
        self._fail = fail
        self._next = 1

    def _begin(self, operation: str) -> None:
        self.operations += 1
        if self._fail is not None:
            self._fail(operation, self.operations)

    def create(self, name: str, size_bytes: int) -> int:
        """Make a file of zeros."""
        self._begin("create")
        if size_bytes > self.free_bytes():
            raise StorageFull(f"memory disk: no {format_size(size_bytes)} left for {name}")
        self._next += 1
        self.files[self._next] = bytearray(size_bytes)
        return self._next

    def read_into(self, handle: int, offset: int, buffer: memoryview) -> None:
        """Fill `buffer`."""
        self._begin("read")
        assert offset % SECTOR_BYTES == 0 and len(buffer) % SECTOR_BYTES == 0
        data = self._file(handle)[offset : offset + len(buffer)]
        if len(data) < len(buffer):
            raise StorageError(f"the file ends at {offset + len(data)}, before the page does")
        buffer[:] = data

    def write(self, handle: int, offset: int, buffers: Sequence[memoryview]) -> None:
        """Write all buffers."""
        self._begin("write")
        data = b"".join(buffers)
        assert offset % SECTOR_BYTES == 0 and len(data) % SECTOR_BYTES == 0
        self._file(handle)[offset : offset + len(data)] = data

    def _file(self, handle: int) -> bytearray:
        if handle not in self.files:
            raise NotFound(f"memory disk has no file {handle}")
        return self.files[handle]

    def flip_bit(self, handle: int, bit: int) -> None:
        """Damage a file."""
        self._file(handle)[bit // 8] ^= 1 << bit % 8

    def reader_fd(self, handle: int) -> int:
        """Return -1: nothing outside this process can read it."""
        return -1

    def delete(self, handle: int) -> None:
        """Remove a file."""
        self._begin("delete")
        del self.files[handle]

    def free_bytes(self) -> int:
        """Return what the capacity leaves."""
        return self.capacity_bytes - sum(len(data) for data in self.files.values())

    def describe(self) -> str:
        """Return one line for people."""
        return "memory"

    def close(self) -> None:
        """Forget every file."""
        self.files.clear()
