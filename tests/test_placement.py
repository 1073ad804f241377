"""Moves between the tiers, whatever becomes of the page meanwhile; eviction."""

import pytest

from tests.rig import INT8, INT8_BLOCK, INT8_SLOT, LAYERS, Rig
from tests.storesteps import checked_rig, keys_of
from tierd.types import CodecId, PageKey, Tier

rig = pytest.fixture(checked_rig, name="rig")


def test_a_page_goes_down_and_up_with_its_bytes(rig):
    session = rig.session()
    rig.demote(session, [1])
    expected = [rig.payload(session, key, CodecId.INT8) for key in keys_of(session)]
    for tier in (Tier.COLD, Tier.WARM, Tier.COLD):
        rig.move(keys_of(session), tier)
        rig.store.check_integrity()
        assert [rig.bytes_of(session, key.layer, 1) for key in keys_of(session)] == expected
        assert session.index.pages_in(tier) == LAYERS
    stats = rig.store.stats()
    assert (stats["spills"], stats["promotions"]) == (2 * LAYERS, LAYERS)


def test_the_page_is_published_at_its_source_until_the_move_is_finished(rig):
    session = rig.session()
    rig.demote(session, [1])
    source = session.index.get(0, 1).place
    (move,) = rig.store.traffic.begin_moves([PageKey(session.number, 0, 1)], Tier.COLD)
    assert session.index.get(0, 1).place == source
    rig.store.check_integrity()
    rig.store.traffic.abort(move)
    assert session.index.get(0, 1).place == source


@pytest.mark.parametrize("ending", ["finish", "abort", "damaged"])
@pytest.mark.parametrize("tier", [Tier.COLD, Tier.WARM])
@pytest.mark.parametrize("loss", ["close", "truncate", "engine death", "close by operator"])
def test_a_page_dropped_while_it_moves_holds_both_slots_until_the_move_ends(
    rig, loss, tier, ending
):
    session = rig.session()
    rig.demote(session, [1])
    if tier is Tier.WARM:
        rig.move(keys_of(session), Tier.COLD)
    moves = rig.store.traffic.begin_moves(keys_of(session), tier)
    if loss == "close":
        rig.store.close_session(session.number, engine_id=1)
    elif loss == "truncate":
        rig.store.truncate(1, session.number, 0)
    elif loss == "engine death":
        rig.store.drop_engine(1)
    else:
        rig.store.close_session(session.number)
    rig.store.tick()
    rig.store.check_integrity()
    assert rig.store.stats()["orphans"] == LAYERS
    assert len(moves[0].warm) == INT8_SLOT  # still mapped: the lane may be at it
    for move in moves:
        if ending == "finish":
            rig.store.traffic.finish([move])
        elif ending == "abort":
            rig.store.traffic.abort(move)
        else:
            rig.store.traffic.damaged(move)
        rig.store.check_integrity()
    moves.clear()
    del move
    rig.store.tick()
    stats = rig.store.stats()
    assert stats["orphans"] == stats["spills"] - (LAYERS if tier is Tier.WARM else 0) == 0
    assert all(t["bytes"] == t["retired_slots"] == 0 for t in stats["tiers"].values())


def test_a_page_demoted_anew_while_its_old_self_moves_is_another_page(rig):
    session = rig.session()
    rig.demote(session, [1])
    old = rig.store.traffic.begin_moves(keys_of(session), Tier.COLD)
    rig.store.truncate(1, session.number, 1)
    rig.demote(session, [1], version=1)
    new = rig.store.traffic.begin_moves(keys_of(session), Tier.COLD)
    rig.store.check_integrity()
    rig.store.traffic.finish(old)
    rig.store.check_integrity()
    expected = rig.payload(session, keys_of(session)[0], CodecId.INT8, version=1)
    assert rig.bytes_of(session, 0, 1) == expected
    assert session.index.get(0, 1).place.tier is Tier.WARM
    for move in new:
        rig.store.traffic.abort(move)


def test_a_damaged_page_of_a_running_session_is_a_miss_and_counted(rig):
    session = rig.session()
    rig.demote(session, [1, 2])
    (move,) = rig.store.traffic.begin_moves([PageKey(session.number, 0, 1)], Tier.COLD)
    rig.store.traffic.damaged(move)
    assert session.index.get(0, 1) is None and session.index.get(1, 1) is not None
    assert rig.store.stats()["corrupt"] == 1
    assert rig.store.truncate(1, session.number, 1) == 3


def test_a_suspended_session_with_a_damaged_page_keeps_the_prefix_before_it(rig):
    session = rig.stored(blocks=4)
    (move,) = rig.store.traffic.begin_moves([PageKey(session.number, 0, 2)], Tier.COLD)
    rig.store.traffic.damaged(move)
    assert session.sealed_blocks == 2
    assert rig.store.resume_session(1, session.number, INT8, 1024).sealed_blocks == 2


def test_a_page_named_twice_in_one_batch_is_a_bug(rig):
    session = rig.session()
    rig.demote(session, [1])
    with pytest.raises(AssertionError, match="named twice"):
        rig.store.traffic.begin_moves(2 * keys_of(session), Tier.COLD)
    assert not rig.store.placement.moving
    rig.store.check_integrity()


def test_what_has_no_room_below_stays_where_it_is():
    rig = Rig(cold_bytes=INT8_SLOT)
    rig.engine(1)
    session = rig.session()
    rig.demote(session, [1])
    moves = rig.store.traffic.begin_moves(keys_of(session), Tier.COLD)
    assert [move.key for move in moves] == [PageKey(session.number, 0, 1)]
    assert rig.store.traffic.begin_moves([PageKey(session.number, 1, 1)], Tier.COLD) == []
    rig.store.check_integrity()


def test_eviction_takes_the_newest_blocks_of_the_longest_suspended(rig):
    old = rig.stored(blocks=3)
    rig.clock.advance(1.0)
    young = rig.stored(blocks=3)
    freed_bytes = rig.store.traffic.evict(INT8_BLOCK + 1)
    assert freed_bytes == 2 * INT8_BLOCK
    assert (old.sealed_blocks, young.sealed_blocks) == (1, 3)
    assert rig.store.stats()["evictions"] == 2 * LAYERS
    rig.store.check_integrity()
    rig.store.traffic.evict(1 << 30)
    assert (old.sealed_blocks, young.sealed_blocks) == (0, 0)
