"""Recovery: a prefix, damage told from a torn end, each file with a second source."""

import pytest

from tests.disk.ledgerrig import (
    NAMESPACE,
    SEGMENT_BYTES,
    UUID,
    Rig,
    State,
    open_ledger,
    rows_of,
    slab_files,
    state_of,
)
from tierd.disk import records
from tierd.disk.ledger import SLAB_IDS_RESERVED, Ledger
from tierd.disk.memory import MemoryDisk
from tierd.disk.recovery import Recovered, recover
from tierd.errors import StorageError
from tierd.testing import FakeClock, Fault, FaultKind, SimulatedDisk, failing
from tierd.types import SlabRecord
from tierd.units import SECTOR_BYTES


def found_on(disk: MemoryDisk | SimulatedDisk, **options: bool) -> Recovered:
    return recover(disk, new_uuid=lambda: UUID, clock=FakeClock(), **options)


def rig_on(disk: MemoryDisk | SimulatedDisk, steps: int = 40, seed: int = 1) -> Rig:
    rig = Rig(disk, seed)
    for _ in range(steps):
        rig.step()
    rig.open_session()
    rig.flush_durably()
    return rig


def kept(rig: Rig, disk: MemoryDisk | SimulatedDisk) -> State:
    """Return what recovery is to find when nothing is lost."""
    return rig.now.pruned(slab_files(disk))


def was(rig: Rig, disk: MemoryDisk | SimulatedDisk, state: State) -> bool:
    """Return whether a state is one that the ledger had."""
    return any(old.pruned(slab_files(disk)) == state for old in rig.history)


def test_an_empty_folder_is_a_new_store() -> None:
    disk = MemoryDisk()
    found = found_on(disk)
    assert (found.fresh, found.store_uuid, found.next_slab) == (True, UUID, 1)
    assert disk.names("") == []  # recovery writes nothing
    ledger = open_ledger(disk)
    assert (ledger.store_uuid, ledger.epoch) == (UUID, 2)


def test_each_start_has_a_higher_epoch_and_the_same_name() -> None:
    disk = MemoryDisk()
    epochs = []
    for number in range(6):
        ledger = Ledger.open(disk, new_uuid=lambda n=number: bytes([n]) * 16, clock=FakeClock())
        assert ledger.store_uuid == bytes(16)
        epochs.append(ledger.epoch)
        if number % 2:
            ledger.close()
    assert epochs == sorted(set(epochs))


@pytest.mark.parametrize("folder", ["journal", "slab"])
def test_data_without_a_superblock_is_refused(folder: str) -> None:
    disk = MemoryDisk()
    rig_on(disk)
    del disk.named["superblock"]
    for name in [name for name in disk.named if not name.startswith(folder)]:
        del disk.named[name]
    before = dict(disk.named)
    with pytest.raises(StorageError, match="fsck memory --rebuild"):
        open_ledger(disk)
    assert disk.named == before


def test_every_step_is_timed_and_counted() -> None:
    disk = MemoryDisk()
    rig = rig_on(disk)
    report = found_on(disk).report
    assert list(report.seconds) == [
        "superblock",
        "heads",
        "snapshot",
        "journal",
        "manifests",
        "check",
    ]
    assert report.frames >= 5 and report.records >= 20
    assert report.rows == len(kept(rig, disk).pages)


def test_damage_in_the_middle_is_told_and_only_once() -> None:
    disk = MemoryDisk()
    rig = rig_on(disk)
    name = disk.names("journal")[-1]
    disk.named[name][3 * SECTOR_BYTES + 60] ^= 1
    found = found_on(disk)
    assert "had been durable" in found.report.damage[0]
    state = state_of(found.image)
    assert was(rig, disk, state) and state != kept(rig, disk)
    files = slab_files(disk)
    ledger = open_ledger(disk)
    assert state_of(ledger._image) == state
    assert slab_files(disk) == files  # nothing is thrown away after damage
    again = found_on(disk)
    assert not again.report.damage
    assert state_of(again.image) == state


def test_frames_beyond_damage_never_come_back() -> None:
    disk = MemoryDisk()
    rig = rig_on(disk)
    name = disk.names("journal")[-1]
    disk.named[name][3 * SECTOR_BYTES + 60] ^= 1
    ledger = open_ledger(disk)
    state = state_of(ledger._image)
    disk.named[name][3 * SECTOR_BYTES + 60] ^= 1  # readable again
    assert state_of(found_on(disk).image) == state != kept(rig, disk)


def test_a_torn_end_is_no_damage() -> None:
    disk = SimulatedDisk(3)
    rig = rig_on(disk, steps=8)
    before = disk.pending()
    for number in range(3):
        rig.led.put_session(records.SessionRecord(number, NAMESPACE, "parked", bytes(40), 0))
        rig.led.flush()
    found = found_on(disk.crash(set(range(disk.pending())) - {before}))
    assert found.report.torn_tail and not found.report.damage
    assert state_of(found.image) == kept(rig, disk)


def with_snapshots() -> tuple[MemoryDisk, Rig]:
    disk = MemoryDisk()
    rig = Rig(disk, 2)
    for number in range(60):
        rig.step()
        if number in (25, 45):
            rig.snapshot()
    rig.open_session()
    rig.flush_durably()
    assert len(disk.names("snap")) == 2
    return disk, rig


@pytest.mark.parametrize("newest", [True, False])
def test_one_damaged_snapshot_loses_nothing(newest: bool) -> None:
    disk, rig = with_snapshots()
    name = disk.names("snap")[-1 if newest else 0]
    disk.named[name][SECTOR_BYTES + 9] ^= 1
    found = found_on(disk)
    assert state_of(found.image) == kept(rig, disk)
    assert bool(found.report.damage) == newest
    assert found.report.snapshot != name
    ledger = open_ledger(disk)
    assert (name in disk.names("snap")) != newest
    assert state_of(ledger._image) == kept(rig, disk)


def test_both_snapshots_damaged_is_told() -> None:
    disk, rig = with_snapshots()
    for name in disk.names("snap"):
        disk.named[name][SECTOR_BYTES + 9] ^= 1
    found = found_on(disk)
    assert was(rig, disk, state_of(found.image))
    assert len(found.report.damage) >= 2 or state_of(found.image) == kept(rig, disk)


def test_a_snapshot_that_could_not_be_read_is_not_believed_later() -> None:
    disk, rig = with_snapshots()
    name = disk.names("snap")[-1]
    unreadable = disk.named.pop(name)
    journal = disk.names("journal")[-1]
    first_frame = disk.named[journal][SECTOR_BYTES : 2 * SECTOR_BYTES]
    disk.named[journal][SECTOR_BYTES : 2 * SECTOR_BYTES] = bytes(SECTOR_BYTES)
    ledger = open_ledger(disk)
    state = state_of(ledger._image)
    assert state != kept(rig, disk)
    # Both come back; a start went on without them.
    disk.named[name] = unreadable
    disk.named[journal][SECTOR_BYTES : 2 * SECTOR_BYTES] = first_frame
    found = found_on(disk)
    assert "went on without it" in found.report.damage[0]
    assert state_of(found.image) == state


def test_a_removed_segment_that_is_back_does_no_harm() -> None:
    disk, rig = with_snapshots()
    ledger = open_ledger(disk)
    old = {name: bytearray(data) for name, data in disk.named.items() if "journal" in name}
    for _ in range(2):
        ledger.put_session(records.SessionRecord(1, NAMESPACE, "running"))
        ledger.snapshot()
    state = state_of(ledger._image)
    assert set(old) - set(disk.named)
    disk.named = {**old, **disk.named}
    assert state_of(found_on(disk).image) == state
    assert not found_on(disk).report.damage
    assert rig.now != state


def test_a_sector_that_cannot_be_read_once_is_read_again() -> None:
    disk = SimulatedDisk(1)
    rig = rig_on(disk)
    disk.plan.add(Fault(FaultKind.IO_ERROR, "read", prefix="journal"))
    assert state_of(found_on(disk).image) == kept(rig, disk)


def test_a_sector_that_cannot_be_read_at_all_is_named_and_nothing_is_given_up() -> None:
    disk = MemoryDisk()
    rig = rig_on(disk)
    name, reading = disk.names("journal")[-1], disk.read_into

    def read_into(handle: int, offset: int, buffer: memoryview) -> None:
        bad = 3 * SECTOR_BYTES
        if disk.files[handle] is disk.named[name] and offset <= bad < offset + len(buffer):
            raise StorageError("I/O")
        reading(handle, offset, buffer)

    disk.read_into = read_into  # type: ignore[method-assign]
    before = dict(disk.named)
    with pytest.raises(StorageError, match=r"sector 3 cannot be read.*fsck"):
        open_ledger(disk)
    assert disk.named == before  # a start that can read it will have it all
    found = found_on(disk, strict=False)
    assert "sector 3 cannot be read" in found.report.damage[0]
    assert was(rig, disk, state_of(found.image))


def test_what_is_sound_and_not_understood_is_refused_and_nothing_is_cut() -> None:
    disk = MemoryDisk()
    rig = rig_on(disk)
    rig.led._journal.append([records.pack_records([[99, 1]])])
    rig.led._journal.sync()
    before = {name: bytes(data) for name, data in disk.named.items()}
    with pytest.raises(StorageError, match="later version"):
        open_ledger(disk)
    assert {name: bytes(data) for name, data in disk.named.items()} == before
    found = found_on(disk, strict=False)
    assert "not understood" in found.report.damage[0]
    assert state_of(found.image) == kept(rig, disk)


def test_files_that_were_not_finished_go() -> None:
    disk = MemoryDisk()
    rig_on(disk)
    for name in ("snap/00000000000000ff.tmp", "superblock.tmp", "journal/00000050"):
        disk.create(name, SECTOR_BYTES)
    disk.create("slab/000000aa", SECTOR_BYTES)
    ledger = open_ledger(disk)
    left = {"snap/00000000000000ff.tmp", "superblock.tmp", "journal/00000050", "slab/000000aa"}
    assert not left & set(disk.named)
    assert left <= set(ledger.recovery.dropped_files)
    assert ledger.take_slab_id() > 0xAA
    assert max(disk.names("journal")) > "journal/00000050"


def test_a_clean_start_burns_no_slab_ids_and_a_crash_few() -> None:
    disk = MemoryDisk()
    taken = []
    for number in range(8):
        ledger = open_ledger(disk)
        taken += [ledger.take_slab_id() for _ in range(3)]
        if number < 4:
            ledger.close()
    assert taken[:12] == list(range(1, 13))
    assert taken == sorted(set(taken))
    assert taken[-1] < 12 + 5 * SLAB_IDS_RESERVED


def test_ids_taken_after_the_reserve_was_raised_are_not_given_out_again() -> None:
    disk = SimulatedDisk(1)
    ledger = open_ledger(disk)
    taken = set()
    for _ in range(5 * SLAB_IDS_RESERVED):
        taken.add(ledger.take_slab_id())
        ledger.flush(sync=True)
    assert len(taken) == 5 * SLAB_IDS_RESERVED
    assert open_ledger(disk.crash([])).take_slab_id() > max(taken)


def test_without_a_flush_ids_run_out_before_one_is_given_out_unreserved() -> None:
    disk = SimulatedDisk(1)
    ledger = open_ledger(disk)
    taken = [ledger.take_slab_id() for _ in range(SLAB_IDS_RESERVED)]
    with pytest.raises(StorageError, match="reserved"):
        ledger.take_slab_id()
    assert ledger.dirty
    assert open_ledger(disk.crash([])).take_slab_id() > max(taken)
    ledger.flush(sync=True)
    assert ledger.take_slab_id() == taken[-1] + 1


def test_a_start_that_fails_in_the_middle_can_be_tried_again() -> None:
    disk = MemoryDisk()
    rig = rig_on(disk)
    total = 0
    for first in range(1, 100):
        disk._fail = failing(
            StorageError("I/O"), range(first, 2**63), operations=("create", "write", "sync")
        )
        try:
            open_ledger(disk)
            break
        except StorageError:
            total += 1
        disk._fail = None
        assert state_of(found_on(disk).image) == kept(rig, disk)
    assert total >= 5
    assert len(disk.names("journal")) * SEGMENT_BYTES < 20 * SEGMENT_BYTES


def test_a_segment_in_anothers_place_is_none() -> None:
    disk = MemoryDisk()
    rig = rig_on(disk)
    name = disk.names("journal")[-1]
    disk.named["journal/000000ff"] = bytearray(disk.named[name])
    found = found_on(disk)
    assert "no HEAD of this segment" in found.report.damage[0]
    assert state_of(found.image) == kept(rig, disk)
    assert found.next_segment == 0x100


def test_a_segment_cut_where_nothing_stood_is_told_and_loses_nothing() -> None:
    disk = MemoryDisk()
    rig = rig_on(disk, steps=5)
    name = disk.names("journal")[-1]
    disk.named[name] = disk.named[name][:-SECTOR_BYTES]
    found = found_on(disk)
    assert "made longer" in found.report.damage[0]
    assert state_of(found.image) == kept(rig, disk)


def test_pages_of_no_session_do_not_come_back_with_it() -> None:
    disk = MemoryDisk()
    rig = rig_on(disk, steps=5)
    slab = min(rig.now.slabs) if rig.now.slabs else rig.led.take_slab_id()
    rig.led.add_slab(SlabRecord(slab, NAMESPACE.digest(), 8192, 500))
    disk.named.setdefault(f"slab/{slab:08x}", bytearray())
    rig.led.commit(rows_of({(77, 0, 0): (slab, 400, 1, bytes(16))}))
    rig.led.flush(sync=True)
    ledger = open_ledger(disk)
    assert len(ledger.pages_of(77)) == 0
    ledger.put_session(records.SessionRecord(77, NAMESPACE, "running"))
    ledger.flush(sync=True)
    assert len(open_ledger(disk).pages_of(77)) == 0
