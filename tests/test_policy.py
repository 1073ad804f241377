"""Who leaves first, and that nobody leaves who should not."""

import itertools

import pytest

from tierd.policy import (
    NOTHING_IS_SAFE,
    Candidate,
    Rank,
    Standing,
    choose_spills,
    choose_victims,
    session_rank,
)
from tierd.types import PageKey, SessionState

RUNNING, IDLE, SUSPENDED = SessionState.RUNNING, SessionState.IDLE, SessionState.SUSPENDED
PAGE_BYTES = 100


def candidate(session: int, rank: Rank, blocks: list[int], layers: int = 2) -> Candidate:
    return Candidate(rank, session, blocks, lambda _: range(layers), lambda _layer, _block: 100)


def spills(candidates: list[Candidate], pages: int, below: Rank = NOTHING_IS_SAFE) -> list[PageKey]:
    return choose_spills(candidates, pages * PAGE_BYTES, below, moving=())


def test_suspended_leave_before_idle_before_hinted_before_running():
    ranks = [
        session_rank(SUSPENDED, 9.0, None),
        session_rank(IDLE, 5.0, None),
        session_rank(SUSPENDED, 1.0, 100.0),
        session_rank(RUNNING, 0.0, 100.0),
    ]
    assert ranks == sorted(ranks)
    for order in itertools.permutations(enumerate(ranks)):
        chosen = spills([candidate(i, rank, [0]) for i, rank in order], 8)
        assert [key.session for key in chosen] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_within_a_state_the_longest_unused_leaves_first():
    old, young = session_rank(IDLE, 1.0, None), session_rank(IDLE, 2.0, None)
    chosen = spills([candidate(2, young, [0]), candidate(1, old, [0])], 2)
    assert {key.session for key in chosen} == {1}


def test_of_hinted_sessions_the_latest_deadline_leaves_first():
    assert session_rank(SUSPENDED, 0.0, 200.0) < session_rank(IDLE, 0.0, 100.0)


def test_oldest_block_leaves_first_with_all_its_layers():
    chosen = spills([candidate(1, session_rank(IDLE, 0.0, None), [3, 5, 9], layers=3)], 6)
    assert chosen == [PageKey(1, layer, block) for block in (3, 5) for layer in range(3)]


def test_bytes_are_met_exactly_and_moving_pages_left_alone():
    pages = [candidate(1, session_rank(IDLE, 0.0, None), [0, 1])]
    moving = {PageKey(1, 0, 0)}
    assert choose_spills(pages, 0, NOTHING_IS_SAFE, moving) == []
    assert choose_spills(pages, 1, NOTHING_IS_SAFE, moving) == [PageKey(1, 1, 0)]
    assert choose_spills(pages, 101, NOTHING_IS_SAFE, moving) == [
        PageKey(1, 1, 0),
        PageKey(1, 0, 1),
    ]


@pytest.mark.parametrize(
    ("state", "hint", "leaves"),
    [
        (RUNNING, None, False),
        (SUSPENDED, 49.0, False),
        (SUSPENDED, 50.0, False),
        (SUSPENDED, 51.0, True),
        (SUSPENDED, None, True),
        (IDLE, None, True),
    ],
)
def test_a_hint_displaces_no_running_session_and_no_earlier_deadline(state, hint, leaves):
    for_hint_at_50 = Rank(Standing.HINTED, -50.0)
    chosen = spills([candidate(1, session_rank(state, 0.0, hint), [0])], 2, for_hint_at_50)
    assert bool(chosen) is leaves


def test_victims_are_oldest_first_without_the_first_block():
    assert choose_victims([5, 0, 2, 9], 2, (), include_first=False) == [2, 5]
    assert choose_victims([5, 0, 2, 9], 2, (), include_first=True) == [0, 2]
    assert choose_victims([5, 0, 2, 9], 9, {2}, include_first=False) == [5, 9]
    assert choose_victims([0], 1, (), include_first=False) == []
    assert choose_victims([3, 3, 3], 3, (), include_first=False) == [3]
