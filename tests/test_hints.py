"""How hints end, and what that does to the client that gave them."""

import pytest

from tierd.errors import InvalidArgument, NotFound, TierFull
from tierd.hints import (
    GRACE_SECONDS,
    OPEN_HINTS_MAX,
    SCORE_MIN,
    THROTTLE_SECONDS,
    Hint,
    HintBook,
    Wish,
)
from tierd.types import PageKey

SESSION = 7
PAGES = [PageKey(SESSION, layer, 0) for layer in range(2)]


def give(book: HintBook, *, deadline: float = 10.0, pages=PAGES, client: str = "a") -> Hint:
    book.admit(client, 0.0)
    return book.open(Wish(client, SESSION, 0, 4, deadline), pages, 0.0)


def outcomes(book: HintBook) -> dict[str, int]:
    book.check_integrity()
    stats = book.stats()
    names = ("useful", "late", "wasted", "cancelled")
    return {name: stats[name] for name in names if stats[name]}


def arrive(book: HintBook, now: float) -> None:
    for key in PAGES:
        book.page_arrived(key, now)


def test_used_after_its_pages_arrived_in_time_is_useful():
    book = HintBook()
    give(book)
    arrive(book, 9.0)
    book.session_used(SESSION)
    assert outcomes(book) == {"useful": 1}


def test_used_before_its_pages_arrived_is_late():
    book = HintBook()
    give(book)
    book.page_arrived(PAGES[0], 1.0)
    book.session_used(SESSION)
    assert outcomes(book) == {"late": 1}


def test_pages_that_arrive_after_the_deadline_are_late():
    book = HintBook()
    give(book)
    arrive(book, 10.1)
    assert outcomes(book) == {"late": 1}


def test_a_hint_without_cold_pages_is_useful_when_used():
    book = HintBook()
    give(book, pages=[])
    book.session_used(SESSION)
    assert outcomes(book) == {"useful": 1}


def test_closed_spilled_again_and_unused_are_wasted():
    book = HintBook()
    give(book)
    book.session_closed(SESSION)
    give(book)
    arrive(book, 1.0)
    book.page_spilled(PAGES[1])
    give(book)
    arrive(book, 1.0)
    book.expire(10.0 + GRACE_SECONDS)
    assert len(book) == 1
    book.expire(10.1 + GRACE_SECONDS)
    assert outcomes(book) == {"wasted": 3}


def test_a_spill_outside_the_range_or_of_an_awaited_page_wastes_nothing():
    book = HintBook()
    give(book)
    book.page_spilled(PageKey(SESSION, 0, 4))
    book.page_spilled(PAGES[0])
    assert len(book) == 1


def test_pages_never_arrived_by_the_end_of_the_grace_are_late():
    book = HintBook()
    give(book)
    book.expire(10.1 + GRACE_SECONDS)
    assert outcomes(book) == {"late": 1}


def test_a_lost_page_is_no_longer_awaited():
    book = HintBook()
    hint = give(book)
    book.page_lost(PAGES[0], 1.0)
    book.page_arrived(PAGES[1], 2.0)
    assert hint.in_time


def test_cancel_is_for_the_client_that_gave_it_and_once():
    book = HintBook()
    hint = give(book)
    with pytest.raises(NotFound):
        book.cancel("b", hint.hint_id)
    book.cancel("a", hint.hint_id)
    with pytest.raises(NotFound):
        book.cancel("a", hint.hint_id)
    assert outcomes(book) == {"cancelled": 1}


def test_hints_of_a_departed_client_are_cancelled_and_its_score_forgotten():
    book = HintBook()
    give(book)
    give(book, client="b")
    book.drop_client("a")
    assert outcomes(book) == {"cancelled": 1}
    assert set(book.stats()["clients"]) == {"b"}


def test_most_urgent_first_and_only_those_that_wait():
    book = HintBook()
    late, early = give(book, deadline=9.0), give(book, deadline=3.0)
    give(book, deadline=1.0, pages=[])
    assert book.urgent_first() == [early, late]
    assert book.deadline_of(SESSION) == 1.0
    assert book.deadline_of(SESSION + 1) is None


def waste(book: HintBook, count: int) -> None:
    for _ in range(count):
        give(book)
    book.session_closed(SESSION)


def test_a_client_that_mostly_wastes_is_throttled_for_a_while():
    book = HintBook()
    waste(book, SCORE_MIN - 1)
    waste(book, 1)
    with pytest.raises(TierFull) as full:
        book.admit("a", 100.0)
    assert full.value.retry_after_seconds == pytest.approx(THROTTLE_SECONDS)
    book.admit("b", 100.0)
    with pytest.raises(TierFull):
        book.admit("a", 99.0 + THROTTLE_SECONDS)
    book.admit("a", 100.0 + THROTTLE_SECONDS)


def test_a_client_with_a_quarter_useful_is_not_throttled():
    book = HintBook()
    waste(book, SCORE_MIN - SCORE_MIN // 4)
    for _ in range(SCORE_MIN // 4):
        give(book, pages=[])
    book.session_used(SESSION)
    book.admit("a", 0.0)


def test_open_hints_are_bounded():
    book = HintBook()
    for _ in range(OPEN_HINTS_MAX):
        give(book)
    with pytest.raises(TierFull):
        book.admit("b", 0.0)


@pytest.mark.parametrize(("confidence", "priority"), [(1.1, 0), (-0.1, 0), (0.5, 101), (0.5, -101)])
def test_confidence_and_priority_out_of_range_are_refused(confidence, priority):
    with pytest.raises(InvalidArgument):
        Wish("a", SESSION, 0, 1, 1.0, confidence, priority)
