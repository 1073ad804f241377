"""A hint's ticket says how many of its pages will find no room in warm, and what takes it."""

import pytest

from tests.moversteps import cool, make
from tests.rig import LAYERS, Rig
from tierd.types import SessionState, Tier


def hinted(rig: Rig, blocks: int):
    session = rig.stored(blocks=blocks)
    cool(rig, session)
    return session


@pytest.mark.parametrize("warm_blocks", range(10, 26, 2))
@pytest.mark.parametrize("running_blocks", [0, 3])
@pytest.mark.parametrize("idle_blocks", [0, 2])
def test_as_many_pages_stay_cold_as_the_ticket_says(
    warm_blocks: int, running_blocks: int, idle_blocks: int
) -> None:
    rig = make(warm_blocks=warm_blocks)
    session = hinted(rig, 8)
    if idle_blocks:
        rig.stored(blocks=idle_blocks)
    if running_blocks:
        rig.demote(rig.session(), list(range(1, 1 + running_blocks)))
    rig.settle()
    ticket = rig.mover.hint("a", session.number, deadline_seconds=5.0)
    assert ticket.pages == 8 * LAYERS and bool(ticket.left_cold) == bool(ticket.why)
    rig.settle()
    assert len(rig.pages(session, Tier.COLD)) == pytest.approx(ticket.left_cold, abs=2 * LAYERS)
    if ticket.left_cold and running_blocks:
        assert "running sessions" in ticket.why


def test_one_that_comes_later_says_that_an_earlier_hint_takes_the_room() -> None:
    rig = make(warm_blocks=8)
    first, second = hinted(rig, 6), hinted(rig, 6)
    assert rig.mover.hint("a", first.number, deadline_seconds=5.0).left_cold == 0
    ticket = rig.mover.hint("a", second.number, deadline_seconds=50.0)
    assert 3 * LAYERS <= ticket.left_cold <= 6 * LAYERS
    assert "hints of an earlier deadline" in ticket.why
    rig.settle()
    assert len(rig.pages(first, Tier.COLD)) == 0 < len(rig.pages(second, Tier.COLD))


def test_a_hint_that_finds_no_room_at_all_estimates_nothing() -> None:
    rig = make(warm_blocks=8)
    session, earlier = hinted(rig, 2), [hinted(rig, 6), hinted(rig, 6)]
    for other in earlier:
        assert rig.mover.hint("a", other.number, deadline_seconds=5.0).estimated_seconds > 0
    ticket = rig.mover.hint("a", session.number, deadline_seconds=50.0)
    assert ticket.left_cold == ticket.pages == 2 * LAYERS
    assert ticket.estimated_seconds == 0.0


def test_what_is_warm_already_needs_no_room() -> None:
    rig = make(warm_blocks=10)
    session = rig.stored(blocks=4)
    assert session.state is SessionState.SUSPENDED
    ticket = rig.mover.hint("a", session.number, deadline_seconds=5.0)
    assert (ticket.pages, ticket.left_cold, ticket.why) == (0, 0, "")
    assert ticket.estimated_seconds == 0.0
