"""The ledger: what is in the cold tier, remembered across restarts.

Changes are records in one ordered buffer and, at once, in the image: any
thread, no I/O. `flush` writes all that is buffered as one group, in order, so
that recovery finds a prefix of what was said. Publish after the flush; for the
only copy of something after `flush(sync=True)`, which returns when it survives
a power cut. Slot bytes are written (and synced) before the flush of their row.

Invariants:
  image == snapshot + journal + buffer, in this order
  only the thread that holds `_io` writes the journal; no I/O under `_mutex`
  a slab id is given out once in a store's life, durably reserved before
  after a failed sync the ledger is read-only: `failed` says why, reads go on
  until this start's segment is there (`waiting`: the disk is full) no slot may be written:
    a slot that is free in the image may still be a page's on the disk
  what is said meanwhile is lost by a crash, but for sessions dropped after `forget`
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tierd.disk import journal as journals
from tierd.disk import manifest as manifests
from tierd.disk import snapshot as snapshots
from tierd.disk.image import Image, Occupancy
from tierd.disk.journal import Journal
from tierd.disk.ports import DiskPort
from tierd.disk.quarantine import QuarantineLog, quarantine_line
from tierd.disk.records import (
    PAGE_ROW,
    REASON_CHARS_MAX,
    STATES,
    Kind,
    Record,
    Rows,
    SessionRecord,
    commit_records,
    drop_records,
    keys_of,
    pack_payloads,
    record_bytes,
    session_records,
    slab_items,
)
from tierd.disk.recovery import Recovered, RecoveryReport, recover
from tierd.disk.superblock import SUPERBLOCK_BYTES, Superblock, write_superblock
from tierd.disk.unstarted import Unstarted, first_words, without_last_word, without_session
from tierd.errors import StorageError, StorageFull
from tierd.types import SlabRecord
from tierd.units import MIB

if TYPE_CHECKING:
    from tierd.clock import Clock

SLAB_ID_MAX = 2**24 - 1  # a page table's entry has 24 bits for it
# A start that ends in a crash burns the ids it reserved: 2**24 / 256 = 65,536 such starts.
SLAB_IDS_RESERVED = 256
# 250,000 rows replay in 0.1 s, and are 11 MB of journal.
SNAPSHOT_RECORDS = 250_000
# Segments since the last snapshot: each start makes one, so starts that crash cannot pile up.
SNAPSHOT_SEGMENTS = 4
# The device takes 64 MiB every 20 ms or the tier stops; a buffer that holds this much more
# means that it takes nothing, and what is buffered would be all of RAM one day.
BUFFER_BYTES_MAX = 256 * MIB


class Ledger:
    """See the module. Make one with `Ledger.open`. Every method may be called from any thread."""

    durable = True  # what it records outlives the process

    def __init__(self, disk: DiskPort, found: Recovered, segment_bytes: int) -> None:
        self._disk = disk
        self.store_uuid, self.epoch = found.store_uuid, found.epoch + 1
        self.recovery: RecoveryReport = found.report
        self._image: Image = found.image
        self._image.slab_limit = min(found.next_slab + SLAB_IDS_RESERVED, SLAB_ID_MAX + 1)
        self._journal = Journal(
            disk,
            store_uuid=self.store_uuid, epoch=self.epoch, end=found.end, found=found.segments,
            next_number=found.next_segment, segment_bytes=segment_bytes,
        )  # fmt: skip
        self.require_there = self._journal.require_there  # from any thread: it never waits
        self._snapshots = list(found.snapshots)  # newest last
        self._part_bytes = journals.payload_bytes_max(segment_bytes) // 2
        self._buffer: list[Record] = []
        self._buffer_bytes = 0
        self._quarantine_log = QuarantineLog(disk)
        self._records = found.report.records  # since the last snapshot
        self._snapshot_at_bytes = 0  # of the journal's written bytes
        self._next_slab = found.next_slab
        self._slab_limit_durable = self._image.slab_limit
        self._failed = ""
        self._waiting = ""  # why this start's segment could not be made
        self._unstarted: Unstarted | None = Unstarted(disk, found)
        self._closed = False
        self._mutex = threading.Lock()  # image, buffer, ids
        self._io = threading.Lock()  # the journal's end
        self._snapshot_io = threading.Lock()
        # Under `_io`.
        self.manifests = manifests.Manifests(disk, found.store_uuid, found.manifests.sizes)
        self._unkept: set[int] = set()  # sessions whose manifest goes after the next flush

    @classmethod
    def open(
        cls,
        disk: DiskPort,
        *,
        new_uuid: Callable[[], bytes],
        clock: Clock,
        segment_bytes: int = journals.SEGMENT_BYTES,
        strict: bool = True,
        patient: bool = False,
        manifest_bytes_max: int = 2**63,
    ) -> Ledger:
        """Recover what the disk holds, or begin a new store; `recovery` says what was found.

        `new_uuid` makes the 16 bytes of a new store's name. `segment_bytes`: a
        multiple of 4 KiB, at least 64 KiB. `strict`: refuse what is sound and
        not understood. `patient`: where the disk is too full to begin, wait: all can be
        looked at, and each flush tries once more. `manifest_bytes_max`: of all manifests
        together; those that do not fit are not written. Raises StorageError (no superblock that
        can be trusted beside data; a disk that fails), StorageFull (for a new store always).
        """
        found = recover(disk, new_uuid=new_uuid, clock=clock, strict=strict)
        if found.fresh:
            # The store's name is durable before anything else bears it.
            write_superblock(disk, Superblock(found.store_uuid, 1, found.next_slab, 0))
            found.epoch = 1
        ledger = cls(disk, found, segment_bytes)
        ledger.manifests.bytes_max = manifest_bytes_max
        ledger._say(first_words(found, ledger._part_bytes))
        try:
            ledger._start()
        except StorageError as error:
            full = isinstance(error, StorageFull) and not ledger._journal.failed
            if patient and full and not found.fresh:
                ledger._wait(str(error))
                return ledger
            ledger._journal.close()
            raise
        return ledger

    def _start(self) -> None:
        """Begin the epoch's segment with what may not be durable, and let what is said follow it.

        Raises StorageFull: what is there stands, and it may be tried again.
        """
        with self._io:
            unstarted = self._unstarted
            if unstarted is None:
                return
            unstarted.begin(self._journal)
            limit = self._image.slab_limit
            self._reserve(self.epoch, limit)
            self._slab_limit_durable = limit
            self._unstarted, self._waiting = None, ""
        if self.dirty:
            self.flush(sync=True)
        for name in unstarted.leftovers:
            self._disk.remove(name)
        self._drop_covered()
        with contextlib.suppress(StorageError):
            self._quarantine_log.find()

    def _wait(self, reason: str) -> None:
        """Go on without a segment: slab ids are reserved, if the superblock can be written."""
        assert self._unstarted is not None, "it has started"
        self._waiting = reason
        self._slab_limit_durable = self._next_slab
        limit = self._image.slab_limit
        with contextlib.suppress(StorageError):
            self._unstarted.reserve_ids(limit)
            self._slab_limit_durable = limit

    def _reserve(self, epoch: int, slab_limit: int) -> None:
        end = self._journal.durable
        write_superblock(self._disk, Superblock(self.store_uuid, epoch, slab_limit, end))

    # -- slabs --------------------------------------------------------------------
    def take_slab_id(self) -> int:
        """Return an id that no slab, warm or cold, ever had. Raises StorageError if none is left.

        Ids are reserved by records: with none reserved, a flush(sync=True) must come first.
        """
        with self._mutex:
            if self._next_slab >= self._slab_limit_durable:
                self._refuse_if_failed()
                raise StorageError("no slab ids are reserved: the journal is behind")
            self._next_slab += 1
            short = self._image.slab_limit - self._next_slab < SLAB_IDS_RESERVED // 2
            if short and self._image.slab_limit <= SLAB_ID_MAX:
                limit = min(self._image.slab_limit + SLAB_IDS_RESERVED, SLAB_ID_MAX + 1)
                self._append([[Kind.SLAB_LIMIT, limit]])
            return self._next_slab - 1

    def add_slab(self, slab: SlabRecord) -> None:
        """Note a slab, whose file is there."""
        self._say([[Kind.SLAB, *slab_items(slab)]])

    def drop_slab(self, slab: int) -> None:
        """Forget a slab; its pages were dropped before. Its file may go after the flush.

        On a full disk it may go before: pages that are missing are lost, never wrong.
        """
        self._say([[Kind.DROP_SLAB, slab]])

    def quarantine(self, slab: int, slot: int, reason: str) -> None:
        """Note that a slot must not be used any more; a page in it was dropped before."""
        line = quarantine_line(self.epoch, slab, slot, reason[:REASON_CHARS_MAX])
        with self._mutex:
            self._append([[Kind.QUARANTINE, slab, slot, reason[:REASON_CHARS_MAX]]])
            if not self._failed:
                self._quarantine_log.note(line)

    # -- pages --------------------------------------------------------------------
    def commit(self, rows: Rows) -> None:
        """Note pages (PAGE_ROW [n], n may be 0) whose slots are written; same page: replaced."""
        assert rows.dtype == PAGE_ROW and rows.ndim == 1, f"{rows.dtype=} {rows.shape=}"
        self._say(commit_records(rows, self._part_bytes))

    def drop_pages(self, session: int, pages: Sequence[tuple[int, int]]) -> None:
        """Forget pages, (layer, block) each; those not there are ignored."""
        self._say(drop_records(session, keys_of(pages), self._part_bytes))

    def truncate(self, session: int, first_block: int) -> None:
        """Forget a session's pages of blocks >= first_block."""
        self._say([[Kind.TRUNCATE, session, first_block]])

    # -- sessions -----------------------------------------------------------------
    def put_session(self, session: SessionRecord) -> None:
        """Note a session, or what has become of it."""
        assert session.state in STATES, f"{session.state=}"
        with self._mutex:
            if self.waiting:
                self._keep_unsaid(without_last_word(self._buffer, session.number))
            self._append(session_records(session, self._part_bytes))

    def drop_session(self, number: int) -> None:
        """Forget a session and its pages. While the ledger waits, `forget` makes it durable."""
        with self._mutex:
            if self.waiting:
                self._keep_unsaid(without_session(self._buffer, number))
            self._append([[Kind.DROP_SESSION, number]])
            self._unkept.add(number)

    def forget(self, number: int) -> None:
        """While the ledger waits, make durable what `drop_session` says next, before any flush.

        Blocking; otherwise nothing happens. Raises StorageFull: the next start has the session as
        it was; StorageError: whether it has is not known.
        """
        with self._io:
            if self._unstarted is None:
                return
            if self._failed:
                raise StorageError(f"the ledger is read-only: {self._failed}")
            self._unstarted.drop(number)
            self.manifests.remove({number})

    def keep(self, number: int) -> None:
        """Write down once more what is kept of a session, for when the journal is lost.

        Blocking; to be called after the flush(sync=True) that made it durable. Raises
        StorageFull, StorageError: it is durable all the same, and is then written down once.
        """
        with self._io:
            with self._mutex:
                record = self._image.sessions.get(number)
                rows, slabs = self._image.rows_of_session(number), dict(self._image.slabs)
                stamp = (self.epoch, self._journal.durable)
            if record is None or not record.kept:
                return
            parked = replace(record, state="parked")
            self.manifests.write(manifests.manifest_of(parked, rows, slabs), stamp)

    @property
    def unmanifested(self) -> list[int]:
        """The kept sessions that are written down once only."""
        with self._mutex:
            kept = [number for number, record in self._image.sessions.items() if record.kept]
        return [number for number in kept if number not in self.manifests]

    # -- the buffer ---------------------------------------------------------------
    def _say(self, records: Sequence[Record]) -> None:
        with self._mutex:
            self._append(records)

    def _append(self, records: Sequence[Record]) -> None:
        for record in records:
            self._records += self._image.apply(record)
            if self._failed:
                continue
            self._buffer.append(record)
            self._buffer_bytes += record_bytes(record)
        if self._buffer_bytes > BUFFER_BYTES_MAX:
            self._fail("the journal takes nothing, and its buffer is full")

    def _keep_unsaid(self, records: list[Record]) -> None:
        """Take fewer records for the buffer. Under the mutex."""
        self._buffer = records
        self._buffer_bytes = sum(map(record_bytes, records))

    def _fail(self, reason: str) -> None:
        """Become read-only. Under the mutex."""
        self._failed = self._failed or reason
        self._buffer, self._buffer_bytes = [], 0

    @property
    def failed(self) -> str:
        """Why nothing is written any more, or not yet; "" while all is well."""
        return self._failed or self._waiting

    @property
    def waiting(self) -> str:
        """Why nothing is written yet: the disk is full, and a flush tries again; or ""."""
        return "" if self._failed else self._waiting

    def _refuse_if_failed(self) -> None:
        if self._failed:
            raise StorageError(f"the ledger is read-only: {self._failed}")
        if self._waiting:
            raise StorageFull(
                "the disk is full: the cold tier is read-only until there is space for "
                f"{self._waiting}"
            )

    @property
    def dirty(self) -> bool:
        """Whether records wait for a flush."""
        return bool(self._buffer)

    @property
    def unsynced(self) -> bool:
        """Whether records wait for a flush(sync=True)."""
        return self.dirty or self._journal.durable < self._journal.end.sequence

    def flush(self, sync: bool = False) -> None:
        """Write what is buffered, in order, as one group; `sync`: return when it is durable.

        Blocking; several threads may call it. Raises StorageFull (nothing is
        lost, try again when there is space), StorageError (read-only from now
        on: a sync failed, or writing did twice).
        """
        if self.waiting:
            self._start_again()
        with self._io:
            self._flush(sync)

    def _start_again(self) -> None:
        try:
            self._start()
        except StorageError as error:
            if self._journal.failed or not isinstance(error, StorageFull):
                with self._mutex:
                    self._fail(self._journal.failed or str(error))
            raise

    def _flush(self, sync: bool, copy: bool = False) -> tuple[Image | None, int]:
        """Under `_io`. With `copy` return the image as of the journal's end, and its records."""
        with self._mutex:
            self._refuse_if_failed()
            records, size_bytes = self._buffer, self._buffer_bytes
            self._buffer, self._buffer_bytes = [], 0
            unkept, self._unkept = self._unkept, set()
            limit = self._image.slab_limit
            seen = self._image.copy() if copy else None, self._records
        try:
            if records:
                self._journal.append(pack_payloads(records, self._part_bytes * 2))
            if sync:
                self._journal.sync()
        except StorageError as error:
            self._take_back(records, size_bytes, error)
            raise
        self.manifests.remove(unkept)
        if sync:
            self._slab_limit_durable = limit
        self._quarantine_log.write_noted()
        return seen

    def _take_back(self, records: list[Record], size_bytes: int, error: StorageError) -> None:
        with self._mutex:
            if isinstance(error, StorageFull) and not self._journal.failed:
                self._buffer[:0] = records
                self._buffer_bytes += size_bytes
            else:
                self._fail(self._journal.failed or str(error))

    # -- snapshots ----------------------------------------------------------------
    @property
    def snapshot_due(self) -> bool:
        """Whether `snapshot` should be called soon: a start would take longer than promised."""
        written_bytes = self._journal.written_bytes - self._snapshot_at_bytes
        return (
            self._records > SNAPSHOT_RECORDS
            or written_bytes > self._journal.segment_bytes
            or len(self._journal.segments) > SNAPSHOT_SEGMENTS
        )

    def snapshot(self) -> None:
        """Write the image to a file, keep the two newest, free segments that the older covers.

        Blocking; flushes are held up only while the journal is synced. Raises
        StorageFull, StorageError: the snapshots and the journal before it stand.
        """
        with self._snapshot_io:
            with self._io:
                image, records = self._flush(sync=True, copy=True)
                end, written_bytes = self._journal.end, self._journal.written_bytes
            assert image is not None
            made = snapshots.write_snapshot(
                self._disk, image, store_uuid=self.store_uuid, epoch=self.epoch, end=end
            )
            self._snapshots = snapshots.keep_newest(self._disk, self._snapshots, made)
            with self._mutex:
                self._records -= records
            self._snapshot_at_bytes = written_bytes
            with self._io:
                self._drop_covered()

    def _drop_covered(self) -> None:
        # With one snapshot alone the whole journal is kept: each file here has a second source.
        if len(self._snapshots) == snapshots.SNAPSHOTS_KEPT:
            self._journal.drop_covered(self._snapshots[0].sequence)

    # -- looks --------------------------------------------------------------------
    def sessions(self) -> dict[int, SessionRecord]:
        """Return every session by number."""
        with self._mutex:
            return dict(self._image.sessions)

    def slabs(self) -> dict[int, SlabRecord]:
        """Return every slab by id."""
        with self._mutex:
            return dict(self._image.slabs)

    def pages_of(self, session: int) -> Rows:
        """Return a session's rows, PAGE_ROW [n] sorted by (block, layer), read-only."""
        with self._mutex:
            return self._image.rows_of_session(session)

    def occupancy(self, slab: int) -> Occupancy:
        """Return a slab's slots that hold pages, and their generations.

        Quick for slab after slab; the first call after a change sorts all rows.
        """
        with self._mutex:
            return self._image.occupancy(slab)

    def quarantined(self, slab: int) -> set[int]:
        """Return the slots of a slab that must not be used."""
        with self._mutex:
            return set(self._image.bad_slots.get(slab, ()))

    def metadata_bytes(self) -> int:
        """Return the bytes of all files but the slabs, for the tier's byte cap."""
        files = sum(snapshot.size_bytes for snapshot in self._snapshots)
        files += self.manifests.size_bytes + self._quarantine_log.size_bytes
        return 2 * SUPERBLOCK_BYTES + self._journal.size_bytes + files

    def check_integrity(self) -> None:
        """Raise AssertionError unless image, buffer and journal agree."""
        with self._io, self._mutex:
            self._image.check_integrity()
            self._journal.check_integrity()
            assert self._next_slab <= self._slab_limit_durable <= self._image.slab_limit, (
                f"{self._next_slab=} {self._slab_limit_durable=} {self._image.slab_limit=}"
            )
            sizes = sum(record_bytes(record) for record in self._buffer)
            assert sizes == self._buffer_bytes, f"{sizes=} {self._buffer_bytes=}"

    def close(self) -> None:
        """Make everything durable and end. Idempotent.

        Raises StorageFull, StorageError: closed all the same, but not all that was said is kept.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self._close()
        finally:
            self._journal.close()
            self._quarantine_log.close()

    def _close(self) -> None:
        self.flush(sync=True)
        if self._records > SNAPSHOT_RECORDS // 10:
            self.snapshot()
        # A newer epoch that says which ids were not used: only a crash burns what it reserved.
        # All that was said is durable without it.
        with contextlib.suppress(StorageError):
            self._reserve(self.epoch + 1, self._next_slab)
