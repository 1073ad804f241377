"""Demotion to cold slots that the engine writes itself: lent, fenced, recorded, published."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from tests.moversteps import intact, make, start, turns
from tests.rig import INT8_BLOCK, INT8_SLOT, LAYERS, Rig, in_loop
from tests.storesteps import plan
from tierd import lending
from tierd.demotions import EXPIRY_SECONDS, RoomNeeded
from tierd.disk.faults import FOR_EVER, Fault, FaultKind
from tierd.disk.simulated import SimulatedDisk
from tierd.errors import (
    DeadlineExceeded,
    InvalidArgument,
    StaleGeneration,
    StorageError,
    TierFull,
)
from tierd.keeping import CLAIM_SECONDS
from tierd.memory.pagetable import PageTableReader
from tierd.mover import RETRY_SECONDS
from tierd.types import SessionState, Tier


def full(warm_blocks: int = 2, cold_blocks: int = 64):
    """Return a rig whose warm tier has just room for what is in it, and its session."""
    rig = make(warm_blocks, cold_blocks)
    session = rig.session()
    rig.demote(session, range(1, 1 + warm_blocks))
    return rig, session


def cold(rig: Rig) -> dict[str, int]:
    return rig.store.stats()["tiers"]["cold"]


def ids(blocks: int) -> bytes:
    return np.arange(16 * blocks, dtype="<u4").tobytes()


# -- a cold tier that ends with the daemon ---------------------------------------------


def test_an_engine_that_does_not_say_so_is_never_lent_cold_slots() -> None:
    rig, session = full()
    with pytest.raises(RoomNeeded):
        plan(rig, session, [3])
    assert plan(rig, session, [3], writes_cold=True).tier is Tier.COLD
    assert cold(rig)["reserved_slots"] == LAYERS


def test_warm_comes_first_where_it_has_room() -> None:
    rig = make(2)
    session = rig.session()
    assert plan(rig, session, [1], writes_cold=True).tier is Tier.WARM


def test_a_plan_is_of_one_tier_and_what_does_not_fit_waits_for_the_next() -> None:
    rig = make(2)
    session = rig.session()
    rig.demote(session, [1])
    first = plan(rig, session, [2, 3, 4], writes_cold=True)
    assert (first.blocks, first.tier) == ([2], Tier.WARM)
    rest = plan(rig, session, [2, 3, 4], writes_cold=True)
    assert (sorted(rest.blocks), rest.tier) == ([3, 4], Tier.COLD)


def test_the_pages_of_a_layer_lie_side_by_side_in_cold() -> None:
    rig, session = full()
    planned = plan(rig, session, [3, 4, 5], writes_cold=True)
    slots = [[place.slot for place in places] for places in planned.places]
    by_layer = list(zip(*slots, strict=True))
    assert [list(np.diff(layer)) for layer in by_layer] == [[1, 1]] * LAYERS
    assert sorted(slot for row in slots for slot in row) == list(range(3 * LAYERS))
    rig.store.commit(1, planned.reservation, rig.write(session, planned, 0))
    intact(rig, session)


def by_layer(rig: Rig, session) -> list[list[int]]:
    places = [[session.index.get(layer, b).place for b in range(3, 9)] for layer in range(LAYERS)]
    assert len({place.slab for row in places for place in row}) == 1
    return [[place.slot for place in row] for row in places]


def test_they_do_also_where_blocks_come_one_at_a_time(monkeypatch) -> None:
    monkeypatch.setattr(lending, "RUN_BYTES", 6 * INT8_SLOT)
    rig, session = full(cold_blocks=400)
    for block in range(3, 9):
        planned = plan(rig, session, [block], writes_cold=True)
        rig.store.commit(1, planned.reservation, rig.write(session, planned, 0))
    slots = by_layer(rig, session)
    assert [list(np.diff(row)) for row in slots] == [[1] * 5] * LAYERS
    # Between two layers there is room for what is to come.
    assert min(np.diff(sorted(row[0] for row in slots))) >= 6
    intact(rig, session)
    rig.store.check_integrity()


def test_where_there_is_no_room_for_gaps_slots_are_lent_as_they_come() -> None:
    rig, session = full(cold_blocks=8)
    for block in range(3, 9):
        planned = plan(rig, session, [block], writes_cold=True)
        assert (list(planned.blocks), planned.tier) == ([block], Tier.COLD)
        rig.store.commit(1, planned.reservation, rig.write(session, planned, 0))
    intact(rig, session)
    rig.store.check_integrity()


def test_committed_pages_are_cold_with_their_bytes() -> None:
    rig, session = full()
    planned = plan(rig, session, [3, 4], writes_cold=True)
    reader = PageTableReader(session.table.fd)
    digests = rig.write(session, planned)
    assert not reader.read(8).tier[:, 3:].any()
    assert rig.store.commit(1, planned.reservation, digests) is None
    assert (reader.read(8).tier[:, 3:5] == Tier.COLD).all()
    rig.store.check_integrity()
    intact(rig, session)
    stats = rig.store.stats()
    assert stats["direct_demotions"] == 2 * LAYERS and stats["spills"] == 0
    reader.close()


@in_loop
async def test_they_come_up_again_as_spilled_ones_do() -> None:
    rig, session = full(warm_blocks=4)
    planned = plan(rig, session, [5], writes_cold=True)
    rig.store.commit(1, planned.reservation, rig.write(session, planned))
    rig.store.truncate(1, session.number, 6)
    rig.move(rig.pages(session, Tier.WARM)[: 2 * LAYERS], Tier.COLD)
    rig.store.tick()
    rig.move([key for key in rig.pages(session, Tier.COLD) if key.block == 5], Tier.WARM)
    assert {p.block for p in rig.pages(session, Tier.WARM)} >= {5}
    intact(rig, session)


def test_abort_and_the_engines_death_free_the_slots() -> None:
    rig, session = full()
    planned = plan(rig, session, [3], writes_cold=True)
    rig.store.abort(1, planned.reservation)
    assert cold(rig)["reserved_slots"] == 0
    plan(rig, session, [3], writes_cold=True)
    rig.store.drop_engine(1)
    rig.store.check_integrity()
    assert cold(rig)["used_bytes"] == cold(rig)["reserved_slots"] == 0


def test_a_revoked_one_holds_its_slots_until_the_engine_answers() -> None:
    rig, session = full()
    planned = plan(rig, session, [3], writes_cold=True)
    rig.clock.advance(EXPIRY_SECONDS)
    rig.store.tick()
    assert cold(rig)["reserved_slots"] == LAYERS
    with pytest.raises(StaleGeneration):
        rig.store.commit(1, planned.reservation, rig.write(session, planned))
    assert cold(rig)["reserved_slots"] == 0
    rig.store.check_integrity()


def test_a_plan_to_cold_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lending, "COLD_PLAN_BYTES", 5 * INT8_BLOCK - 1)
    rig, session = full()
    planned = plan(rig, session, range(3, 20), writes_cold=True)
    assert len(planned.blocks) == 5 and planned.tier is Tier.COLD
    monkeypatch.setattr(lending, "COLD_PLAN_BYTES", 1)
    assert len(plan(rig, session, range(3, 30), writes_cold=True).blocks) == 1


@in_loop
async def test_where_cold_is_full_too_room_in_warm_is_waited_for() -> None:
    rig, session = full(warm_blocks=2, cold_blocks=1)
    planned = plan(rig, session, [3], writes_cold=True)
    rig.store.commit(1, planned.reservation, rig.write(session, planned))
    with pytest.raises(RoomNeeded):
        plan(rig, session, [4], writes_cold=True)


@in_loop
async def test_a_disk_that_failed_just_now_is_lent_to_nobody() -> None:
    rig, session = full()
    rig.mover._note_trouble(StorageError("input/output error"))
    task = await start(
        rig.mover.plan_demotion(1, session.number, [3], 1, writes_cold=True, deadline_seconds=0.5)
    )
    rig.clock.advance(0.5)
    rig.mover.pump()
    with pytest.raises(TierFull):
        await task
    rig.clock.advance(RETRY_SECONDS)
    again = await rig.mover.plan_demotion(1, session.number, [3], 1, writes_cold=True)
    assert again.tier is Tier.COLD


@in_loop
async def test_what_nobody_uses_makes_room_before_a_running_session_goes_past_warm() -> None:
    rig = make(warm_blocks=5)
    rig.engine(2)
    unused = rig.stored(blocks=4)
    session = rig.session(2)
    task = await start(
        rig.mover.plan_demotion(2, session.number, [1], 1, writes_cold=True, deadline_seconds=5)
    )
    await turns(rig, task)
    assert task.result().tier is Tier.WARM
    assert unused.index.pages_in(Tier.COLD) >= LAYERS


@in_loop
async def test_a_session_that_is_hinted_keeps_its_room_and_the_running_one_goes_past_it() -> None:
    rig = make(warm_blocks=5)
    rig.engine(2)
    awaited = rig.stored(blocks=4)
    rig.mover.hint("a", awaited.number, deadline_seconds=60.0)
    session = rig.session(2)
    planned = await rig.mover.plan_demotion(2, session.number, [1], 1, writes_cold=True)
    assert planned.tier is Tier.COLD
    assert awaited.index.pages_in(Tier.WARM) == 4 * LAYERS


# -- fences ----------------------------------------------------------------------------


def lock(rig: Rig, planned, slots: int = LAYERS) -> None:
    place = planned.places[0][0]
    handle = rig.store.placement.cold_files._handle(place.slab)
    rig.disk.locked[handle] = [(place.slot * INT8_SLOT, slots * INT8_SLOT)]


@pytest.mark.parametrize("how", ["abort", "death", "revoked"])
def test_a_slot_that_is_still_locked_is_lent_to_nobody(how: str) -> None:
    rig, session = full()
    rig.engine(2)
    other = rig.session(2)
    planned = plan(rig, session, [3], writes_cold=True)
    lock(rig, planned)
    if how == "abort":
        rig.store.abort(1, planned.reservation)
    elif how == "death":
        rig.store.drop_engine(1)
    else:
        rig.store.truncate(1, session.number, 1)
        with pytest.raises(StaleGeneration):
            rig.store.commit(1, planned.reservation, rig.write(session, planned))
    rig.store.check_integrity()
    fenced = {(p.slab, p.slot) for _, p in planned.pages()}
    rig.store.tick()
    if how != "abort":  # warm has room again
        rig.demote(other, [1, 2])
    more = plan(rig, other, [10, 11], writes_cold=True)
    assert more.tier is Tier.COLD
    assert not fenced & {(p.slab, p.slot) for _, p in more.pages()}
    rig.disk.locked.clear()
    rig.store.tick()
    assert not rig.store.placement.fenced
    rig.store.check_integrity()
    again = plan(rig, other, [12], writes_cold=True)
    assert fenced == {(p.slab, p.slot) for _, p in again.pages()}


def test_a_restart_lends_no_slot_that_an_engine_of_before_has_locked() -> None:
    disk = SimulatedDisk(1)
    rig = Rig(2 * INT8_BLOCK, 64 * INT8_BLOCK, disk, durable=True)
    rig.engine(1)
    session = rig.session()
    rig.demote(session, [1, 2])
    planned = plan(rig, session, [3], writes_cold=True)
    rig.ledger.flush()
    place = planned.places[0][0]
    disk = disk.kill()
    disk.locked_ranges = lambda handle: [(place.slot * INT8_SLOT, LAYERS * INT8_SLOT)]
    again = Rig(2 * INT8_BLOCK, 64 * INT8_BLOCK, disk, durable=True, first_number=100)
    again.engine(1)
    again.clock.advance(CLAIM_SECONDS + 1.0)  # till then warm is for what engines may bring
    again.store.tick()
    other = again.session()
    again.demote(other, [1, 2])
    free = plan(again, other, [3, 4], writes_cold=True)
    fenced = {(p.slab, p.slot) for _, p in planned.pages()}
    assert free.tier is Tier.COLD and not fenced & {(p.slab, p.slot) for _, p in free.pages()}
    again.store.check_integrity()
    del disk.locked_ranges
    again.store.tick()
    assert not again.store.placement.fenced
    after = plan(again, other, [5], writes_cold=True)
    assert {(p.slab, p.slot) for _, p in after.pages()} == fenced


# -- a cold tier that lasts ------------------------------------------------------------


def durable(disk: SimulatedDisk | None = None, warm_blocks: int = 2):
    rig = Rig(warm_blocks * INT8_BLOCK, 64 * INT8_BLOCK, disk or SimulatedDisk(1), durable=True)
    rig.engine(1)
    session = rig.session()
    rig.demote(session, range(1, 1 + warm_blocks))
    return rig, session


async def committing(rig: Rig, planned, session, **options) -> asyncio.Task:
    digests = rig.write(session, planned)
    return await start(rig.mover.commit(1, planned.reservation, digests, **options))


@in_loop
async def test_nothing_is_published_before_the_flush_that_shows_it() -> None:
    rig, session = durable()
    planned = plan(rig, session, [3], writes_cold=True)
    task = await committing(rig, planned, session)
    assert session.index.get(0, 3) is None and not task.done()
    rig.store.check_integrity()
    await turns(rig, task)
    task.result()
    assert session.index.get(0, 3).place.tier is Tier.COLD
    intact(rig, session)
    assert rig.store.stats()["direct_demotions"] == LAYERS


@in_loop
async def test_a_flush_that_fails_publishes_nothing_and_gives_the_slots_back() -> None:
    rig, session = durable()
    planned = plan(rig, session, [3], writes_cold=True)
    task = await committing(rig, planned, session)
    rig.disk.plan.add(Fault(FaultKind.IO_ERROR, "write", count=FOR_EVER))
    for _ in range(20):
        rig.mover.pump()
        rig.lanes.run()
        rig.clock.advance(0.5)
        await asyncio.sleep(0)
        if task.done():
            break
    with pytest.raises(StorageError):
        await task
    assert session.index.get(0, 3) is None
    rig.store.check_integrity()
    assert cold(rig)["reserved_slots"] == 0
    with pytest.raises((RoomNeeded, TierFull)):
        plan(rig, session, [3], writes_cold=True)


@in_loop
async def test_a_disk_that_hangs_holds_no_commit_beyond_its_deadline() -> None:
    rig, session = durable()
    planned = plan(rig, session, [3], writes_cold=True)
    task = await committing(rig, planned, session, deadline_seconds=0.05)
    with pytest.raises(DeadlineExceeded):
        await asyncio.wait_for(task, 5.0)
    rig.settle()
    assert session.index.get(0, 3).place.tier is Tier.COLD  # the reply was lost, the page was not
    intact(rig, session)


@pytest.mark.parametrize("what", ["truncate", "close", "death", "abort", "operator", "suspend"])
@in_loop
async def test_what_befalls_the_session_before_the_flush(what: str) -> None:
    rig, session = durable()
    planned = plan(rig, session, [3], writes_cold=True)
    task = await committing(rig, planned, session)
    if what == "truncate":
        rig.store.truncate(1, session.number, 3)
    elif what == "close":
        rig.store.close_session(session.number, engine_id=1)
    elif what == "death":
        rig.store.drop_engine(1)
    elif what == "abort":
        rig.store.abort(1, planned.reservation)
    elif what == "operator":
        rig.store.close_session(session.number)
    else:
        rig.store.truncate(1, session.number, 1)
        rig.store.begin_suspend(1, session.number, ids(0), 0)
    rig.store.check_integrity()
    with pytest.raises(StaleGeneration):
        rig.store.commit(1, planned.reservation, rig.write(session, planned))
    await turns(rig, task)
    with pytest.raises(StaleGeneration):
        task.result()
    rig.store.check_integrity()
    assert cold(rig)["reserved_slots"] == 0 and len(rig.store.demotions) == 0
    rig.ledger.flush()
    assert len(rig.ledger.pages_of(session.number)) == 0


def test_the_same_blocks_are_not_lent_again_while_they_are_being_committed() -> None:
    rig, session = durable()
    planned = plan(rig, session, [3], writes_cold=True)
    rig.store.commit(1, planned.reservation, rig.write(session, planned))
    with pytest.raises(InvalidArgument):
        plan(rig, session, [3], writes_cold=True)
    rig.clock.advance(2 * EXPIRY_SECONDS)
    rig.store.tick()
    assert session.state is SessionState.IDLE and len(rig.store.demotions) == 1


@in_loop
async def test_a_suspended_session_of_direct_pages_survives_a_power_cut() -> None:
    rig, session = durable(warm_blocks=1)
    rig.store.truncate(1, session.number, 0)
    rig.store.tick()
    for block in range(4):
        planned = plan(rig, session, [block], include_first=True, writes_cold=True)
        task = await committing(rig, planned, session)
        await turns(rig, task)
    assert session.index.pages_in(Tier.COLD) >= 2 * LAYERS
    parked = await start(rig.mover.suspend(1, session.number, ids(4), 4))
    await turns(rig, parked)
    parked.result()
    again = Rig(
        8 * INT8_BLOCK, 64 * INT8_BLOCK, rig.disk.crash(keep=()), durable=True, first_number=9
    )
    again.engine(1)
    back = again.store.resume_session(1, session.number, session.namespace, 1024)
    assert back.sealed_blocks == 4
    intact(again, back)


@pytest.mark.parametrize("offset", [0, 60, 5000], ids=["magic", "block", "payload"])
@in_loop
async def test_bytes_that_are_not_what_was_committed_are_a_typed_miss_and_quarantined(
    offset: int,
) -> None:
    rig, session = durable(warm_blocks=4)
    planned = plan(rig, session, [5], writes_cold=True)
    digests = rig.write(session, planned)
    place = planned.places[0][1]
    rig.flip_cold_bit(place, INT8_SLOT, offset)
    task = await start(rig.mover.commit(1, planned.reservation, digests))
    await turns(rig, task)
    rig.move(rig.pages(session, Tier.WARM)[: 2 * LAYERS], Tier.COLD)
    rig.ledger.flush()
    rig.store.tick()
    promoting = await start(rig.mover.promote(1, session.number, [5]))
    await turns(rig, promoting)
    assert promoting.result() == LAYERS - 1
    assert rig.store.stats()["corrupt"] == 1 and session.index.get(1, 5) is None
    assert place.slot in rig.ledger.quarantined(place.slab)
    intact(rig, session)
