"""Bits flipped and bytes cut in each form on disk, many a second: none may pass."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import xxhash

from tests.disk.ledgerrig import NAMESPACE, UUID
from tierd.disk.frames import FrameKind, Link, pack_frame, seed_of, unpack_frame
from tierd.disk.header import SlotHeader, verify_slot
from tierd.disk.manifest import ManifestHeader, manifest_of, read_manifest, write_manifest
from tierd.disk.memory import MemoryDisk
from tierd.disk.records import PAGE_ROW, SessionRecord
from tierd.disk.snapshot import Section, SnapshotHeader
from tierd.disk.superblock import Superblock
from tierd.errors import PageDamaged, StorageError
from tierd.types import CodecId, DType
from tierd.units import SECTOR_BYTES

FLIPS = 20_000  # a run, over all forms
BITS_MAX = 3

Form = tuple[bytes, Callable[[bytearray], object]]


def forms(draw: random.Random) -> dict[str, Form]:
    """Return packed forms with random contents, and what reads each."""
    word = draw.getrandbits
    payload = draw.randbytes(2048)
    digest = xxhash.xxh3_128_digest(payload)
    header = SlotHeader(
        UUID, word(24), word(16), word(32), CodecId.INT8, DType.FLOAT32, word(64), word(6),
        word(12), NAMESPACE.digest(), 4096, len(payload), digest,
    )  # fmt: skip
    seed = seed_of(UUID)
    follows = Link(word(40), word(64))
    frame, _ = pack_frame(
        FrameKind.RECORDS, draw.randbytes(draw.randrange(600)), follows, epoch=word(20),
        durable=word(40), seed=seed,
    )  # fmt: skip
    sections = {
        name: Section(word(20), SECTOR_BYTES * word(10), word(24), draw.randbytes(16))
        for name in ("rows", "sessions", "slabs", "bad_slots")
    }
    snapshot = SnapshotHeader(UUID, word(20), Link(word(40), word(64)), word(20), sections)
    dropped = tuple(sorted({word(64) for _ in range(draw.randrange(1, 9))}))
    noted = Superblock(UUID, word(20), word(20), word(40), dropped)
    return {
        "header": (header.pack(), SlotHeader.unpack),
        "slot": (header.pack() + payload, lambda data: verify_slot(memoryview(data), header)),
        "frame": (frame, lambda data: unpack_frame(memoryview(data), 0, seed)),
        "superblock": (Superblock(UUID, word(20), word(20), word(40)).pack(), Superblock.unpack),
        "superblock with drops": (noted.pack(), Superblock.unpack),
        "snapshot": (snapshot.pack(), SnapshotHeader.unpack),
        "manifest header": (
            ManifestHeader(UUID, word(64), (word(20), word(40)), word(20), digest).pack(),
            ManifestHeader.unpack,
        ),
        "manifest": _manifest(draw),
    }


def _manifest(draw: random.Random) -> Form:
    rows = np.zeros(draw.randrange(1, 12), PAGE_ROW)
    rows["session"], rows["block"], rows["slot"] = 7, np.arange(len(rows)), np.arange(len(rows))
    record = SessionRecord(7, NAMESPACE, "parked", draw.randbytes(64), len(rows))
    disk = MemoryDisk()
    write_manifest(disk, manifest_of(record, rows, {}), store_uuid=UUID, stamp=(1, 2))
    (name,) = disk.named
    whole = bytes(disk.named[name])
    used = SECTOR_BYTES + ManifestHeader.unpack(whole[:SECTOR_BYTES]).body_bytes
    padding = whole[used:]

    def read(data: bytearray) -> object:
        disk.named[name] = data + padding[len(data) - used :] if len(data) == used else data
        return read_manifest(disk, name, UUID)

    return whole[:used], read


def flip(seed: int, flips: int = FLIPS) -> int:
    """Flip bits and cut; return how often. Raises AssertionError, naming what passed."""
    draw = random.Random(seed)
    made = forms(draw)
    for number in range(flips):
        name = draw.choice(list(made)) if number % 8 else "manifest"
        whole, read = made[name]
        data = bytearray(whole)
        if number % 16 == 15:
            del data[draw.randrange(len(data)) :]
            what = f"cut to {len(data)}"
        else:
            bits = draw.sample(range(len(data) * 8), draw.randint(1, BITS_MAX))
            for bit in bits:
                data[bit // 8] ^= 1 << bit % 8
            what = f"bits {bits}"
        try:
            read(data)
        except (StorageError, PageDamaged):
            continue
        raise AssertionError(f"seed {seed}: {name}, {what}: it passed")
    for whole, read in made.values():
        read(bytearray(whole))
    return flips
