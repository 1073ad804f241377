"""States of one slab's slots, and where in it free ones are found.

Invariants:
  no slot below `first_free` is free
  a slab that takes no more has no free slot
  of stretches of `no_run_of` slots none is free throughout
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

FREE, RESERVED, RESIDENT, RETIRED, BAD = 0, 1, 2, 3, 4
STATES = 5
_SEARCH_SLOTS = 256  # looked at first: as quick as one; a whole slab of 100,000 takes 100 us

Slots = npt.NDArray[np.intp]


@dataclass(slots=True)
class SlabStates:
    """States and generations of one slab's slots; `retired` is (epoch, slots), oldest first."""

    states: npt.NDArray[np.uint8]
    # A slot reused each 10 ms passes 2**32 generations after 497 days.
    generations: npt.NDArray[np.uint32]
    free_count: int
    first_free: int = 0
    takes: bool = True
    is_roomy: bool = True
    no_run_of: int | None = None
    retired: deque[tuple[int, list[int]]] = field(default_factory=deque)

    def take(self, count: int) -> Slots:
        """Reserve the lowest free slots, at most `count`; return which."""
        end = self.first_free + max(2 * count, _SEARCH_SLOTS)
        while True:
            searched = self.states[self.first_free : end]
            slots = self.first_free + np.flatnonzero(searched == FREE)[:count]
            if len(slots) == count or end >= len(self.states):
                break
            end += 4 * (end - self.first_free)
        if len(slots):
            self._reserve(slots)
            self.first_free = int(slots[-1]) + 1
        return slots

    def take_behind(self, slot: int, count: int) -> Slots | None:
        """Reserve the `count` slots behind `slot`; None if one of them is not there or not free."""
        slots = np.arange(slot + 1, slot + 1 + count)
        if slots[-1] >= len(self.states) or (self.states[slots] != FREE).any():
            return None
        return self._reserve(slots)

    def take_run(self, count: int, run_slots: int) -> Slots | None:
        """Reserve the first `count` slots of a stretch of which all are free; None: there is none.

        A slab is cut into stretches of `run_slots` slots; count <= run_slots.
        """
        if run_slots == self.no_run_of:
            return None
        free = self._free_stretches(run_slots)
        if not len(free):
            self.no_run_of = run_slots
            return None
        start = int(free[0]) * run_slots
        return self._reserve(np.arange(start, start + count))

    def has_no_run_as_said(self) -> bool:
        """Whether `no_run_of` still says what is."""
        return self.no_run_of is None or not len(self._free_stretches(self.no_run_of))

    def _free_stretches(self, run_slots: int) -> Slots:
        stretches = len(self.states) // run_slots
        rows = self.states[: stretches * run_slots].reshape(stretches, run_slots)
        return np.flatnonzero((rows == FREE).all(axis=1))

    def _reserve(self, slots: Slots) -> Slots:
        self.states[slots] = RESERVED
        self.generations[slots] += 1
        self.free_count -= len(slots)
        if slots[0] == self.first_free:
            self.first_free += 1
        return slots

    def free(self, slots: list[int]) -> None:
        """Let slots be taken again."""
        self.states[slots] = FREE
        self.free_count += len(slots)
        self.no_run_of = None
        self.first_free = min(self.first_free, *slots)
