"""Lending: a block whose layers differ gets all its slots or none, and says what room it needs."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from tests.rig import INT8, INT8_SLOT, LAYERS, RAW_SLOT, Rig
from tierd.demotions import RoomNeeded
from tierd.errors import BudgetTooSmall, InvalidArgument, LayoutMismatch, TierFull
from tierd.memory.slabs import smallest_budget
from tierd.types import CodecId, Tier

MIXED = (CodecId.RAW, *[CodecId.INT8] * (LAYERS - 1))
MIXED_BLOCK = RAW_SLOT + (LAYERS - 1) * INT8_SLOT
SMALLEST = smallest_budget(MIXED_BLOCK, 2)


def rig_of(warm_bytes: int) -> Rig:
    rig = Rig(warm_bytes=warm_bytes)
    rig.engine(1)
    return rig


def test_a_plan_has_a_codec_a_page_and_the_first_block_is_raw() -> None:
    rig = rig_of(64 * RAW_SLOT)
    session = rig.session()
    plan = rig.store.plan_demotion(1, session.number, [0, 1], 2, codecs=MIXED, include_first=True)
    codecs = [tuple(place.codec for place in places) for places in plan.places]
    assert codecs == [(CodecId.RAW,) * LAYERS, MIXED]
    rig.store.commit(1, plan.reservation, rig.write(session, plan, 1))
    rig.store.check_integrity()
    assert rig.store.stats()["tiers"]["warm"]["bytes"] == LAYERS * RAW_SLOT + MIXED_BLOCK


def test_a_namespaces_exceptions_are_the_plans_codecs() -> None:
    rig = rig_of(64 * RAW_SLOT)
    session = rig.session(namespace=replace(INT8, codec_layers="0=raw"))
    plan = rig.store.plan_demotion(1, session.number, [1], 1)
    assert tuple(place.codec for place in plan.places[0]) == MIXED
    assert session.page_codecs == MIXED


def test_a_coarser_codec_than_the_namespaces_is_refused_by_layer() -> None:
    rig = rig_of(64 * RAW_SLOT)
    session = rig.session()
    codecs = [CodecId.INT8] * (LAYERS - 1) + [CodecId.INT4]
    with pytest.raises(InvalidArgument, match=f"layer {LAYERS - 1}: codec int4 is not int8"):
        rig.store.plan_demotion(1, session.number, [1], 1, codecs=codecs)


@pytest.mark.parametrize("extra", range(0, 3 * 4096, 4096))
def test_the_smallest_budget_named_for_a_mixed_block_works(extra: int) -> None:
    rig = rig_of(MIXED_BLOCK - 1)
    with pytest.raises(BudgetTooSmall, match="int8,layers:0=raw") as small:
        rig.store.plan_demotion(1, rig.session().number, [1], 1, codecs=MIXED)
    assert small.value.smallest_bytes == SMALLEST
    rig = rig_of(SMALLEST + extra)
    assert rig.store.plan_demotion(1, rig.session().number, [1], 1, codecs=MIXED).blocks == [1]
    rig.store.check_integrity()


def test_a_block_that_does_not_fit_lends_nothing_and_names_the_room_of_each_pool() -> None:
    rig = rig_of(SMALLEST)
    session = rig.session()
    rig.store.plan_demotion(1, session.number, [1], 1, codecs=MIXED)
    before = rig.store.stats()["tiers"]["warm"]["reserved_slots"]
    with pytest.raises(RoomNeeded) as full:
        rig.store.plan_demotion(1, session.number, [2], 1, codecs=MIXED)
    needs = {pool.slot_bytes: slots for pool, slots in full.value.needs.items()}
    assert needs == {RAW_SLOT: 1, INT8_SLOT: LAYERS - 1}
    assert rig.store.stats()["tiers"]["warm"]["reserved_slots"] == before
    rig.store.check_integrity()


def test_room_for_several_pools_is_weighed_together() -> None:
    rig = rig_of(64 * RAW_SLOT)
    session = rig.session()
    pools = rig.store.placement.pools[Tier.WARM]
    raw, int8 = (
        rig.store.placement.pool(Tier.WARM, session, codec) for codec in (CodecId.RAW, CodecId.INT8)
    )
    for share, other in product((0.0, 0.5, 1.0), repeat=2):
        needs = {raw: int(share * 64), int8: int(other * pools.slots_max(INT8_SLOT))}
        bytes_needed = sum(pool.slot_bytes * slots for pool, slots in needs.items())
        assert (pools.shortage_bytes(needs) == 0) == (bytes_needed <= 64 * RAW_SLOT), needs


def test_a_slab_that_cannot_be_made_gives_back_the_blocks_other_slots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = rig_of(64 * RAW_SLOT)
    session = rig.session()
    placement = rig.store.placement
    reserve = placement.reserve

    def failing(tier: Tier, owner: object, codec: CodecId, pages: int) -> object:
        if codec is CodecId.INT8:
            raise TierFull("no memory")
        return reserve(tier, owner, codec, pages)  # type: ignore[arg-type]

    monkeypatch.setattr(placement, "reserve", failing)
    with pytest.raises(TierFull, match="no memory"):
        rig.store.plan_demotion(1, session.number, [1], 1, codecs=MIXED)
    assert rig.store.stats()["tiers"]["warm"]["reserved_slots"] == 0
    rig.store.check_integrity()


def test_a_resume_with_other_codecs_says_that_they_differ() -> None:
    rig = rig_of(64 * RAW_SLOT)
    session = rig.session()
    rig.demote(session, [0, 1], first=True)
    tokens = bytes(4 * 2 * session.block_tokens)
    rig.store.begin_suspend(1, session.number, tokens, 2)
    rig.store.finish_suspend(session)
    other = replace(INT8, codec_layers="0=raw")
    with pytest.raises(LayoutMismatch, match=r"it differs in codec_layers$"):
        rig.store.resume_session(1, session.number, other, 1024)
