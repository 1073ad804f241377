"""How much of a hint the warm tier has room for, as things are when it is given.

An estimate: sessions grow and end meanwhile, and room passes between slots of different sizes a
whole slab at a time.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from tierd.hints import Hint
from tierd.lending import spare_slots
from tierd.policy import Rank, Standing
from tierd.sessions import Session
from tierd.store import Store
from tierd.types import CodecId, SessionState, Tier
from tierd.units import format_size


@dataclass(frozen=True, slots=True)
class Shortfall:
    """The pages of a hint that will stay cold, their bytes, and why; none: "" is the reason."""

    pages: int = 0
    bytes: int = 0
    why: str = ""


def shortfall(store: Store, hint: Hint) -> Shortfall:
    """Return what of a new hint finds no room that its session may take from others.

    It takes that of sessions which will be used later, and leaves its own next demotion's.
    """
    placement, session = store.placement, store.session(hint.wish.session)
    counts: Counter[CodecId] = Counter()
    for key in hint.awaited:
        page = session.index.get(key.layer, key.block)
        assert page is not None, f"{key} is awaited and in no tier"
        if page.place.tier is Tier.COLD:  # one that is on its way down leaves its room behind
            counts[page.place.codec] += 1
    if not counts:
        return Shortfall()
    sizes = {codec: placement.slot_bytes(session, codec) for codec in counts}
    running, awaited = _held_by_others(store, hint)
    held_bytes = running + awaited + _warm_bytes(store, session)
    pools = {placement.pool(Tier.WARM, session, codec) for codec in counts}
    held_bytes += sum(spare_slots(placement, session, pool) * pool.slot_bytes for pool in pools)
    budget = placement.pools[Tier.WARM].budget
    left_bytes = sum(sizes[codec] * pages for codec, pages in counts.items())
    left_bytes -= max(0, budget.limit_bytes - budget.awaited_bytes - held_bytes)
    if left_bytes <= 0:
        return Shortfall()
    # At least so many: the largest pages are counted first.
    pages, rest_bytes = 0, left_bytes
    for codec in sorted(counts, key=lambda codec: -sizes[codec]):
        found = min(counts[codec], -(-rest_bytes // sizes[codec])) if rest_bytes > 0 else 0
        pages, rest_bytes = pages + found, rest_bytes - found * sizes[codec]
    parts = (
        (running, "running sessions"),
        (awaited, "hints of an earlier deadline"),
        (budget.awaited_bytes, "engines of before the restart"),
    )
    taken = [f"{format_size(held)} for {whom}" for held, whom in parts if held]
    why = (
        f"the warm tier of {format_size(budget.limit_bytes)} has no room for "
        f"{format_size(left_bytes)} of the {sum(counts.values()):,d} pages that are cold"
    )
    return Shortfall(pages, left_bytes, f"{why}: it keeps {', '.join(taken)}" if taken else why)


def _held_by_others(store: Store, hint: Hint) -> tuple[int, int]:
    """Return the warm bytes that the hint takes from no other: running ones', and hinted ones'."""
    below = Rank(Standing.HINTED, -hint.wish.deadline_seconds)
    running = awaited = 0
    for other in store.book:
        if other.number == hint.wish.session or store.traffic.rank(other) < below:
            continue
        if other.state is SessionState.RUNNING:
            running += _warm_bytes(store, other)
        else:
            awaited += _warm_bytes(store, other)
    for earlier in store.hints.urgent_first():
        is_other = earlier.wish.session != hint.wish.session
        if is_other and earlier.wish.urgency < hint.wish.urgency:
            awaited += store.traffic.slots_bytes(earlier.awaited)
    # What earlier hints left cold they cannot hold.
    limit_bytes = store.placement.pools[Tier.WARM].budget.limit_bytes
    return running, min(awaited, max(0, limit_bytes - running))


def _warm_bytes(store: Store, session: Session) -> int:
    codecs = Counter(page.place.codec for _, page in session.index if page.place.tier is Tier.WARM)
    return sum(store.placement.slot_bytes(session, c) * pages for c, pages in codecs.items())
