"""Cold writer: demoted pages go to cold slots that the daemon lent, past the warm tier.

    lock the slots → is the daemon there? → encode a chunk → digest, headers → write → the next
                                          (two chunks: one is written while the other is encoded)

On a GPU a disk may take a chunk from VRAM (device/directwrite.py): then encoding, digests and
write are done there, and a write that fails is done again here. The first to a disk is read back.

Headers and payloads are what the daemon would write (tierd/disk/header.py), in the bytes of the
warm slot; the caller commits the digests while the slots are locked, and unlocks then.

Invariants:
  a slot is written to only under its lock, and only if the daemon that lent it was there after
  a lock goes when no write of its slot is left; one that is stuck keeps it for good
  a chunk is encoded into only when its last write has ended, here and in VRAM
  every wait ends at a deadline; what a stuck write uses is used for nothing else any more
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import Any

import numpy as np

from tierd.client import Client, Demotion, MappedSlab, SessionHandle
from tierd.codec import digest_pages
from tierd.codec.layout import HEADER_BYTES, PageLayout, page_layout
from tierd.disk.header import SlotHeader, verify_slot
from tierd.disk.ports import storage_errors
from tierd.disk.slotlocks import lock_range
from tierd.errors import DaemonUnavailable, PageDamaged, StorageError
from tierd.types import CodecId
from tierd.units import MIB, SECTOR_BYTES, round_up
from tierd_engine.coldparts import (
    Batch,
    DirectPath,
    Encoded,
    Ended,
    HostStaging,
    IntArray,
    Loan,
    Part,
    SlotRun,
    Staging,
    U8Array,
    U64Array,
    runs_of,
    slot_runs,
)  # fmt: skip
from tierd_engine.workthreads import WorkThreads

CHUNK_BYTES = 8 * MIB
CHUNKS = 2
# A plan holds 256 MiB, or one block, and is revoked after 30 s: a disk that does not take it in
# 20 is left to the daemon, which waits more patiently.
PLAN_SECONDS = 20.0
AGAIN_SECONDS = 5.0  # after an error: blocks wait for warm room meanwhile, as without a writer


@dataclass(slots=True)
class ColdWriteCounts:
    """Pages and bytes written, headers too, and plans that failed on the disk."""

    pages: int = 0
    bytes: int = 0
    failures: int = 0


class ColdWriter:
    """Writes the pages of one session's demotions. Used by one thread; `close` it.

    `write`: os.pwritev, or a fake of it. `can_write`: whether to ask for cold slots now.
    `direct`: who writes from VRAM where that can be; `close` closes it.
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
        direct: DirectPath | None = None,
    ) -> None:
        geometry = handle.namespace.geometry
        self._client, self._handle, self._write = client, handle, write
        largest = page_layout(geometry, CodecId.RAW).slot_bytes
        self._chunk_bytes = round_up(max(chunk_bytes, largest), SECTOR_BYTES)
        self._make_staging = staging
        self._staging: Staging | None = None  # made with the threads, at the first cold demotion
        self._threads: WorkThreads | None = None
        self._writes: list[Future[None] | None] = [None] * CHUNKS
        self._direct = direct
        self._direct_parts: list[Part | None] = [None] * CHUNKS
        self._was_direct_late = False
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
    def lent(self, demotion: Demotion) -> Iterator[Loan]:
        """Hold a demotion's slots; write and commit inside.

        Raises StorageError (a slab cannot be opened or locked), DaemonUnavailable (the daemon
        that lent them has died: they may be another's). When this returns, nothing writes to
        the slots; or they stay locked, and `given_up` says why.
        """
        loan = Loan()
        self._deadline_seconds = time.monotonic() + self._plan_seconds
        self._was_direct_late = False
        try:
            self._lock(loan, demotion)
            if self._client.lost:
                raise DaemonUnavailable("the daemon that lent cold slots has died")
            yield loan
        finally:
            if self._has_settled():
                loan.close()

    def failed(self) -> None:
        """A plan has failed on the disk: ask for no cold slots for a while.

        But at once where a direct write was late: that path is given up, and the CPU's is not.
        """
        if self._was_direct_late:
            self._was_direct_late = False
            return
        self.counts.failures += 1
        self._again_seconds = time.monotonic() + AGAIN_SECONDS

    def _lock(self, loan: Loan, demotion: Demotion) -> None:
        slab, slot = demotion.slab.ravel(), demotion.slot.ravel()
        with storage_errors("cold slots cannot be locked"):
            for slab_id in np.unique(slab).tolist():
                mapped = self._client.slab(slab_id)
                loan.fds[slab_id] = _open_again(mapped)
                size = mapped.slot_bytes
                for first, count in runs_of(np.sort(slot[slab == slab_id])):
                    lock_range(loan.fds[slab_id], first * size, count * size)
                    loan.locked.append((slab_id, first * size, count * size))

    def write(
        self,
        loan: Loan,
        demotion: Demotion,
        source: IntArray,
        encode: Callable[[IntArray, IntArray, PageLayout], Encoded],
        require_encoded: Callable[[U8Array, Sequence[int], CodecId], None],
    ) -> tuple[U8Array, U64Array | None]:
        """Encode pages at addresses `source`, int64 [blocks, layers], into their slots on disk.

        Returns digests uint8 [blocks, layers, 16] and the device's, uint64 [blocks, layers], or
        None. `require_encoded` raises CodecError for a status that is not 0. Raises StorageFull,
        StorageError; what `encode` does.
        """
        if self._staging is None:
            self._staging = self._make_staging(CHUNKS * self._chunk_bytes)
            self._threads = WorkThreads(CHUNKS, "tierd-cold-write", StorageError)
        shape = demotion.codec.shape
        batch = Batch(
            loan, demotion, source, encode, require_encoded, np.zeros(shape, np.uint8),
            np.zeros((*shape, 16), np.uint8), np.zeros(shape, np.uint64),
        )  # fmt: skip
        for codec in map(CodecId, np.unique(demotion.codec).tolist()):
            layout = page_layout(self._handle.namespace.geometry, codec)
            for at in self._parts(demotion, codec, layout):
                runs = tuple(slot_runs(loan, demotion, at, layout))
                self._write_part(self._free_chunk(), Part(batch, at, layout, runs))
        for chunk in range(CHUNKS):
            self._await(chunk)
        return batch.digests, batch.device_digests if batch.has_device_digests else None

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

    def _header(self, part: Part, number: int) -> SlotHeader:
        """Return the header of a part's page."""
        batch, layout = part.batch, part.layout
        demotion, at = batch.demotion, (int(part.at[0][number]), int(part.at[1][number]))
        return SlotHeader(
            store_uuid=self._handle.store_uuid,
            slab=int(demotion.slab[at]),
            slot=int(demotion.slot[at]),
            generation=int(demotion.generation[at]),
            codec=layout.codec,
            dtype=layout.dtype,
            session=self._handle.number,
            layer=at[1],
            block=demotion.blocks[at[0]],
            namespace_digest=self._namespace_digest,
            logical_bytes=self._handle.namespace.geometry.page_bytes,
            stored_bytes=layout.payload_bytes,
            payload_digest=batch.digests[at].tobytes(),
            device_digest=int(batch.device_digests[at]) if batch.has_device_digests else None,
        )

    def _fill_headers(self, chunk: int, part: Part) -> None:
        """Put each page's header before it, and zeros behind it."""
        layout = part.layout
        for number in range(part.pages):
            slot = self._view(chunk, number, 1, layout)
            self._header(part, number).pack_into(slot)
            end = HEADER_BYTES + layout.payload_bytes
            slot[end:] = bytes(layout.slot_bytes - end)

    # -- writes -------------------------------------------------------------------
    def _write_part(self, chunk: int, part: Part) -> None:
        """Encode a part and begin its write, from VRAM if it can go that way."""
        direct, layout = self._direct, part.layout
        if direct is None or not direct.can_take(part.fds, layout, self._chunk_bytes, CHUNKS):
            self._write_staged(chunk, part)
            return
        placed = direct.encode(chunk, part.batch.source[part.at], layout)
        part.take(placed, placed.digests)
        self._fill_headers(chunk, part)
        assert self._staging is not None
        staged = self._staging.address + chunk * self._chunk_bytes
        self._direct_parts[chunk] = part
        direct.start(chunk, staged, part.pages, layout, part.runs)
        if not direct.is_proven(part.fds):
            self._await(chunk)

    def _write_staged(self, chunk: int, part: Part) -> None:
        """Encode a part into staging, and begin to write it from there."""
        layout, batch = part.layout, part.batch
        target = self._targets(chunk, part.pages, layout)
        encoded = batch.encode(batch.source[part.at], target, layout)
        part.take(encoded, digest_pages(target, layout.payload_bytes))
        self._fill_headers(chunk, part)
        views = [self._view(chunk, run.first, run.pages, layout) for run in part.runs]
        assert self._threads is not None
        self._writes[chunk] = self._threads.submit(lambda: self._write_runs(part.runs, views))
        self._count(part)

    def _count(self, part: Part) -> None:
        self.counts.pages += part.pages
        self.counts.bytes += part.pages * part.layout.slot_bytes

    def _write_runs(self, runs: Sequence[SlotRun], views: Sequence[memoryview]) -> None:
        with storage_errors("cold slots cannot be written"):
            for run, view in zip(runs, views, strict=True):
                done = 0
                while done < len(view):  # short writes are normal
                    wrote = self._write(run.fd, [view[done:]], run.offset + done)
                    if wrote <= 0:
                        raise StorageError("cold slots cannot be written: the disk took no bytes")
                    done += wrote

    # -- writes from VRAM ---------------------------------------------------------
    def _end_direct(self, chunk: int, part: Part) -> None:
        """Wait for a chunk's direct write; begin the CPU's where it failed. Raises StorageError."""
        direct = self._direct
        assert direct is not None
        ended = self._wait_direct(chunk)
        if ended is Ended.LATE:
            raise StorageError("cold slots were not written from VRAM in time")
        self._direct_parts[chunk] = None
        if ended is Ended.WRITTEN and direct.is_proven(part.fds):
            self._count(part)
            return
        if ended is Ended.WRITTEN:
            failure = self._read_back(chunk, part)
            direct.prove(part.fds, failure)
            if not failure:
                self._count(part)
                return
        self._write_staged(chunk, part)

    def _wait_direct(self, chunk: int) -> Ended:
        assert self._direct is not None
        ended = self._direct.wait(chunk, max(0.0, self._deadline_seconds - time.monotonic()))
        self._was_direct_late |= ended is Ended.LATE
        return ended

    def _read_back(self, chunk: int, part: Part) -> str:
        """Return "" if a part's slots are whole on the disk, else what is wrong.

        Raises StorageError where the disk does not answer by the plan's deadline.
        """
        found: list[str] = []
        assert self._threads is not None
        self._writes[chunk] = self._threads.submit(lambda: found.append(self._look(chunk, part)))
        self._await_staged(chunk)
        return found[0]

    def _look(self, chunk: int, part: Part) -> str:
        layout = part.layout
        try:
            for run in part.runs:
                view = self._view(chunk, run.first, run.pages, layout)
                if os.preadv(run.fd, [view], run.offset) != len(view):
                    return "what was written cannot be read"
            for number in range(part.pages):
                slot = self._view(chunk, number, 1, layout)
                verify_slot(slot, self._header(part, number))
        except (OSError, PageDamaged) as error:
            return f"what was written is not on the disk: {error}"
        return ""

    # -- ends ---------------------------------------------------------------------
    def _free_chunk(self) -> int:
        chunk, self._next_chunk = self._next_chunk, (self._next_chunk + 1) % CHUNKS
        self._await(chunk)
        return chunk

    def _await(self, chunk: int) -> None:
        """Wait for a chunk's write. Raises StorageError, at the plan's deadline too."""
        part = self._direct_parts[chunk]
        if part is not None:
            self._end_direct(chunk, part)
        self._await_staged(chunk)

    def _await_staged(self, chunk: int) -> None:
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
        """Wait for what is under way; return whether nothing is left.

        Else the writer is given up; or the direct path alone, where it is that.
        """
        has_late = False
        for chunk, part in enumerate(self._direct_parts):
            has_late |= part is not None and self._wait_direct(chunk) is Ended.LATE
            self._direct_parts[chunk] = None
        for chunk, future in enumerate(self._writes):
            if future is None:
                continue
            try:
                future.exception(timeout=max(0.0, self._deadline_seconds - time.monotonic()))
            except FutureTimeout:
                self.given_up = f"a write to cold did not end within {self._plan_seconds:g} s"
                return False
            self._writes[chunk] = None
        return not has_late

    # -- the rest -----------------------------------------------------------------
    @property
    def total_bytes(self) -> int:
        """Bytes of staging, of the host's memory."""
        return 0 if self._staging is None else CHUNKS * self._chunk_bytes

    @property
    def device_bytes(self) -> int:
        """Bytes of slots in VRAM."""
        return 0 if self._direct is None else self._direct.total_bytes

    def figures(self) -> dict[str, Any]:
        """Return the report's counts. `given_up`: why no cold slot is asked for any more, or "".

        `direct`: of those that a disk took from VRAM; None where none can go that way.
        """
        counts = self.counts
        return {"pages": counts.pages, "bytes": counts.bytes, "failures": counts.failures,
                "given_up": self.given_up,
                "direct": None if self._direct is None else self._direct.figures()}  # fmt: skip

    def close(self) -> None:
        """Give the staging back, unless a stuck write reads it. Idempotent."""
        if self._direct is not None:
            self._direct.close()
        if self._threads is not None:
            self._threads.stop()
            self._threads = None
        if self._staging is not None and not self.given_up:
            self._staging.close()
        self._staging = None

    def check_integrity(self) -> None:
        """Raise AssertionError if a write is under way between two demotions."""
        assert self.given_up or self._writes == [None] * CHUNKS, f"{self._writes=}"
        assert self._direct_parts == [None] * CHUNKS, f"{self._direct_parts=}"
        if self._direct is not None:
            self._direct.check_integrity()


def _open_again(slab: MappedSlab) -> int:
    """Return the slab's file, open for writing by this demotion alone. Raises OSError."""
    flags = os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if slab.direct else 0)
    return os.open(f"/proc/self/fd/{slab.fd}", flags)
