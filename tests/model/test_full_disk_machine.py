"""The durable machine, with starts on a disk where no byte is free, and sessions dropped there.

A session that was dropped is never there again, whatever happens next: space, a kill, a power
cut, records that are lost.
"""

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from tests.model.test_durable_machine import EXAMPLES, STEPS, DurableMachine, picks, seldom
from tierd.disk.simulated import SimulatedDisk


class FullDiskMachine(DurableMachine):
    """`full`: whether the next start finds no byte free; `dropped`: for good."""

    def __init__(self) -> None:
        self.full = False
        self.dropped: set[int] = set()
        super().__init__()

    def boot(self, disk: SimulatedDisk) -> None:
        disk.capacity_bytes = disk.used_bytes() if self.full else 2**40
        super().boot(disk)
        assert not self.dropped & {session.number for session in self.store.sessions()}

    @rule(keep=st.randoms(use_true_random=False), pick=picks, cut=st.booleans(), sure=seldom)
    def all_stops_and_the_disk_is_full(self, keep: Any, pick: int, cut: bool, sure: bool) -> None:
        """The next start has no room to write; a session is dropped; space comes, or power goes."""
        if not sure:
            return
        self.full = True
        self.all_stops(keep, False, True)
        self.full = False
        assert self.rig.ledger.waiting
        session = self.pick(pick, owned=False)
        if session is not None:
            self.rig.ledger.forget(session.number)
            self.store.close_session(session.number)
            self.dropped.add(session.number)
            del self.known[session.number]
        self.the_store_is_consistent()
        if cut:
            self.all_stops(keep, True, True)
            return
        self.disk.capacity_bytes = 2**40
        self.rig.ledger.flush(sync=True)


TestFullDiskMachine = FullDiskMachine.TestCase
TestFullDiskMachine.settings = settings(
    max_examples=max(1, EXAMPLES // 3),
    stateful_step_count=STEPS,
    suppress_health_check=list(HealthCheck),
)
