"""Slabs and their allocator: equal slots, one life cycle, the same for warm and cold.

    free --reserve--> reserved --commit--> resident --retire--> retired --reclaim--> free
                         \\--abort--> free      \\--condemn--> bad, for ever
                         \\--fence--> bad --unfence--> free

Invariants:
  in each slab, free + reserved + resident + retired + bad == slots
  a slab that takes no more has no free slot: what would be free is bad
  each slab with a free slot is in `roomy`, lowest first; one without may still be
  `counts` are the slots of all slabs by state
  a generation never falls, and rises at each reserve
  the slabs of all pools of a tier together are the budget's used bytes
  what `slots_within` foresees is what the slabs that are added hold
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from tierd.errors import TierFull
from tierd.memory.budget import ByteBudget
from tierd.memory.slabstates import (
    BAD,
    FREE,
    RESERVED,
    RESIDENT,
    RETIRED,
    STATES,
    SlabStates,
    Slots,
)
from tierd.types import SlabRecord, Tier

SLAB_ID_MAX = 2**24 - 1

# A tier holds several pools (namespaces; the exact first blocks beside encoded ones), and
# room passes from one to another a whole slab at a time: a slab is at most 1/16 of a tier.
SLABS_PER_TIER_MIN = 16
# A pool grows by what is asked for at once, or by half of itself, so that a small job under a
# large cap takes little more than it needs: the first slab holds a few layers' runs, and eleven
# more are half a gibibyte.
FIRST_SLAB_BYTES = 4 << 20
_GROWTH_DIVISOR = 2


def smallest_budget(needed_bytes: int, sizes: int) -> int:
    """Return a tier's budget that holds slots of `sizes` sizes, `needed_bytes` in all.

    Each size but the last may leave a part of a slab unused: 1/SLABS_PER_TIER_MIN at most.
    """
    return -(-needed_bytes * SLABS_PER_TIER_MIN // (SLABS_PER_TIER_MIN + 1 - sizes))


class Slot(Protocol):
    """What names a slot at one generation: a SlotRef, a Place."""

    @property
    def slab(self) -> int: ...
    @property
    def slot(self) -> int: ...
    @property
    def generation(self) -> int: ...


class SlotRef(NamedTuple):
    """One slot at one generation: a stale one is refused by every verb."""

    slab: int
    slot: int
    generation: int


class Runs(NamedTuple):
    """How slots are to be neighbours: as many for each of `behind`.

    Right behind that slot; or, where there is none or what follows it is not free, at the start
    of `run_slots` free ones, so that what comes later finds room behind them.
    """

    behind: Sequence[Slot | None]
    run_slots: int


@dataclass(frozen=True, slots=True)
class SlotCounts:
    """Slots of a pool by state."""

    free: int
    reserved: int
    resident: int
    retired: int
    bad: int = 0  # held ones too


class SlabBacking(Protocol):
    """Where a slab's bytes are: memfds, or files of a disk."""

    def create(self, slab: SlabRecord) -> None:
        """Make a slab, its bytes really there. Raises TierFull or StorageError."""

    def destroy(self, slab_id: int) -> None:
        """Give a slab's bytes back."""

    def fd(self, slab_id: int) -> int:
        """Return the fd to pass to an engine; it stays the backing's."""


class SlabNumbering(Protocol):
    """Who numbers the slabs: unique over both tiers, for as long as the store lives."""

    def take_slab_id(self) -> int:
        """Return a fresh id."""


class SlabIds:
    """Ids from 1 on, of a store that ends with its daemon."""

    def __init__(self) -> None:
        self._next = 1

    def take_slab_id(self) -> int:
        """Return a fresh id."""
        assert self._next <= SLAB_ID_MAX, "slab ids are used up"
        self._next += 1
        return self._next - 1


class SlabPool:
    """Slots of one size in one namespace and tier. Adds slabs while the budget allows."""

    def __init__(
        self,
        tier: Tier,
        slot_bytes: int,
        namespace_digest: bytes,
        budget: ByteBudget,
        slab_bytes: int,
        backing: SlabBacking,
        ids: SlabNumbering,
    ) -> None:
        assert slab_bytes >= slot_bytes, f"{slab_bytes=} {slot_bytes=}"
        self.tier = tier
        self.slot_bytes = slot_bytes
        self.namespace_digest = namespace_digest
        self._budget = budget
        self._slots_per_slab = slab_bytes // slot_bytes
        self._first_slots = max(1, FIRST_SLAB_BYTES // slot_bytes)
        self._backing = backing
        self._ids = ids
        self._slabs: dict[int, SlabStates] = {}
        self._held: set[int] = set()  # slabs of an earlier run whose engines may still come
        self._counts = [0] * STATES
        self._roomy: list[int] = []  # a heap of slab ids

    # -- what there is --------------------------------------------------------

    def slabs(self) -> dict[int, int]:
        """Return slots by slab id."""
        return {slab_id: len(slab.states) for slab_id, slab in self._slabs.items()}

    def capacity_slots(self) -> int:
        """Return the slots of the slabs that are there."""
        return sum(self._counts)

    def capacity_bytes(self) -> int:
        """Return the bytes of the slabs that are there."""
        return self.capacity_slots() * self.slot_bytes

    def available_slots(self) -> int:
        """Return how many slots `reserve` could hand out: free ones and ones to be added."""
        return self._counts[FREE] + self._budget.remaining_bytes // self.slot_bytes

    def slots_within(
        self, remaining_bytes: int, slots: int, *, empty: bool = False
    ) -> tuple[int, int]:
        """Return how many slots the slabs hold that would be added for `slots`, and what is left.

        Both of `remaining_bytes` of the budget; fewer than `slots` where it ends. `empty`: as if
        the pool had no slab.
        """
        capacity = 0 if empty else self.capacity_slots()
        added = 0
        while added < slots and remaining_bytes >= self.slot_bytes:
            more = self._next_slab(capacity + added, slots - added, remaining_bytes)
            added += more
            remaining_bytes -= more * self.slot_bytes
        return added, remaining_bytes

    def _next_slab(self, capacity: int, lacking: int, remaining_bytes: int) -> int:
        """Return the slots of the slab that a pool of `capacity` slots adds if it lacks some."""
        wanted = max(self._first_slots, capacity // _GROWTH_DIVISOR, lacking)
        return min(wanted, self._slots_per_slab, remaining_bytes // self.slot_bytes)

    def counts(self) -> SlotCounts:
        """Return the slots by state."""
        return SlotCounts(*self._counts)

    def _count(self, before: int, after: int, slots: int = 1) -> None:
        self._counts[before] -= slots
        self._counts[after] += slots

    # -- life cycle -----------------------------------------------------------

    def reserve(self, count: int) -> list[SlotRef]:
        """Reserve `count` slots, lowest slab first and contiguous where it can; all or none.

        Returns [] when there is no room. Raises TierFull or StorageError when a
        slab that the budget allows cannot be made; nothing is then reserved.
        """
        if count <= 0 or self.available_slots() < count:
            return []
        while self._counts[FREE] < count:
            self._add_slab(count - self._counts[FREE])
        taken: list[SlotRef] = []
        while len(taken) < count:
            slab_id = self._roomy[0]
            slab = self._slabs.get(slab_id)
            if slab is None or not slab.free_count:
                heapq.heappop(self._roomy)
                if slab is not None:
                    slab.is_roomy = False
                continue
            taken += self._take(slab_id, slab, count - len(taken))
        return taken

    def reserve_runs(self, count: int, runs: Runs) -> list[SlotRef]:
        """Reserve `count` slots, neighbours as `runs` says, in its order; all or none.

        Returns [] when that cannot be: there may be room for `reserve`. Raises as it does.
        """
        each = count // len(runs.behind)
        assert each * len(runs.behind) == count and 0 < each <= runs.run_slots, f"{count=} {each=}"
        taken: list[SlotRef] = []
        for nth, slot in enumerate(runs.behind):
            left = len(runs.behind) - nth
            run = self._behind(slot, each) or self._fresh_run(each, runs.run_slots, left)
            if not run:
                self.abort(taken)
                return []
            taken += run
        return taken

    def _behind(self, slot: Slot | None, count: int) -> list[SlotRef]:
        slab = None if slot is None else self._slabs.get(slot.slab)
        if slot is None or slab is None or not slab.takes:
            return []
        return self._taken(slot.slab, slab, slab.take_behind(slot.slot, count))

    def _fresh_run(self, count: int, run_slots: int, runs: int) -> list[SlotRef]:
        """Take `count` slots at the start of `run_slots` free ones; `runs` in all may be needed."""
        for slab_id, slab in self._slabs.items():
            if slab.takes and slab.free_count >= run_slots:
                run = self._taken(slab_id, slab, slab.take_run(count, run_slots))
                if run:
                    return run
        if self.slots_within(self._budget.remaining_bytes, run_slots)[0] < run_slots:
            return []
        self._add_slab(runs * run_slots)
        slab_id, slab = next(reversed(self._slabs.items()))
        return self._taken(slab_id, slab, slab.take_run(count, run_slots))

    def _take(self, slab_id: int, slab: SlabStates, count: int) -> list[SlotRef]:
        return self._taken(slab_id, slab, slab.take(count))

    def _taken(self, slab_id: int, slab: SlabStates, slots: Slots | None) -> list[SlotRef]:
        if slots is None:
            return []
        self._count(FREE, RESERVED, len(slots))
        generations = slab.generations[slots].tolist()
        return [
            SlotRef(slab_id, slot, generation)
            for slot, generation in zip(slots.tolist(), generations, strict=True)
        ]

    def _free(self, slab_id: int, slab: SlabStates, slots: list[int], before: int) -> None:
        if not slab.takes:
            slab.states[slots] = BAD
            self._count(before, BAD, len(slots))
            return
        slab.free(slots)
        self._count(before, FREE, len(slots))
        if not slab.is_roomy:
            slab.is_roomy = True
            heapq.heappush(self._roomy, slab_id)

    def _add_slab(self, lacking: int) -> None:
        slots = self._next_slab(self.capacity_slots(), lacking, self._budget.remaining_bytes)
        record = SlabRecord(self._ids.take_slab_id(), self.namespace_digest, self.slot_bytes, slots)
        self._backing.create(record)
        self._budget.take(record.size_bytes)
        self._slabs[record.slab] = SlabStates(
            np.zeros(slots, np.uint8), np.zeros(slots, np.uint32), free_count=slots
        )
        self._counts[FREE] += slots
        heapq.heappush(self._roomy, record.slab)

    def restore(
        self,
        record: SlabRecord,
        used: npt.NDArray[np.uint32],
        generations: npt.NDArray[np.uint32],
        bad: Collection[int],
        generation_floor: int,
    ) -> None:
        """Take in a slab of an earlier run, whose backing is there; `used` slots are resident.

        `generation_floor` lies above every generation of a free slot. Raises
        TierFull if the budget does not hold the slab.
        """
        if record.size_bytes > self._budget.unused_bytes:
            raise TierFull(f"a slab of {record.size_bytes} bytes is beyond the budget")
        self._budget.take(record.size_bytes)
        slab = SlabStates(
            np.zeros(record.slots, np.uint8),
            np.full(record.slots, generation_floor, np.uint32),
            free_count=0,
        )
        slab.states[used] = RESIDENT
        slab.generations[used] = generations
        slab.states[list(bad)] = BAD
        found = np.bincount(slab.states, minlength=STATES).tolist()
        self._counts = [count + more for count, more in zip(self._counts, found, strict=True)]
        slab.free_count = found[FREE]
        self._slabs[record.slab] = slab
        heapq.heappush(self._roomy, record.slab)

    def hold(self, record: SlabRecord, generation_floor: int, adopt: Callable[[], None]) -> None:
        """Take in a warm slab of an earlier run, none of its slots free before `release_held`.

        `adopt` maps its memory. Raises TierFull if the budget does not hold it, and what
        `adopt` does; then nothing is taken in.
        """
        if record.size_bytes > self._budget.unused_bytes:
            raise TierFull(f"a slab of {record.size_bytes} bytes is beyond the budget")
        adopt()
        self._budget.arrived(record.size_bytes)
        every = np.arange(record.slots, dtype=np.uint32)
        none = np.zeros(0, np.uint32)
        self.restore(record, none, none, every.tolist(), generation_floor)
        self._slabs[record.slab].takes = False
        self._held.add(record.slab)

    def claim(self, slot: Slot) -> bool:
        """Let a held slot be a page's again; say whether it was still there to be claimed."""
        slab = self._slabs.get(slot.slab)
        if slab is None or slot.slab not in self._held or slab.states[slot.slot] != BAD:
            return False
        slab.states[slot.slot] = RESIDENT
        slab.generations[slot.slot] = slot.generation
        self._count(BAD, RESIDENT)
        return True

    @property
    def holds(self) -> bool:
        """Whether slots are held for engines of an earlier run: those freed now are held too."""
        return bool(self._held)

    def release_held(self) -> None:
        """Let the slots that nobody has claimed be used."""
        for slab_id in self._held & set(self._slabs):
            slab = self._slabs[slab_id]
            slab.takes = True
            if left := np.flatnonzero(slab.states == BAD).tolist():
                self._free(slab_id, slab, left, BAD)
        self._held.clear()

    def close_slab(self, slab_id: int) -> None:
        """Hand out no more slots of a slab: its disk has failed it. Free ones are bad now."""
        slab = self._slabs[slab_id]
        slab.takes = False
        slab.states[slab.states == FREE] = BAD
        self._count(FREE, BAD, slab.free_count)
        slab.free_count = 0

    def condemn(self, slot: Slot) -> None:
        """A resident slot's bytes came back wrong: it is never used again, so needs no epoch."""
        self._turn([slot], RESIDENT, BAD)

    def commit(self, slots: Sequence[Slot]) -> None:
        """Reserved slots' pages are whole."""
        self._turn(slots, RESERVED, RESIDENT)

    def abort(self, slots: Sequence[Slot]) -> None:
        """Reserved slots are not wanted after all."""
        for slab_id, numbers in self._by_slab(slots, RESERVED):
            self._free(slab_id, self._slabs[slab_id], numbers, RESERVED)

    def fence(self, slots: Sequence[Slot]) -> None:
        """Reserved slots are not wanted, but somebody may be writing to them yet."""
        self._turn(slots, RESERVED, BAD)

    def unfence(self, slab_id: int, numbers: list[int]) -> None:
        """Nobody writes to these bad slots any more: they can be used."""
        if numbers:
            self._free(slab_id, self._slabs[slab_id], numbers, BAD)

    def retire(self, slots: Sequence[Slot], epoch: int) -> None:
        """Resident slots' pages are unpublished at `epoch`. Epochs must not fall."""
        for slab_id, numbers in self._by_slab(slots, RESIDENT):
            slab = self._slabs[slab_id]
            assert not slab.retired or epoch >= slab.retired[-1][0], f"{epoch=} {slab.retired[-1]=}"
            slab.states[numbers] = RETIRED
            slab.retired.append((epoch, numbers))
        self._count(RESIDENT, RETIRED, len(slots))

    def _turn(self, slots: Sequence[Slot], before: int, after: int) -> None:
        for slab_id, numbers in self._by_slab(slots, before):
            self._slabs[slab_id].states[numbers] = after
        self._count(before, after, len(slots))

    def _by_slab(self, slots: Sequence[Slot], state: int) -> Iterator[tuple[int, list[int]]]:
        """Yield each slab with its slots, which are in `state`, at the caller's generations."""
        slab_ids = {slot.slab for slot in slots}
        for slab_id in slab_ids:
            of_slab = [s for s in slots if s.slab == slab_id] if len(slab_ids) > 1 else slots
            numbers = [slot.slot for slot in of_slab]
            found = self._slabs[slab_id].states[numbers]
            generations = self._slabs[slab_id].generations[numbers]
            assert (found == state).all(), f"{of_slab} are in states {found}, not {state}"
            same = generations == [slot.generation for slot in of_slab]
            assert same.all(), f"{of_slab} are at generations {generations}"
            assert len(set(numbers)) == len(numbers), f"{of_slab}: a slot twice"
            yield slab_id, numbers

    def reclaim(self, safe_epoch: int) -> int:
        """Free the slots retired before `safe_epoch`; return how many."""
        freed = 0
        for slab_id, slab in self._slabs.items():
            while slab.retired and slab.retired[0][0] < safe_epoch:
                _, slots = slab.retired.popleft()
                self._free(slab_id, slab, slots, RETIRED)
                freed += len(slots)
        return freed

    def release_empty_slabs(self) -> int:
        """Give slabs back of which every slot is free; return their bytes."""
        empty = [key for key, slab in self._slabs.items() if slab.free_count == len(slab.states)]
        return sum(self._release(slab_id) for slab_id in empty)

    def _release(self, slab_id: int) -> int:
        slots = len(self._slabs.pop(slab_id).states)
        self._counts[FREE] -= slots
        size_bytes = slots * self.slot_bytes
        self._backing.destroy(slab_id)
        self._budget.give(size_bytes)
        return size_bytes

    def states(self, slab_id: int) -> Sequence[int]:
        """Return the state of each slot of a slab (for checks across parts)."""
        return [int(state) for state in self._slabs[slab_id].states]

    def check_integrity(self) -> None:
        """Raise AssertionError unless every slot is in exactly one state and counted so."""
        totals = np.zeros(STATES, np.int64)
        for slab_id, slab in self._slabs.items():
            counts = np.bincount(slab.states, minlength=STATES).tolist()
            (free, _, _, retired, _), total = counts, len(slab.states)
            totals += counts
            assert len(counts) == STATES and sum(counts) == total, f"{slab_id=} {counts=}"
            assert free == slab.free_count, f"{slab_id=} {free=} {slab.free_count=}"
            waiting = sum(len(slots) for _, slots in slab.retired)
            assert retired == waiting, f"{slab_id=} {retired=} {waiting=}"
            first = int(np.argmin(slab.states)) if free else total  # FREE is the least state
            assert slab.first_free <= first, f"{slab_id=} {first=} {slab.first_free=}"
            assert slab.has_no_run_as_said(), f"{slab_id=} {slab.no_run_of=}"
            assert slab.is_roomy == (slab_id in self._roomy) >= (free > 0), f"{slab_id=} {free=}"
        self._budget.check_integrity()
        assert self._counts == totals.tolist(), f"{self._counts=} {totals=}"
        used = self._budget.used_bytes
        assert self.capacity_bytes() <= used, f"{self.capacity_bytes()=} {used=}"
