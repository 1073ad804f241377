"""Superblock: which store this is, how often it was opened, which slab ids are spoken for.

Four copies of one sector, 64 KiB apart. Each: magic "TIERDSUP", u32 version,
u32 zero, store uuid (16), u64 epoch, u64 slab limit, u64 durable sequence,
zeros to 4088, u64 xxh3-64 of all before. An update is a new file, synced and
renamed over the old one: the copies are against what happens to a disk later.

Version 2 is written while sessions are dropped that the journal cannot say so of yet, as the
disk is too full for its next segment: after the sequence u64 count, and that many u64 numbers,
rising. With none it is version 1, which every tierd reads; one that does not know the list must
not bring those sessions back, and refuses version 2.

Invariants:
  epoch and slab limit never fall
  the next write's file is there already, wherever there was space for it
  no slab id at or above `slab_limit` was ever given out before this epoch
"""

from __future__ import annotations

import contextlib
import mmap
import struct
from collections import Counter
from dataclasses import dataclass

import xxhash

from tierd.disk.ports import DiskPort
from tierd.errors import NotFound, StorageError
from tierd.units import KIB, SECTOR_BYTES

NAME = "superblock"
SPARE = NAME + ".spare"
TEMPORARY = ".tmp"  # of any file that is not whole yet
COPIES = 4
QUORUM = 2
COPY_STRIDE_BYTES = 64 * KIB
SUPERBLOCK_BYTES = COPIES * COPY_STRIDE_BYTES
_MAGIC = b"TIERDSUP"
_VERSION, _VERSION_DROPPED = 1, 2
_FIELDS = struct.Struct("<8sII16sQQQ")
_CHECKSUM_OFFSET = SECTOR_BYTES - 8
_NUMBER_BYTES = 8
# What is left of a sector, less the count: 503.
DROPPED_MAX = (_CHECKSUM_OFFSET - _FIELDS.size) // _NUMBER_BYTES - 1
UUID_BYTES = 16


@dataclass(frozen=True, slots=True)
class Superblock:
    """What a copy says. `durable`: the journal was on the disk up to this sequence.

    `dropped`: sessions that are no more, whatever the journal says; rising, DROPPED_MAX at most.
    """

    store_uuid: bytes
    epoch: int
    slab_limit: int
    durable: int
    dropped: tuple[int, ...] = ()

    def pack(self) -> bytes:
        """Return one sector."""
        count = len(self.dropped)
        assert count <= DROPPED_MAX and list(self.dropped) == sorted(set(self.dropped)), count
        version = _VERSION_DROPPED if count else _VERSION
        numbers = (self.epoch, self.slab_limit, self.durable)
        body = _FIELDS.pack(_MAGIC, version, 0, self.store_uuid, *numbers)
        if count:
            body += struct.pack(f"<{count + 1}Q", count, *self.dropped)
        body = body.ljust(_CHECKSUM_OFFSET, b"\0")
        return body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")

    @classmethod
    def unpack(cls, sector: bytes | memoryview) -> Superblock:
        """Return the superblock in a sector. Raises StorageError on any wrong bit."""
        view = memoryview(sector)
        if len(view) != SECTOR_BYTES:
            raise StorageError("superblock: a copy is cut short")
        stored = int.from_bytes(view[_CHECKSUM_OFFSET:], "little")
        if xxhash.xxh3_64_intdigest(view[:_CHECKSUM_OFFSET]) != stored:
            raise StorageError("superblock: a copy's checksum does not match")
        magic, version, zero, store_uuid, epoch, slab_limit, durable = _FIELDS.unpack_from(view)
        if magic != _MAGIC or zero:
            raise StorageError("superblock: a copy of no known form")
        if version not in (_VERSION, _VERSION_DROPPED):
            raise StorageError(
                f"superblock: format {version}, this is tierd for {_VERSION} and {_VERSION_DROPPED}"
            )
        found = cls(store_uuid, epoch, slab_limit, durable, _unpack_dropped(view, version))
        if found.pack() != view:  # bytes where zeros were
            raise StorageError("superblock: a copy of no known form")
        return found


def _unpack_dropped(view: memoryview, version: int) -> tuple[int, ...]:
    """Return the numbers of a copy's list. Raises StorageError if it cannot be one."""
    if version == _VERSION:
        return ()
    (count,) = struct.unpack_from("<Q", view, _FIELDS.size)
    if not 0 < count <= DROPPED_MAX:
        raise StorageError("superblock: a copy of no known form")
    dropped = struct.unpack_from(f"<{count}Q", view, _FIELDS.size + _NUMBER_BYTES)
    if list(dropped) != sorted(set(dropped)):
        raise StorageError("superblock: a copy of no known form")
    return dropped


def choose(copies: list[Superblock | None]) -> Superblock | None:
    """Return the newest superblock that two copies agree on, None if there is none."""
    agreed = [found for found, count in Counter(c for c in copies if c).items() if count >= QUORUM]
    return max(agreed, key=lambda found: (found.epoch, len(found.dropped)), default=None)


def read_copies(disk: DiskPort) -> list[Superblock | None]:
    """Return what each copy says, None for a damaged one. Raises NotFound (no file)."""
    handle = disk.open(NAME)
    try:
        size_bytes = disk.size_bytes(handle)
        return [_read_copy(disk, handle, n * COPY_STRIDE_BYTES, size_bytes) for n in range(COPIES)]
    finally:
        disk.release(handle)


def _read_copy(disk: DiskPort, handle: int, offset: int, size_bytes: int) -> Superblock | None:
    if offset + SECTOR_BYTES > size_bytes:
        return None
    sector = memoryview(mmap.mmap(-1, SECTOR_BYTES))
    for _ in range(2):  # an unreadable sector is tried once more
        try:
            disk.read_into(handle, offset, sector)
            return Superblock.unpack(sector)
        except StorageError:
            continue
    return None


def write_superblock(disk: DiskPort, superblock: Superblock) -> None:
    """Make a newer superblock durable, in a new file. Raises StorageFull, StorageError.

    Not in place: after a failed sync nobody knows which copies are on the disk,
    and the next update could leave no two that agree. The next one's file is
    made at once, as long as there is space: a full disk cannot stop it.
    """
    handle = _next_file(disk)
    try:
        sector = memoryview(mmap.mmap(-1, SECTOR_BYTES))
        sector[:] = superblock.pack()
        for copy in range(COPIES):
            disk.write(handle, copy * COPY_STRIDE_BYTES, [sector])
        disk.sync(handle)
    except StorageError:
        disk.delete(handle)
        raise
    disk.release(handle)
    disk.rename(SPARE, NAME)
    _make_spare(disk)
    disk.sync_folder("")


def _make_spare(disk: DiskPort) -> None:
    """Make the next superblock's file, if there is space."""
    with contextlib.suppress(StorageError):
        handle = disk.create(SPARE, SUPERBLOCK_BYTES)
        try:
            disk.sync(handle)
        except StorageError:
            disk.delete(handle)  # what its sync has dropped, a later one does not bring back
        else:
            disk.release(handle)


def _next_file(disk: DiskPort) -> int:
    """Return a handle of the spare file, made if it is not there whole."""
    with contextlib.suppress(NotFound, StorageError):
        handle = disk.open(SPARE)
        if disk.size_bytes(handle) == SUPERBLOCK_BYTES:
            return handle
        disk.delete(handle)
    disk.remove(SPARE)
    return disk.create(SPARE, SUPERBLOCK_BYTES)
