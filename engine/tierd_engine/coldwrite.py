"""Cold writer: demoted pages go to cold slots that the daemon lent, past the warm tier.

    lock the slots → is the daemon there? → encode a chunk → digest, headers → write → the next
                                          (two chunks: one is written while the other is encoded)

Headers and payloads are what the daemon would write (tierd/disk/header.py), in the bytes of the
warm slot; the caller commits the digests while the slots are locked, and unlocks then.

Invariants:
  a slot is written to only under its lock, and only if the daemon that lent it was there after
  a lock goes when no write of its slot is left; one that is stuck keeps it for good
  a chunk is encoded into only when its last write has ended
  every wait ends at a deadline; what a stuck write uses is used for nothing else any more
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tierd.client import Client, Demotion, MappedSlab, SessionHandle
from tierd.codec import digest_pages
from tierd.codec.layout import HEADER_BYTES, PageLayout, page_layout
from tierd.disk.header import SlotHeader
from tierd.disk.ports import storage_errors
from tierd.disk.slotlocks import lock_range, unlock_range
from tierd.errors import DaemonUnavailable, StorageError
from tierd.memory.regions import anonymous
from tierd.types import CodecId
from tierd.units import MIB, SECTOR_BYTES, round_up
from tierd_engine.workthreads import WorkThreads

CHUNK_BYTES = 8 * MIB
CHUNKS = 2
# A plan holds 256 MiB, or one block, and is revoked after 30 s: a disk that does not take it in
# 20 is left to the daemon, which waits more patiently.
PLAN_SECONDS = 20.0
AGAIN_SECONDS = 5.0  # after an error: blocks wait for warm room meanwhile, as without a writer

IntArray = npt.NDArray[np.int64]
# xxh3-128 uint8 [pages, 16] and device digests uint64 [pages], or None
_Pages = npt.NDArray[np.uint8]


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


@dataclass(slots=True)
class ColdWriteCounts:
    """Pages and bytes written, headers too, and plans that failed on the disk."""

    pages: int = 0
    bytes: int = 0
    failures: int = 0


@dataclass(frozen=True, slots=True)
class _Run:
    """Slots that follow one another on disk, as they do in a chunk."""

    slab: int
    offset: int
    view: memoryview


@dataclass(slots=True, eq=False)
class _Loan:
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


class ColdWriter:
    """Writes the pages of one session's demotions. Used by one thread; `close` it.

    `write`: os.pwritev, or a fake of it. `can_write`: whether to ask for cold slots now.
    """

    def __init__(
        self,
        client: Client,
        handle: SessionHandle,
        *,
        staging: Callable[[int], Staging] = HostStaging,
        chunk_bytes: int = CHUNK_BYTES,
        write: Callable[[int, Sequence[memoryview], int], int] = os.pwritev,
        plan_seconds: float = PLAN_SECONDS,
    ) -> None:
        geometry = handle.namespace.geometry
        self._client, self._handle, self._write = client, handle, write
        largest = page_layout(geometry, CodecId.RAW).slot_bytes
        self._chunk_bytes = round_up(max(chunk_bytes, largest), SECTOR_BYTES)
        self._make_staging = staging
        self._staging: Staging | None = None  # made with the threads, at the first cold demotion
        self._threads: WorkThreads | None = None
        self._writes: list[Future[None] | None] = [None] * CHUNKS
        self._next_chunk = 0
        self._plan_seconds = plan_seconds
        self._deadline_seconds = 0.0
        self._again_seconds = float("-inf")
        self._namespace_digest = handle.namespace.digest()
        self.given_up = ""
        self.counts = ColdWriteCounts()

    @property
    def can_write(self) -> bool:
        """Whether cold slots are of use: not just after an error, never after a stuck write."""
        return not self.given_up and time.monotonic() >= self._again_seconds

    # -- a demotion ---------------------------------------------------------------
    @contextlib.contextmanager
    def lent(self, demotion: Demotion) -> Iterator[_Loan]:
        """Hold a demotion's slots; write and commit inside.

        Raises StorageError (a slab cannot be opened or locked), DaemonUnavailable (the daemon
        that lent them has died: they may be another's). When this returns, nothing writes to
        the slots; or they stay locked, and `given_up` says why.
        """
        loan = _Loan()
        self._deadline_seconds = time.monotonic() + self._plan_seconds
        try:
            self._lock(loan, demotion)
            if self._client.lost:
                raise DaemonUnavailable("the daemon that lent cold slots has died")
            yield loan
        finally:
            if self._has_settled():
                loan.close()

    def failed(self) -> None:
        """A plan has failed on the disk: ask for no cold slots for a while."""
        self.counts.failures += 1
        self._again_seconds = time.monotonic() + AGAIN_SECONDS

    def _lock(self, loan: _Loan, demotion: Demotion) -> None:
        slab, slot = demotion.slab.ravel(), demotion.slot.ravel()
        with storage_errors("cold slots cannot be locked"):
            for slab_id in np.unique(slab).tolist():
                mapped = self._client.slab(slab_id)
                loan.fds[slab_id] = _open_again(mapped)
                size = mapped.slot_bytes
                for first, count in _runs_of(np.sort(slot[slab == slab_id])):
                    lock_range(loan.fds[slab_id], first * size, count * size)
                    loan.locked.append((slab_id, first * size, count * size))

    def write(
        self,
        loan: _Loan,
        demotion: Demotion,
        source: IntArray,
        encode: Callable[[IntArray, IntArray, PageLayout], Encoded],
        require_encoded: Callable[[npt.NDArray[np.uint8], Sequence[int], CodecId], None],
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint64] | None]:
        """Encode pages at addresses `source`, int64 [blocks, layers], into their slots on disk.

        Returns digests uint8 [blocks, layers, 16] and the device's, uint64 [blocks, layers], or
        None. `require_encoded` raises CodecError for a status that is not 0. Raises StorageFull,
        StorageError; what `encode` does.
        """
        if self._staging is None:
            self._staging = self._make_staging(CHUNKS * self._chunk_bytes)
            self._threads = WorkThreads(CHUNKS, "tierd-cold-write", StorageError)
        shape = demotion.codec.shape
        digests = np.zeros((*shape, 16), np.uint8)
        device_digests = np.zeros(shape, np.uint64)
        has_device_digests = False
        status = np.zeros(shape, np.uint8)
        for codec in map(CodecId, np.unique(demotion.codec).tolist()):
            layout = page_layout(self._handle.namespace.geometry, codec)
            for at in self._parts(demotion, codec, layout):
                chunk = self._free_chunk()
                target = self._targets(chunk, len(at[0]), layout)
                encoded = encode(source[at], target, layout)
                status[at] = encoded.status
                require_encoded(status, demotion.blocks, codec)
                digests[at] = digest_pages(target, layout.payload_bytes)
                if encoded.device_digests is not None:
                    has_device_digests = True
                    device_digests[at] = encoded.device_digests
                self._fill_headers(chunk, demotion, at, layout, digests,
                                   device_digests if has_device_digests else None)  # fmt: skip
                self._submit(chunk, loan, demotion, at, layout)
        for chunk in range(CHUNKS):
            self._await(chunk)
        return digests, device_digests if has_device_digests else None

    def _parts(
        self, demotion: Demotion, codec: CodecId, layout: PageLayout
    ) -> Iterator[tuple[IntArray, IntArray]]:
        """Yield (rows, layers) of pages of a codec, in the order of their slots, chunk by chunk."""
        rows, layers = np.nonzero(demotion.codec == codec)
        order = np.lexsort((demotion.slot[rows, layers], demotion.slab[rows, layers]))
        per_chunk = self._chunk_bytes // layout.slot_bytes
        for start in range(0, len(order), per_chunk):
            part = order[start : start + per_chunk]
            yield rows[part], layers[part]

    def _targets(self, chunk: int, pages: int, layout: PageLayout) -> IntArray:
        """Return the addresses of payloads in a chunk; int64 [pages]."""
        assert self._staging is not None
        first = self._staging.address + chunk * self._chunk_bytes + HEADER_BYTES
        return first + layout.slot_bytes * np.arange(pages, dtype=np.int64)

    def _view(self, chunk: int, first: int, pages: int, layout: PageLayout) -> memoryview:
        assert self._staging is not None
        start = chunk * self._chunk_bytes + first * layout.slot_bytes
        return self._staging.view[start : start + pages * layout.slot_bytes]

    def _fill_headers(
        self, chunk: int, demotion: Demotion, at: tuple[IntArray, IntArray], layout: PageLayout,
        digests: _Pages, device_digests: npt.NDArray[np.uint64] | None,
    ) -> None:  # fmt: skip
        """Put each page's header before it, and zeros behind it."""
        for number, (row, layer) in enumerate(zip(*(part.tolist() for part in at), strict=True)):
            header = SlotHeader(
                store_uuid=self._handle.store_uuid,
                slab=int(demotion.slab[row, layer]),
                slot=int(demotion.slot[row, layer]),
                generation=int(demotion.generation[row, layer]),
                codec=layout.codec,
                dtype=layout.dtype,
                session=self._handle.number,
                layer=layer,
                block=demotion.blocks[row],
                namespace_digest=self._namespace_digest,
                logical_bytes=self._handle.namespace.geometry.page_bytes,
                stored_bytes=layout.payload_bytes,
                payload_digest=digests[row, layer].tobytes(),
                device_digest=(None if device_digests is None else int(device_digests[row, layer])),
            )
            slot = self._view(chunk, number, 1, layout)
            header.pack_into(slot)
            end = HEADER_BYTES + layout.payload_bytes
            slot[end:] = bytes(layout.slot_bytes - end)

    # -- writes -------------------------------------------------------------------
    def _submit(
        self, chunk: int, loan: _Loan, demotion: Demotion, at: tuple[IntArray, IntArray],
        layout: PageLayout,
    ) -> None:  # fmt: skip
        slabs, slots = demotion.slab[at], demotion.slot[at].astype(np.int64)
        # Slabs apart, so that the last slot of one and the first of the next are no neighbours.
        places = slabs.astype(np.int64) << 32 | slots
        runs, done = [], 0
        for _, count in _runs_of(places):
            slot, slab = int(slots[done]), int(slabs[done])
            view = self._view(chunk, done, count, layout)
            runs.append(_Run(slab, slot * layout.slot_bytes, view))
            done += count
        assert self._threads is not None
        self._writes[chunk] = self._threads.submit(lambda: self._write_runs(loan, runs))
        self.counts.pages += len(slots)
        self.counts.bytes += len(slots) * layout.slot_bytes

    def _write_runs(self, loan: _Loan, runs: Sequence[_Run]) -> None:
        with storage_errors("cold slots cannot be written"):
            for run in runs:
                done = 0
                while done < len(run.view):  # short writes are normal
                    fd, left = loan.fds[run.slab], run.view[done:]
                    wrote = self._write(fd, [left], run.offset + done)
                    if wrote <= 0:
                        raise StorageError("cold slots cannot be written: the disk took no bytes")
                    done += wrote

    def _free_chunk(self) -> int:
        chunk, self._next_chunk = self._next_chunk, (self._next_chunk + 1) % CHUNKS
        self._await(chunk)
        return chunk

    def _await(self, chunk: int) -> None:
        """Wait for a chunk's write. Raises StorageError, at the plan's deadline too."""
        future = self._writes[chunk]
        if future is None:
            return
        try:
            future.result(timeout=max(0.0, self._deadline_seconds - time.monotonic()))
        except FutureTimeout:
            raise StorageError(
                f"cold slots were not written within {self._plan_seconds:g} s"
            ) from None
        self._writes[chunk] = None

    def _has_settled(self) -> bool:
        """Wait for what is under way; return whether nothing is left. Else give the writer up."""
        for chunk, future in enumerate(self._writes):
            if future is None:
                continue
            try:
                future.exception(timeout=max(0.0, self._deadline_seconds - time.monotonic()))
            except FutureTimeout:
                self.given_up = f"a write to cold did not end within {self._plan_seconds:g} s"
                return False
            self._writes[chunk] = None
        return True

    # -- the rest -----------------------------------------------------------------
    @property
    def total_bytes(self) -> int:
        """Bytes of staging, of the host's memory."""
        return 0 if self._staging is None else CHUNKS * self._chunk_bytes

    def figures(self) -> dict[str, Any]:
        """Return the report's counts. `given_up`: why no cold slot is asked for any more, or ""."""
        counts = self.counts
        return {"pages": counts.pages, "bytes": counts.bytes, "failures": counts.failures,
                "given_up": self.given_up}  # fmt: skip

    def close(self) -> None:
        """Give the staging back, unless a stuck write reads it. Idempotent."""
        if self._threads is not None:
            self._threads.stop()
            self._threads = None
        if self._staging is not None and not self.given_up:
            self._staging.close()
        self._staging = None

    def check_integrity(self) -> None:
        """Raise AssertionError if a write is under way between two demotions."""
        assert self.given_up or self._writes == [None] * CHUNKS, f"{self._writes=}"


def _open_again(slab: MappedSlab) -> int:
    """Return the slab's file, open for writing by this demotion alone. Raises OSError."""
    flags = os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if slab.direct else 0)
    return os.open(f"/proc/self/fd/{slab.fd}", flags)


def _runs_of(numbers: npt.NDArray[Any]) -> Iterator[tuple[int, int]]:
    """Yield (first, count) of each run of numbers that rise by one."""
    cuts = np.flatnonzero(np.diff(numbers) != 1) + 1
    for part in np.split(numbers, cuts):
        if len(part):
            yield int(part[0]), len(part)
