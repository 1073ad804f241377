"""What is kept outlives engines, daemons and power cuts: right bytes, or a loss that is named."""

import asyncio
import contextlib
import itertools

import numpy as np
import pytest

from tests.moversteps import cool, demote, intact, start, turns
from tests.rig import INT8, INT8_BLOCK, LAYERS, RAW_SLOT, Rig, in_loop
from tierd import mover, traffic
from tierd.disk.faults import FOR_EVER, Fault, FaultKind
from tierd.disk.fsck import check
from tierd.disk.simulated import SimulatedDisk
from tierd.errors import (
    DeadlineExceeded,
    NotFound,
    StaleGeneration,
    StorageError,
    StorageFull,
    TierFull,
)
from tierd.keeping import CLAIM_SECONDS
from tierd.testing import FakeClock
from tierd.types import CodecId, SessionState, Tier


def make(disk: SimulatedDisk, warm_blocks: int = 8, cold_blocks: int = 64, first: int = 1) -> Rig:
    rig = Rig(warm_blocks * INT8_BLOCK, cold_blocks * INT8_BLOCK, disk, durable=True,
              first_number=first)  # fmt: skip
    rig.engine(1)
    return rig


def ids(blocks: int) -> bytes:
    return np.arange(blocks * 16, dtype="<u4").tobytes()


async def suspend(rig: Rig, session, blocks: int, *, patient: bool = False) -> None:
    """Suspend; `patient`: time passes, so that what failed is tried again."""
    task = await start(rig.mover.suspend(session.engine_id, session.number, ids(blocks), blocks))
    if patient:
        for _ in range(100):
            rig.mover.pump()
            rig.lanes.run()
            rig.clock.advance(0.5)
            await asyncio.sleep(0)
            if task.done():
                break
    else:
        await turns(rig, task)
    task.result()


async def kept(rig: Rig, blocks: int = 4):
    session = rig.session()
    await demote(rig, session, range(blocks), include_first=True)
    await suspend(rig, session, blocks)
    return session


def reopened(disk: SimulatedDisk, **options) -> Rig:
    rig = make(disk, first=1000, **options)
    rig.store.check_integrity()
    return rig


def resumed(rig: Rig, number: int, blocks: int):
    session = rig.store.resume_session(1, number, INT8, 1024)
    assert (session.sealed_blocks, session.token_ids[: len(ids(blocks))]) == (blocks, ids(blocks))
    rig.store.check_integrity()
    intact(rig, session)
    return session


@pytest.mark.parametrize("how", ["kill", "crash"])
@in_loop
async def test_a_suspended_session_is_there_after(how: str) -> None:
    disk = SimulatedDisk(1)
    number = (await kept(make(disk))).number
    again = reopened(disk.kill() if how == "kill" else disk.crash(keep=()))
    session = resumed(again, number, 4)
    assert session.index.pages_in(Tier.COLD) == 4 * LAYERS


@in_loop
async def test_a_suspension_is_not_acknowledged_before_its_sync() -> None:
    disk = SimulatedDisk(1)
    rig = make(disk)
    session = rig.session()
    await demote(rig, session, range(4), include_first=True)
    task = await start(rig.mover.suspend(1, session.number, ids(4), 4))
    for _ in range(10):
        rig.mover.pump()
        rig.lanes.run()  # each pass: the copies, then the flush
        if not task.done() and not disk.pending() and not session.index.unbacked_count:
            break
    assert session.state is SessionState.RUNNING
    rig.mover.pump()
    await task
    assert session.state is SessionState.SUSPENDED


@in_loop
async def test_a_suspension_looks_at_each_page_a_few_times_however_many_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = make(SimulatedDisk(1), warm_blocks=64, cold_blocks=128)
    session = rig.session()
    await demote(rig, session, range(48), include_first=True)
    monkeypatch.setattr(mover, "BATCH_BYTES", 2 * INT8_BLOCK)
    monkeypatch.setattr(traffic, "LOOK_BYTES", 4 * INT8_BLOCK)
    unbacked, looked_at = rig.store.keeper.unbacked, 0

    def counted(session):
        nonlocal looked_at
        for key in unbacked(session):
            looked_at += 1
            yield key

    monkeypatch.setattr(rig.store.keeper, "unbacked", counted)
    await suspend(rig, session, 48)
    # A batch looks at twice its pages, and passes by those of the two batches under way.
    assert 48 * LAYERS <= looked_at <= 5 * 48 * LAYERS


@in_loop
async def test_what_stays_warm_of_a_suspended_session_is_spilled_without_a_copy() -> None:
    rig = make(SimulatedDisk(1))
    session = await kept(rig)
    assert session.index.pages_in(Tier.WARM) == session.index.backed_count == 4 * LAYERS
    cold = rig.store.stats()["tiers"]["cold"]
    assert (cold["pages"], cold["backup_pages"]) == (0, 4 * LAYERS)
    assert cold["bytes"] == cold["backup_bytes"] == INT8_BLOCK * 3 + LAYERS * RAW_SLOT
    writes = rig.disk.operations
    cool(rig, session)
    cold = rig.store.stats()["tiers"]["cold"]
    assert (cold["pages"], cold["backup_pages"], cold["backup_bytes"]) == (4 * LAYERS, 0, 0)
    assert session.index.pages_in(Tier.COLD) == 4 * LAYERS and rig.disk.operations == writes
    resumed(rig, session.number, 4)


@in_loop
async def test_an_engine_that_dies_leaves_a_resumed_session_as_it_was_kept() -> None:
    rig = make(SimulatedDisk(1))
    number = (await kept(rig)).number
    session = resumed(rig, number, 4)
    await demote(rig, session, range(4, 7))
    rig.store.drop_engine(1)
    assert session.state is SessionState.SUSPENDED and len(session.index) == 4 * LAYERS
    rig.engine(2)
    rig.store.resume_session(2, number, INT8, 1024)
    intact(rig, session)


@in_loop
async def test_a_resumed_session_is_as_it_was_kept_after_both_have_died() -> None:
    disk = SimulatedDisk(1)
    rig = make(disk)
    number = (await kept(rig)).number
    session = resumed(rig, number, 4)
    await demote(rig, session, range(4, 10))
    rig.settle()
    resumed(reopened(disk.kill()), number, 4)


@in_loop
async def test_a_truncation_cuts_what_is_kept() -> None:
    disk = SimulatedDisk(1)
    rig = make(disk)
    number = (await kept(rig)).number
    session = rig.store.resume_session(1, number, INT8, 1024)
    rig.store.truncate(1, number, 2)
    await demote(rig, session, [2, 3], version=1)
    rig.store.drop_engine(1)
    assert session.sealed_blocks == 2
    rig.clock.advance(1.0)
    rig.settle()
    resumed(reopened(disk.kill()), number, 2)


@in_loop
async def test_close_by_its_engine_keeps_discard_does_not() -> None:
    disk = SimulatedDisk(1)
    rig = make(disk)
    first, second = (await kept(rig)).number, (await kept(rig)).number
    for number in (first, second):
        rig.store.resume_session(1, number, INT8, 1024)
    rig.store.close_session(first, engine_id=1)
    rig.store.close_session(second, engine_id=1, discard=True)
    rig.clock.advance(1.0)
    rig.settle()
    again = reopened(disk.kill())
    resumed(again, first, 4)
    with pytest.raises(NotFound):
        again.store.session(second)


@in_loop
async def test_a_session_that_was_never_kept_waits_for_its_engine_then_goes() -> None:
    disk = SimulatedDisk(1)
    rig = make(disk)
    session = rig.session()
    await demote(rig, session, range(1, 20))
    rig.settle()
    cold = rig.store.stats()["tiers"]["cold"]["bytes"]
    again = reopened(disk.kill())
    assert again.store.stats()["tiers"]["cold"]["bytes"] == cold > 0
    assert list(again.store.keeper.unclaimed) == [session.number]
    again.clock.advance(CLAIM_SECONDS)
    again.store.tick()
    again.store.check_integrity()
    again.store.tick()
    assert again.store.stats()["tiers"]["cold"]["bytes"] == 0
    again.mover.pump()
    again.settle()
    assert not reopened(again.disk.kill()).store.keeper.unclaimed


@in_loop
async def test_no_room_to_keep_leaves_the_session_with_its_engine() -> None:
    rig = make(SimulatedDisk(1), warm_blocks=16, cold_blocks=4)
    session = rig.session()
    await demote(rig, session, range(8), include_first=True)
    with pytest.raises(TierFull, match="cold tier has no room to keep"):
        await suspend(rig, session, 8)
    assert session.state is SessionState.RUNNING
    intact(rig, session)


@in_loop
async def test_kept_sessions_are_not_evicted_for_a_running_one() -> None:
    rig = make(SimulatedDisk(1), warm_blocks=4, cold_blocks=10)
    session = await kept(rig, 4)
    other = rig.session()
    with pytest.raises(TierFull, match="kept sessions hold"):
        while True:
            left = [block for block in range(1, 40) if not other.index.layers_of(block)]
            task = await start(
                rig.mover.plan_demotion(1, other.number, left, 1, deadline_seconds=5.0)
            )
            while not task.done():
                rig.mover.pump()
                rig.lanes.run()
                rig.clock.advance(0.5)
                await asyncio.sleep(0)
            plan = task.result()
            rig.store.commit(1, plan.reservation, rig.write(other, plan))
    rig.store.close_session(other.number, engine_id=1)
    resumed(rig, session.number, 4)


@pytest.mark.parametrize("count", [1, FOR_EVER], ids=["once", "for ever"])
@pytest.mark.parametrize(
    "kind", [FaultKind.SYNC_DROPS, FaultKind.IO_ERROR, FaultKind.FULL, FaultKind.SHORT]
)
@in_loop
async def test_each_operation_that_fails_is_an_error_never_a_false_acknowledgement(
    kind: FaultKind, count: int
) -> None:
    """From the start of a store on: the n-th operation fails, for every n that there is."""
    struck = 0
    for number in itertools.count(1):
        disk = SimulatedDisk(number, faults=[Fault(kind, first=number, count=count)])
        with contextlib.suppress(StorageError):
            rig = make(disk)
            session = rig.session()
            await demote(rig, session, range(4), include_first=True)
            try:
                await suspend(rig, session, 4, patient=True)
            except (StorageError, TierFull, DeadlineExceeded):
                assert session.engine_id == 1
                intact(rig, session)
                raise StorageError("as it should be") from None
            resumed(reopened(disk.crash(keep=())), session.number, 4)
            if disk.plan._seen[0][1] < number:  # there are no more operations
                break
        struck += 1
    assert struck >= (5 if kind is FaultKind.SYNC_DROPS else 10), f"{struck=}"


@in_loop
async def test_a_resumed_session_whose_next_suspension_fails_at_any_sync_stays_as_it_was_kept() -> (
    None
):
    failed = 0
    for first in itertools.count(1):
        disk = SimulatedDisk(first, faults=[Fault(FaultKind.SYNC_DROPS, first=first)])
        try:
            rig = make(disk)
            session = await kept(rig)
        except StorageError:
            continue  # that sync was of the start, or of the first suspension
        resumed(rig, session.number, 4)
        await demote(rig, session, range(4, 7))
        try:
            await suspend(rig, session, 7, patient=True)
        except StorageError:
            failed += 1
        else:
            if disk.plan._seen[0][1] < first:  # there are no more syncs
                break
            continue  # of a second copy, which no suspension needs
        rig.store.close_session(session.number, engine_id=1)  # the job ends
        assert (session.sealed_blocks, session.token_ids) == (4, ids(4))
        rig.store.check_integrity()
        resumed(rig, session.number, 4)
        rig.store.close_session(session.number, engine_id=1)
        assert (session.sealed_blocks, session.token_ids) == (4, ids(4))
    assert failed >= 2  # of a slab, and of the journal


@in_loop
async def test_a_disk_that_never_answers_is_a_deadline() -> None:
    rig = make(SimulatedDisk(1))
    session = rig.session()
    await demote(rig, session, range(4), include_first=True)
    task = await start(rig.mover.suspend(1, session.number, ids(4), 4, deadline_seconds=30.0))
    for _ in range(40):  # the lanes are given work, and do none of it
        rig.mover.pump()
        rig.clock.advance(1.0)
        await asyncio.sleep(0)
    with pytest.raises(DeadlineExceeded, match="not on disk yet"):
        task.result()
    assert session.engine_id == 1
    intact(rig, session)


@in_loop
async def test_another_engine_cannot_take_an_unclaimed_session_that_was_never_kept() -> None:
    disk = SimulatedDisk(1)
    rig = make(disk)
    session = rig.session()
    await demote(rig, session, range(1, 20))
    rig.settle()
    again = reopened(disk.kill())
    with pytest.raises((NotFound, StaleGeneration)):
        again.store.resume_session(1, session.number, INT8, 1024)


@in_loop
async def test_a_session_that_found_no_room_on_disk_has_blocks_in_ram_alone() -> None:
    disk = SimulatedDisk(1)
    rig = make(disk, cold_blocks=6)
    first = await kept(rig)
    session = rig.session()
    await demote(rig, session, range(4), include_first=True)
    task = await start(rig.mover.suspend(1, session.number, ids(4), 4))
    await turns(rig, task)
    with pytest.raises(TierFull, match=r"drop another .* or raise --cold-cap$"):
        task.result()
    rig.store.close_session(session.number, engine_id=1)
    assert session.state is SessionState.SUSPENDED
    keeper = rig.store.keeper
    waiting = {key.block for key in keeper.unbacked(session)}
    assert 0 < keeper.ram_only_blocks(session) == len(waiting) <= 4
    assert keeper.ram_only_blocks(first) == 0
    disk = disk.kill()
    assert check(disk, FakeClock()).clean  # nobody was told that it is kept
    again = reopened(disk, cold_blocks=6)
    assert all(again.store.keeper.ram_only_blocks(found) == 0 for found in again.store.book)


@pytest.mark.parametrize("then", ["closed", "closed and killed", "killed", "lost power"])
@in_loop
async def test_a_resumed_session_that_finds_no_room_is_kept_as_it_was(then: str) -> None:
    disk = SimulatedDisk(1)
    rig = make(disk, warm_blocks=16, cold_blocks=6)
    session = resumed(rig, (await kept(rig)).number, 4)
    await demote(rig, session, range(4, 10))
    with pytest.raises(TierFull, match="cold tier has no room to keep"):
        await suspend(rig, session, 10)
    assert session.state is SessionState.RUNNING
    intact(rig, session)
    if then.startswith("closed"):
        rig.store.close_session(session.number, engine_id=1)
        rig.store.check_integrity()
        assert (session.sealed_blocks, session.token_ids) == (4, ids(4))
        assert rig.store.keeper.ram_only_blocks(session) == 0
    if then != "closed":
        rig = reopened(disk.crash() if then == "lost power" else disk.kill(), cold_blocks=6)
        rig.clock.advance(CLAIM_SECONDS)
        rig.store.tick()
        (session,) = rig.store.sessions()
        assert (session.sealed_blocks, session.token_ids) == (4, ids(4))
    resumed(rig, session.number, 4)


@in_loop
async def test_a_disk_that_fills_under_the_daemon_takes_nothing_of_what_was_kept() -> None:
    disk = SimulatedDisk(1)
    rig = make(disk, warm_blocks=16)
    session = resumed(rig, (await kept(rig)).number, 4)
    await demote(rig, session, range(4, 16))
    disk.capacity_bytes = disk.used_bytes()
    with pytest.raises(TierFull, match=r"its disk takes none: .* left for slab"):
        await suspend(rig, session, 16, patient=True)
    rig.store.close_session(session.number, engine_id=1)
    rig.store.check_integrity()
    assert (session.sealed_blocks, session.token_ids) == (4, ids(4))
    disk.capacity_bytes = 2**40
    again = reopened(disk.kill())
    resumed(again, session.number, 4)


@in_loop
async def test_a_disk_that_fails_is_not_said_to_be_full() -> None:
    disk = SimulatedDisk(1)
    rig = make(disk, warm_blocks=16)
    session = resumed(rig, (await kept(rig)).number, 4)
    await demote(rig, session, range(4, 16))
    disk.plan.add(Fault(FaultKind.IO_ERROR, "create", count=FOR_EVER))
    with pytest.raises(StorageError) as refused:
        await suspend(rig, session, 16, patient=True)
    assert not isinstance(refused.value, StorageFull)
    assert "disk fails, so the session is not kept" in str(refused.value)
    assert not any(word in str(refused.value) for word in ("room", "full", "space"))


@in_loop
async def test_a_resumed_session_whose_old_blocks_went_keeps_what_is_left_of_them() -> None:
    disk = SimulatedDisk(1)
    rig = make(disk, warm_blocks=16, cold_blocks=6)
    session = resumed(rig, (await kept(rig)).number, 4)
    rig.store.truncate(1, session.number, 2)
    await demote(rig, session, range(2, 10))
    with pytest.raises(TierFull, match="cold tier has no room to keep"):
        await suspend(rig, session, 10)
    rig.store.truncate(1, session.number, 1)
    rig.store.close_session(session.number, engine_id=1)
    assert (session.sealed_blocks, session.token_ids) == (1, ids(4))
    rig.ledger.flush()
    again = reopened(disk.kill(), cold_blocks=6)
    resumed(again, session.number, 1)


async def resumed_without_a_guard(rig: Rig, session) -> None:
    """Resume, and keep anew with a block that is as was asked for, though layers had risen."""
    before = rig.store.keeper.page_codecs(session)
    rig.store.truncate(1, resumed(rig, session.number, 4).number, 1)
    await demote(rig, session, [1], codecs=before)
    await demote(rig, session, [2], codecs=(CodecId.INT8,) * 2)
    assert rig.store.keeper.page_codecs(session) == before
    await suspend(rig, session, 3)


@in_loop
async def test_encoded_blocks_say_which_codecs_a_session_has() -> None:
    disk = SimulatedDisk(1)
    rig = make(disk)
    session, keeper = rig.session(), rig.store.keeper
    assert keeper.page_codecs(session) == ()
    await demote(rig, session, range(2), include_first=True)
    assert keeper.page_codecs(session) == (CodecId.INT8, CodecId.INT8)
    raised = (CodecId.INT8, CodecId.RAW)
    await demote(rig, session, [2], codecs=raised)
    assert keeper.page_codecs(session) == raised
    await demote(rig, session, [3], codecs=(CodecId.RAW,) * 2)  # one that int8 cannot encode
    assert keeper.page_codecs(session) == raised
    await suspend(rig, session, 4)
    await resumed_without_a_guard(rig, session)
    again = reopened(disk.kill())
    dormant = again.store.session(session.number)
    assert dormant.dormant and again.store.keeper.page_codecs(dormant) == raised
    again.store.keeper.wake(dormant)
    assert again.store.keeper.page_codecs(dormant) == raised
