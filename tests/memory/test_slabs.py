"""The allocator: no slot is ever two pages', no generation falls, no byte goes uncounted."""

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tierd.errors import StorageFull, TierFull
from tierd.memory import slabs
from tierd.memory.budget import ByteBudget
from tierd.memory.memfd import Mapping
from tierd.memory.slabmemory import MemfdBacking
from tierd.memory.slabs import Runs, SlabIds, SlabPool, SlotCounts, SlotRef
from tierd.types import SlabRecord, Tier

SLOT = 8192
SLAB = 4 * SLOT
NAMESPACE = bytes(16)


class CountingBacking:
    """Slabs without bytes; `refuse` makes the next creations fail."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self.refuse: Exception | None = None

    def create(self, slab: SlabRecord) -> None:
        if self.refuse is not None:
            raise self.refuse
        assert slab.slab not in self.sizes
        self.sizes[slab.slab] = slab.size_bytes

    def destroy(self, slab_id: int) -> None:
        del self.sizes[slab_id]

    def fd(self, slab_id: int) -> int:
        return -1


class Tiny:
    """Pools on one budget and one backing."""

    def __init__(self, budget_bytes: int, slab_bytes: int = SLAB) -> None:
        self.budget = ByteBudget(budget_bytes)
        self.backing = CountingBacking()
        self.ids = SlabIds()
        self.slab_bytes = slab_bytes
        self.pools: list[SlabPool] = []

    def pool(self, slot_bytes: int = SLOT, first_slots: int | None = None) -> SlabPool:
        pool = SlabPool(
            Tier.WARM, slot_bytes, NAMESPACE, self.budget, self.slab_bytes, self.backing, self.ids
        )
        if first_slots is not None:
            pool._first_slots = first_slots
        self.pools.append(pool)
        return pool

    def check(self) -> None:
        for pool in self.pools:
            pool.check_integrity()
        used = sum(pool.capacity_bytes() for pool in self.pools)
        assert used == self.budget.used_bytes == sum(self.backing.sizes.values())


def test_runs_follow_what_they_are_behind_or_leave_room_behind_them() -> None:
    tiny = Tiny(24 * SLOT, slab_bytes=12 * SLOT)
    pool = tiny.pool()
    first = pool.reserve_runs(2, Runs([None, None], 4))
    assert [(ref.slab, ref.slot) for ref in first] == [(1, 0), (1, 4)]
    again = pool.reserve_runs(4, Runs(first, 4))
    assert [(ref.slab, ref.slot) for ref in again] == [(1, 1), (1, 2), (1, 5), (1, 6)]
    # What follows is not all free, nor are there two stretches more in this slab.
    more = pool.reserve_runs(4, Runs([again[1], again[3]], 4))
    assert [(ref.slab, ref.slot) for ref in more] == [(1, 8), (1, 9), (2, 0), (2, 1)]
    assert pool.reserve_runs(9, Runs([None] * 3, 4)) == [], "all or none"
    assert pool.counts().reserved == 10
    assert [(ref.slab, ref.slot) for ref in pool.reserve(2)] == [(1, 3), (1, 7)], "gaps are room"
    tiny.check()


def test_a_small_job_under_a_large_cap_takes_little_more_than_it_needs() -> None:
    tiny = Tiny(budget_bytes=4 << 30, slab_bytes=256 << 20)
    pool = tiny.pool()
    pool.reserve(30)
    assert pool.capacity_bytes() == slabs.FIRST_SLAB_BYTES
    needed = 30
    while pool.capacity_bytes() < 2 << 30:
        assert pool.reserve(30)
        needed += 30
        used = pool.capacity_bytes()
        assert used <= max(2 * slabs.FIRST_SLAB_BYTES, 1.5 * needed * SLOT + SLOT)
    assert len(tiny.backing.sizes) < 25 and max(tiny.backing.sizes.values()) == 256 << 20
    tiny.check()


def test_what_is_asked_for_at_once_comes_in_one_slab() -> None:
    tiny = Tiny(budget_bytes=4 << 30, slab_bytes=256 << 20)
    tiny.pool().reserve(10_000)
    tiny.pool(5 * SLOT).reserve_runs(30, Runs([None] * 30, 25))
    assert list(tiny.backing.sizes.values()) == [10_000 * SLOT, 30 * 25 * 5 * SLOT]
    tiny.check()


@given(
    asked=st.lists(st.tuples(st.integers(0, 1), st.integers(1, 40)), max_size=12),
    first=st.integers(1, 6),
    budget=st.integers(16, 200),
)
def test_the_slabs_that_are_added_hold_what_was_foreseen(
    asked: list[tuple[int, int]], first: int, budget: int
) -> None:
    tiny = Tiny(budget_bytes=budget * SLOT, slab_bytes=12 * SLOT)
    pools = [tiny.pool(SLOT, first), tiny.pool(3 * SLOT, first)]
    for which, count in asked:
        pool, remaining = pools[which], tiny.budget.remaining_bytes
        lacking = count - pool.counts().free
        added, left = pool.slots_within(remaining, lacking)
        before = pool.capacity_slots()
        if pool.reserve(count):
            assert pool.capacity_slots() == before + added
            assert tiny.budget.remaining_bytes == left
        else:
            assert added < lacking and pool.capacity_slots() == before
        tiny.check()


@pytest.fixture
def tiny():
    tiny = Tiny(budget_bytes=10 * SLOT)
    yield tiny
    tiny.check()


def places(slots: list[SlotRef]) -> list[tuple[int, int]]:
    return [(slot.slab, slot.slot) for slot in slots]


def test_slots_are_contiguous_from_the_lowest_slab(tiny) -> None:
    assert places(tiny.pool().reserve(6)) == [(1, 0), (1, 1), (1, 2), (1, 3), (2, 0), (2, 1)]


def test_a_freed_slot_is_the_first_to_be_taken_again_at_a_higher_generation(tiny) -> None:
    pool = tiny.pool()
    slots = pool.reserve(4)
    pool.abort([slots[2]])
    pool.abort([slots[1]])
    again = pool.reserve(2)
    assert places(again) == [(1, 1), (1, 2)]
    assert [slot.generation for slot in again] == [2, 2]


def test_the_life_cycle_passes_through_each_state(tiny) -> None:
    pool = tiny.pool()
    (slot, other) = pool.reserve(2)
    assert pool.counts() == SlotCounts(free=2, reserved=2, resident=0, retired=0)
    pool.commit([slot])
    pool.abort([other])
    assert pool.counts() == SlotCounts(free=3, reserved=0, resident=1, retired=0)
    pool.retire([slot], epoch=5)
    assert pool.counts() == SlotCounts(free=3, reserved=0, resident=0, retired=1)
    assert pool.reclaim(5) == 0
    assert pool.reclaim(6) == 1
    assert pool.counts() == SlotCounts(free=4, reserved=0, resident=0, retired=0)


def test_a_retired_slot_is_not_handed_out_before_it_is_reclaimed(tiny) -> None:
    pool = tiny.pool()
    slots = pool.reserve(10)
    pool.commit([slots[0]])
    pool.retire([slots[0]], epoch=1)
    assert pool.reserve(1) == []
    pool.reclaim(2)
    assert places(pool.reserve(1)) == places(slots[:1])


def test_reserve_gives_all_or_nothing(tiny) -> None:
    pool = tiny.pool()
    assert pool.available_slots() == 10
    assert pool.reserve(11) == []
    assert tiny.budget.used_bytes == 0
    assert len(pool.reserve(10)) == 10
    assert pool.reserve(1) == []


@pytest.mark.parametrize("count", [0, -1])
def test_none_of_no_slots(tiny, count) -> None:
    assert tiny.pool().reserve(count) == []


def test_the_last_slab_is_as_small_as_the_budgets_rest(tiny) -> None:
    pool = tiny.pool()
    pool.reserve(10)
    assert pool.slabs() == {1: 4, 2: 4, 3: 2}


def test_a_rest_too_small_for_a_slot_is_left() -> None:
    tiny = Tiny(budget_bytes=SLOT + SLOT - 1)
    assert tiny.pool().available_slots() == 1
    assert len(tiny.pool().reserve(1)) == 1
    assert tiny.pool().reserve(1) == []
    tiny.check()


def test_pools_share_a_budget_and_pass_empty_slabs_on(tiny) -> None:
    one, other = tiny.pool(), tiny.pool(2 * SLOT)
    slots = one.reserve(9)
    assert other.available_slots() == 0
    for slot in slots[:5]:
        one.abort([slot])
    assert one.release_empty_slabs() == SLAB, "the second slab still has slots in use"
    assert [slot.slab for slot in other.reserve(2)] == [4, 4]
    assert tiny.budget.peak_bytes == 10 * SLOT


def test_only_wholly_free_slabs_are_released(tiny) -> None:
    pool = tiny.pool()
    slots = pool.reserve(8)
    for slot in slots:
        pool.commit([slot])
    for slot in slots[:4]:
        pool.retire([slot], epoch=1)
    assert pool.release_empty_slabs() == 0, "retired slots may still be read"
    pool.reclaim(2)
    assert pool.release_empty_slabs() == SLAB
    assert list(pool.slabs()) == [2]


def test_a_slab_id_is_never_used_again(tiny) -> None:
    pool = tiny.pool()
    seen = set()
    for _ in range(5):
        (slot,) = pool.reserve(1)
        assert slot.slab not in seen
        seen.add(slot.slab)
        pool.abort([slot])
        pool.release_empty_slabs()


@pytest.mark.parametrize("error", [TierFull("no memory"), StorageFull("no space")])
def test_a_slab_that_cannot_be_made_reserves_nothing_and_later_can(tiny, error) -> None:
    pool = tiny.pool()
    pool.reserve(3)
    tiny.backing.refuse = error
    with pytest.raises(type(error)):
        pool.reserve(2)
    assert pool.counts().reserved == 3
    tiny.check()
    tiny.backing.refuse = None
    assert places(pool.reserve(2))[0] == (1, 3)


def test_each_wrong_step_of_the_life_cycle_is_a_bug(tiny) -> None:
    pool = tiny.pool()
    slot, free = pool.reserve(2)
    pool.abort([free])
    for verb in (pool.commit, pool.abort):
        with pytest.raises(AssertionError):
            verb([free])
    pool.commit([slot])
    with pytest.raises(AssertionError):
        pool.commit([slot])
    with pytest.raises(AssertionError):
        pool.abort([slot])
    pool.retire([slot], epoch=1)
    with pytest.raises(AssertionError):
        pool.retire([slot], epoch=1)
    assert pool.counts().retired == 1


def test_a_slot_of_an_earlier_generation_is_refused(tiny) -> None:
    pool = tiny.pool()
    (stale,) = pool.reserve(1)
    pool.abort([stale])
    (current,) = pool.reserve(1)
    for verb in (pool.commit, pool.abort):
        with pytest.raises(AssertionError):
            verb([stale])
    pool.commit([current])


def test_epochs_of_retirement_do_not_fall(tiny) -> None:
    pool = tiny.pool()
    slots = pool.reserve(2)
    for slot in slots:
        pool.commit([slot])
    pool.retire([slots[0]], epoch=7)
    with pytest.raises(AssertionError):
        pool.retire([slots[1]], epoch=6)


def test_a_hundred_thousand_slots_live_and_die() -> None:
    count = 100_000
    tiny = Tiny(budget_bytes=count * SLOT, slab_bytes=64 << 20)
    pool = tiny.pool()
    slots = pool.reserve(count)
    assert len(set(places(slots))) == count
    for slot in slots:
        pool.commit([slot])
    for slot in slots:
        pool.retire([slot], epoch=1)
    assert pool.reclaim(2) == count
    assert pool.release_empty_slabs() == count * SLOT
    tiny.check()


@pytest.mark.parametrize("apart", [1, 2, 255, 256, 1000, 9_999])
def test_free_slots_far_apart_in_one_slab_are_found_in_order(apart: int) -> None:
    count = 10_000
    tiny = Tiny(budget_bytes=count * SLOT, slab_bytes=count * SLOT)
    pool = tiny.pool()
    slots = pool.reserve(count)
    freed = slots[::apart]
    for slot in freed:
        pool.abort([slot])
    taken = [*pool.reserve(min(3, len(freed)))]
    while again := pool.reserve(min(50, len(freed) - len(taken))):
        taken += again
    assert places(taken) == places(freed)
    tiny.check()


def test_slots_taken_one_by_one_are_those_taken_together_holes_and_released_slabs_too() -> None:
    def taken(one_by_one: bool) -> list[tuple[int, int]]:
        tiny = Tiny(budget_bytes=40 * SLOT)
        pool = tiny.pool()
        slots = pool.reserve(30)
        for slot in [*slots[3:9], *slots[12:20], *slots[25:26]]:
            pool.abort([slot])
        assert pool.release_empty_slabs() == 3 * SLAB  # slots 4 to 7 and 12 to 19
        counts = [1] * 20 if one_by_one else [20]
        again = [slot for count in counts for slot in pool.reserve(count)]
        tiny.check()
        return places(again)

    assert taken(one_by_one=True) == taken(one_by_one=False)


@pytest.mark.parametrize("state", ["FREE", "RETIRED"])
def test_integrity_notices_a_slot_that_changed_state_by_itself(tiny, state) -> None:
    pool = tiny.pool()
    (slot,) = pool.reserve(1)
    states = pool._slabs[slot.slab].states
    states[slot.slot] = getattr(slabs, state)
    with pytest.raises(AssertionError):
        pool.check_integrity()
    states[slot.slot] = slabs.RESERVED


def test_memory_of_a_destroyed_slab_is_free_while_an_engine_still_maps_it() -> None:
    backing = MemfdBacking()
    backing.create(SlabRecord(1, bytes(16), SLOT, SLAB // SLOT))
    backing.mapping(1).buffer[:4] = b"page"
    engine_fd = os.dup(backing.fd(1))
    with Mapping(engine_fd, SLAB, writable=True) as engine:
        backing.destroy(1)
        assert os.fstat(engine_fd).st_blocks == 0
        assert bytes(engine.buffer[:4]) == bytes(4)
    os.close(engine_fd)


def test_memfd_slabs_leave_nothing_behind() -> None:
    before = len(os.listdir("/proc/self/fd"))
    backing = MemfdBacking()
    for slab_id in range(1, 20):
        backing.create(SlabRecord(slab_id, bytes(16), SLOT, SLAB // SLOT))
    backing.destroy(3)
    backing.close()
    backing.close()
    assert len(os.listdir("/proc/self/fd")) == before


class LifeOfSlots(RuleBasedStateMachine):
    """Two pools with slots of different size on one budget, against dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.tiny = Tiny(budget_bytes=13 * SLOT)
        self.pools = [self.tiny.pool(first_slots=1), self.tiny.pool(3 * SLOT)]
        self.reserved: list[tuple[SlabPool, SlotRef]] = []
        self.resident: list[tuple[SlabPool, SlotRef]] = []
        self.retired: list[tuple[SlabPool, SlotRef, int]] = []
        self.generations: dict[tuple[int, int], int] = {}
        self.epoch = 1

    def held(self) -> set[tuple[int, int]]:
        slots = [entry[1] for entry in (*self.reserved, *self.resident, *self.retired)]
        return {(slot.slab, slot.slot) for slot in slots}

    @rule(which=st.integers(0, 1), count=st.integers(1, 6))
    def reserve(self, which: int, count: int) -> None:
        pool = self.pools[which]
        available, held = pool.available_slots(), self.held()
        slots = pool.reserve(count)
        assert len(slots) == (count if available >= count else 0)
        for slot in slots:
            place = (slot.slab, slot.slot)
            assert place not in held
            assert slot.generation > self.generations.get(place, 0)
            self.generations[place] = slot.generation
            held.add(place)
        self.reserved += [(pool, slot) for slot in slots]

    @rule(which=st.integers(0, 1), rows=st.integers(1, 3), each=st.integers(1, 3), data=st.data())
    def reserve_runs(self, which: int, rows: int, each: int, data: st.DataObject) -> None:
        pool, held = self.pools[which], self.held()
        before = pool.available_slots()
        of_pool = [slot for own, slot in (*self.reserved, *self.resident) if own is pool]
        behind = [data.draw(st.sampled_from([None, *of_pool])) for _ in range(rows)]
        slots = pool.reserve_runs(rows * each, Runs(behind, each + 1))
        assert len(slots) in (0, rows * each)
        for number, slot in enumerate(slots):
            place = (slot.slab, slot.slot)
            assert place not in held and slot.generation > self.generations.get(place, 0)
            if number % each:
                assert place == (slots[number - 1].slab, slots[number - 1].slot + 1)
            self.generations[place] = slot.generation
            held.add(place)
        assert pool.available_slots() == before - len(slots)
        self.reserved += [(pool, slot) for slot in slots]

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        pool, slot = self.reserved.pop(data.draw(st.integers(0, len(self.reserved) - 1)))
        pool.commit([slot])
        self.resident.append((pool, slot))

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        pool, slot = self.reserved.pop(data.draw(st.integers(0, len(self.reserved) - 1)))
        pool.abort([slot])

    @precondition(lambda self: self.resident)
    @rule(data=st.data())
    def retire(self, data: st.DataObject) -> None:
        pool, slot = self.resident.pop(data.draw(st.integers(0, len(self.resident) - 1)))
        pool.retire([slot], self.epoch)
        self.retired.append((pool, slot, self.epoch))
        self.epoch += 1

    @rule(lag=st.integers(0, 5))
    def reclaim(self, lag: int) -> None:
        safe = self.epoch - lag
        freed = sum(pool.reclaim(safe) for pool in self.pools)
        kept = [entry for entry in self.retired if entry[2] >= safe]
        assert freed == len(self.retired) - len(kept)
        self.retired = kept

    @rule(which=st.integers(0, 1))
    def release(self, which: int) -> None:
        pool = self.pools[which]
        held = {slab for slab, _ in self.held()}
        empty = {slab for slab in pool.slabs() if slab not in held}
        used = self.tiny.budget.used_bytes
        assert pool.release_empty_slabs() == used - self.tiny.budget.used_bytes
        assert not empty & set(pool.slabs())

    @invariant()
    def all_is_counted(self) -> None:
        self.tiny.check()
        for pool in self.pools:
            counts = pool.counts()
            assert counts.reserved == sum(entry[0] is pool for entry in self.reserved)
            assert counts.resident == sum(entry[0] is pool for entry in self.resident)
            assert counts.retired == sum(entry[0] is pool for entry in self.retired)


LifeOfSlots.TestCase.settings = settings(max_examples=300, stateful_step_count=50)
TestLifeOfSlots = LifeOfSlots.TestCase
