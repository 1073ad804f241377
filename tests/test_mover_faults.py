"""The mover with damaged pages, failing and hanging disks, and its own end."""

import asyncio

import pytest

from tests.moversteps import cool, demote, intact, make, start, turns
from tests.rig import INT8_SLOT, LAYERS, Rig, in_loop
from tierd.errors import DaemonUnavailable, NotFound, TierFull
from tierd.mover import IO_DEADLINE_SECONDS, RETRY_SECONDS
from tierd.types import SessionState, Tier


def damage_warm(rig: Rig, session, layer: int, block: int) -> None:
    place = session.index.get(layer, block).place
    memory = rig.store.placement.warm_memory.mapping(place.slab).buffer
    memory[place.slot * INT8_SLOT + 5000] ^= 1


def test_a_page_damaged_in_warm_is_never_written_to_cold():
    rig = make(warm_blocks=16)
    session = rig.stored(blocks=4)
    damage_warm(rig, session, 1, 2)
    running = rig.session()
    asyncio.run(demote(rig, running, range(1, 17)))
    rig.settle()
    assert rig.store.stats()["corrupt"] == 1
    assert session.sealed_blocks == 2
    intact(rig, session)


def test_a_page_damaged_on_disk_is_a_typed_miss_for_a_running_session():
    rig = make(warm_blocks=16)
    session = rig.session()
    rig.demote(session, [1, 2])
    cool(rig, session)
    place = session.index.get(0, 1).place
    rig.flip_cold_bit(place, INT8_SLOT, offset=5000)

    async def scenario():
        task = await start(rig.mover.promote(1, session.number, [1, 2]))
        await turns(rig, task)
        return task.result()

    assert asyncio.run(scenario()) == 2 * LAYERS - 1
    assert session.index.get(0, 1) is None
    assert rig.store.stats()["corrupt"] == 1
    intact(rig, session)


@in_loop
async def test_a_write_that_fails_leaves_the_page_warm_and_is_tried_again_later():
    rig = make(warm_blocks=2)
    session = rig.session()
    rig.demote(session, [1, 2])
    rig.fail_writes(3)  # both pages at once, then each alone
    task = await start(rig.mover.plan_demotion(1, session.number, [3], 1))
    for _ in range(5):
        rig.mover.pump()
        rig.lanes.run()
    rig.mover.pump()
    assert not rig.lanes.held and session.index.pages_in(Tier.WARM) == 2 * LAYERS
    assert list(rig.store.stats()["troubles"]) == ["disk"]
    rig.clock.advance(RETRY_SECONDS)
    await turns(rig, task)
    assert task.result().blocks == [3]
    rig.store.abort(1, task.result().reservation)
    rig.settle()
    assert rig.store.stats()["troubles"] == {}
    intact(rig, session)


@in_loop
async def test_room_that_a_slow_disk_has_not_made_in_time_is_no_full_disk():
    rig = make(warm_blocks=2)
    session = rig.session()
    rig.demote(session, [1, 2])
    task = await start(rig.mover.plan_demotion(1, session.number, [3], 1, deadline_seconds=3.0))
    rig.mover.pump()
    assert rig.lanes.held
    rig.clock.advance(3.0)
    rig.mover.pump()
    with pytest.raises(TierFull, match=r"not taken 2 pages, 24.0 KiB, .* try again"):
        await task
    rig.settle()
    await demote(rig, session, [3])
    intact(rig, session)


@in_loop
async def test_a_disk_that_hangs_delays_nobody_beyond_the_deadline_and_recovers():
    rig = make(warm_blocks=2)
    session = rig.session()
    rig.demote(session, [1, 2])
    task = await start(rig.mover.plan_demotion(1, session.number, [3], 1, deadline_seconds=12.0))
    rig.mover.pump()
    hung = len(rig.lanes.held)
    assert hung
    rig.clock.advance(IO_DEADLINE_SECONDS)
    rig.mover.pump()
    assert len(rig.lanes.held) == hung  # nothing new is given to a disk that does not answer
    rig.clock.advance(2.0)
    rig.mover.pump()
    with pytest.raises(TierFull, match="no answer"):
        await task
    rig.store.check_integrity()
    rig.settle()  # the disk answers after all: what it did is used
    assert session.index.pages_in(Tier.COLD) > 0
    intact(rig, session)


@in_loop
async def test_engine_death_while_a_spill_hangs_keeps_its_slots_until_the_disk_answers():
    rig = make(warm_blocks=2)
    session = rig.session()
    rig.demote(session, [1, 2])
    task = await start(rig.mover.plan_demotion(1, session.number, [3], 1))
    rig.mover.pump()
    rig.store.drop_engine(1)
    rig.mover.pump()
    rig.store.check_integrity()
    with pytest.raises(NotFound):
        await task
    assert rig.store.stats()["orphans"] > 0
    rig.settle()
    rig.store.tick()
    assert all(tier["used_bytes"] == 0 for tier in rig.store.stats()["tiers"].values())


# -- life of the loop --------------------------------------------------------


@in_loop
async def test_run_ends_at_stop_and_fails_who_waits():
    rig = make(warm_blocks=2, cold_blocks=1)
    session = rig.session()
    await demote(rig, session, [1, 2, 3])
    loop = await start(rig.mover.run())
    task = await start(rig.mover.plan_demotion(1, session.number, [4], 1))
    await rig.mover.stop()
    with pytest.raises(DaemonUnavailable):
        await task
    await asyncio.wait_for(loop, 5.0)
    with pytest.raises(DaemonUnavailable):
        await rig.mover.plan_demotion(1, session.number, [4], 1)


@in_loop
async def test_a_loop_that_breaks_fails_who_waits():
    rig = make(warm_blocks=2, cold_blocks=1)
    session = rig.session()
    await demote(rig, session, [1, 2, 3])
    task = await start(rig.mover.plan_demotion(1, session.number, [4], 1))
    rig.store.tick = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        await rig.mover.run()
    with pytest.raises(DaemonUnavailable):
        await task


@in_loop
async def test_a_session_stays_suspended_through_everything_above():
    rig = make(warm_blocks=4)
    session = rig.stored(blocks=3)
    running = rig.session()
    await demote(rig, running, range(1, 9))
    assert session.state is SessionState.SUSPENDED and session.sealed_blocks == 3
    intact(rig, session)
