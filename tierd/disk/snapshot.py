"""Snapshot: the image in one file, "snap/" and the sequence of the last frame it holds.

    sector 0   magic "TIERDSNP", u32 version, u32 bytes of the table, store uuid (16),
               u64 epoch, u64 sequence and checksum of the last frame, u64 slab limit;
               a msgpack map: section → [items, offset, bytes, xxh3-128];
               zeros to 4088; u64 xxh3-64 of all before
    rows       PAGE_ROW, sorted by (session, block, layer)
    sessions, slabs, bad_slots     msgpack arrays, one after the other

Sections begin at sectors. Written under a temporary name, synced, renamed, and
the folder synced: a snapshot that has its name is whole, or was damaged later.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack
import numpy as np
import xxhash

from tierd.disk.frames import Link
from tierd.disk.image import Image, SessionPages
from tierd.disk.ports import DiskPort
from tierd.disk.records import (
    PAGE_ROW,
    WORD_MAX,
    Record,
    Rows,
    integer,
    page_keys,
    session_items,
    session_of,
    slab_items,
    slab_of,
    text,
)
from tierd.disk.superblock import TEMPORARY
from tierd.errors import StorageError
from tierd.units import MIB, SECTOR_BYTES, round_up

FOLDER = "snap"
SNAPSHOTS_KEPT = 2
SECTIONS = ("rows", "sessions", "slabs", "bad_slots")
_MAGIC = b"TIERDSNP"
_VERSION = 1
_FIELDS = struct.Struct("<8sII16sQQQQ")
_CHECKSUM_OFFSET = SECTOR_BYTES - 8
_TABLE_BYTES_MAX = _CHECKSUM_OFFSET - _FIELDS.size
# Written and read in pieces: a snapshot of any size costs this much beside the rows.
_CHUNK_BYTES = 4 * MIB


def snapshot_name(sequence: int) -> str:
    """Return a snapshot's name."""
    return f"{FOLDER}/{sequence:016x}"


@dataclass(frozen=True, slots=True)
class SnapshotFile:
    """A snapshot on the disk."""

    sequence: int
    size_bytes: int

    @property
    def name(self) -> str:
        """Its file's name."""
        return snapshot_name(self.sequence)


@dataclass(frozen=True, slots=True)
class Section:
    """Where a part of a snapshot stands, and what it must hash to."""

    items: int
    offset: int
    size_bytes: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class SnapshotHeader:
    """Sector 0."""

    store_uuid: bytes
    epoch: int
    end: Link
    slab_limit: int
    sections: dict[str, Section]

    def pack(self) -> bytes:
        """Return one sector."""
        table: bytes = msgpack.packb(
            {n: [s.items, s.offset, s.size_bytes, s.digest] for n, s in self.sections.items()}
        )
        assert len(table) <= _TABLE_BYTES_MAX, f"{len(table)=}"
        fields = _FIELDS.pack(
            _MAGIC, _VERSION, len(table), self.store_uuid, self.epoch, self.end.sequence,
            self.end.checksum, self.slab_limit,
        )  # fmt: skip
        body: bytes = (fields + table).ljust(_CHECKSUM_OFFSET, b"\0")
        return body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")

    @classmethod
    def unpack(cls, sector: bytes | memoryview) -> SnapshotHeader:
        """Return the header in a sector. Raises StorageError on any wrong bit."""
        view = memoryview(sector)
        if len(view) != SECTOR_BYTES:
            raise StorageError("snapshot: the header is cut short")
        stored = int.from_bytes(view[_CHECKSUM_OFFSET:], "little")
        if xxhash.xxh3_64_intdigest(view[:_CHECKSUM_OFFSET]) != stored:
            raise StorageError("snapshot: the header's checksum does not match")
        magic, version, table_bytes, uuid, epoch, sequence, checksum, limit = _FIELDS.unpack_from(
            view
        )
        if magic != _MAGIC or version != _VERSION or table_bytes > _TABLE_BYTES_MAX:
            raise StorageError(f"snapshot: not of version {_VERSION}")
        table = bytes(view[_FIELDS.size : _FIELDS.size + table_bytes])
        return cls(uuid, epoch, Link(sequence, checksum), limit, _sections_of(table))


def _sections_of(table: bytes) -> dict[str, Section]:
    try:
        found = msgpack.unpackb(table, raw=False, max_map_len=len(SECTIONS), max_ext_len=0)
        sections = {name: Section(*found[name]) for name in SECTIONS}
    except (ValueError, TypeError, LookupError, msgpack.UnpackException, RecursionError) as error:
        raise StorageError(f"snapshot: a table of no known form: {error}") from None
    for section in sections.values():
        numbers = (section.items, section.offset, section.size_bytes)
        if any(type(n) is not int or n < 0 for n in numbers) or section.offset % SECTOR_BYTES:
            raise StorageError("snapshot: a section stands where none can")
    return sections


# -- writing --------------------------------------------------------------------------


@dataclass(slots=True)
class _Writer:
    """Writes sections one after the other through one aligned buffer."""

    disk: DiskPort
    handle: int
    offset: int = SECTOR_BYTES
    filled: int = 0
    buffer: mmap.mmap = field(default_factory=lambda: mmap.mmap(-1, _CHUNK_BYTES))

    def section(self, items: int, parts: Iterable[memoryview]) -> Section:
        """Write a section; return where it stands."""
        start, hasher, size_bytes = self.offset, xxhash.xxh3_128(), 0
        for part in parts:
            hasher.update(part)
            size_bytes += len(part)
            self._put(part)
        self._flush()
        return Section(items, start, size_bytes, hasher.digest())

    def _put(self, part: memoryview) -> None:
        while len(part):
            taken = min(len(part), _CHUNK_BYTES - self.filled)
            self.buffer[self.filled : self.filled + taken] = part[:taken]
            self.filled, part = self.filled + taken, part[taken:]
            if self.filled == _CHUNK_BYTES:
                self._flush()

    def _flush(self) -> None:
        size_bytes = round_up(self.filled, SECTOR_BYTES)
        if size_bytes:
            self.buffer[self.filled : size_bytes] = bytes(size_bytes - self.filled)
            self.disk.write(self.handle, self.offset, [memoryview(self.buffer)[:size_bytes]])
        self.offset, self.filled = self.offset + size_bytes, 0


def write_snapshot(
    disk: DiskPort, image: Image, *, store_uuid: bytes, epoch: int, end: Link
) -> SnapshotFile:
    """Write an image, durably. `end` is the last frame it holds. Raises StorageFull, StorageError.

    The image's rows are settled. An older snapshot of the same name is replaced.
    """
    numbers = sorted(image.pages)
    rows = [image.pages[number].settle() for number in numbers]
    blobs = {
        "sessions": [session_items(s) for s in image.sessions.values()],
        "slabs": [slab_items(s) for s in image.slabs.values()],
        "bad_slots": [
            [slab, slot, reason] for slab, slots in image.bad_slots.items()
            for slot, reason in slots.items()
        ],
    }  # fmt: skip
    packed = {name: b"".join(map(msgpack.packb, items)) for name, items in blobs.items()}
    row_count = sum(map(len, rows))
    sizes = [row_count * PAGE_ROW.itemsize, *map(len, packed.values())]
    size_bytes = SECTOR_BYTES + sum(round_up(size, SECTOR_BYTES) for size in sizes)
    name = snapshot_name(end.sequence)
    disk.remove(name + TEMPORARY)
    handle = disk.create(name + TEMPORARY, size_bytes)
    try:
        writer = _Writer(disk, handle)
        sections = {"rows": writer.section(row_count, map(_bytes_of, rows))}
        for section, blob in packed.items():
            sections[section] = writer.section(len(blobs[section]), [memoryview(blob)])
        header = SnapshotHeader(store_uuid, epoch, end, image.slab_limit, sections)
        writer.buffer[:SECTOR_BYTES] = header.pack()
        disk.write(handle, 0, [memoryview(writer.buffer)[:SECTOR_BYTES]])
        disk.sync(handle)
    except StorageError:
        disk.delete(handle)
        raise
    disk.release(handle)
    try:
        disk.rename(name + TEMPORARY, name)
        disk.sync_folder(FOLDER)
    except StorageError:
        # Whether the name is durable is not known: nothing is freed for its sake.
        disk.remove(name + TEMPORARY)
        disk.remove(name)
        raise
    return SnapshotFile(end.sequence, size_bytes)


def _bytes_of(rows: Rows) -> memoryview:
    return np.ascontiguousarray(rows).view(np.uint8).data


# -- reading --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot as read."""

    header: SnapshotHeader
    image: Image
    size_bytes: int


def read_snapshot(disk: DiskPort, sequence: int, store_uuid: bytes) -> Snapshot:
    """Return the snapshot of that sequence. Raises StorageError if any bit of it is wrong."""
    handle = disk.open(snapshot_name(sequence))
    try:
        size_bytes = disk.size_bytes(handle)
        if size_bytes < SECTOR_BYTES:
            raise StorageError("snapshot: the file is cut short")
        header = SnapshotHeader.unpack(_read(disk, handle, 0, SECTOR_BYTES))
        if header.store_uuid != store_uuid or header.end.sequence != sequence:
            raise StorageError("snapshot: it is another store's, or another snapshot")
        image = Image(slab_limit=header.slab_limit)
        parts = {
            name: _read_section(disk, handle, size_bytes, name, section)
            for name, section in header.sections.items()
        }
        _fill(image, parts, header.sections)
        return Snapshot(header, image, size_bytes)
    finally:
        disk.release(handle)


def _read(disk: DiskPort, handle: int, offset: int, size_bytes: int) -> memoryview:
    buffer = memoryview(mmap.mmap(-1, max(size_bytes, 1)))[:size_bytes]
    for start in range(0, size_bytes, _CHUNK_BYTES):
        piece = buffer[start : start + _CHUNK_BYTES]
        try:
            disk.read_into(handle, offset + start, piece)
        except StorageError:
            disk.read_into(handle, offset + start, piece)  # once more
    return buffer


def _read_section(
    disk: DiskPort, handle: int, file_bytes: int, name: str, section: Section
) -> memoryview:
    padded = round_up(section.size_bytes, SECTOR_BYTES)
    if section.offset + padded > file_bytes:
        raise StorageError(f"snapshot: {name} stand beyond the end of the file")
    data = _read(disk, handle, section.offset, padded)[: section.size_bytes]
    if xxhash.xxh3_128_digest(data) != section.digest:
        raise StorageError(f"snapshot: {name} do not match their checksum")
    return data


def _fill(image: Image, parts: dict[str, memoryview], sections: dict[str, Section]) -> None:
    if len(parts["rows"]) != sections["rows"].items * PAGE_ROW.itemsize:
        raise StorageError("snapshot: another number of rows")
    rows = np.frombuffer(parts["rows"], dtype=PAGE_ROW)
    rows.flags.writeable = False
    image.pages.update(_pages_of(rows))
    image.sessions.update(
        (s.number, s) for s in map(session_of, _items(parts, sections, "sessions"))
    )
    image.slabs.update((s.slab, s) for s in map(slab_of, _items(parts, sections, "slabs")))
    for item in _items(parts, sections, "bad_slots"):
        if len(item) != 3:
            raise StorageError("snapshot: a bad slot of no known form")
        slab, slot, reason = item
        image.quarantine(integer(slab, WORD_MAX), integer(slot, WORD_MAX), text(reason))


def _items(
    parts: dict[str, memoryview], sections: dict[str, Section], name: str
) -> Iterator[Record]:
    data = parts[name]
    unpacker = msgpack.Unpacker(raw=False, max_buffer_size=max(len(data), 1), max_ext_len=0)
    unpacker.feed(data)
    count = 0
    try:
        for item in unpacker:
            if not isinstance(item, list):
                raise StorageError(f"snapshot: {name} hold something else")
            count += 1
            yield item
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise StorageError(f"snapshot: {name} are not msgpack: {error}") from None
    if count != sections[name].items:
        raise StorageError(f"snapshot: {count} {name} of {sections[name].items}")


def _pages_of(rows: Rows) -> Iterator[tuple[int, SessionPages]]:
    """Yield each session's rows. Raises StorageError unless all are sorted."""
    sessions: Any = np.ascontiguousarray(rows["session"])
    keys = page_keys(rows)
    same = sessions[1:] == sessions[:-1]
    rising = (sessions[1:] > sessions[:-1]) | (same & (keys[1:] > keys[:-1]))
    if not bool(np.all(rising)):
        raise StorageError("snapshot: rows out of order")
    starts = [0, *(np.flatnonzero(~same) + 1).tolist()] if len(rows) else []
    for start, end in zip(starts, [*starts[1:], len(rows)], strict=False):
        yield int(sessions[start]), SessionPages(rows[start:end])


def keep_newest(
    disk: DiskPort, older: Sequence[SnapshotFile], made: SnapshotFile
) -> list[SnapshotFile]:
    """Return the SNAPSHOTS_KEPT newest files, `made` among them, newest last; remove the others."""
    kept = [old for old in older if old.sequence != made.sequence]
    for old in kept[: 1 - SNAPSHOTS_KEPT]:
        disk.remove(old.name)
    return [*kept, made][-SNAPSHOTS_KEPT:]
