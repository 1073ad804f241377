"""Demotions: planned, committed once or aborted, revoked; which blocks go."""

import numpy as np
import pytest

from tests.rig import INT8, INT8_BLOCK, INT8_SLOT, LAYERS, RAW, RAW_SLOT, Rig
from tests.storesteps import assert_empty, checked_rig, commit, plan, warm
from tierd.demotions import DEMOTIONS_MAX, EXPIRY_SECONDS, RoomNeeded
from tierd.disk.header import SlotHeader
from tierd.errors import (
    BudgetTooSmall,
    InvalidArgument,
    StaleGeneration,
    TierFull,
)
from tierd.memory.pagetable import PageTableReader
from tierd.types import CodecId, PageKey, Tier

rig = pytest.fixture(checked_rig, name="rig")


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


def test_device_digests_stand_in_the_headers_and_come_back_from_disk(rig):
    session = rig.session()
    planned = plan(rig, session, [4])
    digests = rig.write(session, planned)
    given = [2**64 - 1, 7]
    for wrong in (bytes(8), bytes(17), bytes(24)):
        with pytest.raises(InvalidArgument, match="device digests"):
            rig.store.commit(1, planned.reservation, digests, wrong)
    rig.store.commit(1, planned.reservation, digests, np.array(given, "<u8").tobytes())
    keys = [PageKey(session.number, layer, 4) for layer in range(LAYERS)]

    def found() -> list[int | None]:
        mapping = rig.store.placement.warm_memory.mapping
        places = [session.index.get(layer, 4).place for layer in range(LAYERS)]
        starts = [(mapping(p.slab).buffer, p.slot * INT8_SLOT) for p in places]
        return [SlotHeader.unpack(memory[at:][:4096]).device_digest for memory, at in starts]

    assert found() == given
    rig.move(keys, Tier.COLD)
    place = session.index.get(1, 4).place
    written = next(iter(rig.disk.files.values()))
    cold = SlotHeader.unpack(bytes(written[place.slot * INT8_SLOT :][:4096]))
    assert cold.device_digest == given[1] and cold.slot == place.slot
    rig.move(keys, Tier.WARM)
    assert found() == given


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
    lent = [{place for row in plan.places for place in row} for plan in (planned, again)]
    assert not lent[0] & lent[1]
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


def test_the_first_block_goes_only_when_asked_and_always_raw(rig):
    session = rig.session()
    assert plan(rig, session, [0, 1, 2], 3).blocks == [1, 2]
    planned = plan(rig, session, [0, 3], 2, include_first=True)
    assert planned.blocks == [0, 3]
    codecs = [{place.codec for place in places} for places in planned.places]
    assert codecs == [{CodecId.RAW}, {CodecId.INT8}]


def test_a_block_that_the_codec_cannot_hold_goes_raw(rig):
    session = rig.session()
    planned = plan(rig, session, [1], codecs=[CodecId.RAW] * LAYERS)
    assert {place.codec for place in planned.places[0]} == {CodecId.RAW}
    commit(rig, session, planned)
    assert rig.store.stats()["tiers"]["warm"]["bytes"] == LAYERS * RAW_SLOT


def test_blocks_below_hot_or_on_their_way_are_not_planned_again(rig):
    session = rig.session()
    rig.demote(session, [1])
    plan(rig, session, [2])
    assert plan(rig, session, [1, 2, 3]).blocks == [3]
    with pytest.raises(InvalidArgument):
        plan(rig, session, [1])


def test_a_plan_whose_reply_was_lost_is_given_again(rig):
    session = rig.session()
    lost = plan(rig, session, [1, 2], 2)
    again = plan(rig, session, [1, 2], 2)
    assert again is lost
    commit(rig, session, again)
    assert rig.store.stats()["tiers"]["warm"]["reserved_slots"] == 0
    with pytest.raises(InvalidArgument):
        plan(rig, session, [1, 2], 2)


@pytest.mark.parametrize(
    ("blocks", "need", "codecs"),
    [
        ([64], 1, None),
        ([-1], 1, None),
        ([1], 0, None),
        ([], 1, None),
        ([0], 1, None),
        ([1], 1, [CodecId.INT8]),
    ],
)
def test_a_plan_for_impossible_blocks_is_refused(rig, blocks, need, codecs):
    with pytest.raises(InvalidArgument):
        plan(rig, rig.session(), blocks, need, codecs=codecs)


def test_a_raw_session_has_no_other_codec(rig):
    with pytest.raises(InvalidArgument):
        plan(rig, rig.session(namespace=RAW), [1], codecs=[CodecId.INT8] * LAYERS)


def test_a_plan_holds_what_fits_and_says_what_room_is_needed_when_nothing_does():
    rig = Rig(warm_bytes=3 * INT8_BLOCK)
    rig.engine(1)
    session = rig.session()
    planned = plan(rig, session, [1, 2, 3, 4, 5])
    assert planned.blocks == [1, 2, 3]
    with pytest.raises(RoomNeeded) as full:
        plan(rig, session, [4])
    assert list(full.value.needs.values()) == [LAYERS]
    assert full.value.retry_after_seconds > 0


def test_a_warm_tier_less_than_a_block_is_named_with_the_smallest_that_works():
    rig = Rig(warm_bytes=INT8_BLOCK - 1)
    rig.engine(1)
    with pytest.raises(BudgetTooSmall) as small:
        plan(rig, rig.session(), [1])
    assert small.value.smallest_bytes == INT8_BLOCK
