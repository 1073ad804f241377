"""The mover on a fake clock, a memory disk and lanes that run when the test says so."""

import asyncio

import pytest

from tests.moversteps import cool, demote, intact, make, start, turns
from tests.rig import INT8, INT8_BLOCK, INT8_SLOT, LAYERS, RAW, Rig, in_loop
from tierd import mover
from tierd.errors import BudgetTooSmall, InvalidArgument, NotFound, TierFull
from tierd.store import IDLE_SECONDS
from tierd.types import Tier

# -- room --------------------------------------------------------


@in_loop
async def test_a_session_much_larger_than_warm_is_demoted_through_it():
    rig = make(warm_blocks=4)
    session = rig.session()
    assert sorted(await demote(rig, session, range(1, 33))) == list(range(1, 33))
    assert len(session.index) == 32 * LAYERS
    rig.settle()
    assert session.index.pages_in(Tier.WARM) <= 4 * LAYERS
    assert rig.store.stats()["tiers"]["warm"]["peak_bytes"] <= 4 * INT8_BLOCK
    assert session.index.blocks_in(Tier.WARM)[-1] == 32  # the newest stay, the oldest went
    assert session.index.blocks_in(Tier.COLD)[0] == 1
    intact(rig, session)


@in_loop
async def test_the_first_block_finds_room_beside_encoded_pages():
    rig = make(warm_blocks=4)
    session = rig.session()
    await demote(rig, session, range(1, 10))
    await demote(rig, session, [0], include_first=True)
    intact(rig, session)
    rig.suspend(session, 10)
    rig.store.check_integrity()


@in_loop
async def test_another_namespace_gets_room_from_a_suspended_session():
    rig = make(warm_blocks=8)
    idle = rig.stored(blocks=4)
    session = rig.session(namespace=RAW)
    await demote(rig, session, range(1, 5))
    intact(rig, idle)
    intact(rig, session)
    assert idle.index.pages_in(Tier.COLD) > 0


@in_loop
async def test_suspended_sessions_make_room_before_running_ones():
    rig = make(warm_blocks=6)
    stored = rig.stored(blocks=2)
    first, second = rig.session(), rig.session()
    rig.demote(first, [1])
    await demote(rig, second, [1, 2, 3])
    assert first.index.pages_in(Tier.WARM) == LAYERS
    assert stored.index.pages_in(Tier.COLD) > 0


@in_loop
async def test_without_room_anywhere_the_plan_fails_at_its_deadline():
    rig = make(warm_blocks=2, cold_blocks=1)
    session = rig.session()
    await demote(rig, session, [1, 2, 3])
    plan = rig.mover.plan_demotion(1, session.number, [4], 1, deadline_seconds=10.0)
    task = await start(plan)
    rig.settle()
    await asyncio.sleep(0)
    assert not task.done()
    rig.clock.advance(10.0)
    await turns(rig, task)
    with pytest.raises(TierFull, match="no room in warm"):
        task.result()
    intact(rig, session)


@in_loop
async def test_when_cold_is_full_suspended_sessions_lose_their_newest_blocks():
    rig = make(warm_blocks=4, cold_blocks=4)
    stored = rig.stored(blocks=3)
    cool(rig, stored)
    session = rig.session()
    await demote(rig, session, range(1, 8))
    assert stored.sealed_blocks < 3
    assert rig.store.stats()["evictions"] > 0
    rig.store.check_integrity()
    intact(rig, session)


@in_loop
async def test_room_waits_for_the_epoch_of_a_reader():
    rig = make(warm_blocks=2)
    rig.engine(2)
    session = rig.session(1)
    await demote(rig, session, [1, 2])
    rig.epochs[2].enter(rig.store.placement.epochs.now)
    task = await start(rig.mover.plan_demotion(1, session.number, [3], 1, deadline_seconds=10.0))
    for _ in range(5):
        rig.mover.pump()
        rig.lanes.run()
    await asyncio.sleep(0)
    # No more is spilled than is needed, however long the step takes.
    assert not task.done() and rig.store.stats()["spills"] == LAYERS
    rig.epochs[2].leave()
    await turns(rig, task)
    assert task.result().blocks == [3]


@in_loop
async def test_a_plan_that_can_never_fit_fails_at_once():
    rig = Rig(warm_bytes=INT8_SLOT)
    rig.engine(1)
    session = rig.session()
    with pytest.raises(BudgetTooSmall):
        await rig.mover.plan_demotion(1, session.number, [1], 1)


@in_loop
async def test_a_plan_of_a_session_closed_meanwhile_is_not_found():
    rig = make(warm_blocks=2)
    session, other = rig.session(), rig.session()
    await demote(rig, other, [1, 2])
    task = await start(rig.mover.plan_demotion(1, session.number, [1], 1))
    rig.store.close_session(session.number)
    await turns(rig, task)
    with pytest.raises(NotFound):
        task.result()


@in_loop
async def test_a_cancelled_plan_leaves_nothing_behind():
    rig = make(warm_blocks=2, cold_blocks=1)
    session = rig.session()
    await demote(rig, session, [1, 2, 3])
    task = await start(rig.mover.plan_demotion(1, session.number, [4], 1))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    rig.settle()
    assert rig.store.stats()["tiers"]["warm"]["reserved_slots"] == 0


@in_loop
async def test_spare_slots_are_kept_while_a_session_runs_and_no_more():
    rig = make(warm_blocks=32)
    session = rig.session()
    rig.demote(session, range(1, 33))
    rig.settle()
    assert rig.store.stats()["spills"] == 32 * LAYERS // 16
    rig.settle()
    assert rig.store.stats()["spills"] == 32 * LAYERS // 16


@in_loop
async def test_no_spare_slots_are_made_for_who_goes_past_a_full_warm_tier():
    rig = make(warm_blocks=32)
    session = rig.session()
    rig.demote(session, range(1, 33))
    planned = await rig.mover.plan_demotion(1, session.number, [33, 34], 2, writes_cold=True)
    assert planned.tier is Tier.COLD
    rig.settle()
    assert rig.store.stats()["spills"] == 0
    # As soon as the engine wants warm slots again, they are.
    rig.store.abort(1, planned.reservation)
    task = await start(rig.mover.plan_demotion(1, session.number, [33], 1))
    await turns(rig, task)
    rig.settle()
    assert rig.store.stats()["spills"] >= 32 * LAYERS // 16


@pytest.mark.parametrize("seconds", [0.0, -1.0, 61.0, float("nan")])
@in_loop
async def test_a_deadline_out_of_range_is_refused(seconds):
    rig = make()
    session = rig.session()
    with pytest.raises(InvalidArgument):
        await rig.mover.plan_demotion(1, session.number, [1], 1, deadline_seconds=seconds)


# -- promotion --------------------------------------------------------


@in_loop
async def test_promote_brings_cold_pages_up_with_their_bytes():
    rig = make(warm_blocks=16)
    session = rig.session()
    rig.demote(session, [1, 2, 3])
    cool(rig, session)
    task = await start(rig.mover.promote(1, session.number, [1, 2]))
    await turns(rig, task)
    assert task.result() == 2 * LAYERS
    assert session.index.blocks_in(Tier.WARM) == [1, 2]
    intact(rig, session)


@in_loop
async def test_promote_counts_pages_that_are_nowhere_as_misses():
    rig = make()
    session = rig.session()
    rig.demote(session, [1])
    assert await rig.mover.promote(1, session.number, [1, 7]) == LAYERS
    assert rig.store.stats()["misses"] == LAYERS


@in_loop
async def test_promote_that_would_displace_what_is_wanted_as_soon_returns_what_there_is():
    rig = make(warm_blocks=2)
    session = rig.session()
    rig.demote(session, [1, 2])
    cool(rig, session)
    rig.demote(session, [3, 4])
    task = await start(rig.mover.promote(1, session.number, [1]))
    await turns(rig, task)
    assert task.result() == 0
    assert session.index.blocks_in(Tier.WARM) == [3, 4]


@in_loop
async def test_a_page_that_came_up_and_was_spilled_is_not_asked_for_again(monkeypatch):
    monkeypatch.setattr(mover, "BATCH_BYTES", 2 * INT8_BLOCK)
    rig = make(warm_blocks=6)
    session, growing = rig.session(), rig.session()
    rig.demote(session, range(1, 7))
    cool(rig, session)

    async def grow():
        for block in range(1, 31):
            planned = await rig.mover.plan_demotion(1, growing.number, [block], 1)
            rig.store.commit(1, planned.reservation, rig.write(growing, planned))

    promotion = await start(rig.mover.promote(1, session.number, list(range(1, 7))))
    growth = await start(grow())
    while not (promotion.done() and growth.done()):
        rig.clock.advance(0.01)
        for _ in range(2):
            rig.mover.pump()
            await asyncio.sleep(0)
            rig.lanes.run()
    growth.result()  # it found room, block after block
    assert rig.store.stats()["promotions"] <= 6 * LAYERS
    intact(rig, session)
    intact(rig, growing)


@in_loop
async def test_a_session_closed_while_its_pages_come_up_ends_the_call():
    rig = make(warm_blocks=16)
    session = rig.session()
    rig.demote(session, [1, 2])
    cool(rig, session)
    task = await start(rig.mover.promote(1, session.number, [1, 2]))
    rig.mover.pump()
    rig.store.drop_engine(1)
    rig.store.check_integrity()
    await turns(rig, task)
    assert task.result() == 0
    rig.settle()
    rig.store.tick()
    assert rig.store.stats()["tiers"]["warm"]["used_bytes"] == 0


# -- hints --------------------------------------------------------


def test_a_hint_brings_a_suspended_session_up_before_its_deadline():
    rig = make(warm_blocks=16)
    session = rig.stored(blocks=4)
    cool(rig, session)
    ticket = rig.mover.hint("a", session.number, deadline_seconds=5.0)
    assert ticket.pages == 4 * LAYERS and 0 < ticket.estimated_seconds < 5.0
    rig.settle()
    assert session.index.pages_in(Tier.WARM) == 4 * LAYERS
    rig.store.resume_session(1, session.number, INT8, 1024)
    intact(rig, session)
    assert rig.store.stats()["hints"]["useful"] == 1


@pytest.mark.parametrize("writes_fail", [False, True])
def test_a_hint_awaits_pages_that_a_spill_is_just_taking_down(writes_fail):
    rig = make(warm_blocks=16)
    session = rig.stored(blocks=4)
    keys = rig.pages(session, Tier.WARM)
    rig.mover._begin(rig.store.traffic.begin_moves(keys, Tier.COLD), Tier.COLD)
    ticket = rig.mover.hint("a", session.number, deadline_seconds=5.0)
    assert (ticket.pages, ticket.left_cold) == (4 * LAYERS, 0)
    if writes_fail:
        rig.fail_writes(2 + len(keys))  # the raw and the encoded together, then each alone
    rig.settle()
    assert session.index.pages_in(Tier.WARM) == 4 * LAYERS
    assert rig.store.stats()["promotions"] == (0 if writes_fail else 4 * LAYERS)
    assert rig.store.stats()["hints"]["open"] == 1
    rig.store.resume_session(1, session.number, INT8, 1024)
    intact(rig, session)
    assert rig.store.stats()["hints"]["useful"] == 1


def test_a_hint_brings_up_a_session_that_no_engine_has_opened_since_a_restart():
    rig = make(warm_blocks=16)
    session = rig.stored(blocks=4)
    cool(rig, session)
    session.max_blocks = 0  # a restart leaves it so, until an engine resumes the session
    assert rig.mover.hint("a", session.number, deadline_seconds=5.0).pages == 4 * LAYERS


def test_a_hint_brings_an_idle_session_up():
    rig = make(warm_blocks=16)
    session = rig.session()
    rig.demote(session, [1, 2])
    cool(rig, session)
    rig.clock.advance(IDLE_SECONDS)
    rig.store.tick()
    rig.mover.hint("a", session.number, deadline_seconds=5.0)
    rig.settle()
    assert session.index.pages_in(Tier.WARM) == 2 * LAYERS
    rig.store.truncate(1, session.number, 64)
    assert rig.store.stats()["hints"]["useful"] == 1


def test_a_session_resumed_before_its_pages_came_makes_the_hint_late():
    rig = make(warm_blocks=16)
    session = rig.stored(blocks=4)
    cool(rig, session)
    rig.mover.hint("a", session.number, deadline_seconds=5.0)
    rig.mover.pump()
    rig.store.resume_session(1, session.number, INT8, 1024)
    rig.settle()
    assert rig.store.stats()["hints"]["late"] == 1
    intact(rig, session)


def test_a_hint_displaces_suspended_sessions_but_no_running_one():
    rig = make(warm_blocks=10)
    hinted = rig.stored(blocks=4)
    cool(rig, hinted)
    stored = rig.stored(blocks=2)
    running = rig.session()
    rig.demote(running, [1, 2, 3])
    rig.settle()
    rig.mover.hint("a", hinted.number, deadline_seconds=5.0)
    rig.settle()
    assert running.index.pages_in(Tier.COLD) == 0
    assert stored.index.pages_in(Tier.COLD) > 0
    assert hinted.index.pages_in(Tier.WARM) >= 3 * LAYERS


def test_a_hint_takes_room_for_exact_pages_from_encoded_ones_and_no_more_than_it_needs():
    rig = make(warm_blocks=16)
    hinted = rig.stored(blocks=4)
    cool(rig, hinted)
    other = rig.session()
    rig.demote(other, range(1, 17))  # every slab holds encoded pages
    rig.clock.advance(IDLE_SECONDS + 1)
    rig.mover.pump()
    rig.mover.hint("a", hinted.number, deadline_seconds=5.0)
    rig.settle()
    assert hinted.index.pages_in(Tier.WARM) == 4 * LAYERS
    assert other.index.pages_in(Tier.WARM) > 0
    intact(rig, hinted)
    intact(rig, other)


def test_a_hint_does_not_displace_one_with_an_earlier_deadline():
    rig = make(warm_blocks=6)
    early = rig.stored(blocks=3)
    cool(rig, early)
    late = rig.stored(blocks=3)
    cool(rig, late)
    rig.mover.hint("a", late.number, deadline_seconds=50.0)
    rig.mover.hint("a", early.number, deadline_seconds=5.0)
    rig.settle()
    assert early.index.pages_in(Tier.WARM) == 3 * LAYERS
    spills = rig.store.stats()["spills"]
    rig.settle()
    assert rig.store.stats()["spills"] == spills


def test_a_cancelled_hint_stops_what_has_not_begun():
    rig = make(warm_blocks=16)
    session = rig.stored(blocks=4)
    cool(rig, session)
    ticket = rig.mover.hint("a", session.number, deadline_seconds=5.0)
    rig.store.cancel_hint("a", ticket.hint_id)
    rig.settle()
    assert session.index.pages_in(Tier.WARM) == 0


def test_hinted_pages_displaced_by_a_running_engine_make_the_hint_wasted():
    rig = make(warm_blocks=6)
    session = rig.stored(blocks=3)
    cool(rig, session)
    rig.mover.hint("a", session.number, deadline_seconds=5.0)
    rig.settle()
    running = rig.session()
    asyncio.run(demote(rig, running, range(1, 7)))
    assert rig.store.stats()["hints"]["wasted"] == 1
