"""Torture of the cold tier's records: power cuts, kills and faults, by seed, for minutes or hours.

    scripts/torture --minutes 60
    scripts/torture --seed 4711 --kind crash --runs 1     # repeat what failed

Runs of each kind take turns, the next seed each. Stops at the first failure and
prints the line that repeats it.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable

import hypothesis
from hypothesis import HealthCheck
from hypothesis.stateful import run_state_machine_as_test

from tests.disk.flips import flip
from tests.disk.ledgercrash import CrashRun, Tally
from tests.disk.ledgerfaults import LIES, FaultRun
from tests.e2e.killing import killing_run
from tests.model.test_durable_machine import DurableMachine
from tests.model.test_ledger_machine import LedgerMachine
from tests.model.test_records_lost import drive
from tests.model.test_store_machine import StoreMachine
from tierd.testing import FaultKind

REPORT_SECONDS = 30.0
HONEST_RATES = {
    FaultKind.IO_ERROR: 0.01, FaultKind.SHORT: 0.01, FaultKind.FULL: 0.01,
    FaultKind.SYNC_DROPS: 0.01,
}  # fmt: skip
STEPS = 60
MACHINES = (LedgerMachine, StoreMachine, DurableMachine)
EXAMPLES, EXAMPLE_STEPS = 20, 200
Counts = Counter[str]


def crash(seed: int, counts: Counts) -> None:
    """Cut the power at every operation of a workload."""
    tally = Tally()
    CrashRun(seed, tally).run()
    counts.update(points=tally.points, reopened=tally.reopened, kills=tally.kills)


def faults(seed: int, counts: Counts) -> None:
    """Let operations fail, each kind now and then."""
    _fault_run(FaultRun(seed, rates=HONEST_RATES, steps=STEPS), counts)


def lies(seed: int, counts: Counts) -> None:
    """Let the disk lie, in one way or in all."""
    draw = random.Random(seed)
    kinds = draw.choice([(kind,) for kind in LIES] + [LIES])
    rate = draw.choice([0.003, 0.03])
    _fault_run(FaultRun(seed, rates=dict.fromkeys(kinds, rate), steps=STEPS), counts)


def _fault_run(run: FaultRun, counts: Counts) -> None:
    run.run()
    counts.update(faults=run.struck, refused=run.refused.total())


def records(seed: int, counts: Counts) -> None:
    """Lose journal and snapshots under a store at work: fsck rebuilds what was kept."""
    machine = drive(seed)
    counts.update(rebuilt=machine.whole_sessions, cut=machine.cut_sessions)


def flips(seed: int, counts: Counts) -> None:
    """Flip bits of every form on disk, and cut it."""
    counts.update(flips=flip(seed))


def machines(seed: int, counts: Counts) -> None:
    """Drive a state machine against its dict model: EXAMPLES times EXAMPLE_STEPS steps."""
    machine = MACHINES[seed % len(MACHINES)]
    run_state_machine_as_test(
        hypothesis.seed(seed)(machine),
        settings=hypothesis.settings(
            max_examples=EXAMPLES, stateful_step_count=EXAMPLE_STEPS, deadline=None,
            database=None, suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip
    counts.update(examples=EXAMPLES)


# A kind of run more is a function more: of a seed, to raise if anything is wrong.
KINDS: dict[str, Callable[[int, Counts], None]] = {
    "crash": crash, "faults": faults, "lies": lies, "records": records, "flips": flips,
    "processes": killing_run, "machines": machines,
}  # fmt: skip


def main() -> int:
    """Run until the time or the runs are over. Returns 1 at a failure."""
    parser = argparse.ArgumentParser(prog="scripts/torture", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--runs", type=int, default=sys.maxsize, help="at most so many runs")
    parser.add_argument("--seed", type=int, default=None, help="of the first run; default: drawn")
    parser.add_argument("--kind", choices=sorted(KINDS), default=None, help="default: all")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(10**9) if options.seed is None else options.seed
    kinds = [options.kind] if options.kind else list(KINDS)
    counts: Counts = Counter()
    began = reported = time.monotonic()
    for number in range(options.runs):
        now = time.monotonic()
        if now - began > options.minutes * 60.0:
            break
        if now - reported > REPORT_SECONDS:
            reported = now
            print(_line(counts, now - began), file=sys.stderr, flush=True)
        kind = kinds[number % len(kinds)]
        if not _passes(kind, seed + number, counts):
            return 1
    print(f"{_line(counts, time.monotonic() - began)}; 0 wrong pages; first seed {seed}")
    return 0


def _passes(kind: str, seed: int, counts: Counts) -> bool:
    try:
        KINDS[kind](seed, counts)
    except (AssertionError, LookupError, TypeError, ValueError, ArithmeticError, OSError):
        traceback.print_exc()
        print(f"FAILED: scripts/torture --kind {kind} --seed {seed} --runs 1")
        return False
    counts["runs"] += 1
    return True


def _line(counts: Counts, seconds: float) -> str:
    return (
        f"{seconds:,.0f} s: {counts['runs']:,d} runs, {counts['points']:,d} crash points "
        f"({counts['reopened']:,d} gone on from), {counts['kills']:,d} kills, "
        f"{counts['process_kills']:,d} of real processes, "
        f"{counts['faults']:,d} faults ({counts['refused']:,d} refusals), "
        f"{counts['rebuilt']:,d} sessions rebuilt whole, {counts['cut']:,d} cut, "
        f"{counts['flips']:,d} flips, {counts['examples']:,d} x {EXAMPLE_STEPS} model steps"
    )


if __name__ == "__main__":
    sys.exit(main())
