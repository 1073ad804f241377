"""The durable machine, step by step: a suspension finds no room on disk, then the daemon is killed.

Nothing of it was acknowledged. What of it was in RAM alone ends with the daemon, what was on
disk stays, and the engine that hands its pages back goes on with all of them until it ends.
"""

from collections.abc import Iterator

import pytest

from tests.model.test_durable_machine import DurableMachine
from tierd.sessions import Session

SEALED, ON_DISK = 4, 2


def check(machine: DurableMachine) -> None:
    machine.the_store_is_consistent()
    machine.the_pages_are_the_models_and_so_are_their_bytes()
    machine.every_kept_session_is_there()


@pytest.fixture
def machine() -> Iterator[DurableMachine]:
    """Two sessions kept, and engine 2's, of which cold had room for ON_DISK of SEALED blocks."""
    machine = DurableMachine()
    machine.start()
    for number in range(2):
        machine.demote(0, SEALED, writes_cold=False, at_once=True)
        machine.suspend(0)
        for _ in range(2):
            machine.spill(number, owned=False, first=0, many=6)
        machine.tick(0.0)  # the slots are free
        machine.open(number + 1)
    machine.demote(0, SEALED, writes_cold=False, at_once=True)
    machine.suspend(0)
    session = machine.pick(0, owned=True)
    assert session is not None and machine.on_disk(session) == ON_DISK
    check(machine)
    yield machine
    machine.teardown()


def of_engine_2(machine: DurableMachine) -> Session:
    return machine.store.sessions()[-1]


def test_blocks_that_found_no_room_are_not_kept_though_their_engine_hands_them_back(
    machine: DurableMachine,
) -> None:
    machine.killed_and_handed_back(sure=True)
    check(machine)
    assert of_engine_2(machine).index.holds(range(SEALED))
    machine.die(2, sure=True)
    check(machine)
    assert of_engine_2(machine).sealed_blocks == ON_DISK


def test_another_refusal_after_that_keeps_what_the_kill_left(machine: DurableMachine) -> None:
    machine.killed_and_handed_back(sure=True)
    machine.suspend(0)
    check(machine)
    machine.close(0, discard=False, sure=True)
    check(machine)
    assert of_engine_2(machine).sealed_blocks == ON_DISK


def test_blocks_that_found_no_room_and_lost_their_engine_end_with_the_daemon(
    machine: DurableMachine,
) -> None:
    machine.die(2, sure=True)
    check(machine)
    assert of_engine_2(machine).sealed_blocks == SEALED
    machine.killed_and_handed_back(sure=True)
    machine.resume(2, engine=1)
    check(machine)
    assert of_engine_2(machine).sealed_blocks == ON_DISK
