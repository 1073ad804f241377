"""The ledger's own promises: order, read-only after a failed sync, bounds, threads, no I/O held."""

import sys
import threading
from types import FrameType

import numpy as np
import pytest

from tests.disk.ledgerrig import (
    NAMESPACE,
    SEGMENT_BYTES,
    SLOT_BYTES,
    UUID,
    Rig,
    open_ledger,
    rows_of,
    state_of,
)
from tierd.disk import journal, ledger
from tierd.disk.ledger import Ledger
from tierd.disk.memory import MemoryDisk
from tierd.disk.records import (
    PAGE_ROW,
    Kind,
    SessionRecord,
    SlabRecord,
    pack_payloads,
    unpack_records,
)
from tierd.disk.superblock import SUPERBLOCK_BYTES
from tierd.errors import StorageError, StorageFull
from tierd.testing import FOR_EVER, FakeClock, Fault, FaultKind, SimulatedDisk

SESSION = SessionRecord(7, NAMESPACE, "running")


def with_slab(led: Ledger, disk: MemoryDisk | SimulatedDisk, slots: int = 2**20) -> int:
    slab = led.take_slab_id()
    disk.create(f"slab/{slab:08x}", SLOT_BYTES)
    led.add_slab(SlabRecord(slab, NAMESPACE.digest(), SLOT_BYTES, slots))
    led.put_session(SESSION)
    return slab


def some_rows(slab: int, count: int, first: int = 0) -> np.ndarray:
    rows = np.zeros(count, PAGE_ROW)
    rows["session"], rows["slab"], rows["generation"] = 7, slab, 1
    index = np.arange(first, first + count)
    rows["block"], rows["layer"], rows["slot"] = index // 2, index % 2, index
    return rows


def test_many_small_commits_are_one_record_of_one_frame() -> None:
    disk = MemoryDisk()
    led = open_ledger(disk)
    slab = with_slab(led, disk)
    led.flush(sync=True)
    for number in range(300):
        led.commit(some_rows(slab, 1, number))
    before = led._journal.end.sequence
    led.flush()
    assert led._journal.end.sequence == before + 1
    assert len(open_ledger(disk).pages_of(7)) == 300


def test_payloads_keep_the_order_and_the_limit() -> None:
    rows = some_rows(1, 10).tobytes()
    records = [
        [Kind.COMMIT, rows],
        [Kind.COMMIT, rows],
        [Kind.DROP_SESSION, 7],
        [Kind.COMMIT, rows],
    ]
    whole = [
        record for payload in pack_payloads(records, 10**6) for record in unpack_records(payload)
    ]
    assert [record[0] for record in whole] == [Kind.COMMIT, Kind.DROP_SESSION, Kind.COMMIT]
    assert whole[0][1] == rows + rows
    assert all(len(payload) <= 1000 for payload in pack_payloads(records, 1000))


def test_the_callers_rows_may_change_afterwards() -> None:
    disk = MemoryDisk()
    led = open_ledger(disk)
    slab = with_slab(led, disk)
    rows = some_rows(slab, 4)
    led.commit(rows)
    rows["digest"] = 255
    led.flush(sync=True)
    assert not led.pages_of(7)["digest"].any()
    assert not open_ledger(disk).pages_of(7)["digest"].any()


def test_dirty_and_unsynced_say_what_a_flush_would_do() -> None:
    led = open_ledger(MemoryDisk())
    assert (led.dirty, led.unsynced) == (False, False)
    led.put_session(SESSION)
    assert (led.dirty, led.unsynced) == (True, True)
    led.flush()
    assert (led.dirty, led.unsynced) == (False, True)
    led.flush(sync=True)
    assert (led.dirty, led.unsynced) == (False, False)
    led.check_integrity()


@pytest.mark.parametrize("kind", [FaultKind.IO_ERROR, FaultKind.FULL, FaultKind.SYNC_DROPS])
def test_a_failed_sync_makes_it_read_only_and_is_never_tried_again(kind: FaultKind) -> None:
    disk = SimulatedDisk(1)
    led = open_ledger(disk)
    slab = with_slab(led, disk)
    led.commit(some_rows(slab, 3))
    disk.plan.add(Fault(kind, "sync"))
    with pytest.raises(StorageError):
        led.flush(sync=True)
    assert "fdatasync" in led.failed
    operations = disk.operations
    led.commit(some_rows(slab, 9))
    for act in (led.flush, led.snapshot, lambda: led.flush(sync=True), led.close):
        with pytest.raises(StorageError, match="read-only"):
            act()
    assert disk.operations == operations
    assert len(led.pages_of(7)) == 9  # reads go on
    assert not led.dirty
    led.close()


def test_a_write_that_fails_once_is_not_even_noticed() -> None:
    disk = SimulatedDisk(1)
    led = open_ledger(disk)
    with_slab(led, disk)
    disk.plan.add(Fault(FaultKind.IO_ERROR, "write"))
    led.flush(sync=True)
    assert not led.failed
    assert open_ledger(disk.crash([])).sessions() == {7: SESSION}


def test_writes_that_fail_for_ever_make_it_read_only() -> None:
    disk = SimulatedDisk(1)
    led = open_ledger(disk)
    led.put_session(SESSION)
    disk.plan.add(Fault(FaultKind.IO_ERROR, "write", count=FOR_EVER))
    with pytest.raises(StorageError):
        led.flush()
    assert led.failed
    assert led.sessions() == {7: SESSION}


def test_a_full_disk_is_told_and_flushing_goes_on_when_there_is_space() -> None:
    disk = MemoryDisk()
    led = open_ledger(disk)
    slab = with_slab(led, disk)
    disk.capacity_bytes = disk.used_bytes()
    with pytest.raises(StorageFull):
        for number in range(1000):
            led.commit(some_rows(slab, 100, number * 100))
            led.flush()
    said = len(led.pages_of(7))
    for _ in range(2):
        with pytest.raises(StorageFull):
            led.flush(sync=True)
    assert led.dirty and not led.failed
    led.check_integrity()
    disk.capacity_bytes = 2**30
    led.flush(sync=True)
    assert len(open_ledger(disk).pages_of(7)) == said


def test_what_is_said_while_a_flush_fails_comes_after_what_it_held() -> None:
    def say(operation: str, _count: int) -> None:
        if operation == "create" and full:
            led.drop_session(7)
            raise StorageFull("no space")

    full = False
    disk = MemoryDisk(fail=say)
    led = open_ledger(disk)
    led._journal._give_up_segment(led._journal.end)
    led.put_session(SESSION)
    full = True
    with pytest.raises(StorageFull):
        led.flush()
    full = False
    led.flush(sync=True)
    assert led.sessions() == open_ledger(disk).sessions() == {}


def test_a_buffer_that_nothing_takes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "BUFFER_BYTES_MAX", 100_000)
    disk = MemoryDisk()
    led = open_ledger(disk)
    slab = with_slab(led, disk)
    disk.capacity_bytes = 0
    for number in range(50):
        led.commit(some_rows(slab, 100, number * 100))
    assert "buffer" in led.failed and not led.dirty
    assert len(led.pages_of(7)) == 5000
    led.check_integrity()


def test_snapshots_become_due_by_records_by_bytes_and_by_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ledger, "SNAPSHOT_RECORDS", 1000)
    disk = MemoryDisk()
    led = open_ledger(disk)
    slab = with_slab(led, disk)
    led.commit(some_rows(slab, 1000))
    assert led.snapshot_due
    led.snapshot()
    assert not led.snapshot_due
    for number in range(20):
        led.put_session(SessionRecord(number, NAMESPACE, "parked", bytes(4000), 0))
        led.flush()
    assert led.snapshot_due
    led.snapshot()
    assert not led.snapshot_due
    starts = 0
    while not led.snapshot_due:
        led, starts = open_ledger(disk), starts + 1
    assert starts <= ledger.SNAPSHOT_SEGMENTS
    led.snapshot()
    led.snapshot()
    assert not led.snapshot_due


def test_the_disk_used_for_metadata_is_bounded_and_counted() -> None:
    disk = MemoryDisk()
    led = open_ledger(disk)
    slab = with_slab(led, disk, slots=500)
    most = 0
    for number in range(400):
        led.drop_pages(7, [(layer, block) for block in range(50) for layer in range(2)])
        led.commit(some_rows(slab, 100, number % 5 * 100))
        led.flush(sync=number % 10 == 0)
        if number % 40 == 39:
            led = open_ledger(disk)
        if led.snapshot_due:
            led.snapshot()
        counted = led.metadata_bytes()
        real = sum(len(data) for name, data in disk.named.items() if not name.startswith("slab"))
        assert counted == real
        most = max(most, real)
    snapshots = 2 * (5 * 4096 + 500 * PAGE_ROW.itemsize)
    # Segments since the older snapshot: each interval has at most those that make one due.
    assert most <= SUPERBLOCK_BYTES + snapshots + 2 * (ledger.SNAPSHOT_SEGMENTS + 2) * SEGMENT_BYTES


def test_no_io_is_done_while_the_image_is_locked() -> None:
    """Everything can be said and looked at during any I/O operation, from the same thread."""
    asked = 0

    def ask(_operation: str, _name: str) -> None:
        nonlocal asked
        if not asking:
            return
        asked += 1
        led.put_session(SessionRecord(100 + asked, NAMESPACE, "running"))
        led.drop_session(100 + asked)
        assert led.sessions()[7] == SESSION and led.dirty and len(led.pages_of(7)) == 3

    asking = False
    disk = SimulatedDisk(1, watch=ask)
    led = open_ledger(disk)
    slab = with_slab(led, disk)
    led.commit(some_rows(slab, 3))
    asking = True
    for act in (led.flush, lambda: led.flush(sync=True), led.snapshot, led.snapshot, led.close):
        act()
    assert asked > 20


def test_threads_say_and_flush_at_once() -> None:
    disk = MemoryDisk()
    led = open_ledger(disk)
    slab = with_slab(led, disk)
    threads = 4

    def work(number: int) -> None:
        session = SessionRecord(1000 + number, NAMESPACE, "running")
        led.put_session(session)
        for turn in range(40):
            rows = some_rows(slab, 5, number * 1000 + turn * 5)
            rows["session"] = session.number
            led.commit(rows)
            led.flush(sync=turn % 3 == 0)
            if turn == 20:
                led.snapshot()
        led.flush(sync=True)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=60)
    led.check_integrity()
    again = open_ledger(disk)
    assert not again.recovery.damage
    for number in range(threads):
        assert len(again.pages_of(1000 + number)) == 200
    assert state_of(again._image) == state_of(led._image)


def test_a_million_rows_are_opened_without_a_loop_over_rows() -> None:
    disk = MemoryDisk()

    def reopen() -> Ledger:
        return Ledger.open(disk, new_uuid=lambda: UUID, clock=FakeClock())

    led = reopen()
    slab = with_slab(led, disk)
    for first in range(0, 900_000, 100_000):
        led.commit(some_rows(slab, 100_000, first))
    led.snapshot()
    for first in range(900_000, 1_000_000, 1000):
        led.commit(some_rows(slab, 1000, first))
        led.flush()
    led.flush(sync=True)
    calls = 0

    def count(_frame: FrameType, _event: str, _argument: object) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    again = reopen()
    occupied = len(again.occupancy(slab).slots)
    sys.setprofile(None)
    assert again.recovery.rows == occupied == 1_000_000
    assert calls < 50_000  # 100 frames of 1,000 rows; 64 MiB in pieces of 4


def test_closing_twice_is_fine_and_a_close_snapshots_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "SNAPSHOT_RECORDS", 1000)
    disk = MemoryDisk()
    led = open_ledger(disk)
    slab = with_slab(led, disk)
    led.commit(some_rows(slab, 500))
    led.close()
    led.close()
    assert len(disk.names("snap")) == 1
    again = open_ledger(disk)
    assert again.recovery.records == 0 and len(again.pages_of(7)) == 500
    again.close()


def test_what_recovery_left_out_is_said_in_the_journal_first() -> None:
    disk = MemoryDisk()
    rig = Rig(disk, 1)
    rig.add_slab()
    rig.open_session()
    for _ in range(4):
        rig.commit()
    rig.flush_durably()
    name = disk.names("slab")[0]
    lost = disk.named.pop(name)
    led = open_ledger(disk)
    assert led.recovery.missing_slabs == [int(name[-8:], 16)]
    assert led.recovery.unkept and not led.recovery.lost and not led.slabs()
    disk.named[name] = lost  # it is back: what was given up stays given up
    again = open_ledger(disk)
    assert not again.slabs() and not again.recovery.missing_slabs
    assert again.recovery.rows == 0
    assert name not in disk.named


def test_a_segment_size_that_cannot_be_is_a_bug() -> None:
    for size in (journal.SEGMENT_BYTES_MIN - 4096, journal.SEGMENT_BYTES_MIN + 1):
        with pytest.raises(AssertionError):
            Ledger.open(MemoryDisk(), new_uuid=lambda: UUID, clock=FakeClock(), segment_bytes=size)


def test_rows_of_another_dtype_are_a_bug() -> None:
    with pytest.raises(AssertionError):
        open_ledger(MemoryDisk()).commit(np.zeros(3, np.uint8))
    assert rows_of({}).dtype == PAGE_ROW
