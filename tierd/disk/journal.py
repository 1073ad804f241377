"""Journal: segments of frames, preallocated; what is appended stands at fresh sectors.

    segment   "journal/%08x": HEAD frame, then groups of RECORDS frames

Invariants:
  only the newest segment may hold frames that are not durable
  a sector is written once, but for a segment given up after a failed write
  a HEAD frame says what it follows: frames beyond that in older segments do not count
  frames that follow a HEAD are durable only after it; copies of older ones only before
  after a failed sync nothing is written any more
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tierd.disk import removed
from tierd.disk.frames import (
    FRAME_BYTES_MAX,
    FRAME_HEADER_BYTES,
    Frame,
    FrameKind,
    Link,
    pack_frame,
    seed_of,
)
from tierd.disk.ports import DiskPort
from tierd.errors import StorageError, StorageFull
from tierd.units import KIB, MIB, SECTOR_BYTES, round_up

FOLDER = "journal"
SEGMENT_BYTES = 64 * MIB
SEGMENT_BYTES_MIN = 64 * KIB
GROUP_BYTES_MAX = FRAME_BYTES_MAX  # what one write takes, and the buffer it needs


def segment_name(number: int) -> str:
    """Return a segment's name."""
    return f"{FOLDER}/{number:08x}"


def segment_number(name: str) -> int:
    """Return the number in a segment's name."""
    return int(name.rpartition("/")[2], 16)


_HEAD = struct.Struct("<IQ")


def head_payload(number: int, size_bytes: int) -> bytes:
    """Return what a HEAD says beside its frame: its segment's number and size."""
    return _HEAD.pack(number, size_bytes)


def head_size_bytes(head: Frame, number: int) -> int:
    """Return the size that a segment was made with. Raises StorageError if this is not its HEAD."""
    if head.kind == FrameKind.HEAD and len(head.payload) == _HEAD.size:
        own, size_bytes = _HEAD.unpack(head.payload)
        if own == number:
            return int(size_bytes)
    raise StorageError("the first frame is no HEAD of this segment")


def payload_bytes_max(segment_bytes: int) -> int:
    """Return the largest payload of a frame: a group of one fits a quarter of a segment."""
    return min(FRAME_BYTES_MAX, segment_bytes // 4) - FRAME_HEADER_BYTES


@dataclass(slots=True)
class Segment:
    """A segment that this process wrote or found. `last` is its last frame's sequence."""

    number: int
    size_bytes: int
    last: int


class Journal:
    """The end of the journal, where frames are appended. One thread at a time."""

    def __init__(
        self,
        disk: DiskPort,
        *,
        store_uuid: bytes,
        epoch: int,
        end: Link,
        found: Sequence[Segment],
        next_number: int,
        segment_bytes: int,
    ) -> None:
        assert segment_bytes >= SEGMENT_BYTES_MIN and segment_bytes % SECTOR_BYTES == 0
        self._disk, self.epoch, self._seed = disk, epoch, seed_of(store_uuid)
        self.end = end  # of what was written
        self.durable = end.sequence  # all up to here is on the disk
        self.segments = list(found)
        self.segment_bytes = segment_bytes
        self.failed = ""
        self.written_bytes = 0  # by this process
        self._handle = 0  # 0: no segment is open
        self._usable = False  # whether the open segment may be written into
        self._offset = 0
        self._next_number = next_number
        self._scratch = mmap.mmap(-1, GROUP_BYTES_MAX)

    @property
    def size_bytes(self) -> int:
        """Bytes of all segments on the disk."""
        return sum(segment.size_bytes for segment in self.segments)

    def append(self, payloads: Sequence[bytes]) -> None:
        """Write one group: a frame a payload.

        A failed write is tried once more in a new segment. After an error
        nothing of the group counts, and it may be appended again. Raises
        StorageFull, StorageError.
        """
        self._refuse_if_failed()
        before = self.end
        try:
            self._append(payloads)
        except StorageError as error:
            self._give_up_segment(before)
            if self.failed or isinstance(error, StorageFull):
                raise
            try:
                self._append(payloads)
            except StorageError:
                self._give_up_segment(before)
                raise

    def _append(self, payloads: Sequence[bytes]) -> None:
        if not self._usable:
            self.rotate()
        group: list[bytes] = []
        group_bytes = 0
        for payload in payloads:
            frame_bytes = FRAME_HEADER_BYTES + len(payload)
            full = self.segment_bytes - self._offset < group_bytes + frame_bytes
            if full or group_bytes + frame_bytes > GROUP_BYTES_MAX:
                self._write_group(group)
                group, group_bytes = [], 0
            if full:
                self.rotate()
            group.append(self._pack(FrameKind.RECORDS, payload))
            group_bytes += frame_bytes
        self._write_group(group)

    def _pack(self, kind: FrameKind, payload: bytes) -> bytes:
        """Return the next frame, the chain's end from now on."""
        frame, self.end = pack_frame(
            kind, payload, self.end, epoch=self.epoch, durable=self.durable, seed=self._seed
        )
        return frame

    def _write_group(self, group: Sequence[bytes]) -> None:
        """Write frames at the next sector."""
        size_bytes = self._write(self._offset, b"".join(group))
        self._offset += size_bytes
        self.segments[-1].last = self.end.sequence

    def _write(self, offset: int, data: bytes) -> int:
        """Write bytes, padded with zeros to whole sectors; return how many that are."""
        for start in range(0, len(data), GROUP_BYTES_MAX):
            piece = data[start : start + GROUP_BYTES_MAX]
            padded = round_up(len(piece), SECTOR_BYTES)
            buffer = memoryview(self._scratch)[:padded]
            buffer[: len(piece)] = piece
            buffer[len(piece) :] = bytes(padded - len(piece))
            self._disk.write(self._handle, offset + start, [buffer])
        size_bytes = round_up(len(data), SECTOR_BYTES)
        self.written_bytes += size_bytes
        return size_bytes

    @property
    def begun(self) -> bool:
        """Whether this epoch's first segment was made."""
        return self._handle != 0

    def begin(self, tail: Sequence[bytes]) -> None:
        """Begin this epoch's first segment, `tail` in it: payloads said before, not yet durable.

        Raises StorageFull, StorageError.
        """
        assert not self.failed and self._handle == 0
        self._begin_segment(tail)

    def rotate(self) -> None:
        """Begin a new segment, durable before anything else is in it.

        Raises StorageFull, StorageError; all that counts in older ones is durable then.
        """
        self.sync()
        self.close()
        self._begin_segment([])

    def _begin_segment(self, tail: Sequence[bytes]) -> None:
        number, before = self._next_number, self.end
        copies_bytes = sum(FRAME_HEADER_BYTES + len(payload) for payload in tail)
        needed_bytes = round_up(SECTOR_BYTES + copies_bytes, SECTOR_BYTES)
        size_bytes = max(self.segment_bytes, needed_bytes)
        head = self._pack(FrameKind.HEAD, head_payload(number, size_bytes))
        copies = b"".join(self._pack(FrameKind.COPY, payload) for payload in tail)
        try:
            self._handle = self._disk.create(segment_name(number), size_bytes)
        except StorageError:
            self._give_up_segment(before)
            raise
        self._next_number, self._offset = number + 1, needed_bytes
        self.segments.append(Segment(number, size_bytes, self.end.sequence))
        try:
            # The HEAD puts an end to what it follows: it comes when all that follows it is there.
            if copies:
                self._write(SECTOR_BYTES, copies)
                self._sync_durably(lambda: self._disk.sync(self._handle))
            self._write(0, head)
            self._sync_durably(lambda: self._disk.sync(self._handle))
            self._sync_durably(lambda: self._disk.sync_folder(FOLDER))
        except StorageError:
            self._give_up_segment(before)
            self.segments.pop()
            self._disk.delete(self._handle)
            self._handle = 0
            raise
        self.durable = self.end.sequence
        self._usable = True

    def _give_up_segment(self, end: Link) -> None:
        """Write no more into this segment; the next one's HEAD follows `end`.

        Frames beyond `end` that may stand here do not count any more.
        """
        self.end, self._usable = end, False
        self.durable = min(self.durable, end.sequence)
        for segment in self.segments:
            segment.last = min(segment.last, end.sequence)

    def sync(self) -> None:
        """Make all that was written durable. Raises StorageError, once and for all."""
        self._refuse_if_failed()
        if self.durable < self.end.sequence:
            self._sync_durably(lambda: self._disk.sync(self._handle))
            self.durable = self.end.sequence

    def _sync_durably(self, sync: Callable[[], None]) -> None:
        try:
            sync()
        except StorageError as error:
            # What was written may be gone, and a second sync would not say so.
            self.fail(f"fdatasync of the journal failed: {error}")
            raise

    def fail(self, reason: str) -> None:
        """Write nothing any more."""
        self.failed = self.failed or reason

    def _refuse_if_failed(self) -> None:
        if self.failed:
            raise StorageError(f"the journal is read-only: {self.failed}")

    def require_there(self) -> None:
        """Raise StorageError if the folder was removed, or the file that is written now."""
        self._disk.require_there()
        if self._handle and not self._disk.is_there(self._handle):
            name = segment_name(self.segments[-1].number)
            raise StorageError(removed.segment_gone(self._disk.folder, name))

    def drop_covered(self, sequence: int) -> None:
        """Remove the segments whose frames all stand in a snapshot up to `sequence`."""
        kept = []
        for segment in self.segments:
            newest = segment is self.segments[-1] and self._handle != 0
            if newest or segment.last > sequence:
                kept.append(segment)
            else:
                self._disk.remove(segment_name(segment.number))
        self.segments = kept

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._usable = False
        if self._handle:
            self._disk.release(self._handle)
            self._handle = 0

    def check_integrity(self) -> None:
        """Raise AssertionError unless segments rise and nothing durable is ahead of the end."""
        numbers = [segment.number for segment in self.segments]
        assert numbers == sorted(set(numbers)), f"{numbers=}"
        assert self.durable <= self.end.sequence, f"{self.durable=} {self.end.sequence=}"
        assert self._offset <= self.segment_bytes, f"{self._offset=}"
