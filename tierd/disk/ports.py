"""Disk ports: what the cold tier asks of a disk, and who answers.

    PosixDisk    a folder: preallocated files, O_DIRECT where the file system allows
    MemoryDisk   bytes in this process, with faults on demand: the fake for tests

Whole reads and writes, or a typed error: short I/O is continued, the end of a
file is an error. Offsets, lengths and addresses are multiples of 4 KiB. The
fault-injecting simulated disk and io_uring would stand here too.

Invariants:
  a handle is never used again: I/O that outlives its file cannot reach another one
  a deleted file's blocks are free at once; its last user closes it
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import mmap
import os
import secrets
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from tierd.errors import StorageError, StorageFull
from tierd.units import SECTOR_BYTES, format_size

_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)
_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)
_SLAB_SUFFIX = ".slab"


class DiskPort(Protocol):
    """Named, preallocated files. `handle` is what `create` returned.

    Removing cannot fail: a broken device must not wedge those who make room.
    """

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


@dataclass(slots=True)
class _File:
    """An open file; `name` is "" where it has none, `users` counts the I/O under way."""

    fd: int
    name: str
    size_bytes: int
    reader_fd: int = -1
    users: int = 0


class PosixDisk:
    """A folder on a file system. Reads and writes may come from any thread.

    `ephemeral`: files have no name, so that nothing can outlive the process
    and any number of processes can share the folder. Otherwise the folder has
    one owner at a time (flock on LOCK), and files left by an earlier run are
    removed at start: until the journal exists they cannot be trusted.
    """

    def __init__(self, folder: str, *, ephemeral: bool) -> None:
        self.folder, self.ephemeral = folder, ephemeral
        self._files: dict[int, _File] = {}
        self._handles = itertools.count(1)
        self._mutex = threading.Lock()  # of the files' users; never held during I/O
        self._lock_fd = self._dir_fd = -1
        with self._errors():
            os.makedirs(folder, mode=0o700, exist_ok=True)
            self._dir_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if not ephemeral:
                self._lock()
                self._remove_leftovers()
            with self._errors():
                self.direct = self._probe()
        except BaseException:
            self.close()
            raise

    def _errors(self, doing: str = "") -> AbstractContextManager[None]:
        return _storage_errors(f"cold folder {self.folder}{doing}")

    def _lock(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with self._errors(", LOCK"):
            self._lock_fd = os.open("LOCK", flags, 0o600, dir_fd=self._dir_fd)
            try:
                fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(self._lock_fd, 32, 0).decode(errors="replace").strip()
                raise StorageError(
                    f"cold folder {self.folder} is in use by process {holder or 'unknown'}"
                ) from None
            os.ftruncate(self._lock_fd, 0)
            os.pwrite(self._lock_fd, f"{os.getpid()}\n".encode(), 0)

    def _probe(self) -> bool:
        """Return whether this file system takes O_DIRECT, by writing a sector. Raises OSError."""
        probe = self._open_unnamed(0)
        try:
            direct = _reopen(probe, os.O_RDWR | os.O_DIRECT)
            try:
                os.pwrite(direct, mmap.mmap(-1, SECTOR_BYTES), 0)
            finally:
                os.close(direct)
        except OSError as error:
            if error.errno not in _NO_DIRECT:
                raise
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

    def _open_named(self, name: str, flags: int) -> int:
        flags |= os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(name, flags, 0o600, dir_fd=self._dir_fd)

    def _remove_leftovers(self) -> None:
        with self._errors(", files of an earlier run"):
            for entry in os.listdir(self._dir_fd):
                if entry.endswith(_SLAB_SUFFIX):
                    status = os.stat(entry, dir_fd=self._dir_fd, follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode):
                        os.unlink(entry, dir_fd=self._dir_fd)

    def create(self, name: str, size_bytes: int) -> int:
        """Make a file of `size_bytes`, allocated. Raises StorageFull, StorageError."""
        direct = os.O_DIRECT if self.direct else 0
        with self._errors(f", a slab of {format_size(size_bytes)}"):
            if self.ephemeral:
                file = _File(self._open_unnamed(direct), "", size_bytes)
            else:
                named = name + _SLAB_SUFFIX
                file = _File(self._open_named(named, direct), named, size_bytes)
            handle = next(self._handles)
            self._files[handle] = file
            try:
                os.posix_fallocate(file.fd, 0, size_bytes)
                file.reader_fd = _reopen(file.fd, os.O_RDONLY | direct)
            except OSError:
                self.delete(handle)
                raise
        return handle

    def read_into(self, handle: int, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset`. Raises StorageError."""
        with self._errors(", read"), self._using(handle) as file:
            _assert_whole_sectors(file.size_bytes, offset, [buffer])
            _read_all(file.fd, offset, buffer)

    def write(self, handle: int, offset: int, buffers: Sequence[memoryview]) -> None:
        """Write all buffers at `offset`. Raises StorageFull, StorageError."""
        with self._errors(", write"), self._using(handle) as file:
            _assert_whole_sectors(file.size_bytes, offset, buffers)
            _write_all(file.fd, offset, buffers)

    def reader_fd(self, handle: int) -> int:
        """Return an fd opened for reading alone; it stays the disk's."""
        return self._files[handle].reader_fd

    def delete(self, handle: int) -> None:
        """Remove a file; its blocks are free at once, whoever still has it open."""
        with self._using(handle) as file:
            del self._files[handle]
            # An undeletable file must not wedge those who make room: its blocks go all the
            # same, and its name at the next start.
            with contextlib.suppress(OSError):
                os.ftruncate(file.fd, 0)
            if file.name:
                with contextlib.suppress(OSError):
                    os.unlink(file.name, dir_fd=self._dir_fd)

    @contextlib.contextmanager
    def _using(self, handle: int) -> Iterator[_File]:
        """Keep a file open meanwhile. Raises StorageError if it was deleted."""
        with self._mutex:
            file = self._files.get(handle)
            if file is None:
                raise StorageError(f"cold folder {self.folder}: the file was deleted")
            file.users += 1
        try:
            yield file
        finally:
            with self._mutex:
                file.users -= 1
                if file.users == 0 and handle not in self._files:
                    os.close(file.fd)
                    if file.reader_fd >= 0:
                        os.close(file.reader_fd)

    def free_bytes(self) -> int:
        """Return the bytes that this user may still allocate. Raises StorageError."""
        with self._errors():
            status = os.fstatvfs(self._dir_fd)
        return status.f_bavail * status.f_frsize

    def describe(self) -> str:
        """Return one line for people."""
        how = "O_DIRECT" if self.direct else "buffered: the file system refuses O_DIRECT"
        return f"posix, {how}"

    def check_integrity(self) -> None:
        """Raise AssertionError if two files share an fd, or one is used a negative time."""
        with self._mutex:
            fds = [fd for file in self._files.values() for fd in (file.fd, file.reader_fd)]
            users = [file.users for file in self._files.values()]
        assert len(set(fds)) == len(fds), f"{sorted(fds)=}"
        assert min(users, default=0) >= 0, f"{users=}"

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


def _reopen(fd: int, flags: int) -> int:
    """Return another open file description of a file that may have no name. Raises OSError."""
    return os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC)


def _assert_whole_sectors(file_bytes: int, offset: int, buffers: Sequence[memoryview]) -> None:
    lengths = [len(buffer) for buffer in buffers]
    aligned = all(length % SECTOR_BYTES == 0 for length in (offset, *lengths))
    assert aligned and offset >= 0, f"{offset=} {lengths=}"
    assert offset + sum(lengths) <= file_bytes, f"{offset=} {lengths=} {file_bytes=}"


def _read_all(fd: int, offset: int, buffer: memoryview) -> None:
    done = 0
    while done < len(buffer):
        got = os.preadv(fd, [buffer[done:]], offset + done)
        if got == 0:
            raise StorageError(f"the file ends at {offset + done}, before the page does")
        done += got


def _write_all(fd: int, offset: int, buffers: Sequence[memoryview]) -> None:
    left = [buffer for buffer in buffers if len(buffer)]
    while left:
        wrote = os.pwritev(fd, left, offset)
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
    """A disk in memory, the fake for tests.

    `fail(operation, count)` is called before each "create", "read" and "write"
    (count from 1): what it raises is the operation's error, and it may let a
    fake clock advance. See tierd.testing.failing.
    """

    def __init__(
        self, capacity_bytes: int = 2**40, fail: Callable[[str, int], None] | None = None
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.files: dict[int, bytearray] = {}
        self.operations = 0
        self.direct = False
        self._fail = fail
        self._handles = itertools.count(1)

    def _begin(self, operation: str) -> None:
        self.operations += 1
        if self._fail is not None:
            self._fail(operation, self.operations)

    def create(self, name: str, size_bytes: int) -> int:
        """Make a file of zeros. Raises StorageFull."""
        self._begin("create")
        if size_bytes > self.free_bytes():
            raise StorageFull(f"memory disk: no {format_size(size_bytes)} left for {name}")
        handle = next(self._handles)
        self.files[handle] = bytearray(size_bytes)
        return handle

    def read_into(self, handle: int, offset: int, buffer: memoryview) -> None:
        """Fill `buffer`. Raises StorageError."""
        self._begin("read")
        file = self._file(handle)
        _assert_whole_sectors(len(file), offset, [buffer])
        buffer[:] = file[offset : offset + len(buffer)]

    def write(self, handle: int, offset: int, buffers: Sequence[memoryview]) -> None:
        """Write all buffers. Raises StorageError."""
        self._begin("write")
        file = self._file(handle)
        _assert_whole_sectors(len(file), offset, buffers)
        data = b"".join(buffers)
        file[offset : offset + len(data)] = data

    def _file(self, handle: int) -> bytearray:
        if handle not in self.files:
            raise StorageError("memory disk: the file was deleted")
        return self.files[handle]

    def flip_bit(self, handle: int, bit: int) -> None:
        """Damage a file."""
        self._file(handle)[bit // 8] ^= 1 << bit % 8

    def reader_fd(self, handle: int) -> int:
        """Return -1: nothing outside this process can read it."""
        return -1

    def delete(self, handle: int) -> None:
        """Remove a file."""
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
