"""The power goes at every operation of short workloads: at 10,000 points nothing is lost."""

import pytest

from tests.disk.ledgercrash import CrashRun, Tally

POINTS, PARTS = 10_000, 20


@pytest.mark.parametrize("part", range(PARTS))
def test_a_power_cut_anywhere_leaves_a_prefix_with_all_that_was_acknowledged(part: int) -> None:
    tally = Tally()
    seed = part * 1000
    while tally.points < POINTS // PARTS:
        CrashRun(seed, tally).run()
        seed += 1
    assert tally.reopened >= tally.points // 10
