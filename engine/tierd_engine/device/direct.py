"""Direct cold units: a disk's bytes land in VRAM, and are attended once the GPU has checked them.

Invariants:
  a landing chunk is written to only after the event of its last reader
  bytes are attended only after the device digest of each page was found to be its header's
  a chunk whose read did not end in time is never used again, nor freed before it has ended
  every unit ends landed, or read by the CPU and verified there, or in a typed miss

A page's device digest is learned when the cold reader reads it for the first time: then the CPU
has verified header and bytes. From the next step on its unit goes direct, if every page of it
has one. What a digest names is bytes, not a place: a slot that holds another page by now does
not match. A unit that fails is read by the CPU at once, and from then on.

cuFile knows no stream order, so the host waits: for the last reader of a chunk before a read
goes there, for a read before its check, for the check before its use. The check has a stream of
its own: on the compute stream it would wait for all attention that is queued there.
"""

from __future__ import annotations

import enum
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tierd.codec.layout import HEADER_BYTES, PageLayout
from tierd.disk.header import device_digest_in
from tierd.errors import DeadlineExceeded
from tierd.units import SECTOR_BYTES
from tierd_engine.coldread import ColdPage, ColdReader, ColdUnit
from tierd_engine.device.coldpath import ColdPath, PathRead
from tierd_engine.device.fences import Fence
from tierd_engine.device.kernels import PageKernels
from tierd_engine.device.port import Buffer, Device
from tierd_engine.staging import RING_CHUNKS

# The stager holds as many as its own ring has; two more are on their way.
LANDING_CHUNKS = RING_CHUNKS + 2
# 8 MiB at 4 MiB/s. A disk slower than that is the cold reader's, which waits five times as long.
DIRECT_SECONDS = 2.0
CHECK_SECONDS = 10.0  # a kernel over 8 MiB, with nothing before it: ten is a device that failed
FAILURES_MAX = 3  # one after the other: then the path is given up for this session


class Elsewhere(enum.Enum):
    """A unit that has not landed. READER: the cold reader's next one. ASIDE: `read_aside`."""

    READER = "reader"
    ASIDE = "aside"


@dataclass(frozen=True, slots=True)
class Landing:
    """A checked unit in VRAM: payload addresses int64 [pages] on the device, until `release`."""

    chunk: int
    addresses: torch.Tensor


@dataclass(slots=True)
class DirectCounts:
    """Units, pages and bytes that landed; units that were to, by what befell them."""

    units: int = 0
    pages: int = 0
    bytes: int = 0
    errors: int = 0
    mismatches: int = 0
    deadlines: int = 0


@dataclass(frozen=True, slots=True)
class _Pending:
    unit: ColdUnit
    chunk: int
    reads: tuple[PathRead, ...]

    @property
    def has_ended(self) -> bool:
        return all([read.wait(0) for read in self.reads])


class DirectCold:
    """Splits cold units between a path and the cold reader. Used by one thread.

    `schedule` at each new plan, `begin` at each step, `take` for each of its cold units in
    order. `path_for`: the path for an open file, None where there is none.
    """

    def __init__(
        self, device: Device, kernels: PageKernels, reader: ColdReader,
        path_for: Callable[[int], ColdPath | None], chunk_bytes: int,
        *, chunks: int = LANDING_CHUNKS,
    ) -> None:  # fmt: skip
        self._device, self._kernels, self._reader, self._path_for = (
            device, kernels, reader, path_for
        )  # fmt: skip
        self._chunk_bytes, self._chunks = chunk_bytes, chunks
        self._landing = device.allocate(chunks * chunk_bytes)
        words = 8 * (chunk_bytes // SECTOR_BYTES)  # a slot is two sectors at least
        self._found, self._found_host = device.allocate(words), device.allocate_host(words)
        self._aside: list[Buffer] = []  # the last one is in use; a read may be stuck in others
        self._stream = device.new_stream("check")
        self._checked = device.new_event("a landed unit's digests")
        self._read = [device.new_event(f"landing {i} read") for i in range(chunks)]
        self._free: deque[int] = deque(range(chunks))
        self._addresses: dict[PageLayout, list[torch.Tensor]] = {}
        self._digests: dict[tuple[int, ...], int] = {}
        self._refused: set[tuple[int, ...]] = set()
        self._has_learned = False
        self._units: Sequence[ColdUnit] = ()
        self._is_direct: tuple[bool, ...] = ()
        self._queue: list[ColdUnit] = []  # direct units of a cycle
        self._issued = self._next = 0
        self._pending: deque[_Pending] = deque()
        self._lost: list[_Pending] = []
        self._in_a_row = 0
        self.counts = DirectCounts()
        self.given_up = ""

    # -- what goes direct ---------------------------------------------------------
    def learn(self, page: ColdPage, slot: memoryview) -> None:
        """Note the device digest of a page whose slot was verified. Called by reading threads."""
        digest = device_digest_in(slot)
        if digest is not None and self._digests.get(page.key) != digest:
            self._digests[page.key] = digest
            self._has_learned = True

    def schedule(self, units: Sequence[ColdUnit]) -> None:
        """Take these units in this order, again and again; forget what is not among them."""
        keys = {page.key for unit in units for page in unit.pages}
        known = self._digests
        self._digests = {key: known[key] for key in keys if key in known}
        self._refused &= keys
        self._units = units
        self._split(self._choose())

    def begin(self) -> None:
        """Start a step: units whose digests were learned in the last one go direct."""
        assert self._next in (0, len(self._units)), "a step given up needs a new schedule"
        self._next = 0
        if self._has_learned:
            chosen = self._choose()
            if chosen != self._is_direct:
                self._split(chosen)

    def _choose(self) -> tuple[bool, ...]:
        self._has_learned = False
        fds = {page.fd for unit in self._units for page in unit.pages}
        open_to_us = {fd for fd in fds if not self.given_up and self._path_for(fd) is not None}
        # Compiled threads read for a reader that tells nobody: where nothing can go direct, it
        # has nothing to tell.
        self._reader.on_verified = self.learn if open_to_us else None
        return tuple(
            all(
                page.fd in open_to_us
                and page.key in self._digests
                and page.key not in self._refused
                for page in unit.pages
            )
            for unit in self._units
        )

    def _split(self, is_direct: tuple[bool, ...]) -> None:
        self._drain()
        self._is_direct = is_direct
        pairs = list(zip(self._units, is_direct, strict=True))
        self._queue = [unit for unit, lands in pairs if lands]
        self._reader.set_schedule([unit for unit, lands in pairs if not lands])
        self._issued = self._next = 0
        self._issue()

    # -- a step's units -----------------------------------------------------------
    def take(self) -> Landing | Elsewhere:
        """Return the next cold unit, or where it is. Waits for its read, DIRECT_SECONDS at most."""
        number = self._next
        self._next += 1
        if not self._is_direct[number]:
            return Elsewhere.READER
        if self.given_up:
            self._leave_all()
            return Elsewhere.ASIDE
        if not self._pending:
            self._issue(must=True)
        pending = self._pending.popleft()
        assert pending.unit is self._units[number], "units are taken in order"
        began = time.monotonic()
        failure = self._land(pending)
        self._reader.wait_seconds += time.monotonic() - began
        self._issue()
        if failure:
            self._refuse(pending.unit, failure)
            return Elsewhere.ASIDE
        self._in_a_row = 0
        self.counts.units += 1
        self.counts.pages += len(pending.unit.pages)
        self.counts.bytes += len(pending.unit.pages) * pending.unit.layout.slot_bytes
        return Landing(pending.chunk, self._page_addresses(pending))

    def release(self, landing: Landing) -> None:
        """Say that all that reads a landed unit is on the compute stream."""
        event = self._read[landing.chunk]
        self._device.record(event, self._device.compute, Fence.RECORD_LANDING_READ)
        self._free.append(landing.chunk)
        self._issue()

    def read_aside(self) -> int:
        """Read the unit taken last with the CPU; return the address of its first slot.

        Pinned and verified, valid until the next call. Raises as ColdReader.take.
        """
        unit = self._units[self._next - 1]
        if not self._aside:
            self._aside.append(self._device.allocate_host(self._chunk_bytes + SECTOR_BYTES))
        buffer = self._aside[-1]
        start = -buffer.address % SECTOR_BYTES
        try:
            self._reader.read_aside(unit, buffer.tensor.numpy().data[start:])
        except DeadlineExceeded:
            # A stuck read may write there yet: the next one gets another buffer.
            self._aside.append(self._device.allocate_host(self._chunk_bytes + SECTOR_BYTES))
            raise
        return buffer.address + start

    # -- reads --------------------------------------------------------------------
    def _issue(self, *, must: bool = False) -> None:
        """Start reads where chunks are free, a cycle ahead at most. `must`: wait for one chunk."""
        while self._free and len(self._pending) < len(self._queue) and not self.given_up:
            chunk = self._free[0]
            if must:
                event = self._read[chunk]
                self._device.wait_host(event, CHECK_SECONDS, Fence.WAIT_LANDING_READ)
            elif not self._device.is_reached(self._read[chunk]):
                return
            must = False
            self._free.popleft()
            unit = self._queue[self._issued % len(self._queue)]
            self._issued += 1
            self._pending.append(_Pending(unit, chunk, tuple(self._start(unit, chunk))))

    def _start(self, unit: ColdUnit, chunk: int) -> Iterable[PathRead]:
        first, size = chunk * self._chunk_bytes, unit.layout.slot_bytes
        for start, stop in _neighbours(unit):
            page = unit.pages[start]
            path = self._path_for(page.fd)
            assert path is not None, "the unit was not to land"
            target = self._landing.tensor[first + start * size : first + stop * size]
            yield path.start(page.fd, page.offset, target)

    def _land(self, pending: _Pending) -> str:
        """Wait for a read, check it; return "", or what failed: then its chunk is free, or lost."""
        if not self._await(pending):
            self._leave(pending)
            return self.given_up
        errors = [read.error for read in pending.reads if read.error]
        if errors:
            self.counts.errors += 1
        elif not self._matches(pending):
            self.counts.mismatches += 1
            errors = ["the bytes do not match their device digest"]
        if errors:
            self._free.append(pending.chunk)
        return errors[0] if errors else ""

    def _await(self, pending: _Pending) -> bool:
        """Return whether all its reads end in time; else the path is given up."""
        until = time.monotonic() + DIRECT_SECONDS
        for read in pending.reads:
            if not read.wait(max(until - time.monotonic(), 0.0)):
                self.counts.deadlines += 1
                self.given_up = f"a direct read did not end within {DIRECT_SECONDS:g} s"
                return False
        return True

    def _matches(self, pending: _Pending) -> bool:
        pages, layout = pending.unit.pages, pending.unit.layout
        keys = [page.key for page in pages]
        expected = np.array([self._digests.get(key, 0) for key in keys], dtype=np.uint64)
        host = self._found_host.tensor.view(torch.int64)[: len(pages)].numpy().view(np.uint64)
        host[:] = ~expected  # so that digests that were not made never match
        found = self._found.tensor.view(torch.int64)[: len(pages)]
        addresses = self._page_addresses(pending)
        device, stream = self._device, self._stream
        device.launch(stream, lambda: self._kernels.digest(addresses, layout.payload_bytes, found))
        device.copy_out(stream, self._found.address, self._found_host.address, 8 * len(pages))
        device.record(self._checked, stream, Fence.RECORD_CHECKED)
        device.wait_host(self._checked, CHECK_SECONDS, Fence.WAIT_CHECKED)
        is_known = all(key in self._digests for key in keys)
        return is_known and bool((host == expected).all())

    def _refuse(self, unit: ColdUnit, reason: str) -> None:
        self._refused.update(page.key for page in unit.pages)
        self._has_learned = True  # the next step splits anew
        self._in_a_row += 1
        if self._in_a_row == FAILURES_MAX and not self.given_up:
            self.given_up = f"{FAILURES_MAX} direct reads failed in a row: {reason}"

    def _leave(self, pending: _Pending) -> None:
        if pending.has_ended:
            self._free.append(pending.chunk)
        else:
            self._lost.append(pending)

    def _leave_all(self) -> None:
        while self._pending:
            self._leave(self._pending.popleft())

    def _drain(self) -> None:
        """Let what is under way end; what does not in time is left where it is."""
        for pending in self._pending:
            if self.given_up or not self._await(pending):
                break
        self._leave_all()

    def wait_for_reads(self, seconds: float) -> bool:
        """Wait until what is being read has landed, `seconds` at most; return whether it has."""
        until = time.monotonic() + seconds
        reads = [read for pending in self._pending for read in pending.reads]
        return all(read.wait(max(until - time.monotonic(), 0.0)) for read in reads)

    # -- the rest -----------------------------------------------------------------
    def prepare(self, layouts: Iterable[PageLayout]) -> None:
        """Put addresses of these layouts on the device, so that no step does."""
        for layout in layouts:
            if layout in self._addresses:
                continue
            per_chunk = self._chunk_bytes // layout.slot_bytes
            slots = np.arange(per_chunk, dtype=np.int64) * layout.slot_bytes + HEADER_BYTES
            self._addresses[layout] = [
                self._to_device(self._landing.address + chunk * self._chunk_bytes + slots)
                for chunk in range(self._chunks)
            ]

    def _to_device(self, numbers: npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(numbers).to(self._device.torch_device)

    def _page_addresses(self, pending: _Pending) -> torch.Tensor:
        return self._addresses[pending.unit.layout][pending.chunk][: len(pending.unit.pages)]

    def figures(self) -> dict[str, Any]:
        """Return the report's counts. `given_up`: why the path is used no more, "" if it is."""
        return {**asdict(self.counts), "given_up": self.given_up, "lost_chunks": len(self._lost)}

    @property
    def total_bytes(self) -> int:
        """Bytes of landing chunks on the device."""
        return self._landing.size_bytes + self._found.size_bytes

    def close(self) -> None:
        """Give the memory back, but not under a read that has not ended. No reader may be left."""
        self._reader.on_verified = None
        self._drain()
        self._lost = [pending for pending in self._lost if not pending.has_ended]
        buffers = [self._found, self._found_host, *self._aside[-1:]]
        for buffer in buffers if self._lost else [self._landing, *buffers]:
            self._device.free(buffer)

    def check_integrity(self) -> None:
        """Raise AssertionError unless no chunk is in two places at once."""
        pending = [read.chunk for read in (*self._pending, *self._lost)]
        chunks = [*self._free, *pending]
        assert len(set(chunks)) == len(chunks) <= self._chunks, f"{self._free=} {pending=}"


def _neighbours(unit: ColdUnit) -> Iterable[tuple[int, int]]:
    """Yield [start, stop) of pages that follow one another on disk as they do in the unit."""
    start = 0
    for number in range(1, len(unit.pages) + 1):
        if number < len(unit.pages):
            page, before = unit.pages[number], unit.pages[number - 1]
            if page.fd == before.fd and page.offset == before.offset + unit.layout.slot_bytes:
                continue
        yield start, number
        start = number
