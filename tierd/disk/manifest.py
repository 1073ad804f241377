"""Manifest: what is kept of one session, for when snapshots and journal are lost.

    sector 0   magic "TIERDKPT", u32 version, u32 zero, store uuid (16), u64 session,
               u64 epoch, u64 sequence of the journal's last durable frame,
               u64 bytes of the body, xxh3-128 of the body; zeros to 4088; u64 xxh3-64 of all before
    body       msgpack: [session, slabs, rows]

A slot's header says which page stands there, not whether it is still the
session's: a freed slot keeps its header, and the daemon learns a session's
token ids at its suspension only. So a suspension writes both down together:
these token ids, these pages at these generations, with these digests. A slot
that holds exactly such a page holds what was kept, whatever has happened since.

Invariants:
  a manifest that has its name is whole and durable, or was damaged later
  it is never newer than a sound journal: one that is says that frames were lost
  its rows are of its session, below its sealed blocks
"""

from __future__ import annotations

import contextlib
import mmap
import struct
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import msgpack
import numpy as np
import xxhash

from tierd.disk.ports import DiskPort
from tierd.disk.records import (
    Rows,
    SessionRecord,
    rows_of,
    session_items,
    session_of,
    slab_items,
    slab_of,
)
from tierd.disk.superblock import TEMPORARY
from tierd.errors import StorageError, StorageFull
from tierd.types import SlabRecord
from tierd.units import SECTOR_BYTES, round_up

FOLDER = "kept"
_MAGIC = b"TIERDKPT"
_VERSION = 1
_FIELDS = struct.Struct("<8sII16sQQQQ16s")
_CHECKSUM_OFFSET = SECTOR_BYTES - 8
# A session has 4M tokens at most (16 MiB of ids), and a page table of 256 MiB: 2**24 rows.
_BODY_BYTES_MAX = 1 << 30


def manifest_name(session: int) -> str:
    """Return a manifest's name."""
    return f"{FOLDER}/{session:016x}"


def session_number(name: str) -> int:
    """Return the session in a manifest's name."""
    return int(name.rpartition("/")[2], 16)


@dataclass(frozen=True, slots=True)
class ManifestHeader:
    """Sector 0. `stamp` is (epoch, sequence): where the journal stood."""

    store_uuid: bytes
    session: int
    stamp: tuple[int, int]
    body_bytes: int
    body_digest: bytes

    @property
    def size_bytes(self) -> int:
        """Bytes of the file."""
        return SECTOR_BYTES + round_up(self.body_bytes, SECTOR_BYTES)

    def pack(self) -> bytes:
        """Return one sector."""
        fields = _FIELDS.pack(
            _MAGIC, _VERSION, 0, self.store_uuid, self.session, *self.stamp, self.body_bytes,
            self.body_digest,
        )  # fmt: skip
        body: bytes = fields.ljust(_CHECKSUM_OFFSET, b"\0")
        return body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")

    @classmethod
    def unpack(cls, sector: bytes | memoryview) -> ManifestHeader:
        """Return the header in a sector. Raises StorageError on any wrong bit."""
        view = memoryview(sector)
        stored = int.from_bytes(view[_CHECKSUM_OFFSET:], "little")
        if len(view) != SECTOR_BYTES or xxhash.xxh3_64_intdigest(view[:_CHECKSUM_OFFSET]) != stored:
            raise StorageError("manifest: the header's checksum does not match")
        magic, version, zero, uuid, session, epoch, sequence, body_bytes, digest = (
            _FIELDS.unpack_from(view)
        )
        if magic != _MAGIC or version != _VERSION or zero or body_bytes > _BODY_BYTES_MAX:
            raise StorageError(f"manifest: not of version {_VERSION}")
        return cls(uuid, session, (epoch, sequence), body_bytes, digest)


@dataclass(frozen=True, slots=True)
class Manifest:
    """What is kept of a session: its record, its rows (PAGE_ROW [n]), and their slabs."""

    session: SessionRecord
    slabs: tuple[SlabRecord, ...]
    rows: Rows


def manifest_of(record: SessionRecord, rows: Rows, slabs: Mapping[int, SlabRecord]) -> Manifest:
    """Return the manifest of a kept session; `rows` beyond its sealed blocks are left out."""
    own = rows[rows["block"] < record.sealed_blocks]
    used = sorted(set(own["slab"].tolist()))
    return Manifest(record, tuple(slabs[slab] for slab in used if slab in slabs), own)


def write_manifest(
    disk: DiskPort,
    manifest: Manifest,
    *,
    store_uuid: bytes,
    stamp: tuple[int, int],
    bytes_max: int = _BODY_BYTES_MAX,
) -> int:
    """Write a manifest durably over the session's older one; return its bytes, `bytes_max` at most.

    Raises StorageFull, StorageError: then there is none of this session.
    """
    number = manifest.session.number
    slabs = [slab_items(slab) for slab in manifest.slabs]
    rows = np.ascontiguousarray(manifest.rows).tobytes()
    body: bytes = msgpack.packb([session_items(manifest.session), slabs, rows])
    digest = xxhash.xxh3_128_digest(body)
    header = ManifestHeader(store_uuid, number, stamp, len(body), digest)
    name = manifest_name(number)
    buffer = mmap.mmap(-1, header.size_bytes)
    buffer[: SECTOR_BYTES + len(body)] = header.pack() + body
    disk.remove(name + TEMPORARY)
    try:
        if header.size_bytes > bytes_max:
            raise StorageFull(f"{name} needs {header.size_bytes} bytes, and has {bytes_max}")
        _write_whole(disk, name + TEMPORARY, memoryview(buffer))
        disk.rename(name + TEMPORARY, name)
        disk.sync_folder(FOLDER)
    except StorageError:
        # The older one says less than what is acknowledged next: it would be worse than none.
        disk.remove(name + TEMPORARY)
        disk.remove(name)
        raise
    return header.size_bytes


def _write_whole(disk: DiskPort, name: str, data: memoryview) -> None:
    handle = disk.create(name, len(data))
    try:
        disk.write(handle, 0, [data])
        disk.sync(handle)
    finally:
        disk.release(handle)


def read_header(disk: DiskPort, name: str, store_uuid: bytes) -> ManifestHeader:
    """Return a manifest's header. Raises StorageError."""
    handle = disk.open(name)
    try:
        header = ManifestHeader.unpack(_read(disk, handle, 0, SECTOR_BYTES))
        size_bytes = disk.size_bytes(handle)
    finally:
        disk.release(handle)
    if header.store_uuid != store_uuid or header.session != session_number(name):
        raise StorageError("manifest: it is another store's, or another session's")
    if header.size_bytes != size_bytes:
        raise StorageError(f"manifest: {size_bytes} bytes long, it was made {header.size_bytes}")
    return header


def read_manifest(disk: DiskPort, name: str, store_uuid: bytes) -> Manifest:
    """Return a manifest. Raises StorageError if any bit of it is wrong."""
    header = read_header(disk, name, store_uuid)
    handle = disk.open(name)
    try:
        body = _read(disk, handle, SECTOR_BYTES, header.size_bytes - SECTOR_BYTES)
    finally:
        disk.release(handle)
    body = body[: header.body_bytes]
    if xxhash.xxh3_128_digest(body) != header.body_digest:
        raise StorageError("manifest: the body does not match its checksum")
    manifest = _parse(body)
    rows, record = manifest.rows, manifest.session
    own = (rows["session"] == record.number) & (rows["block"] < record.sealed_blocks)
    if record.number != header.session or not bool(np.all(own)):
        raise StorageError("manifest: it names pages of another session")
    return manifest


def _parse(body: memoryview) -> Manifest:
    try:
        items: Any = msgpack.unpackb(body, raw=False, max_map_len=0, max_ext_len=0)
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise StorageError(f"manifest: not msgpack: {error}") from None
    if not isinstance(items, list) or len(items) != 3 or not isinstance(items[1], list):
        raise StorageError("manifest: of no known form")
    session, slabs, rows = items
    return Manifest(session_of(session), tuple(map(slab_of, slabs)), rows_of(rows))


def _read(disk: DiskPort, handle: int, offset: int, size_bytes: int) -> memoryview:
    """Read bytes, trying twice. Raises StorageError."""
    buffer = memoryview(mmap.mmap(-1, max(size_bytes, 1)))[:size_bytes]
    if offset + size_bytes > disk.size_bytes(handle):
        raise StorageError("manifest: the file is cut short")
    try:
        disk.read_into(handle, offset, buffer)
    except StorageError:
        disk.read_into(handle, offset, buffer)
    return buffer


@dataclass(slots=True)
class FoundManifests:
    """All manifests of a disk: bytes by session, those newer than the journal, damaged ones."""

    sizes: dict[int, int] = field(default_factory=dict)
    newer: list[Manifest] = field(default_factory=list)
    damaged: dict[int, str] = field(default_factory=dict)  # session → reason


def find_manifests(disk: DiskPort, store_uuid: bytes, end: tuple[int, int]) -> FoundManifests:
    """Look at every manifest: its header, and all of one that is newer than `end`.

    `end`: (epoch, sequence) up to which records could be read. Raises StorageError
    if the folder cannot be read.
    """
    found = FoundManifests()
    for name in disk.names(FOLDER):
        if name.endswith(TEMPORARY):
            continue
        number = session_number(name)
        try:
            header = read_header(disk, name, store_uuid)
            if header.stamp > end:
                found.newer.append(read_manifest(disk, name, store_uuid))
        except StorageError as error:
            found.damaged[number] = str(error)
        else:
            found.sizes[number] = header.size_bytes
    return found


class Manifests:
    """The manifests of one store, by their bytes: `bytes_max` together. One thread at a time."""

    def __init__(self, disk: DiskPort, store_uuid: bytes, sizes: Mapping[int, int]) -> None:
        self._disk = disk
        self._store_uuid = store_uuid
        self._sizes = dict(sizes)
        self.bytes_max = 2**63

    def __contains__(self, session: int) -> bool:
        return session in self._sizes

    @property
    def size_bytes(self) -> int:
        """Bytes of all of them."""
        return sum(self._sizes.values())

    def write(self, manifest: Manifest, stamp: tuple[int, int]) -> None:
        """Write one over the session's older one. Raises StorageFull, StorageError: see above."""
        number = manifest.session.number
        self._sizes.pop(number, None)
        left_bytes = self.bytes_max - self.size_bytes
        self._sizes[number] = write_manifest(
            self._disk, manifest, store_uuid=self._store_uuid, stamp=stamp, bytes_max=left_bytes
        )

    def remove(self, sessions: Set[int]) -> None:
        """Remove those of these sessions. One that a crash brings back is a leftover then."""
        gone = sessions & self._sizes.keys()
        for number in gone:
            del self._sizes[number]
            self._disk.remove(manifest_name(number))
        if gone:
            with contextlib.suppress(StorageError):
                self._disk.sync_folder(FOLDER)
