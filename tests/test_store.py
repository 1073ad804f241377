"""Life cycles in the store: each ending of a session, a demotion, a move; engine death anywhere."""

import numpy as np
import pytest

from tests.rig import GEOMETRY, INT8, INT8_BLOCK, INT8_SLOT, LAYERS, RAW, RAW_SLOT, Rig
from tierd.demotions import DEMOTIONS_MAX, EXPIRY_SECONDS, RoomNeeded
from tierd.disk.header import SlotHeader
from tierd.errors import (
    BudgetTooSmall,
    InvalidArgument,
    LayoutMismatch,
    NotFound,
    PageMiss,
    StaleGeneration,
    TierFull,
)
from tierd.memory.pagetable import PageTableReader
from tierd.store import IDLE_SECONDS
from tierd.types import CodecId, Geometry, Namespace, PageKey, SessionState, Tier


@pytest.fixture
def rig():
    rig = Rig()
    rig.engine(1)
    yield rig
    rig.store.check_integrity()
    rig.store.close()
    assert_empty(rig)


def assert_empty(rig: Rig) -> None:
    rig.store.check_integrity()
    for tier, figures in rig.store.stats()["tiers"].items():
        assert figures["used_bytes"] == figures["pages"] == 0, (tier, figures)


def warm(rig: Rig) -> dict[str, int]:
    return rig.store.stats()["tiers"]["warm"]


def plan(rig: Rig, session, blocks, need=None, **options):
    need = len(blocks) if need is None else need
    return rig.store.plan_demotion(session.engine_id, session.number, blocks, need, **options)


def commit(rig: Rig, session, planned) -> None:
    digests = rig.write(session, planned)
    rig.store.commit(session.engine_id, planned.reservation, digests)


# -- reserve → commit | abort --------------------------------------------------------


def test_nothing_is_published_before_commit_and_all_of_it_after(rig):
    session = rig.session()
    reader = PageTableReader(session.table.fd)
    planned = plan(rig, session, [1, 2, 3])
    digests = rig.write(session, planned)
    assert not reader.read(64).tier.any()
    version = reader.version()
    rig.store.commit(1, planned.reservation, digests)
    assert reader.version() != version
    view = reader.read(64)
    assert (view.tier[:, 1:4] == Tier.WARM).all() and view.tier.sum() == 6 * Tier.WARM
    assert (view.codec[:, 1:4] == CodecId.INT8).all()
    for block in (1, 2, 3):
        for layer in range(LAYERS):
            expected = rig.payload(session, PageKey(session.number, layer, block), CodecId.INT8)
            assert rig.bytes_of(session, layer, block) == expected
    reader.close()


def test_commit_writes_the_header_of_each_page(rig):
    session = rig.session()
    planned = plan(rig, session, [4])
    digests = rig.write(session, planned)
    rig.store.commit(1, planned.reservation, digests)
    place = planned.places[0][1]
    memory = rig.store.placement.warm_memory.mapping(place.slab).buffer
    header = SlotHeader.unpack(memory[place.slot * INT8_SLOT :][:4096])
    assert (header.session, header.layer, header.block) == (session.number, 1, 4)
    assert (header.slab, header.slot, header.generation) == (
        place.slab,
        place.slot,
        place.generation,
    )
    assert header.payload_digest == digests[16:32]
    assert header.namespace_digest == INT8.digest()


def test_abort_frees_the_slots_at_once(rig):
    session = rig.session()
    planned = plan(rig, session, [1, 2])
    assert warm(rig)["reserved_slots"] == 4
    rig.store.abort(1, planned.reservation)
    assert warm(rig)["reserved_slots"] == 0
    with pytest.raises(StaleGeneration):
        rig.store.abort(1, planned.reservation)
    with pytest.raises(StaleGeneration):
        rig.store.commit(1, planned.reservation, bytes(64))


def test_a_demotion_is_committed_once(rig):
    session = rig.session()
    planned = plan(rig, session, [1])
    digests = rig.write(session, planned)
    rig.store.commit(1, planned.reservation, digests)
    with pytest.raises(StaleGeneration):
        rig.store.commit(1, planned.reservation, digests)
    assert rig.store.stats()["demotions"] == LAYERS


def test_another_engine_can_neither_commit_nor_abort(rig):
    rig.engine(2)
    session = rig.session()
    planned = plan(rig, session, [1])
    for call in (
        lambda: rig.store.commit(2, planned.reservation, bytes(32)),
        lambda: rig.store.abort(2, planned.reservation),
    ):
        with pytest.raises(StaleGeneration):
            call()
    commit(rig, session, planned)


def test_digests_of_the_wrong_length_leave_the_demotion_open(rig):
    session = rig.session()
    planned = plan(rig, session, [1])
    digests = rig.write(session, planned)
    for wrong in (b"", digests[:-1], digests + b"x", digests * 2):
        with pytest.raises(InvalidArgument):
            rig.store.commit(1, planned.reservation, wrong)
    rig.store.commit(1, planned.reservation, digests)


def test_an_expired_demotion_is_not_published_and_its_slots_wait_for_the_engine(rig):
    session = rig.session()
    planned = plan(rig, session, [1])
    digests = rig.write(session, planned)
    rig.clock.advance(EXPIRY_SECONDS)
    rig.store.tick()
    rig.store.check_integrity()
    # The engine may still be writing: its slots are nobody else's yet.
    assert warm(rig)["reserved_slots"] == LAYERS
    again = plan(rig, session, [1])
    assert not set(np.ravel(planned.places)) & set(np.ravel(again.places))
    with pytest.raises(StaleGeneration):
        rig.store.commit(1, planned.reservation, digests)
    assert warm(rig)["reserved_slots"] == LAYERS  # those of `again`
    commit(rig, session, again)
    assert rig.store.stats()["expired"] == 1


def test_an_expired_demotion_is_freed_by_abort_too(rig):
    session = rig.session()
    planned = plan(rig, session, [1])
    rig.clock.advance(EXPIRY_SECONDS)
    rig.store.tick()
    rig.store.abort(1, planned.reservation)
    assert warm(rig)["reserved_slots"] == 0


def test_unanswered_demotions_of_an_engine_are_bounded():
    rig = Rig(warm_bytes=INT8_BLOCK * (DEMOTIONS_MAX + 8))
    rig.engine(1)
    session = rig.session(blocks=DEMOTIONS_MAX + 8)
    for block in range(1, DEMOTIONS_MAX + 1):
        plan(rig, session, [block])
    with pytest.raises(TierFull, match="neither committed nor aborted"):
        plan(rig, session, [DEMOTIONS_MAX + 1])
    rig.store.close_session(session.number, engine_id=1)
    assert_empty(rig)


# -- which blocks --------------------------------------------------------


def test_the_first_block_goes_only_when_asked_and_always_raw(rig):
    session = rig.session()
    assert plan(rig, session, [0, 1, 2], 3).blocks == [1, 2]
    planned = plan(rig, session, [0, 3], 2, include_first=True)
    assert planned.blocks == [0, 3]
    codecs = [{place.codec for place in places} for places in planned.places]
    assert codecs == [{CodecId.RAW}, {CodecId.INT8}]


def test_a_block_that_the_codec_cannot_hold_goes_raw(rig):
    session = rig.session()
    planned = plan(rig, session, [1], codec=CodecId.RAW)
    assert {place.codec for place in planned.places[0]} == {CodecId.RAW}
    commit(rig, session, planned)
    assert rig.store.stats()["tiers"]["warm"]["bytes"] == LAYERS * RAW_SLOT


def test_blocks_below_hot_or_on_their_way_are_not_planned_again(rig):
    session = rig.session()
    rig.demote(session, [1])
    plan(rig, session, [2])
    assert plan(rig, session, [1, 2, 3]).blocks == [3]
    with pytest.raises(InvalidArgument):
        plan(rig, session, [1, 2, 3])


@pytest.mark.parametrize(
    ("blocks", "need", "codec"),
    [([64], 1, None), ([-1], 1, None), ([1], 0, None), ([], 1, None), ([0], 1, None)],
)
def test_a_plan_for_impossible_blocks_is_refused(rig, blocks, need, codec):
    with pytest.raises(InvalidArgument):
        plan(rig, rig.session(), blocks, need, codec=codec)


def test_a_raw_session_has_no_other_codec(rig):
    with pytest.raises(InvalidArgument):
        plan(rig, rig.session(namespace=RAW), [1], codec=CodecId.INT8)


def test_a_plan_holds_what_fits_and_says_what_room_is_needed_when_nothing_does():
    rig = Rig(warm_bytes=3 * INT8_BLOCK)
    rig.engine(1)
    session = rig.session()
    planned = plan(rig, session, [1, 2, 3, 4, 5])
    assert planned.blocks == [1, 2, 3]
    with pytest.raises(RoomNeeded) as full:
        plan(rig, session, [4])
    assert full.value.slots == LAYERS
    assert full.value.retry_after_seconds > 0


def test_a_warm_tier_less_than_a_block_is_named_with_the_smallest_that_works():
    rig = Rig(warm_bytes=INT8_BLOCK - 1)
    rig.engine(1)
    with pytest.raises(BudgetTooSmall) as small:
        plan(rig, rig.session(), [1])
    assert small.value.smallest_bytes == INT8_BLOCK


# -- sessions --------------------------------------------------------


def test_suspend_keeps_pages_and_resume_publishes_them_in_a_new_table(rig):
    session = rig.stored(blocks=4)
    assert session.state is SessionState.SUSPENDED and session.table is None
    rig.engine(2)
    resumed = rig.store.resume_session(2, session.number, INT8, 2048)
    assert resumed is session and resumed.sealed_blocks == 4
    assert np.frombuffer(resumed.token_ids, "<u4").tolist() == list(range(64))
    reader = PageTableReader(resumed.table.fd)
    assert reader.max_blocks == 128
    assert int((reader.read(128).tier == Tier.WARM).sum()) == 4 * LAYERS
    reader.close()
    expected = rig.payload(session, PageKey(session.number, 1, 3), CodecId.INT8)
    assert rig.bytes_of(session, 1, 3) == expected


def test_suspend_drops_blocks_beyond_the_sealed_ones_and_frees_open_demotions(rig):
    session = rig.session()
    rig.demote(session, [0, 1, 2, 3], first=True)
    plan(rig, session, [5])
    rig.suspend(session, 2)
    assert session.index.blocks_from(0) == [0, 1]
    assert warm(rig)["reserved_slots"] == 0


def test_suspend_with_a_page_still_hot_is_refused_and_names_it(rig):
    session = rig.session()
    rig.demote(session, [0, 2], first=True)
    with pytest.raises(PageMiss) as miss:
        rig.suspend(session, 3)
    assert (miss.value.layer, miss.value.block) == (0, 1)
    assert session.state is SessionState.RUNNING


@pytest.mark.parametrize(("token_bytes", "sealed"), [(63, 0), (64, 2), (64, -1), (4 * 1025, 0)])
def test_suspend_with_wrong_token_ids_is_refused(rig, token_bytes, sealed):
    session = rig.session()
    with pytest.raises(InvalidArgument):
        rig.store.suspend_session(1, session.number, bytes(token_bytes), sealed)


def test_a_session_of_no_sealed_block_can_be_suspended_and_resumed(rig):
    session = rig.session()
    rig.store.suspend_session(1, session.number, bytes(40), 0)
    assert rig.store.resume_session(1, session.number, INT8, 16).token_ids == bytes(40)


def other_namespaces():
    yield Namespace(GEOMETRY, "other", CodecId.INT8)
    yield RAW
    yield Namespace(GEOMETRY, "weights", CodecId.INT8, revision="2")
    yield Namespace(GEOMETRY, "weights", CodecId.INT8, adapters="a")
    yield Namespace(GEOMETRY, "weights", CodecId.INT8, rope="b")
    yield Namespace(GEOMETRY, "weights", CodecId.INT8, tenant_salt="c")
    yield Namespace(Geometry(2, 1, 128, GEOMETRY.dtype, 32), "weights", CodecId.INT8)


@pytest.mark.parametrize("namespace", list(other_namespaces()))
def test_a_session_of_another_namespace_is_not_resumed(rig, namespace):
    session = rig.stored(blocks=1)
    with pytest.raises(LayoutMismatch):
        rig.store.resume_session(1, session.number, namespace, 1024)


def test_resume_is_refused_when_running_unknown_or_too_small(rig):
    running = rig.session()
    with pytest.raises(StaleGeneration):
        rig.store.resume_session(1, running.number, INT8, 1024)
    with pytest.raises(NotFound):
        rig.store.resume_session(1, 999, INT8, 1024)
    stored = rig.stored(blocks=4)
    with pytest.raises(InvalidArgument):
        rig.store.resume_session(1, stored.number, INT8, 48)
    assert stored.state is SessionState.SUSPENDED


def test_sessions_of_another_engine_are_not_found(rig):
    rig.engine(2)
    session = rig.session(1)
    number = session.number
    for call in (
        lambda: rig.store.session(number, engine_id=2),
        lambda: rig.store.plan_demotion(2, number, [1], 1),
        lambda: rig.store.truncate(2, number, 0),
        lambda: rig.store.suspend_session(2, number, b"", 0),
        lambda: rig.store.close_session(number, engine_id=2),
    ):
        with pytest.raises(NotFound):
            call()


@pytest.mark.parametrize("max_tokens", [0, -1, 1 << 40])
def test_a_session_of_impossible_size_is_refused(rig, max_tokens):
    with pytest.raises(InvalidArgument):
        rig.store.open_session(1, INT8, max_tokens)
    assert rig.store.sessions() == []


def test_an_unregistered_engine_opens_nothing(rig):
    with pytest.raises(NotFound):
        rig.store.open_session(9, INT8, 1024)


def test_truncate_retires_the_suffix_and_revokes_its_demotions(rig):
    session = rig.session()
    rig.demote(session, [1, 2, 3])
    kept, lost = plan(rig, session, [4]), plan(rig, session, [5, 6])
    assert rig.store.truncate(1, session.number, 5) == 0
    assert rig.store.truncate(1, session.number, 2) == 2 * LAYERS
    assert session.index.blocks_from(0) == [1]
    for planned in (kept, lost):
        with pytest.raises(StaleGeneration):
            commit(rig, session, planned)
    rig.demote(session, [2, 3, 4, 5, 6], version=1)
    key = PageKey(session.number, 0, 2)
    assert rig.bytes_of(session, 0, 2) == rig.payload(session, key, CodecId.INT8, version=1)


def test_truncate_counts_a_page_that_the_engine_found_damaged(rig):
    session = rig.session()
    rig.demote(session, [1, 2])
    rig.store.truncate(1, session.number, 2, damaged_layer=1)
    rig.store.truncate(1, session.number, 2, damaged_layer=1)  # nothing there: not counted
    assert rig.store.stats()["corrupt"] == 1
    with pytest.raises(InvalidArgument):
        rig.store.truncate(1, session.number, 65)


def test_a_quiet_session_is_idle_and_runs_again_when_used(rig):
    session = rig.session()
    rig.clock.advance(IDLE_SECONDS)
    rig.store.tick()
    assert session.state is SessionState.IDLE
    plan(rig, session, [1])
    assert session.state is SessionState.RUNNING


def test_a_session_whose_engine_is_in_a_step_is_not_idle(rig):
    session = rig.session()
    rig.epochs[1].enter(rig.store.placement.epochs.now)
    for _ in range(3):
        rig.clock.advance(IDLE_SECONDS)
        rig.store.tick()
    assert session.state is SessionState.RUNNING
    rig.epochs[1].leave()
    rig.clock.advance(IDLE_SECONDS)
    rig.store.tick()
    assert session.state is SessionState.IDLE


def test_an_operator_closes_a_running_session_without_freeing_what_its_engine_writes(rig):
    session = rig.session()
    rig.demote(session, [1])
    planned = plan(rig, session, [2])
    digests = rig.write(session, planned)
    rig.store.close_session(session.number)
    rig.store.check_integrity()
    assert warm(rig)["reserved_slots"] == LAYERS
    with pytest.raises(StaleGeneration):
        rig.store.commit(1, planned.reservation, digests)
    rig.store.tick()
    assert_empty(rig)


# -- publish → retire → reclaim --------------------------------------------------------


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


# -- engine death --------------------------------------------------------


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


# -- moves --------------------------------------------------------


def keys_of(session, block=1):
    return [PageKey(session.number, layer, block) for layer in range(LAYERS)]


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
    move = rig.store.begin_move(PageKey(session.number, 0, 1), Tier.COLD)
    assert session.index.get(0, 1).place == source
    rig.store.check_integrity()
    rig.store.abort_move(move)
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
    moves = [rig.store.begin_move(key, tier) for key in keys_of(session)]
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
            rig.store.finish_moves([move])
        elif ending == "abort":
            rig.store.abort_move(move)
        else:
            rig.store.damaged(move)
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
    old = [rig.store.begin_move(key, Tier.COLD) for key in keys_of(session)]
    rig.store.truncate(1, session.number, 1)
    rig.demote(session, [1], version=1)
    new = [rig.store.begin_move(key, Tier.COLD) for key in keys_of(session)]
    rig.store.check_integrity()
    rig.store.finish_moves(old)
    rig.store.check_integrity()
    expected = rig.payload(session, keys_of(session)[0], CodecId.INT8, version=1)
    assert rig.bytes_of(session, 0, 1) == expected
    assert session.index.get(0, 1).place.tier is Tier.WARM
    for move in new:
        rig.store.abort_move(move)


def test_a_damaged_page_of_a_running_session_is_a_miss_and_counted(rig):
    session = rig.session()
    rig.demote(session, [1, 2])
    rig.store.damaged(rig.store.begin_move(PageKey(session.number, 0, 1), Tier.COLD))
    assert session.index.get(0, 1) is None and session.index.get(1, 1) is not None
    assert rig.store.stats()["corrupt"] == 1
    assert rig.store.truncate(1, session.number, 1) == 3


def test_a_suspended_session_with_a_damaged_page_keeps_the_prefix_before_it(rig):
    session = rig.stored(blocks=4)
    rig.store.damaged(rig.store.begin_move(PageKey(session.number, 0, 2), Tier.COLD))
    assert session.sealed_blocks == 2
    assert rig.store.resume_session(1, session.number, INT8, 1024).sealed_blocks == 2


def test_no_room_below_is_none_and_changes_nothing():
    rig = Rig(cold_bytes=INT8_SLOT)
    rig.engine(1)
    session = rig.session()
    rig.demote(session, [1])
    assert rig.store.begin_move(PageKey(session.number, 0, 1), Tier.COLD) is not None
    assert rig.store.begin_move(PageKey(session.number, 1, 1), Tier.COLD) is None
    rig.store.check_integrity()


def test_eviction_takes_the_newest_blocks_of_the_longest_suspended(rig):
    old = rig.stored(blocks=3)
    rig.clock.advance(1.0)
    young = rig.stored(blocks=3)
    freed_bytes = rig.store.evict(INT8_BLOCK + 1)
    assert freed_bytes == 2 * INT8_BLOCK
    assert (old.sealed_blocks, young.sealed_blocks) == (1, 3)
    assert rig.store.stats()["evictions"] == 2 * LAYERS
    rig.store.check_integrity()
    rig.store.evict(1 << 30)
    assert (old.sealed_blocks, young.sealed_blocks) == (0, 0)


# -- slabs and room --------------------------------------------------------


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


# -- hints --------------------------------------------------------


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
    rig.store.evict(1)
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
