"""The split between the CPU and the link: pure, and right at its ends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd_engine.device.split import (
    Rates,
    StepTimes,
    corrected_rates,
    near_pages,
    starting_rates,
)


def test_it_starts_at_what_dram_has_left_beside_the_link() -> None:
    assert starting_rates(200e9, 50e9).share == pytest.approx((200 - 50) / 200)
    assert starting_rates(20e9, 25e9).share == 0.0
    assert Rates(0.0, 0.0).share == 0.0


def test_steps_lead_it_to_where_both_end_together() -> None:
    near, link, rates = 12e9, 24e9, starting_rates(200e9, 50e9)
    for _ in range(60):
        mine = round(rates.share * 1e9)
        rest = 10**9 - mine
        rates = corrected_rates(rates, StepTimes(mine, mine / near, rest, rest / link))
    assert rates.share == pytest.approx(near / (near + link), rel=1e-3)


def test_a_side_that_was_not_timed_stays() -> None:
    rates = Rates(3.0, 5.0)
    assert corrected_rates(rates, StepTimes(0, 0.0, 10, 0.0)) == rates
    assert corrected_rates(rates, StepTimes(10, 1.0, 10, 0.0)).link == 5.0


@given(st.lists(st.integers(0, 500), max_size=6), st.floats(0, 1))
def test_the_share_is_taken_over_all_runs_together(pages: list[int], share: float) -> None:
    taken = near_pages(pages, share)
    assert all(0 <= mine <= count for mine, count in zip(taken, pages, strict=True))
    assert abs(sum(taken) - share * sum(pages)) <= 0.5 + 1e-9
    if share in (0.0, 1.0):
        assert sum(taken) == share * sum(pages)
