"""Direct cold writes: demoted pages are encoded in VRAM, and a disk takes whole slots from there.

    encode into slots in VRAM → statuses and digests to RAM → headers into the slots → write
    (two chunks: one is written while the other is encoded)

Invariants:
  a chunk is encoded into only when its last write has ended
  a write begins only after the event of what made its slots whole, and after the reads that were
    asked for before it; but those are waited for no more once they were late
  a chunk whose write did not end in time is never used again, nor freed before it has ended
  what the first write left on a disk is read back by the CPU and verified (coldwrite.py)

The header's xxh3-128 is of bytes that no CPU sees: the GPU makes it too (gpu/xxhashing.py). What
was rejected: a digest by the CPU, for which the payload would cross PCIe to RAM after all, so that
only the disk's reading of RAM was saved and the GPU's own link carried it twice; and pages that
have the device digest alone: header, index, journal and snapshot know a page by 16 bytes, and 64
bits do not stand for them. So header and ledger are as ever, and whoever reads such a page checks
it as any other. Of a page of 549 KB, 4 KiB cross PCIe to the GPU and 44 bytes to RAM.

A write that fails is done again by the CPU, from the hot pages, which stay until the commit. One
that is late leaves its slots to nobody: the plan ends, its locks stay, and the path is given up.

cuFile knows no stream order, so the host waits: for the encoder's event and no other. That a write
of a process that is killed ends before its locks go is taken from cuFile's being a call of one of
its threads, as a write of the CPU's is; it was not seen on a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tierd.codec.layout import HEADER_BYTES, PageLayout
from tierd.errors import DeviceFailed, HotBudgetExceeded
from tierd_engine.attention.plan import IntArray
from tierd_engine.coldparts import Ended, SlotRun
from tierd_engine.device.coldpath import PathWrite
from tierd_engine.device.encoder import DeviceEncoder, PlacedPages
from tierd_engine.device.fences import Fence
from tierd_engine.device.port import Buffer, Device, Rows
from tierd_engine.device.probing import ColdPaths

# 8 MiB at 2 MiB/s. A disk slower than that is the CPU's, whose plan has 20 s.
WRITE_SECONDS = 4.0
HEADER_SECONDS = 10.0  # 4 MiB of headers at most, behind a round: ten is a device that failed
# All that is read ahead, 40 MiB, at 20 MiB/s. Waited for in vain once a session: a plan that
# waited so at each of its 32 chunks would be late for no fault of its own.
READS_SECONDS = 2.0
FAILURES_MAX = 3  # one after the other: then the path is given up for this session


@dataclass(slots=True)
class DirectWriteCounts:
    """Chunks, pages and bytes that a disk took from VRAM; chunks that were to, by what befell them.

    `mismatches`: of a first write, that was not found on the disk as it should be.
    """

    chunks: int = 0
    pages: int = 0
    bytes: int = 0
    errors: int = 0
    mismatches: int = 0
    deadlines: int = 0


@dataclass(frozen=True, slots=True)
class _UnderWay:
    pages: int
    size_bytes: int
    writes: tuple[PathWrite, ...]

    @property
    def has_ended(self) -> bool:
        return all([write.wait(0) for write in self.writes])


class DirectWrites:
    """Chunks of slots in VRAM, and their writes. Used by one thread; `close` it.

    A chunk's life is `encode`, `start`, `wait` until it is not LATE. `after_reads`: waits for
    reads that a step needs, for some seconds at most, and returns whether they have ended.
    """

    def __init__(
        self, device: Device, encoder: DeviceEncoder, paths: ColdPaths,
        after_reads: Callable[[float], bool] = lambda seconds: True,
    ) -> None:  # fmt: skip
        self._device, self._encoder, self._paths = device, encoder, paths
        self._after_reads = after_reads
        self._chunks: list[Buffer] = []
        self._whole = device.new_event("slots in VRAM that may be written")
        self._under_way: dict[int, _UnderWay] = {}
        self._late: set[int] = set()
        self._reads_are_late = False
        self._counted_before: int | None = None
        self._in_a_row = 0
        self.counts = DirectWriteCounts()
        self.given_up = ""

    # -- which pages --------------------------------------------------------------
    def can_take(
        self, fds: Sequence[int], layout: PageLayout, chunk_bytes: int, chunks: int
    ) -> bool:
        """Return whether pages of these files and this layout go directly, by chunks of this size.

        The first call for a disk that none was read from yet probes it.
        """
        if self.given_up or not self._encoder.can_place(layout):
            return False
        if any(self._paths.write_path_for(fd) is None for fd in fds):
            return False
        return bool(self._chunks) or self._open(chunk_bytes, chunks)

    def _open(self, chunk_bytes: int, chunks: int) -> bool:
        try:
            for _ in range(chunks):
                self._chunks.append(self._device.allocate(chunk_bytes))
        except (HotBudgetExceeded, DeviceFailed) as error:
            self.given_up = f"no room for slots in VRAM: {error}"
            self.close()
            return False
        return True

    def is_proven(self, fds: Sequence[int]) -> bool:
        """Return whether a write to each of these files' disks was read back."""
        return all(self._paths.is_write_proven(fd) for fd in fds)

    def prove(self, fds: Sequence[int], failure: str) -> None:
        """Note what the first write to a disk has shown: `failure` "" if the CPU found it whole."""
        if failure:
            self.counts.mismatches += 1
        for fd in fds:
            if not self._paths.is_write_proven(fd):
                self._paths.prove_write(fd, failure, self._counted_before)

    # -- a chunk ------------------------------------------------------------------
    def encode(self, chunk: int, source: IntArray, layout: PageLayout) -> PlacedPages:
        """Encode hot pages at device addresses into the payloads of a chunk's slots.

        Raises DeviceFailed.
        """
        assert chunk not in self._under_way, "the chunk's write has not ended"
        slots = np.arange(len(source), dtype=np.int64) * layout.slot_bytes
        return self._encoder.place(
            source, self._chunks[chunk].address + HEADER_BYTES + slots, layout
        )

    def start(
        self, chunk: int, staged: int, pages: int, layout: PageLayout, runs: Sequence[SlotRun]
    ) -> None:
        """Give a chunk's slots what stands around their payloads, and begin to write them.

        `staged`: address of the same slots in pinned host memory, with headers, and zeros behind
        the payloads. Nothing reads it when this returns. Raises DeviceFailed.
        """
        buffer, size = self._chunks[chunk], layout.slot_bytes
        used = HEADER_BYTES + layout.payload_bytes
        for first, end in ((0, HEADER_BYTES), (used, size)):
            if first < end:
                rows = Rows(staged + first, size, buffer.address + first, size, end - first, pages)
                self._device.copy_in_rows(self._encoder.stream, rows)
        self._device.record(self._whole, self._encoder.stream, Fence.RECORD_SLOTS_WHOLE)
        self._device.wait_host(self._whole, HEADER_SECONDS, Fence.WAIT_SLOTS_WHOLE)
        self._reads_are_late = self._reads_are_late or not self._after_reads(READS_SECONDS)
        self._counted_before = self._paths.write_counts()
        writes: list[PathWrite] = []
        self._under_way[chunk] = _UnderWay(pages, pages * size, ())
        for run in runs:
            path = self._paths.write_path_for(run.fd)
            assert path is not None, "the pages were not to go directly"
            slots = buffer.tensor[run.first * size : (run.first + run.pages) * size]
            writes.append(path.start_write(run.fd, run.offset, slots))
            self._under_way[chunk] = _UnderWay(pages, pages * size, tuple(writes))

    def wait(self, chunk: int, seconds: float) -> Ended:
        """Wait for a chunk's write, `seconds` and WRITE_SECONDS at most; say how it has ended.

        LATE gives the path up; the chunk is used no more.
        """
        work = self._under_way.get(chunk)
        if work is None:
            return Ended.FAILED  # its start was interrupted: no write has begun
        until = time.monotonic() + min(seconds, WRITE_SECONDS)
        for write in work.writes:
            if not write.wait(max(until - time.monotonic(), 0.0)):
                if chunk not in self._late:
                    self._late.add(chunk)
                    self.counts.deadlines += 1
                self.given_up = self.given_up or "a direct write did not end in time"
                return Ended.LATE
        del self._under_way[chunk]
        errors = [write.error for write in work.writes if write.error]
        if errors:
            self._count_error(errors[0])
            return Ended.FAILED
        self._in_a_row = 0
        self.counts.chunks += 1
        self.counts.pages += work.pages
        self.counts.bytes += work.size_bytes
        return Ended.WRITTEN

    def _count_error(self, reason: str) -> None:
        self.counts.errors += 1
        self._in_a_row += 1
        if self._in_a_row == FAILURES_MAX and not self.given_up:
            self.given_up = f"{FAILURES_MAX} direct writes failed in a row: {reason}"

    # -- the rest -----------------------------------------------------------------
    def figures(self) -> dict[str, Any]:
        """Return the report's counts. `given_up`: why the path is used no more, "" if it is."""
        return {
            **asdict(self.counts), "given_up": self.given_up, "lost_chunks": len(self._under_way),
        }  # fmt: skip

    @property
    def total_bytes(self) -> int:
        """Bytes of chunks on the device."""
        return sum(buffer.size_bytes for buffer in self._chunks)

    def close(self) -> None:
        """Give the memory back, but not under a write that has not ended. Idempotent."""
        for chunk, buffer in enumerate(self._chunks):
            work = self._under_way.get(chunk)
            if work is None or work.has_ended:
                self._device.free(buffer)
        self._chunks.clear()

    def check_integrity(self) -> None:
        """Raise AssertionError if a chunk is under way that is not lost."""
        assert self.given_up or not self._under_way, f"{self._under_way=}"
