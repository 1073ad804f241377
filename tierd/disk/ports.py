"""Disk ports: what the cold tier asks of a disk, and who answers.

    posix.PosixDisk          a folder: preallocated files, O_DIRECT where the file system allows
    memory.MemoryDisk        bytes in this process, with faults on demand: the fake for tests
    simulated.SimulatedDisk  a memory disk that crashes, tears, lies and stalls, by seed

Whole reads and writes, or a typed error: short I/O is continued, the end of a
file is an error. Offsets, lengths and addresses are multiples of 4 KiB.

Invariants:
  a handle is never used again: I/O that outlives its file cannot reach another one
  a deleted file's blocks are free at once; its last user closes it
  a file's name is one of ours, checked against a pattern, never from the wire
"""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Protocol

from tierd.errors import StorageError, StorageFull
from tierd.openfiles import why_not_opened
from tierd.units import SECTOR_BYTES

FULL = (errno.ENOSPC, errno.EDQUOT)
FOLDERS = ("journal", "kept", "slab", "snap")
# A name may end in .tmp while its file is not whole yet: rename makes it count.
_NAME = re.compile(
    r"(superblock(\.spare)?|quarantine\.log|(journal|slab)/[0-9a-f]{8}|(kept|snap)/[0-9a-f]{16})(\.tmp)?"
)


class DiskPort(Protocol):
    """Named, preallocated files. `handle` is what `create` or `open` returned.

    Nothing is durable before `sync` (a file's bytes) and `sync_folder` (names:
    made, renamed, removed). Removing cannot fail: a broken device must not
    wedge those who make room, and what stays is found again at the next start.
    """

    @property
    def folder(self) -> str:
        """Where its files are, as people would name it to a command."""

    @property
    def direct(self) -> bool:
        """Whether I/O bypasses the page cache."""

    def create(self, name: str, size_bytes: int) -> int:
        """Make a file of zeros, its blocks allocated. Raises StorageFull, StorageError.

        A name that is taken is a StorageError.
        """

    def open(self, name: str) -> int:
        """Open a file that is there. Raises NotFound, StorageError."""

    def size_bytes(self, handle: int) -> int:
        """Return a file's size, any number of bytes if somebody cut it. Raises StorageError."""

    def names(self, folder: str) -> list[str]:
        """Return the files of ours in one of FOLDERS or "" (the top), sorted.

        Names are whole: "slab/0000002a". Raises StorageError.
        """

    def read_into(self, handle: int, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset`. Raises StorageError."""

    def scatter(self, handle: int, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill all buffers, one after the other, from `offset`: one I/O. Raises StorageError."""

    def write(self, handle: int, offset: int, buffers: Sequence[memoryview]) -> None:
        """Write all buffers, one after the other, at `offset`. Raises StorageFull, StorageError."""

    def sync(self, handle: int) -> None:
        """Make what was written to a file durable. Raises StorageError, StorageFull.

        After a failure the bytes may be gone: calling again proves nothing.
        """

    def rename(self, old: str, new: str) -> None:
        """Give a file another name in its folder; the file that had it is gone.

        Raises NotFound, StorageError.
        """

    def sync_folder(self, folder: str) -> None:
        """Make a folder's names durable. Raises StorageError."""

    def release(self, handle: int) -> None:
        """Close a file and keep it."""

    def delete(self, handle: int) -> None:
        """Close and remove a file."""

    def remove(self, name: str) -> None:
        """Remove a file by name. One that is not there is no error."""

    def reader_fd(self, handle: int) -> int:
        """Return an fd for reading alone, the disk's; -1 where there is none."""

    def is_there(self, handle: int) -> bool:
        """Return whether an open file has its name yet: nobody else removed it.

        Never waits for the device, nor does `require_there`. A handle that is closed tells nothing.
        """

    def require_there(self) -> None:
        """Raise StorageError if the folder was removed: what is there goes with this process."""

    def locked_ranges(self, handle: int) -> list[tuple[int, int]]:
        """Return (start, size) of what other processes have locked of a file (slotlocks.py)."""

    def free_bytes(self) -> int:
        """Return the bytes that may still be allocated. Raises StorageError."""

    def used_bytes(self) -> int:
        """Return the bytes allocated to all files here, metadata too. Raises StorageError."""

    def describe(self) -> str:
        """Return one line for people: where, and how I/O is done."""

    def close(self) -> None:
        """Close every handle; files that have a name stay. Idempotent."""


@lru_cache(maxsize=4096)  # a store has a few hundred files
def folder_of(name: str) -> str:
    """Return the folder of a file's name, "" for the top. A name not of ours is a bug."""
    assert _NAME.fullmatch(name), f"no name of a store's file: {name!r}"
    return name.rpartition("/")[0]


def is_name(name: str) -> bool:
    """Return whether a file of a store may have this name."""
    return _NAME.fullmatch(name) is not None


def assert_whole_sectors(file_bytes: int, offset: int, buffers: Sequence[memoryview]) -> None:
    """Raise AssertionError unless the I/O is whole sectors inside the file."""
    lengths = [len(buffer) for buffer in buffers]
    aligned = all(length % SECTOR_BYTES == 0 for length in (offset, *lengths))
    assert aligned and offset >= 0, f"{offset=} {lengths=}"
    assert offset + sum(lengths) <= file_bytes, f"{offset=} {lengths=} {file_bytes=}"


@contextlib.contextmanager
def storage_errors(what: str) -> Iterator[None]:
    """Turn an OSError inside into StorageFull or StorageError, `what` before its text."""
    try:
        yield
    except OSError as error:
        kind = StorageFull if error.errno in FULL else StorageError
        raise kind(f"{what}: {why_not_opened(error)}") from error
