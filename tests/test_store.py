"""Slots retired and reclaimed, engine death, slabs between namespaces, hints."""

import pytest

from tests.rig import GEOMETRY, INT8, INT8_BLOCK, INT8_SLOT, LAYERS, RAW, Rig
from tests.storesteps import assert_empty, checked_rig, keys_of, plan, warm
from tierd.demotions import RoomNeeded
from tierd.errors import (
    InvalidArgument,
    NotFound,
)
from tierd.memory.pagetable import PageTableReader
from tierd.types import CodecId, Namespace, Tier

rig = pytest.fixture(checked_rig, name="rig")


def test_a_retired_slot_waits_for_the_step_that_may_read_it(rig):
    session = rig.session()
    reader = PageTableReader(session.table.fd)
    rig.demote(session, [1])
    rig.epochs[1].enter(reader.epoch())
    rig.store.truncate(1, session.number, 1)
    rig.store.tick()
    assert warm(rig)["retired_slots"] == LAYERS
    rig.epochs[1].leave()
    rig.epochs[1].enter(reader.epoch())  # a later step has read the table without the page
    rig.store.tick()
    assert warm(rig)["retired_slots"] == 0
    reader.close()


def test_a_reused_slot_has_a_new_generation(rig):
    session = rig.session()
    rig.demote(session, [1])
    before = session.index.get(0, 1).place
    rig.store.truncate(1, session.number, 1)
    rig.store.tick()
    rig.demote(session, [1])
    after = session.index.get(0, 1).place
    assert (before.slab, before.slot) == (after.slab, after.slot)
    assert before.generation < after.generation


def test_all_that_a_dead_engine_held_is_free_at_once(rig):
    rig.engine(2)
    kept = rig.session(2)
    rig.demote(kept, [1])
    used_bytes = warm(rig)["used_bytes"]
    other = Namespace(GEOMETRY, "other weights", CodecId.INT8)
    session = rig.session(1, other)
    rig.demote(session, [1, 2])
    plan(rig, session, [3, 4])
    rig.epochs[1].enter(rig.store.placement.epochs.now)
    rig.store.drop_engine(1)
    rig.store.drop_engine(1)
    stats = rig.store.stats()
    assert stats["engines"] == 1 and stats["sessions"]["running"] == 1
    assert stats["tiers"]["warm"]["retired_slots"] == stats["demotions_open"] == 0
    assert stats["tiers"]["warm"]["used_bytes"] == used_bytes


def test_an_engine_taken_for_dead_sees_that_its_slots_are_reclaimed(rig):
    sessions = [rig.session(), rig.session()]
    readers = [PageTableReader(session.table.fd) for session in sessions]
    rig.demote(sessions[0], [1])
    epoch = readers[0].epoch()
    rig.epochs[1].enter(epoch)
    rig.store.truncate(1, sessions[0].number, 1)
    rig.store.tick()
    assert all(reader.reclaimed() <= epoch for reader in readers)
    rig.store.drop_engine(1)
    assert all(reader.reclaimed() > epoch for reader in readers)
    for reader in readers:
        reader.close()


def test_suspended_sessions_survive_their_engine(rig):
    session = rig.stored(blocks=2)
    rig.store.drop_engine(1)
    assert rig.store.sessions() == [session]
    rig.engine(2)
    assert rig.store.resume_session(2, session.number, INT8, 1024).sealed_blocks == 2


def test_engine_death_frees_demotions_that_were_revoked(rig):
    session = rig.session()
    plan(rig, session, [1])
    rig.store.close_session(session.number)
    rig.store.drop_engine(1)
    assert_empty(rig)


def test_slabs_are_shown_to_engines_of_their_namespace_only(rig):
    rig.engine(2)
    session = rig.session(1)
    rig.session(2, RAW)
    rig.demote(session, [1])
    slab = session.index.get(0, 1).place.slab
    info = rig.store.slab_for(1, slab)
    assert (info.tier, info.slot_bytes, info.slab) == (Tier.WARM, INT8_SLOT, slab)
    assert info.slots > 0 and info.fd >= 0
    for engine_id, other in ((2, slab), (1, slab + 1000), (9, slab)):
        with pytest.raises(NotFound):
            rig.store.slab_for(engine_id, other)


def test_room_passes_from_one_namespace_to_another_when_slabs_are_empty():
    rig = Rig(warm_bytes=4 * INT8_BLOCK)
    rig.engine(1)
    first, second = rig.session(), rig.session(namespace=RAW)
    rig.demote(first, [1, 2, 3, 4])
    with pytest.raises(RoomNeeded):
        plan(rig, second, [1])
    rig.store.truncate(1, first.number, 0)
    rig.store.tick()
    rig.demote(second, [1, 2])
    rig.store.check_integrity()


def test_a_namespace_without_sessions_holds_no_slabs(rig):
    session = rig.session()
    rig.demote(session, [1, 2])
    rig.move(keys_of(session), Tier.COLD)
    rig.store.close_session(session.number, engine_id=1)
    assert_empty(rig)


def test_a_hint_awaits_the_cold_pages_of_its_tokens(rig):
    session = rig.stored(blocks=4)
    for block in (1, 2, 3):
        rig.move(keys_of(session, block), Tier.COLD)
    hint = rig.store.hint("a", session.number, deadline_seconds=5.0, first_token=17, last_token=47)
    assert {key.block for key in hint.awaited} == {1, 2} and len(hint.awaited) == 2 * LAYERS
    everything = rig.store.hint("a", session.number, deadline_seconds=5.0)
    assert len(everything.awaited) == 3 * LAYERS
    rig.store.cancel_hint("a", hint.hint_id)


def test_a_hinted_session_that_is_resumed_in_time_makes_the_hint_useful(rig):
    session = rig.stored(blocks=2)
    rig.move(keys_of(session), Tier.COLD)
    rig.store.hint("a", session.number, deadline_seconds=5.0)
    rig.move(keys_of(session), Tier.WARM)
    rig.store.resume_session(1, session.number, INT8, 1024)
    hints = rig.store.stats()["hints"]
    assert (hints["useful"], hints["open"]) == (1, 0)


def test_hints_on_lost_blocks_await_nothing(rig):
    session = rig.stored(blocks=2)
    rig.move(keys_of(session), Tier.COLD)
    hint = rig.store.hint("a", session.number, deadline_seconds=5.0)
    rig.store.traffic.evict(1)
    assert not hint.awaited


@pytest.mark.parametrize(
    "wrong",
    [
        {"deadline_seconds": 0.0},
        {"deadline_seconds": float("nan")},
        {"deadline_seconds": 1e9},
        {"deadline_seconds": 1.0, "first_token": -1},
        {"deadline_seconds": 1.0, "first_token": 5, "last_token": 4},
        {"deadline_seconds": 1.0, "confidence": 2.0},
    ],
)
def test_a_hint_out_of_range_is_refused(rig, wrong):
    session = rig.stored(blocks=1)
    with pytest.raises(InvalidArgument):
        rig.store.hint("a", session.number, **wrong)


def test_a_running_session_takes_no_hint_and_an_unknown_one_is_not_found(rig):
    with pytest.raises(InvalidArgument):
        rig.store.hint("a", rig.session().number, deadline_seconds=1.0)
    with pytest.raises(NotFound):
        rig.store.hint("a", 999, deadline_seconds=1.0)
