"""Cold reader: brings cold pages into the staging ring before they are attended.

Invariants:
  taken <= issued <= taken + chunks; a chunk is refilled only after `release`
  a page's address leaves `take` only after its header and digest were verified
  every wait ends at a deadline

Exact decode reads the same cold pages, in the same order, at every step: the
schedule is known, and cyclic. So reading ahead is no guess, and the first
units of a step are read under the end of the step before. Pages of a unit that
are neighbours on disk are read in one I/O.

Where it can be, compiled threads read and check (coldpool.py). A unit that is
not right then, and all others, are read by threads of Python, which say why.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tierd.codec.layout import HEADER_BYTES, PageLayout
from tierd.disk.header import SlotCheck
from tierd.errors import DeadlineExceeded, PageDamaged, PageMiss, TierdError
from tierd.units import RUN_BYTES
from tierd_engine.staging import StagingRing
from tierd_engine.workthreads import WorkThreads

if TYPE_CHECKING:  # it imports Numba, which is of use only where pages are cold
    from tierd_engine.coldpool import ColdPool, Run

# Where a layer's pages lie apart on disk, many reads at a time make up for their size.
READ_THREADS = 16
# 8 MiB in a chunk; 1 MiB/s is the slowest disk a job can still use: 8 s, and 2 s of grace.
READ_DEADLINE_SECONDS = 10.0
# A job of the team hears of nothing while it waits, a Ctrl-C neither: what comes later than this
# is waited for layer by layer.
JOB_WAIT_SECONDS = 1.0
FILLS = 4  # in which all chunks are filled again: each wakes threads
# Reads that one thread does for one future: a future costs as much of the interpreter's lock as
# two pages' digests. A ring of two units of 4 MiB still has a share for each thread.
SHARE_BYTES = 512 << 10
# The ring is cut into as many chunks as units fit: a step of a few megabytes is then read under
# the one before it, whole.
CHUNKS_MAX = 64
_READS_PER_PAGE = 2  # a digest mismatch gets one re-read, for a bit flipped on the way


@dataclass(frozen=True, slots=True)
class ColdPage:
    """One page to read: where it lies and what its header must say."""

    layer: int
    block: int
    fd: int
    offset: int
    verify: Callable[[memoryview], object]
    generation: int = 0

    @property
    def key(self) -> tuple[int, int, int, int, int]:
        """What no two writes of pages of one session share."""
        return self.layer, self.block, self.fd, self.offset, self.generation


@dataclass(frozen=True, slots=True)
class ColdUnit:
    """Pages of one layer and one codec that fill at most one chunk."""

    layout: PageLayout
    pages: tuple[ColdPage, ...]

    def runs(self) -> list[list[int]]:
        """Return the pages' numbers as runs of neighbours on disk, each RUN_BYTES together."""
        runs: list[list[int]] = []
        pages_max = -(-RUN_BYTES // self.layout.slot_bytes)
        for i in sorted(range(len(self.pages)), key=self._place):
            if runs and len(runs[-1]) < pages_max and self._follows(runs[-1][-1], i):
                runs[-1].append(i)
            else:
                runs.append([i])
        return runs

    def shares(self) -> list[list[list[int]]]:
        """Return the runs as what one thread each reads, SHARE_BYTES together or a run more."""
        shares: list[list[list[int]]] = []
        size_bytes = SHARE_BYTES
        for run in self.runs():
            if size_bytes >= SHARE_BYTES:
                shares.append([])
                size_bytes = 0
            shares[-1].append(run)
            size_bytes += len(run) * self.layout.slot_bytes
        return shares

    def pool_shares(self, shares: Sequence[Sequence[Sequence[int]]]) -> list[list[Run]]:
        """Return such shares as the pool takes them: runs that are neighbours in the chunk too."""
        from tierd_engine.coldpool import Run

        size_bytes = self.layout.slot_bytes
        made: list[list[Run]] = []
        for share in shares:
            made.append([])
            for run in share:
                for at, number in enumerate(run):
                    page, offset = self.pages[number], number * size_bytes
                    if not at or run[at - 1] + 1 != number:
                        made[-1].append(Run(page.fd, page.offset, offset))
                    assert isinstance(page.verify, SlotCheck)
                    made[-1][-1].add(offset, size_bytes, page.verify)
        return made

    def _place(self, number: int) -> tuple[int, int]:
        return self.pages[number].fd, self.pages[number].offset

    def _follows(self, number: int, following: int) -> bool:
        fd, offset = self._place(number)
        return self._place(following) == (fd, offset + self.layout.slot_bytes)


_Pieces = list[tuple[ColdPage, memoryview]]


class ColdReader:
    """Reads a cyclic schedule of units ahead of `take`. Used by one thread.

    `cuts_ring`: into chunks as small as the units are, and no longer as the ring is made; not
    where its own chunks are pinned one by one.
    `on_verified`: told of each page with the slot's bytes, once they are verified; called by
    the threads that read.
    """

    def __init__(
        self,
        ring: StagingRing,
        clock: Callable[[], float] = time.monotonic,
        *,
        cuts_ring: bool = True,
    ) -> None:
        self.ring, self._cuts_ring = ring, cuts_ring
        self._clock = clock
        # Reads of Python's threads that may still write, whoever waits for them.
        self._unsettled: set[Future[None]] = set()
        self._threads: WorkThreads | None = None  # both are made when they are first needed
        self._pool: ColdPool | None = None
        self._is_pooled = False  # the schedule is the pool's
        self.on_verified: Callable[[ColdPage, memoryview], None] | None = None
        self._units: Sequence[ColdUnit] = ()
        self._chunk_bytes, self._chunks = ring.chunk_bytes, ring.chunks
        self._shares: list[list[list[list[int]]]] = []  # of each unit
        self._unit_bytes: list[int] = []
        self._payloads: list[npt.NDArray[np.int64]] = []  # offsets in a chunk
        self._issued: deque[Sequence[Future[None]]] = deque()
        self._issued_count = 0
        self._taken_count = 0
        self._released_count = 0
        self.pages_read = 0
        self.bytes_read = 0
        self.wait_seconds = 0.0

    def set_schedule(self, units: Sequence[ColdUnit]) -> None:
        """Read `units` in this order, again and again. Drops what an older schedule read."""
        self._drain()
        self._units, self._shares = (), []
        self._issued_count = self._taken_count = self._released_count = 0
        sizes = [len(unit.pages) * unit.layout.slot_bytes for unit in units]
        largest_bytes = max(sizes, default=self.ring.chunk_bytes)
        assert largest_bytes <= self.ring.chunk_bytes, "a unit is larger than a chunk of the ring"
        if self._cuts_ring:
            self._chunk_bytes = largest_bytes
            self._chunks = min(self.ring.total_bytes // largest_bytes, CHUNKS_MAX)
        self._shares = [unit.shares() for unit in units]
        self._unit_bytes = sizes
        self._payloads = [
            HEADER_BYTES + np.arange(len(unit.pages), dtype=np.int64) * unit.layout.slot_bytes
            for unit in units
        ]
        self._is_pooled = bool(units) and self._set_pool(units)
        self._units = units
        self._fill()

    def _set_pool(self, units: Sequence[ColdUnit]) -> bool:
        """Give the schedule to the pool, if it can check these pages; say whether it can."""
        checks = (page.verify for unit in units for page in unit.pages)
        if self.on_verified is not None or not all(isinstance(c, SlotCheck) for c in checks):
            return False
        if self._pool is None:
            from tierd.codec import xxh3
            from tierd_engine.coldpool import ColdPool

            if not xxh3.is_there():
                return False
            try:
                self._pool = ColdPool(READ_THREADS, CHUNKS_MAX, self.ring)
            except (OSError, TierdError):  # no fds or no threads left: Python's may do
                return False
        table = zip(units, self._shares, strict=True)
        addresses = [self._address(chunk) for chunk in range(self._chunks)]
        self._pool.set_table(
            [unit.pool_shares(shares) for unit, shares in table], addresses,
            min(self._chunks, len(units)), self._refill(len(units)), JOB_WAIT_SECONDS,
        )  # fmt: skip
        return True

    def take(self) -> npt.NDArray[np.int64]:
        """Return the payload addresses of the next unit's pages, verified.

        Valid until `release`. Raises PageDamaged, PageMiss or DeadlineExceeded;
        the reader then needs a new schedule.
        """
        number = self._taken_count
        index, chunk = number % len(self._units), number % self._chunks
        futures = () if self._is_pooled else self._issued.popleft()
        if not (self._is_pooled and self._pool_has_read(number)):
            self._wait_for(self._units[index], chunk, futures)
        self._taken_count += 1
        self.pages_read += len(self._units[index].pages)
        self.bytes_read += self._unit_bytes[index]
        return self._payloads[index] + self._address(chunk)

    # -- a job of the team that takes units by itself ---------------------------------
    def pool_for_job(self) -> ColdPool | None:
        """Return what such a job waits at and gives back to; None where it cannot.

        It takes the next units from `next_number` on, then `taken_by_job` is called.
        """
        return self._pool if self._is_pooled else None

    @property
    def next_number(self) -> int:
        """The schedule's number of the unit that is taken next."""
        return self._taken_count

    def addresses_of(self, number: int) -> npt.NDArray[np.int64]:
        """Return where a number's payloads will be, once it is there."""
        payloads = self._payloads[number % len(self._units)]
        return payloads + self._address(number % self._chunks)

    def taken_by_job(self, units: int) -> bool:
        """Count so many units as taken and released; return whether all of them were sound.

        If not, the reader needs a new schedule.
        """
        assert self._pool is not None
        self.wait_seconds += self._pool.waited_seconds()
        if self._pool.has_failed:
            return False
        for number in range(self._taken_count, self._taken_count + units):
            index = number % len(self._units)
            self.pages_read += len(self._units[index].pages)
            self.bytes_read += self._unit_bytes[index]
        self._taken_count += units
        self._released_count += units
        self._issued_count = self._pool.issued
        return True

    def _wait_for(self, unit: ColdUnit, chunk: int, futures: Sequence[Future[None]]) -> None:
        """Wait for the unit that is taken next, and read it again if the pool could not."""
        start = self._clock()
        try:
            if self._is_pooled and not self._pool_wait(start):
                shares = self._shares[self._taken_count % len(self._units)]
                futures = self._submit(unit, shares, self._views(unit, chunk), tries=1)
            self._await(futures, start)
        finally:
            self.wait_seconds += self._clock() - start

    def read_aside(self, unit: ColdUnit, into: memoryview) -> None:
        """Read one unit, out of the schedule's order, to `into`: its slots, one after the other.

        `into` is 4 KiB-aligned. Verifies as `take` does, and raises the same.
        """
        size = unit.layout.slot_bytes
        views = [into[i * size : (i + 1) * size] for i in range(len(unit.pages))]
        start = self._clock()
        self._await(self._submit(unit, unit.shares(), views), start)
        self.wait_seconds += self._clock() - start
        self._count(unit)

    def _await(self, futures: Sequence[Future[None]], start: float) -> None:
        """Wait for all of them, then raise what the first that failed did."""
        failed: PageMiss | PageDamaged | None = None
        for future in futures:
            try:
                future.result(timeout=max(self._seconds_left(start), 0.0))
            except FutureTimeout:
                raise _no_answer() from None
            except (PageMiss, PageDamaged) as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def _pool_has_read(self, number: int) -> bool:
        assert self._pool is not None
        return self._pool.has_read(number)

    def _pool_wait(self, start: float) -> bool:
        assert self._pool is not None
        try:
            return self._pool.wait(self._taken_count, lambda: self._seconds_left(start))
        except TimeoutError:
            raise _no_answer() from None

    def _seconds_left(self, start: float) -> float:
        return start + READ_DEADLINE_SECONDS - self._clock()

    def _count(self, unit: ColdUnit) -> None:
        self.pages_read += len(unit.pages)
        self.bytes_read += len(unit.pages) * unit.layout.slot_bytes

    def release(self) -> None:
        """Let the chunk of the last taken unit be filled again, now or together with the next."""
        self._released_count += 1
        assert self._released_count == self._taken_count, "one unit is in use at a time"
        if self._is_pooled:
            assert self._pool is not None
            self._pool.release()
            self._issued_count = self._pool.issued
            return
        ahead = self._issued_count - self._released_count
        if ahead <= self._ahead_max - self._refill(len(self._units)):
            self._fill()

    @property
    def _ahead_max(self) -> int:
        """Never further than one whole cycle: a short schedule is read once a step."""
        return min(self._chunks, len(self._units))

    def _refill(self, units: int) -> int:
        """How many of so many units are begun together."""
        return max(1, min(self._chunks, units) // FILLS)

    def _fill(self) -> None:
        first, end = self._issued_count, self._released_count + self._ahead_max
        if first >= end:
            return
        if self._is_pooled:
            assert self._pool is not None
            self._pool.fill()
        else:
            for number in range(first, end):
                index, chunk = number % len(self._units), number % self._chunks
                views = self._views(self._units[index], chunk)
                self._issued.append(self._submit(self._units[index], self._shares[index], views))
        self._issued_count = end

    def _views(self, unit: ColdUnit, chunk: int) -> list[memoryview]:
        size = unit.layout.slot_bytes
        first = chunk * self._chunk_bytes
        return [self.ring.view(first + i * size, size) for i in range(len(unit.pages))]

    def _address(self, chunk: int) -> int:
        return self.ring.base_address + chunk * self._chunk_bytes

    def _submit(
        self,
        unit: ColdUnit,
        shares: Sequence[Sequence[Sequence[int]]],
        views: Sequence[memoryview],
        *,
        tries: int = _READS_PER_PAGE,
    ) -> list[Future[None]]:
        if self._threads is None:
            self._threads = WorkThreads(READ_THREADS, "tierd-cold", PageMiss)
        futures = []
        for share in shares:
            runs = [[(unit.pages[number], views[number]) for number in run] for run in share]
            future = self._threads.submit(partial(self._read_share, runs, tries))
            self._unsettled.add(future)
            future.add_done_callback(self._unsettled.discard)
            futures.append(future)
        return futures

    def _read_share(self, runs: Sequence[_Pieces], tries: int) -> None:
        """Read runs of neighbours, each together if that works, then verify every page.

        Page by page where it does not: that says which one is at fault.
        """
        are_read = [_read_together(pieces) for pieces in runs]
        for pieces, is_read in zip(runs, are_read, strict=True):
            for page, into in pieces:
                _read_page(page, into, is_read=is_read, tries=tries)
                told = self.on_verified  # it may be taken back meanwhile
                if told is not None:
                    told(page, into)

    def _drain(self) -> None:
        """Wait until nothing writes to the ring. Raises DeadlineExceeded; it may be called again.

        The outcome of a read that nobody takes any more does not matter.
        """
        self._issued.clear()
        running = [future for future in tuple(self._unsettled) if not future.cancel()]
        start = self._clock()
        try:
            if self._pool is not None:
                self._pool.skip(lambda: self._seconds_left(start))
            if wait_for(running, max(self._seconds_left(start), 0.0)).not_done:
                raise TimeoutError
        except TimeoutError:
            raise DeadlineExceeded("cold tier: a read did not end in time") from None

    def close(self) -> None:
        """Stop reading. A read stuck in the kernel is left to end by itself."""
        for future in tuple(self._unsettled):
            future.cancel()
        if self._threads is not None:
            self._threads.stop()
        if self._pool is not None:
            self._pool.close()

    def check_integrity(self) -> None:
        """Raise AssertionError unless the ring's counts add up."""
        issued, taken, released = self._issued_count, self._taken_count, self._released_count
        assert released <= taken <= released + 1, f"{released=} {taken=}"
        assert issued - released <= self._chunks, f"{issued=} {released=}"
        futures = 0 if self._is_pooled else issued - taken
        assert len(self._issued) == futures, f"{len(self._issued)=} {issued=} {taken=}"
        if self._pool is not None:
            self._pool.check_integrity()


def _no_answer() -> DeadlineExceeded:
    return DeadlineExceeded(
        f"cold tier: the disk did not answer within {READ_DEADLINE_SECONDS:.0f} s"
    )


def _read_together(pieces: _Pieces) -> bool:
    first = pieces[0][0]
    views = [view for _, view in pieces]
    try:
        return os.preadv(first.fd, views, first.offset) == sum(map(len, views))
    except OSError:
        return False


def _read_page(page: ColdPage, into: memoryview, *, is_read: bool, tries: int) -> None:
    for attempt in range(tries):
        if attempt or not is_read:
            _read_whole(page, into)
        try:
            page.verify(into)
        except PageDamaged:
            if attempt + 1 == tries:
                raise
        else:
            return


def _read_whole(page: ColdPage, into: memoryview) -> None:
    done = 0
    while done < len(into):
        try:
            got = os.preadv(page.fd, [into[done:]], page.offset + done)
        except OSError as error:
            # Whatever the disk says, the page is gone for us: recomputing it is always right.
            raise PageMiss(
                f"cold tier: layer {page.layer} block {page.block}: {error.strerror}",
                layer=page.layer,
                block=page.block,
            ) from error
        if got == 0:
            raise PageMiss(
                f"cold tier: layer {page.layer} block {page.block}: slab file ends early",
                layer=page.layer,
                block=page.block,
            )
        done += got
