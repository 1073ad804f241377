"""Crash points of a ledger: a workload, and at each of its I/O operations a power cut.

At an operation the power goes in several ways: subsets of what is pending
reach the disk, some sectors torn. Each is recovered and compared; every
eighth is opened for good, closed or cut again, and compared once more.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from tests.disk.ledgerrig import Rig
from tierd.testing import SimulatedDisk, crash_choices

STEPS, STEPS_PER_START = 40, 14
SUBSETS = 6  # ways in which the power goes at one operation
REOPENED = 8  # every so many points a ledger goes on from there
TORN_SHARE = 0.3


@dataclass
class Tally:
    """What was tried."""

    points: int = 0
    reopened: int = 0
    operations: int = 0
    kills: int = 0


class CrashRun:
    """One workload by seed; `tally` is added to."""

    def __init__(self, seed: int, tally: Tally) -> None:
        self.seed, self.tally = seed, tally
        self.draw = random.Random(f"crashes {seed}")
        self.rig: Rig | None = None
        self.disk = SimulatedDisk(seed, watch=self._watch)

    def run(self) -> None:
        """Raise AssertionError, naming the seed, if any crash loses or invents anything."""
        self.rig = Rig(self.disk, self.seed, manifests=True)
        for number in range(STEPS):
            self.rig.step()
            self.rig.check_now()
            if number % STEPS_PER_START == STEPS_PER_START - 1:
                self._start_again()
        self.disk.check_integrity()

    def _start_again(self) -> None:
        assert self.rig is not None
        if self.draw.random() < 0.5:
            self.rig.reopen()
            return
        self.tally.kills += 1
        self.disk = self.disk.kill()
        self.disk._watch = self._watch
        self.rig.adopt(self.disk)

    def _watch(self, _operation: str, _name: str) -> None:
        if self.rig is None:
            return  # the first start has nothing to lose
        self.tally.operations += 1
        for keep in crash_choices(self.disk.pending(), SUBSETS, self.draw):
            self._cut_power(keep)

    def _cut_power(self, keep: frozenset[int]) -> None:
        assert self.rig is not None
        self.tally.points += 1
        after = self.disk.crash(keep, torn=self.draw.random() < TORN_SHARE)
        if self.tally.points % REOPENED:
            self.rig.check_disk(after)
            return
        self.tally.reopened += 1
        ledger = self.rig.check_reopened(after)
        if self.draw.random() < 0.5:
            ledger.close()
        self.rig.check_reopened(after.crash([]))
