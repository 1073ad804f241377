"""The ledger against plain dicts, by random steps with starts, kills, power cuts, full disks.

After each step the ledger's own integrity holds and it has what was said; after
each end of the machine it has a state that was, no older than acknowledged.

TIERD_MODEL_EXAMPLES and TIERD_MODEL_STEPS make a longer run.
"""

import os
import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.disk.ledgerrig import SLOTS, Rig, slab_files
from tierd.testing import SimulatedDisk

SEEDS = st.integers(0, 2**32 - 1)
EXAMPLES = int(os.environ.get("TIERD_MODEL_EXAMPLES", "300"))
STEPS = int(os.environ.get("TIERD_MODEL_STEPS", "50"))


class LedgerMachine(RuleBasedStateMachine):
    """Steps of the rig, each drawn by a seed that hypothesis can shrink."""

    def __init__(self) -> None:
        super().__init__()
        self.disk = SimulatedDisk(1)
        self.rig = Rig(self.disk, 1)

    def _draw(self, seed: int) -> None:
        self.rig.draw = random.Random(seed)

    @rule(seed=SEEDS)
    def commit(self, seed: int) -> None:
        self._draw(seed)
        self.rig.commit()

    @rule(seed=SEEDS)
    def open_session(self, seed: int) -> None:
        self._draw(seed)
        self.rig.open_session()

    @precondition(lambda self: self.rig.now.sessions)
    @rule(seed=SEEDS, step=st.sampled_from(["drop_pages", "truncate", "resume", "drop_session"]))
    def change_session(self, seed: int, step: str) -> None:
        self._draw(seed)
        getattr(self.rig, step)()

    @precondition(lambda self: self.rig.now.sessions)
    @rule(seed=SEEDS)
    def park(self, seed: int) -> None:
        self._draw(seed)
        self.rig.park()

    @rule()
    def add_slab(self) -> None:
        self.rig.add_slab()

    @rule(seed=SEEDS, step=st.sampled_from(["drop_slab", "quarantine"]))
    def change_slab(self, seed: int, step: str) -> None:
        self._draw(seed)
        getattr(self.rig, step)()

    @rule(step=st.sampled_from(["flush", "flush_durably", "snapshot", "reopen"]))
    def keep(self, step: str) -> None:
        getattr(self.rig, step)()

    @rule()
    def kill(self) -> None:
        self.disk = self.disk.kill()
        self.rig.adopt(self.disk)

    @rule(seed=SEEDS, torn=st.booleans())
    def cut_power(self, seed: int, torn: bool) -> None:
        draw = random.Random(seed)
        keep = {n for n in range(self.disk.pending()) if draw.random() < 0.5}
        self.disk = self.disk.crash(keep, torn=torn)
        self.rig.adopt(self.disk)

    @rule(seed=SEEDS, cut_power=st.booleans())
    def start_on_a_full_disk(self, seed: int, cut_power: bool) -> None:
        self._draw(seed)
        self.rig.start_on_a_full_disk(cut_power=cut_power)
        self.disk = self.rig.disk

    @invariant()
    def holds_what_was_said(self) -> None:
        self.rig.check_now()
        self.disk.check_integrity()
        assert set(self.rig.now.slabs) <= slab_files(self.disk)
        for slab in self.rig.now.slabs:
            assert len(self.rig.led.occupancy(slab).slots) <= SLOTS


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=EXAMPLES, stateful_step_count=STEPS)
