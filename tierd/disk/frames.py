"""Journal frame: one batch of records, chained to the frame before.

    offset  field
    0       u32 length, header included
    4       u32 epoch
    8       u64 sequence: the one before plus 1
    16      u64 checksum of the frame before
    24      u64 durable: when this was written, all up to this sequence was on the disk
    32      u8 kind, 7 zeros
    40      u64 xxh3-64 of all else in the frame, seeded by the store's uuid
    48      payload

A frame proves itself, so frames beyond a damaged one can still be found; the
link to the frame before makes the chain. A group of frames begins at a sector
and is padded with zeros to whole sectors: a durable sector is never written
again. What follows a frame stands right after it or at the next sector.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import xxhash

from tierd.errors import StorageError
from tierd.units import MIB, SECTOR_BYTES

_HEAD = struct.Struct("<IIQQQB7s")
_CHECKSUM = struct.Struct("<Q")
FRAME_HEADER_BYTES = _HEAD.size + _CHECKSUM.size
FRAME_BYTES_MAX = 4 * MIB
_ZEROS = bytes(7)


class FrameKind(enum.IntEnum):
    """HEAD: first of a segment. COPY: of a frame in an older one. Numbers are on disk."""

    HEAD = 1
    RECORDS = 2
    COPY = 3


_KINDS = frozenset(FrameKind)


@dataclass(frozen=True, slots=True)
class Link:
    """An end of the chain: the sequence and the checksum of its last frame."""

    sequence: int
    checksum: int


# What the first frame of a store follows.
ORIGIN = Link(0, 0)


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame as read. `offset` is where it began in its buffer."""

    offset: int
    length: int
    epoch: int
    sequence: int
    previous: int
    durable: int
    kind: FrameKind
    checksum: int
    payload: bytes

    @property
    def link(self) -> Link:
        """What the next frame must follow."""
        return Link(self.sequence, self.checksum)

    @property
    def follows(self) -> Link:
        """What this frame follows."""
        return Link(self.sequence - 1, self.previous)


def seed_of(store_uuid: bytes) -> int:
    """Return the checksum seed of a store: another store's frames are no frames here."""
    return xxhash.xxh3_64_intdigest(store_uuid)


def pack_frame(
    kind: FrameKind, payload: bytes, follows: Link, *, epoch: int, durable: int, seed: int
) -> tuple[bytes, Link]:
    """Return a frame's bytes and the link for the next one."""
    length = FRAME_HEADER_BYTES + len(payload)
    assert length <= FRAME_BYTES_MAX, f"a frame of {length} bytes"
    sequence = follows.sequence + 1
    head = _HEAD.pack(length, epoch, sequence, follows.checksum, durable, kind, _ZEROS)
    checksum = _checksum(head, payload, seed)
    return b"".join((head, _CHECKSUM.pack(checksum), payload)), Link(sequence, checksum)


def _checksum(head: bytes | memoryview, payload: bytes | memoryview, seed: int) -> int:
    hasher = xxhash.xxh3_64(seed=seed)
    hasher.update(head)
    hasher.update(payload)
    return hasher.intdigest()


def unpack_frame(buffer: memoryview, offset: int, seed: int) -> Frame:
    """Return the frame at `offset`. Raises StorageError on any wrong bit."""
    if offset + FRAME_HEADER_BYTES > len(buffer):
        raise StorageError("a frame is cut short")
    head = buffer[offset : offset + _HEAD.size]
    length, epoch, sequence, previous, durable, kind, zeros = _HEAD.unpack(head)
    if not FRAME_HEADER_BYTES <= length <= min(FRAME_BYTES_MAX, len(buffer) - offset):
        raise StorageError(f"a frame of {length} bytes")
    payload = buffer[offset + FRAME_HEADER_BYTES : offset + length]
    (checksum,) = _CHECKSUM.unpack_from(buffer, offset + _HEAD.size)
    if _checksum(head, payload, seed) != checksum:
        raise StorageError("a frame's checksum does not match")
    if zeros != _ZEROS or kind not in _KINDS or sequence == 0:
        raise StorageError("a frame of no known form")
    return Frame(
        offset, length, epoch, sequence, previous, durable, FrameKind(kind), checksum,
        bytes(payload),
    )  # fmt: skip


def stray_frames(buffer: memoryview, size_bytes: int, seed: int) -> Iterator[Frame]:
    """Yield the frames that begin at a sector of the first `size_bytes`, whatever they follow."""
    words = np.frombuffer(buffer[:size_bytes], dtype="<u4").reshape(-1, SECTOR_BYTES // 4)
    lengths = words[:, 0]
    # The zeros beside the kind: in the middle of a frame of rows few sectors pass.
    likely = (lengths >= FRAME_HEADER_BYTES) & (lengths <= FRAME_BYTES_MAX) & (words[:, 9] == 0)
    for index in np.flatnonzero(likely).tolist():
        try:
            yield unpack_frame(buffer, index * SECTOR_BYTES, seed)
        except StorageError:
            continue
