"""Traffic: in which order pages are given their slots in cold."""

import pytest

from tests.moversteps import demote, intact, make, start, turns
from tests.rig import INT8_SLOT, LAYERS, in_loop
from tierd import traffic
from tierd.types import PageKey, Tier


def keys_of(session: int, blocks) -> list[PageKey]:
    return [PageKey(session, layer, block) for block in blocks for layer in range(LAYERS)]


@pytest.fixture
def three_blocks_a_run(monkeypatch) -> None:
    monkeypatch.setattr(traffic, "RUN_BYTES", 3 * INT8_SLOT)


def test_a_layers_pages_of_a_few_blocks_follow_one_another(three_blocks_a_run) -> None:
    rig = make(warm_blocks=8)
    session = rig.session()
    rig.demote(session, range(1, 8))
    ordered = rig.store.traffic.in_runs(keys_of(session.number, range(1, 8)))
    assert [(key.layer, key.block) for key in ordered] == [
        *[(layer, block) for layer in range(LAYERS) for block in (1, 2, 3)],
        *[(layer, block) for layer in range(LAYERS) for block in (4, 5, 6)],
        *[(layer, 7) for layer in range(LAYERS)],
    ]


def test_sessions_stay_apart_and_no_page_is_lost(three_blocks_a_run) -> None:
    rig = make(warm_blocks=8)
    sessions = [rig.session(), rig.session()]
    for session in sessions:
        rig.demote(session, [1, 2])
    keys = [key for session in sessions for key in keys_of(session.number, [1, 2])]
    keys.append(PageKey(sessions[0].number, 0, 60))  # one that has gone
    ordered = rig.store.traffic.in_runs(keys)
    assert sorted(ordered) == sorted(keys)
    numbers = [key.session for key in ordered]
    first, second = (session.number for session in sessions)
    assert numbers == [first] * 2 * LAYERS + [second] * 2 * LAYERS + [first]
    assert rig.store.traffic.in_runs([]) == []


@in_loop
async def test_a_spill_of_several_blocks_puts_a_layers_pages_side_by_side() -> None:
    rig = make(warm_blocks=16)
    old, new = rig.session(), rig.session()
    await demote(rig, old, range(1, 17))
    task = await start(rig.mover.plan_demotion(1, new.number, range(1, 5), 4))
    await turns(rig, task)
    cold = {
        block: old.index.layers_in(Tier.COLD, block) for block in old.index.blocks_in(Tier.COLD)
    }
    assert len(cold) >= 4 and all(len(layers) == LAYERS for layers in cold.values())
    for layer in range(LAYERS):
        slots = [old.index.get(layer, block).place.slot for block in list(cold)[:4]]
        assert slots == list(range(slots[0], slots[0] + 4))
    intact(rig, old)


@in_loop
async def test_pages_come_up_in_as_few_reads_as_they_went_down_in(monkeypatch) -> None:
    monkeypatch.setattr(traffic, "RUN_BYTES", 4 * INT8_SLOT)
    rig = make(warm_blocks=16)
    old, new = rig.session(), rig.session()
    await demote(rig, old, range(1, 17))
    await demote(rig, new, range(1, 17))
    assert old.index.pages_in(Tier.WARM) == 0
    rig.store.close_session(new.number, engine_id=1)
    rig.settle()
    reads: list[int] = []
    read_slots = rig.store.placement.cold_files.read_slots

    def counted(slab, slot, slot_bytes, buffers) -> None:  # type: ignore[no-untyped-def]
        reads.append(len(buffers))
        read_slots(slab, slot, slot_bytes, buffers)

    monkeypatch.setattr(rig.store.placement.cold_files, "read_slots", counted)
    task = await start(rig.mover.promote(1, old.number, range(1, 13)))
    await turns(rig, task)
    assert sum(reads) == 12 * LAYERS
    assert max(reads) >= 4 and len(reads) <= 12 * LAYERS // 3
    intact(rig, old)
