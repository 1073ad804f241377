"""A segment read piece by piece: a journal of any size is looked at in 8 MiB of memory.

Invariants:
  what is held begins at a piece and ends two pieces later, or with the file
  a frame that begins in the first of the two is held whole
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from dataclasses import replace

from tierd.disk.frames import FRAME_BYTES_MAX, Frame, Link, stray_frames, unpack_frame
from tierd.errors import StorageError
from tierd.units import SECTOR_BYTES, round_up

PIECE_BYTES = FRAME_BYTES_MAX


class Window:
    """`offset` is where the next frame is looked for. `read(offset, buffer)` fills a buffer."""

    def __init__(self, read: Callable[[int, memoryview], None], size_bytes: int) -> None:
        self._read, self._size_bytes = read, size_bytes
        room_bytes = min(2 * PIECE_BYTES, max(size_bytes, SECTOR_BYTES))
        self._buffer = memoryview(mmap.mmap(-1, room_bytes))
        self._start = self._end = 0  # of what is held
        self.offset = 0

    def _hold(self, offset: int) -> memoryview:
        """Return what stands from `offset` on; valid until the next call."""
        start = offset // PIECE_BYTES * PIECE_BYTES
        if start != self._start:
            if start == self._start + PIECE_BYTES and self._end > start:
                self._buffer[: self._end - start] = self._buffer[
                    PIECE_BYTES : self._end - start + PIECE_BYTES
                ]
            else:
                self._end = start
            self._start = start
        end = min(start + 2 * PIECE_BYTES, self._size_bytes)
        while self._end < end:
            length = min(PIECE_BYTES, end - self._end)
            place = self._end - start
            self._read(self._end, self._buffer[place : place + length])
            self._end += length
        return self._buffer[offset - start : max(self._end - start, 0)]

    def find(self, follows: Link, seed: int) -> Frame | None:
        """Return the frame that follows, here or at the next sector; None if there is none."""
        for place in sorted({self.offset, round_up(self.offset, SECTOR_BYTES)}):
            try:
                frame = unpack_frame(self._hold(place), 0, seed)
            except StorageError:
                continue
            if frame.follows == follows:
                return replace(frame, offset=place)
        return None

    def pass_by(self, frame: Frame) -> None:
        """Look behind a frame from now on."""
        self.offset = frame.offset + frame.length

    def blank_here(self) -> bool:
        """Return whether nothing was written from here to the end of the next sector."""
        end = round_up(self.offset, SECTOR_BYTES) + SECTOR_BYTES
        return not any(self._hold(self.offset)[: end - self.offset])

    def strays(self, seed: int) -> Iterator[Frame]:
        """Yield the frames that begin at a sector from here on, whatever they follow."""
        place = round_up(self.offset, SECTOR_BYTES)
        while place < self._size_bytes:
            held = self._hold(place)
            end = min(self._start + PIECE_BYTES, self._size_bytes)
            for frame in stray_frames(held, end - place, seed):
                yield replace(frame, offset=place + frame.offset)
            place = end
