"""A hundred kills of engines and daemons in turn; `scripts/torture --kind processes` makes more."""

from __future__ import annotations

from collections import Counter

from tests.e2e.killing import killing_run


def test_a_hundred_kills_lose_nothing_kept_and_leak_nothing() -> None:
    counts: Counter[str] = Counter()
    killing_run(seed=1, counts=counts, kills=100)
    assert counts["process_kills"] == 100
