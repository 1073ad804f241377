"""A start on a full disk: all can be looked at, nothing is written, later it begins by itself."""

import random

import pytest

from tests.disk.ledgerrig import NAMESPACE, SEGMENT_BYTES, UUID, Rig, slab_files, state_of
from tierd.disk.ledger import Ledger
from tierd.disk.records import SessionRecord
from tierd.disk.superblock import SPARE
from tierd.errors import StorageError, StorageFull
from tierd.testing import FOR_EVER, FakeClock, Fault, FaultKind, SimulatedDisk

FULL = Fault(FaultKind.FULL, "create", count=FOR_EVER)


def patient(disk: SimulatedDisk) -> Ledger:
    return Ledger.open(
        disk, new_uuid=lambda: UUID, clock=FakeClock(), segment_bytes=SEGMENT_BYTES, patient=True
    )


def worked(seed: int, steps: int = 30) -> Rig:
    """Return a rig with some history, everything said flushed."""
    rig = Rig(SimulatedDisk(seed), seed)
    for _ in range(steps):
        rig.step()
    rig.flush_durably()
    return rig


def test_a_new_store_on_a_full_disk_is_refused() -> None:
    disk = SimulatedDisk(1, faults=[FULL])
    with pytest.raises(StorageFull):
        patient(disk)


def test_without_patience_a_start_on_a_full_disk_is_refused_and_changes_nothing() -> None:
    rig = worked(1)
    disk = rig.disk.kill()
    before = {name: disk.names(name) for name in ("", "journal", "snap", "slab")}
    disk.plan.add(FULL)
    with pytest.raises(StorageFull):
        Ledger.open(disk, new_uuid=lambda: UUID, clock=FakeClock(), segment_bytes=SEGMENT_BYTES)
    assert {name: disk.names(name) for name in before} == before
    disk.plan.clear()
    rig.adopt(disk)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_there_is_read_what_is_said_waits_and_is_kept_once_there_is_space(
    seed: int,
) -> None:
    rig = worked(seed)
    disk = rig.disk.kill() if seed % 2 else rig.disk.crash(keep=())
    disk.plan.add(FULL)
    led = patient(disk)
    assert "full" in led.failed.lower() or "space" in led.failed.lower(), led.failed
    assert led.waiting == led.failed
    assert state_of(led._image) == rig.check_found(state_of(led._image), slab_files(disk)).pruned(
        slab_files(disk)
    )
    said = SessionRecord(2**40 + seed, NAMESPACE, "parked", bytes(8), 0)
    led.put_session(said)
    for _ in range(3):
        with pytest.raises(StorageFull):
            led.flush(sync=True)
    assert led.waiting and led.dirty
    disk.plan.clear()
    led.flush(sync=True)
    assert not led.waiting and not led.failed and not led.dirty
    led.check_integrity()
    expected = state_of(led._image)
    again = patient(disk.crash(keep=()))
    assert state_of(again._image) == expected
    assert again.sessions()[said.number] == said


@pytest.mark.parametrize("seed", range(20))
def test_a_power_cut_while_it_waits_costs_nothing(seed: int) -> None:
    """Whatever was said and not flushed is gone; all before is there, as often as this happens."""
    rig, draw = worked(seed), random.Random(seed)
    disk = rig.disk.kill()
    for _ in range(3):
        disk.plan.add(FULL)
        led = patient(disk)
        assert led.waiting
        for number in list(led.sessions())[:2]:
            led.drop_session(number)
        with pytest.raises(StorageFull):
            led.flush()
        disk.plan.clear()
        disk = disk.crash(torn=draw.random() < 0.5)
        rig.check_disk(disk)
    rig.adopt(disk)


def test_slab_ids_go_on_while_it_waits_and_none_is_given_out_twice() -> None:
    rig = worked(1)
    disk, seen = rig.disk.kill(), set(rig.used_ids)
    for _ in range(3):
        assert SPARE in disk.names("")
        disk.plan.add(FULL)
        led = patient(disk)
        taken = {led.take_slab_id() for _ in range(5)}
        assert not taken & seen
        seen |= taken
        disk.plan.clear()
        # The next file of the superblock was used up: it comes back with the space.
        if SPARE not in disk.names(""):
            led.flush(sync=True)
        disk = disk.kill()


def test_without_the_superblocks_next_file_no_id_is_given_out_and_the_rest_works() -> None:
    disk = worked(1).disk.kill()
    disk.remove(SPARE)
    disk.plan.add(FULL)
    led = patient(disk)
    with pytest.raises(StorageFull):
        led.take_slab_id()
    assert led.sessions() is not None
    disk.plan.clear()
    led.flush(sync=True)
    led.take_slab_id()


def test_a_disk_that_fails_while_it_waits_is_no_full_disk() -> None:
    disk = worked(1).disk.kill()
    disk.plan.add(FULL)
    led = patient(disk)
    disk.plan.clear()
    disk.plan.add(Fault(FaultKind.SYNC_DROPS, "sync", prefix="journal"))
    with pytest.raises(StorageError):
        led.flush(sync=True)
    assert led.failed and not led.waiting
    with pytest.raises(StorageError):
        led.flush(sync=True)


def test_it_can_be_closed_while_it_waits() -> None:
    rig = worked(1)
    disk = rig.disk.kill()
    disk.plan.add(FULL)
    led = patient(disk)
    led.put_session(SessionRecord(5, NAMESPACE, "running"))
    with pytest.raises(StorageFull):
        led.close()
    led.close()
    disk.plan.clear()
    rig.adopt(disk)
