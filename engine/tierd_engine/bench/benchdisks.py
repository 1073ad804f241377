"""Disks of the disk benchmark: one that counts, one that answers after a fixed time.

The second shows our own path apart from the disk. It is at `depth` I/Os at a time, as a drive has
so many units, and more wait in its queue. Each takes the time that makes its bytes per second of
all together, whatever the machine's own disk does meanwhile.

It moves no bytes, as a disk takes no CPU to move them: of a spill it keeps the pages' headers, and
a read gives these back alone. A page's bytes must stand already where they are read to.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Sequence

from tierd.codec.layout import HEADER_BYTES
from tierd.disk.posix import PosixDisk


class CountingDisk(PosixDisk):
    """Counts I/Os, so that the limit is measured at our size of an I/O."""

    ios = 0
    io_bytes = 0

    def scatter(self, handle: int, offset: int, buffers: Sequence[memoryview]) -> None:
        """Read, as a disk does."""
        self.count(buffers)
        super().scatter(handle, offset, buffers)

    def write(self, handle: int, offset: int, buffers: Sequence[memoryview]) -> None:
        """Write, as a disk does."""
        self.count(buffers)
        super().write(handle, offset, buffers)

    def count(self, buffers: Sequence[memoryview]) -> None:
        """Count an I/O."""
        self.ios += 1
        self.io_bytes += sum(map(len, buffers))


class SteadyDisk(CountingDisk):
    """Answers with the same bytes per second always. Create and delete are the real folder's."""

    def __init__(self, folder: str, depth: int, bytes_per_second: float, slot_bytes: int) -> None:
        super().__init__(folder, ephemeral=True)
        self._seconds_per_byte = depth / bytes_per_second
        self._slot_bytes = slot_bytes
        self._mutex = threading.Lock()
        self._ends = [0.0] * depth  # when each of its units is free again; a heap
        self._headers: dict[int, dict[int, memoryview]] = {}  # of each file's slots
        self._spare: list[memoryview] = []  # new memory costs more than the copy

    def write(self, handle: int, offset: int, buffers: Sequence[memoryview]) -> None:
        """Keep the headers: every other buffer is a slot's, and another its payload."""
        self.count(buffers)
        of_file = self._headers.setdefault(handle, {})
        for place, header in enumerate(buffers[::2], offset // self._slot_bytes):
            kept = self._spare.pop() if self._spare else memoryview(bytearray(HEADER_BYTES))
            kept[:] = header
            of_file[place] = kept
        self.answer(sum(map(len, buffers)))

    def scatter(self, handle: int, offset: int, buffers: Sequence[memoryview]) -> None:
        """Give the headers back: a buffer is a slot."""
        self.count(buffers)
        for place, slot in enumerate(buffers, offset // self._slot_bytes):
            slot[:HEADER_BYTES] = self._headers[handle][place]
        self.answer(sum(map(len, buffers)))

    def delete(self, handle: int) -> None:
        """Remove a file."""
        self._spare.extend(self._headers.pop(handle, {}).values())
        super().delete(handle)

    def answer(self, size_bytes: int) -> None:
        """Return when an I/O of so many bytes, begun now, is done."""
        seconds = size_bytes * self._seconds_per_byte
        with self._mutex:
            end = max(self._ends[0], time.perf_counter()) + seconds
            heapq.heapreplace(self._ends, end)
        time.sleep(max(0.0, end - time.perf_counter()))
