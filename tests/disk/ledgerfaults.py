"""A workload on a disk that fails: typed errors, reads go on, what was acknowledged stays."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence

from tests.disk.ledgerrig import Rig
from tierd.errors import StorageError
from tierd.testing import Fault, FaultKind, SimulatedDisk

STEPS, STEPS_PER_START = 24, 8
ENDS = 3  # ways in which the machine stops at the end
LIES = (FaultKind.BIT_FLIP, FaultKind.LOST_WRITE, FaultKind.MISDIRECTED, FaultKind.STALE_READ)


class FaultRun:
    """One workload by seed, with faults scheduled or at `rates`.

    `refused` counts what the ledger refused; after it the ledger's image is
    still all that was said.
    """

    def __init__(
        self,
        seed: int,
        faults: Sequence[Fault] = (),
        rates: Mapping[FaultKind, float] | None = None,
        *,
        steps: int = STEPS,
    ) -> None:
        self.seed, self.steps = seed, steps
        self.draw = random.Random(f"faults {seed}")
        self.disk = SimulatedDisk(seed, faults=faults, rates=rates or {})
        self.lies = any(kind in LIES for kind in (*(f.kind for f in faults), *(rates or {})))
        self.refused: Counter[str] = Counter()
        self.operations: Counter[str] = Counter()
        self.struck = 0  # faults that an operation met
        self.disk._watch = lambda operation, _name: self.operations.update([operation])
        self._count_faults()
        self.rig: Rig | None = None

    def _count_faults(self) -> None:
        strike = self.disk.plan.strike

        def counting(operation: str, name: str) -> Fault | None:
            fault = strike(operation, name)
            self.struck += fault is not None
            return fault

        self.disk.plan.strike = counting  # type: ignore[method-assign]

    def run(self) -> None:
        """Raise AssertionError, naming the seed, if anything is wrong or acknowledged and lost."""
        try:
            self.rig = Rig(self.disk, self.seed, lies=self.lies, manifests=not self.lies)
        except StorageError as error:
            self._note(error)
        if self.rig is not None:
            self._work(self.rig)
        self.disk.plan.clear()
        self._end()

    def _note(self, error: StorageError) -> None:
        self.refused[type(error).__name__] += 1

    def _work(self, rig: Rig) -> None:
        for number in range(self.steps):
            try:
                if number % STEPS_PER_START == STEPS_PER_START - 1:
                    rig.reopen()
                else:
                    rig.step()
            except StorageError as error:
                self._note(error)
                if rig.led._closed and not self._started_again(rig):
                    return
            rig.check_now()

    def _started_again(self, rig: Rig) -> bool:
        """Return whether a second try to open succeeds; the first failed in the middle."""
        try:
            rig.adopt(self.disk)
        except StorageError as error:
            self._note(error)
            return False
        return True

    def _end(self) -> None:
        """The machine stops, in several ways; then a sound disk holds what it should."""
        rig = self.rig
        if rig is None:
            Rig(self.disk.crash(), self.seed)  # nothing was there: a store can be made
            return
        for after in (*(self.disk.crash(torn=True) for _ in range(ENDS)), self.disk.kill()):
            try:
                rig.check_reopened(after).close()
                rig.check_reopened(after.crash([]))
            except StorageError:
                # Copies of the superblock may be what the disk lost: then nothing is believed.
                assert self.lies, f"seed {self.seed}"
