"""What the cold writer is made of: who encodes, stages and writes, and the records between them.

A `Loan` is a demotion's slabs, open and locked; a `Batch` what is known of its pages; a `Part` a
chunk of them, in the order of their slots.
"""

from __future__ import annotations

import contextlib
import enum
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tierd.client import Demotion
from tierd.codec.layout import PageLayout
from tierd.disk.slotlocks import unlock_range
from tierd.memory.regions import anonymous
from tierd.types import CodecId

IntArray = npt.NDArray[np.int64]
U8Array = npt.NDArray[np.uint8]
U64Array = npt.NDArray[np.uint64]


class Encoded(Protocol):
    """What an encoder returns (agent.EncodedPages)."""

    @property
    def status(self) -> npt.NDArray[np.uint8]: ...
    @property
    def device_digests(self) -> npt.NDArray[np.uint64] | None: ...


class Staging(Protocol):
    """Memory for CHUNKS chunks, its address a multiple of 4 KiB, pinned where that is of use."""

    address: int
    view: memoryview

    def close(self) -> None:
        """Give it back; nothing reads or writes it any more."""


class HostStaging:
    """Staging in this process's own memory."""

    def __init__(self, size_bytes: int) -> None:
        self.address, self.view = anonymous(size_bytes)

    def close(self) -> None:
        """See Staging: the last reference to it frees it."""


class Placed(Encoded, Protocol):
    """What is known of pages that stand in VRAM: their xxh3-128 too, uint8 [pages, 16]."""

    @property
    def digests(self) -> npt.NDArray[np.uint8]: ...


@dataclass(frozen=True, slots=True)
class SlotRun:
    """Slots that follow one another in a file as they do in a chunk, from its slot `first` on."""

    fd: int
    offset: int
    first: int
    pages: int


class Ended(enum.Enum):
    """How a direct write has ended. LATE: it has not, and may write yet."""

    WRITTEN = "written"
    FAILED = "failed"
    LATE = "late"


class DirectPath(Protocol):
    """Who writes slots from VRAM: device/directwrite.DirectWrites, which see."""

    @property
    def total_bytes(self) -> int: ...
    def can_take(
        self, fds: Sequence[int], layout: PageLayout, chunk_bytes: int, chunks: int
    ) -> bool: ...
    def encode(self, chunk: int, source: IntArray, layout: PageLayout) -> Placed: ...
    def start(
        self, chunk: int, staged: int, pages: int, layout: PageLayout, runs: Sequence[SlotRun]
    ) -> None: ...
    def wait(self, chunk: int, seconds: float) -> Ended: ...
    def is_proven(self, fds: Sequence[int]) -> bool: ...
    def prove(self, fds: Sequence[int], failure: str) -> None: ...
    def figures(self) -> dict[str, Any]: ...
    def close(self) -> None: ...
    def check_integrity(self) -> None: ...


@dataclass(slots=True, eq=False)
class Loan:
    """The slabs of a demotion, open for writing, and what of them is locked."""

    fds: dict[int, int] = field(default_factory=dict)
    locked: list[tuple[int, int, int]] = field(default_factory=list)

    def close(self) -> None:
        """Unlock and close everything."""
        for slab, start, size in self.locked:
            with contextlib.suppress(OSError):  # the close below lets it go as well
                unlock_range(self.fds[slab], start, size)
        for fd in self.fds.values():
            os.close(fd)
        self.fds.clear()
        self.locked.clear()


@dataclass(slots=True, eq=False)
class Batch:
    """A demotion that is being written, and what is known of its pages, [blocks, layers]."""

    loan: Loan
    demotion: Demotion
    source: IntArray
    encode: Callable[[IntArray, IntArray, PageLayout], Encoded]
    require_encoded: Callable[[U8Array, Sequence[int], CodecId], None]
    status: U8Array
    digests: U8Array
    device_digests: U64Array
    has_device_digests: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A chunk's pages: (rows, layers), in the order of their slots."""

    batch: Batch
    at: tuple[IntArray, IntArray]
    layout: PageLayout
    runs: tuple[SlotRun, ...]

    @property
    def pages(self) -> int:
        """How many there are."""
        return len(self.at[0])

    @property
    def fds(self) -> list[int]:
        """The files that they go to."""
        return sorted({run.fd for run in self.runs})

    def take(self, encoded: Encoded, digests: U8Array) -> None:
        """Note what encoding gave. Raises CodecError for a page that cannot be encoded."""
        batch = self.batch
        batch.status[self.at] = encoded.status
        batch.require_encoded(batch.status, batch.demotion.blocks, self.layout.codec)
        batch.digests[self.at] = digests
        if encoded.device_digests is not None:
            batch.has_device_digests = True
            batch.device_digests[self.at] = encoded.device_digests


def slot_runs(
    loan: Loan, demotion: Demotion, at: tuple[IntArray, IntArray], layout: PageLayout
) -> Iterator[SlotRun]:
    """Yield the runs of a part's slots, in their order."""
    slabs, slots = demotion.slab[at], demotion.slot[at].astype(np.int64)
    # Slabs apart, so that the last slot of one and the first of the next are no neighbours.
    places = slabs.astype(np.int64) << 32 | slots
    done = 0
    for _, count in runs_of(places):
        fd, offset = loan.fds[int(slabs[done])], int(slots[done]) * layout.slot_bytes
        yield SlotRun(fd, offset, done, count)
        done += count


def runs_of(numbers: npt.NDArray[Any]) -> Iterator[tuple[int, int]]:
    """Yield (first, count) of each run of numbers that rise by one."""
    cuts = np.flatnonzero(np.diff(numbers) != 1) + 1
    for part in np.split(numbers, cuts):
        if len(part):
            yield int(part[0]), len(part)
