"""Memory disk: the fake of a disk for tests, with faults on demand.

Invariants:
  a handle's file is in `files` until it is released or deleted, whatever its name
  a name is in `named` from `create` until it is removed, replaced or its file deleted
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from tierd.disk.ports import FOLDERS, assert_whole_sectors, folder_of
from tierd.errors import NotFound, StorageError, StorageFull
from tierd.units import format_size


class MemoryDisk:
    """Files by handle (`files`, the open ones) and by name (`named`): tests may change the bytes.

    `fail(operation, count)` is called before each "create", "open", "read",
    "write", "sync", "rename" and "sync_folder" (count from 1): what it raises
    is the operation's error, and it may let a fake clock advance. See
    tierd.testing.failing. Everything written is there at once; the disk that
    loses what was not synced is simulated.SimulatedDisk.
    """

    folder = "memory"

    def __init__(
        self, capacity_bytes: int = 2**40, fail: Callable[[str, int], None] | None = None
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.files: dict[int, bytearray] = {}
        self.named: dict[str, bytearray] = {}
        self.locked: dict[int, list[tuple[int, int]]] = {}  # by handle: a test's
        self.operations = 0
        self.direct = False
        self._fail = fail
        self._handles = itertools.count(1)

    def _begin(self, operation: str) -> None:
        self.operations += 1
        if self._fail is not None:
            self._fail(operation, self.operations)

    def create(self, name: str, size_bytes: int) -> int:
        """Make a file of zeros. Raises StorageFull, StorageError."""
        folder_of(name)
        self._begin("create")
        if name in self.named:
            raise StorageError(f"memory disk: {name} is there already")
        if size_bytes > self.free_bytes():
            raise StorageFull(f"memory disk: no {format_size(size_bytes)} left for {name}")
        self.named[name] = bytearray(size_bytes)
        return self._opened(name)

    def open(self, name: str) -> int:
        """Open a file that is there. Raises NotFound."""
        folder_of(name)
        self._begin("open")
        return self._opened(name)

    def _opened(self, name: str) -> int:
        handle = next(self._handles)
        self.files[handle] = self._by_name(name)
        return handle

    def _by_name(self, name: str) -> bytearray:
        if name not in self.named:
            raise NotFound(f"memory disk: there is no {name}")
        return self.named[name]

    def size_bytes(self, handle: int) -> int:
        """Return a file's size. Raises StorageError."""
        return len(self._file(handle))

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder, sorted."""
        assert folder in ("", *FOLDERS), folder
        return sorted(name for name in self.named if folder_of(name) == folder)

    def read_into(self, handle: int, offset: int, buffer: memoryview) -> None:
        """Fill `buffer`. Raises StorageError."""
        self.scatter(handle, offset, [buffer])

    def scatter(self, handle: int, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill all buffers, one after the other: one "read". Raises StorageError."""
        self._begin("read")
        file = self._file(handle)
        assert_whole_sectors(len(file), offset, buffers)
        for buffer in buffers:
            buffer[:] = file[offset : offset + len(buffer)]
            offset += len(buffer)

    def write(self, handle: int, offset: int, buffers: Sequence[memoryview]) -> None:
        """Write all buffers. Raises StorageError."""
        self._begin("write")
        file = self._file(handle)
        assert_whole_sectors(len(file), offset, buffers)
        data = b"".join(buffers)
        file[offset : offset + len(data)] = data

    def _file(self, handle: int) -> bytearray:
        if handle not in self.files:
            raise StorageError("memory disk: the file was deleted")
        return self.files[handle]

    def sync(self, handle: int) -> None:
        """Do nothing but fail on demand. Raises StorageError."""
        self._begin("sync")
        self._file(handle)

    def rename(self, old: str, new: str) -> None:
        """Give a file another name. Raises NotFound."""
        assert folder_of(old) == folder_of(new), f"{old=} {new=}"
        self._begin("rename")
        self.named[new] = self._by_name(old)
        if old != new:
            del self.named[old]

    def sync_folder(self, folder: str) -> None:
        """Do nothing but fail on demand."""
        assert folder in ("", *FOLDERS), folder
        self._begin("sync_folder")

    def flip_bit(self, handle: int, bit: int) -> None:
        """Damage a file."""
        self._file(handle)[bit // 8] ^= 1 << bit % 8

    def reader_fd(self, handle: int) -> int:
        """Return -1: nothing outside this process can read it."""
        return -1

    def is_there(self, handle: int) -> bool:
        """Return whether a file has a name."""
        file = self.files.get(handle)
        return file is None or any(data is file for data in self.named.values())

    def require_there(self) -> None:
        """Do nothing: a memory disk is where its test is."""

    def locked_ranges(self, handle: int) -> list[tuple[int, int]]:
        """Return what a test says is locked."""
        return list(self.locked.get(handle, ()))

    def release(self, handle: int) -> None:
        """Close a file and keep it."""
        del self.files[handle]

    def delete(self, handle: int) -> None:
        """Close and remove a file."""
        file = self.files.pop(handle)
        for name in [name for name, data in self.named.items() if data is file]:
            del self.named[name]

    def remove(self, name: str) -> None:
        """Remove a file by name, if it is there."""
        folder_of(name)
        self.named.pop(name, None)

    def free_bytes(self) -> int:
        """Return what the capacity leaves."""
        return self.capacity_bytes - self.used_bytes()

    def used_bytes(self) -> int:
        """Return the bytes of all files, open or named."""
        files = {id(data): len(data) for data in (*self.files.values(), *self.named.values())}
        return sum(files.values())

    def describe(self) -> str:
        """Return one line for people."""
        return "memory"

    def check_integrity(self) -> None:
        """Raise AssertionError if two names share a file."""
        files = [id(data) for data in self.named.values()]
        assert len(files) == len(set(files)), f"{sorted(self.named)=}"

    def close(self) -> None:
        """Forget every handle; what has a name stays, and can be opened again."""
        self.files.clear()
