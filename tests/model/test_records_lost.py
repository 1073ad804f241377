"""The durable machine, driven towards kept sessions whose records are lost: fsck rebuilds them."""

import random
from collections.abc import Callable

import pytest

from tests.model.test_durable_machine import BLOCKS
from tests.model.test_full_disk_machine import FullDiskMachine
from tierd.disk import manifest

RUNS, STEPS = 25, 60


class Driven(FullDiskMachine):
    """Counts what it met: `whole`, `cut`: sessions rebuilt."""

    def __init__(self) -> None:
        super().__init__()
        self.whole_sessions = self.cut_sessions = 0

    def rebuilt(self, session, known, lost):
        found = super().rebuilt(session, known, lost)
        if session.sealed_blocks:
            self.whole_sessions += session.sealed_blocks == known.acknowledged.sealed
        self.cut_sessions += session.sealed_blocks < known.acknowledged.sealed
        return found


def drive(seed: int) -> Driven:
    draw, machine = random.Random(seed), Driven()
    machine.start()

    def pick() -> int:
        return draw.randrange(6)

    def blocks() -> None:
        for engine in (1, 2):
            machine.register(engine)
        machine.demote(pick(), draw.randint(2, BLOCKS), draw.random() < 0.5, draw.random() < 0.7)

    def rewrite() -> None:
        """Cut a kept session and let other pages into the slots that it had."""
        which = pick()
        machine.resume(which, draw.choice(sorted(machine.alive) or [1]))
        machine.truncate(which, draw.randint(0, 2), True)
        machine.tick(0.0)
        blocks()
        for number in range(6):
            machine.spill(number, True, 0, 10)

    steps: list[tuple[int, Callable[[], object]]] = [
        (8, blocks),
        (5, lambda: machine.suspend(pick())),
        (5, lambda: machine.resume(pick(), draw.choice(sorted(machine.alive) or [1]))),
        (3, lambda: machine.truncate(pick(), draw.randrange(BLOCKS), True)),
        (3, lambda: machine.spill(pick(), True, draw.randrange(4), 6)),
        (2, lambda: machine.promote(pick(), draw.random() < 0.5, 0, 6)),
        (2, lambda: machine.tick(0.0)),
        (3, rewrite),
        (1, machine.snapshot),
        (1, machine.finish_commits),
        (1, lambda: machine.open(draw.choice(sorted(machine.alive) or [1]))),
        (1, lambda: machine.close(pick(), draw.random() < 0.5, True)),
        (1, lambda: machine.die(draw.choice((1, 2)), True)),
        (1, lambda: machine.killed_and_handed_back(True)),
        (1, lambda: machine.all_stops(draw, draw.random() < 0.5, True)),
        (
            1,
            lambda: machine.all_stops_and_the_disk_is_full(draw, pick(), draw.random() < 0.5, True),
        ),
        (2, lambda: machine.all_records_are_lost(draw.random() < 0.5, True)),
    ]
    try:
        for _ in range(STEPS):
            draw.choices([step for _, step in steps], [weight for weight, _ in steps])[0]()
            machine.the_store_is_consistent()
            machine.the_pages_are_the_models_and_so_are_their_bytes()
            machine.every_kept_session_is_there()
    except BaseException as error:
        error.add_note(f"seed {seed}")
        raise
    finally:
        machine.teardown()
    return machine


def test_kept_sessions_are_rebuilt_as_they_were_acknowledged_or_a_prefix_of_that() -> None:
    machines = [drive(seed) for seed in range(RUNS)]
    assert sum(machine.whole_sessions for machine in machines) > RUNS // 3
    assert sum(machine.cut_sessions for machine in machines) > 0
    assert sum(len(machine.dropped) for machine in machines) > RUNS // 3


def test_this_would_notice_a_page_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = manifest.manifest_of

    def forgetful(record, rows, slabs):
        made = honest(record, rows, slabs)
        return manifest.Manifest(made.session, made.slabs, made.rows[:-1])

    monkeypatch.setattr(manifest, "manifest_of", forgetful)
    with pytest.raises(AssertionError):
        for seed in range(RUNS):
            drive(seed)
