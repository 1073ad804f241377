"""A kept session's end is durable when its caller hears ok, or refused with what to do."""

import pytest

from tests.moversteps import demote, start, turns
from tests.rig import INT8, INT8_BLOCK, Rig, in_loop
from tests.test_full_disk import FULL, dropped, full, while_it_waits
from tests.test_keeping import kept, make, reopened, resumed, suspend
from tierd.adoption import Found
from tierd.backups import AGAIN_SECONDS
from tierd.disk.faults import Fault, FaultKind
from tierd.disk.fsck import check
from tierd.disk.records import SessionRecord
from tierd.disk.simulated import SimulatedDisk
from tierd.errors import DeadlineExceeded, NotFound, StorageError, StorageFull
from tierd.testing import FakeClock

# -- where a full disk at the start lets nothing be written --------------------------------


async def roomless(blocks: int = 4) -> tuple[Rig, int, int]:
    """Return a store started where no byte is free, and two sessions kept there."""
    disk = SimulatedDisk(1)
    rig = make(disk, warm_blocks=16)
    first, second = (await kept(rig, blocks)).number, (await kept(rig, blocks)).number
    rig.ledger.flush()
    disk = disk.kill()
    disk.capacity_bytes = disk.used_bytes()
    rig = Rig(32 * INT8_BLOCK, 64 * INT8_BLOCK, disk, durable=True, patient=True, first_number=1000)
    rig.engine(1)
    assert rig.store.ledger.waiting
    return rig, first, second


def gone(disk: SimulatedDisk, number: int, other: int) -> None:
    """The next start has the one session, and not the other."""
    disk.capacity_bytes = 2**40
    assert check(disk, FakeClock()).clean
    again = reopened(disk)
    with pytest.raises(NotFound):
        again.store.session(number)
    resumed(again, other, 4)


@pytest.mark.parametrize("by", ["operator", "engine"])
@pytest.mark.parametrize("end", ["killed", "lost power", "closed", "space"])
@in_loop
async def test_a_session_dropped_while_it_waits_stays_dropped(by: str, end: str) -> None:
    rig, number, other = await roomless()
    if by == "engine":
        resumed(rig, number, 4)
        await dropped(rig, number, engine_id=1, discard=True)
    else:
        await dropped(rig, number)
    with pytest.raises(NotFound):
        rig.store.session(number)
    assert rig.store.ledger.waiting
    disk = rig.disk
    if end == "space":
        disk.capacity_bytes = 2**40
        await while_it_waits(rig)
        assert not rig.store.ledger.failed
    if end == "closed":
        await rig.mover.stop()
        rig.store.close()
        with pytest.raises(StorageFull):
            rig.ledger.close()
    gone(disk.crash(keep=()) if end == "lost power" else disk.kill(), number, other)


@in_loop
async def test_with_all_of_a_namespace_dropped_its_slabs_go_and_the_ledger_begins() -> None:
    rig, first, second = await roomless(blocks=24)
    await dropped(rig, first)
    assert rig.disk.names("slab")
    await dropped(rig, second)
    await while_it_waits(rig)
    assert not rig.disk.names("slab") and not rig.store.ledger.failed
    for disk in (rig.disk.crash(keep=()), rig.disk.kill()):
        assert check(disk, FakeClock()).clean
        disk.capacity_bytes = 2**40  # the removal of the slabs may be undone
        assert not reopened(disk).store.sessions()


@in_loop
async def test_slabs_that_went_after_a_drop_are_no_damage_before_the_ledger_begins() -> None:
    rig, first, second = await roomless()
    await dropped(rig, first)
    await dropped(rig, second)
    assert not rig.disk.names("slab") and rig.store.ledger.waiting
    for disk in (rig.disk.crash(keep=()), rig.disk.kill()):
        report = check(disk, FakeClock())
        assert report.clean, report
        disk.capacity_bytes = 2**40
        assert not reopened(disk).store.sessions()


@in_loop
async def test_a_drop_that_cannot_be_noted_is_refused_says_what_to_do_and_changes_nothing() -> None:
    rig, number = await full()
    with pytest.raises(StorageFull, match=r"stays.*make room outside the cold folder"):
        await dropped(rig, number)
    resumed(rig, number, 4)
    with pytest.raises(StorageFull, match="stays"):
        await dropped(rig, number, engine_id=1, discard=True)
    rig.store.drop_engine(1)
    rig.engine(1)
    resumed(rig, number, 4)
    disk = rig.disk.kill()
    disk.plan.clear()
    resumed(reopened(disk), number, 4)


@in_loop
async def test_a_drop_that_a_failing_disk_cannot_note_says_that_it_may_be_gone() -> None:
    rig, number, _ = await roomless()
    rig.disk.plan.add(Fault(FaultKind.IO_ERROR, "sync_folder"))
    with pytest.raises(StorageError, match="may be gone") as caught:
        await dropped(rig, number)
    assert not isinstance(caught.value, StorageFull)
    resumed(rig, number, 4)


@in_loop
async def test_a_drop_that_a_hanging_disk_does_not_note_is_answered_by_its_deadline() -> None:
    rig, number, other = await roomless()
    with pytest.raises(DeadlineExceeded, match="may be gone after a restart, or not"):
        await rig.mover.acks.close_session(number, deadline_seconds=0.05)
    rig.settle()  # the lane goes on later: what it was asked is done
    with pytest.raises(NotFound):
        rig.store.session(number)
    gone(rig.disk.crash(keep=()), number, other)


@in_loop
async def test_space_that_comes_amid_a_drop_lets_the_journal_say_so() -> None:
    rig, number, other = await roomless()
    task = await start(rig.mover.acks.close_session(number))
    rig.disk.capacity_bytes = 2**40
    rig.ledger.flush(sync=True)  # as a lane that was ahead of it does
    await turns(rig, task)
    task.result()
    assert not rig.store.ledger.waiting
    gone(rig.disk.crash(keep=()), number, other)


@in_loop
async def test_a_session_resumed_amid_its_drop_is_gone_for_its_engine() -> None:
    rig, number, other = await roomless()
    task = await start(rig.mover.acks.close_session(number))
    rig.mover.pump()
    resumed(rig, number, 4)
    await turns(rig, task)
    task.result()
    with pytest.raises(NotFound):
        rig.store.truncate(1, number, 0)
    gone(rig.disk.crash(keep=()), number, other)


@in_loop
async def test_an_engine_that_dies_amid_its_discard_leaves_nothing() -> None:
    rig, number, other = await roomless()
    resumed(rig, number, 4)
    task = await start(rig.mover.acks.close_session(number, engine_id=1, discard=True))
    rig.mover.pump()
    rig.store.drop_engine(1)
    await turns(rig, task)
    task.result()
    with pytest.raises(NotFound):
        rig.store.session(number)
    gone(rig.disk.crash(keep=()), number, other)


@in_loop
async def test_a_dropped_session_that_its_engine_hands_back_can_be_kept_anew() -> None:
    """The engine outlived the daemon before, and has nothing but the session's number."""
    rig, number, other = await roomless()
    await dropped(rig, number)
    session = rig.store.adopt_session(1, number, INT8, 1024, Found())
    await demote(rig, session, range(3), include_first=True)
    with pytest.raises(StorageFull):
        await suspend(rig, session, 3)
    rig.store.close_session(number, engine_id=1)
    rig.disk.capacity_bytes = 2**40
    await while_it_waits(rig, 4 * AGAIN_SECONDS)
    assert not rig.store.keeper.ram_only
    again = reopened(rig.disk.crash(keep=()))
    resumed(again, number, 3)
    resumed(again, other, 4)


# -- where the ledger writes ---------------------------------------------------------------


@pytest.mark.parametrize("by", ["operator", "engine"])
@in_loop
async def test_a_drop_is_answered_when_it_is_durable(by: str) -> None:
    disk = SimulatedDisk(1)
    rig = make(disk, warm_blocks=16)
    number, other = (await kept(rig)).number, (await kept(rig)).number
    options = {}
    if by == "engine":
        resumed(rig, number, 4)
        options = {"engine_id": 1, "discard": True}
    await dropped(rig, number, **options)
    gone(disk.crash(keep=()), number, other)


@in_loop
async def test_a_drop_on_a_ledger_that_has_failed_is_refused_and_a_restart_has_the_session() -> (
    None
):
    disk = SimulatedDisk(1)
    rig = make(disk, warm_blocks=16)
    number = (await kept(rig)).number
    disk.plan.add(Fault(FaultKind.SYNC_DROPS, "sync", prefix="journal"))
    session = rig.session()
    await demote(rig, session, range(2), include_first=True)
    with pytest.raises(StorageError):
        await suspend(rig, session, 2)
    assert rig.store.ledger.failed
    with pytest.raises(StorageError, match=r"stays.*start the daemon again, then drop it"):
        await dropped(rig, number)
    disk = disk.kill()
    disk.plan.clear()
    resumed(reopened(disk), number, 4)


@in_loop
async def test_a_drop_whose_sync_fails_says_what_a_restart_may_do() -> None:
    disk = SimulatedDisk(1)
    rig = make(disk)
    number = (await kept(rig)).number
    disk.plan.add(Fault(FaultKind.SYNC_DROPS, "sync", prefix="journal"))
    with pytest.raises(StorageError, match="gone here, and a restart may bring back"):
        await dropped(rig, number)
    with pytest.raises(NotFound):
        rig.store.session(number)


@in_loop
async def test_a_drop_that_finds_no_space_says_so_and_is_durable_once_there_is_some() -> None:
    disk = SimulatedDisk(1)
    rig = make(disk, warm_blocks=16)
    number, other = (await kept(rig)).number, (await kept(rig)).number
    disk.plan.add(FULL)
    # More than is left of the journal's segment: the next cannot be made.
    rig.ledger.put_session(SessionRecord(7**9, INT8, "running", bytes(60 * 1024)))
    with pytest.raises(StorageFull, match=r"gone here, .* make room outside the cold folder"):
        await dropped(rig, number)
    assert not rig.store.ledger.waiting
    disk.plan.clear()
    await while_it_waits(rig)
    gone(disk.kill(), number, other)
