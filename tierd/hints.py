"""Hints: a client's word on what will be needed, by when, how surely.

    open → useful | late | wasted | cancelled        (settled once, then forgotten)

    useful     the session was used after its pages had arrived in time
    late       it was used before they arrived, or they arrived after the deadline
    wasted     it was not used: closed, pages spilled again, or nothing until the grace ended
    cancelled  by the client, or because the client went

Invariants:
  every hint ever opened is open or counted under one outcome
  `awaited` pages of a hint are cold; each leaves the set once, by arriving or by being lost
  at most CLIENTS_MAX scores are kept; the one not heard of for longest goes first
"""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tierd.errors import InvalidArgument, NotFound, TierFull
from tierd.types import PageKey

OPEN_HINTS_MAX = 1024
CLIENTS_MAX = 1024
DEADLINE_SECONDS_MAX = 3600.0
PRIORITY_MAX = 100
# A hinted resume that comes this long after its deadline was not the one foreseen.
GRACE_SECONDS = 30.0
# 16 outcomes are few enough to notice a bad client in one session's work, and enough
# that a good one (half its hints useful) is throttled by chance once in 500 times.
SCORE_MIN = 16
SCORE_MAX = 64
WASTED_SHARE_MAX = 0.75
THROTTLE_SECONDS = 10.0


class Outcome(enum.StrEnum):
    """How a hint ended."""

    USEFUL = "useful"
    LATE = "late"
    WASTED = "wasted"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class HintTicket:
    """Answer to a hint: `pages` are cold; those that move are warm in about `estimated_seconds`.

    `left_cold` of them, about, find no room in warm; `why` says what takes it, "" if none. Where
    none moves there is nothing to wait for: 0 seconds.
    """

    hint_id: int
    pages: int
    estimated_seconds: float
    left_cold: int = 0
    why: str = ""


@dataclass(frozen=True, slots=True)
class Wish:
    """What a client asks: blocks [first_block, end_block) by a deadline on the store's clock."""

    client_id: str
    session: int
    first_block: int
    end_block: int
    deadline_seconds: float
    confidence: float = 1.0
    priority: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.confidence <= 1.0:
            raise InvalidArgument(f"hint: confidence is {self.confidence}, must be 0 to 1")
        if not -PRIORITY_MAX <= self.priority <= PRIORITY_MAX:
            raise InvalidArgument(
                f"hint: priority is {self.priority}, must be -{PRIORITY_MAX} to {PRIORITY_MAX}"
            )

    @property
    def urgency(self) -> tuple[float, int, float]:
        """Sort key: earliest deadline, then highest priority, then surest."""
        return (self.deadline_seconds, -self.priority, -self.confidence)


@dataclass(slots=True, eq=False)
class Hint:
    """An open hint. `awaited` are the pages that are cold, or were on their way there as it was
    opened; `arrived_seconds` once there are none."""

    hint_id: int
    wish: Wish
    awaited: dict[PageKey, None]
    arrived_seconds: float | None = None

    @property
    def in_time(self) -> bool:
        """Say whether all pages were warm by the deadline."""
        return (
            self.arrived_seconds is not None and self.arrived_seconds <= self.wish.deadline_seconds
        )


@dataclass(slots=True)
class _Score:
    recent: deque[Outcome] = field(default_factory=lambda: deque(maxlen=SCORE_MAX))
    counts: Counter[Outcome] = field(default_factory=Counter)
    throttled_until_seconds: float = 0.0

    def add(self, outcome: Outcome) -> None:
        self.counts[outcome] += 1
        if outcome is not Outcome.CANCELLED:
            self.recent.append(outcome)

    def mostly_wasted(self) -> bool:
        wasted = self.recent.count(Outcome.WASTED)
        return len(self.recent) >= SCORE_MIN and wasted > WASTED_SHARE_MAX * len(self.recent)


class HintBook:
    """All open hints, and how each client's ended. `on_settled` is told of each end, if set."""

    def __init__(self) -> None:
        self.on_settled: Callable[[Hint, Outcome], None] | None = None
        self._open: dict[int, Hint] = {}
        self._of_session: dict[int, set[int]] = {}
        self._scores: OrderedDict[str, _Score] = OrderedDict()
        self._opened = 0
        self._counts: Counter[Outcome] = Counter()

    def __len__(self) -> int:
        return len(self._open)

    def admit(self, client_id: str, now_seconds: float) -> None:
        """Raise TierFull if there are too many open hints, or this client's are mostly wasted.

        After THROTTLE_SECONDS a throttled client starts with a clean score.
        """
        if len(self._open) >= OPEN_HINTS_MAX:
            raise TierFull(f"hint: {OPEN_HINTS_MAX} are open already", retry_after_seconds=1.0)
        score = self._score(client_id)
        if score.mostly_wasted():
            score.recent.clear()
            score.throttled_until_seconds = now_seconds + THROTTLE_SECONDS
        wait_seconds = score.throttled_until_seconds - now_seconds
        if wait_seconds > 0:
            raise TierFull(
                "hint: most of this client's hints were wasted", retry_after_seconds=wait_seconds
            )

    def open(self, wish: Wish, cold: Iterable[PageKey], now_seconds: float) -> Hint:
        """Open a hint that awaits the `cold` pages (none is allowed: it guards the warm ones)."""
        self._opened += 1
        hint = Hint(self._opened, wish, dict.fromkeys(cold))
        if not hint.awaited:
            hint.arrived_seconds = now_seconds
        self._open[hint.hint_id] = hint
        self._of_session.setdefault(wish.session, set()).add(hint.hint_id)
        self._score(wish.client_id)
        return hint

    def urgent_first(self) -> list[Hint]:
        """Return the hints that still await pages, earliest deadline first."""
        waiting = [hint for hint in self._open.values() if hint.awaited]
        return sorted(waiting, key=lambda hint: (hint.wish.urgency, hint.hint_id))

    def deadline_of(self, session: int) -> float | None:
        """Return the earliest deadline of a session's open hints, or None."""
        deadlines = [hint.wish.deadline_seconds for hint in self._of(session)]
        return min(deadlines, default=None)

    def cancel(self, client_id: str, hint_id: int) -> None:
        """Raise NotFound if it is unknown, settled, or another client's."""
        hint = self._open.get(hint_id)
        if hint is None or hint.wish.client_id != client_id:
            raise NotFound(f"hint {hint_id} is not open")
        self._settle(hint, Outcome.CANCELLED)

    def drop_client(self, client_id: str) -> None:
        """Cancel a client's open hints and forget its score."""
        for hint in list(self._open.values()):
            if hint.wish.client_id == client_id:
                self._settle(hint, Outcome.CANCELLED)
        self._scores.pop(client_id, None)

    def page_arrived(self, key: PageKey, now_seconds: float) -> None:
        """A cold page is warm now."""
        for hint in self._of(key.session):
            if key in hint.awaited:
                self._no_longer_awaited(hint, key, now_seconds)

    def page_spilled(self, key: PageKey) -> None:
        """A warm page went cold: the hints that had it warm were wasted."""
        for hint in self._of(key.session):
            covers = hint.wish.first_block <= key.block < hint.wish.end_block
            if covers and key not in hint.awaited:
                self._settle(hint, Outcome.WASTED)

    def page_lost(self, key: PageKey, now_seconds: float) -> None:
        """A page is gone (damaged, evicted, truncated): nobody need wait for it."""
        self.page_arrived(key, now_seconds)

    def session_used(self, session: int) -> None:
        """The session was resumed, or ran again: settle its hints."""
        for hint in self._of(session):
            self._settle(hint, Outcome.USEFUL if hint.in_time else Outcome.LATE)

    def session_closed(self, session: int) -> None:
        """The session is gone: its hints were wasted."""
        for hint in self._of(session):
            self._settle(hint, Outcome.WASTED)

    def expire(self, now_seconds: float) -> None:
        """Settle hints whose deadline and grace have passed without a use."""
        for hint in list(self._open.values()):
            if now_seconds > hint.wish.deadline_seconds + GRACE_SECONDS:
                self._settle(hint, Outcome.WASTED if hint.in_time else Outcome.LATE)

    def stats(self) -> dict[str, object]:
        """Return counts by outcome, `opened`, `open`, and the outcomes by client."""
        clients = {
            client: {outcome.value: score.counts[outcome] for outcome in Outcome}
            for client, score in self._scores.items()
        }
        counts = {outcome.value: self._counts[outcome] for outcome in Outcome}
        return {**counts, "opened": self._opened, "open": len(self._open), "clients": clients}

    def check_integrity(self) -> None:
        """Raise AssertionError unless opened == open + settled, by session as well."""
        settled = sum(self._counts.values())
        assert self._opened == len(self._open) + settled, (
            f"hints: opened {self._opened}, open {len(self._open)}, settled {settled}"
        )
        by_session = sum(len(ids) for ids in self._of_session.values())
        assert by_session == len(self._open), (
            f"hints: {by_session} by session, {len(self._open)} open"
        )
        for hint in self._open.values():
            assert bool(hint.awaited) == (hint.arrived_seconds is None), (
                f"hint {hint.hint_id}: awaits {len(hint.awaited)}, arrived {hint.arrived_seconds}"
            )

    def _of(self, session: int) -> list[Hint]:
        ids = self._of_session.get(session)
        return [self._open[hint_id] for hint_id in sorted(ids)] if ids else []

    def _no_longer_awaited(self, hint: Hint, key: PageKey, now_seconds: float) -> None:
        del hint.awaited[key]
        if not hint.awaited:
            hint.arrived_seconds = now_seconds
            if not hint.in_time:
                self._settle(hint, Outcome.LATE)

    def _settle(self, hint: Hint, outcome: Outcome) -> None:
        del self._open[hint.hint_id]
        siblings = self._of_session[hint.wish.session]
        siblings.remove(hint.hint_id)
        if not siblings:
            del self._of_session[hint.wish.session]
        self._counts[outcome] += 1
        self._score(hint.wish.client_id).add(outcome)
        if self.on_settled is not None:
            self.on_settled(hint, outcome)

    def _score(self, client_id: str) -> _Score:
        score = self._scores.setdefault(client_id, _Score())
        self._scores.move_to_end(client_id)
        while len(self._scores) > CLIENTS_MAX:
            self._scores.popitem(last=False)
        return score
