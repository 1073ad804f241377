"""Who waits for the mover, until when, and what they are told.

Invariants:
  every waiter is answered by its deadline, once, and is then forgotten
  no answer is made to wait once `stop` was called
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from tierd.errors import (
    DaemonUnavailable,
    DeadlineExceeded,
    InvalidArgument,
    StorageError,
    StorageFull,
    TierdError,
    TierFull,
)
from tierd.memory.slabs import SlabPool
from tierd.moves import Move
from tierd.sessions import Session
from tierd.store import Store
from tierd.types import PageKey, SessionState, Tier
from tierd.units import format_size

WAIT_SECONDS_MAX = 60.0
PARK_SECONDS_MAX = 600.0  # 37 GiB at the slowest disk we promise for


@dataclass(slots=True, eq=False)
class RoomWaiter:
    """A demotion that waits until the slots of `needs` can be reserved, all of them."""

    session: Session
    needs: Mapping[SlabPool, int]
    deadline_seconds: float
    answer: asyncio.Future[None]


@dataclass(slots=True, eq=False)
class PromotionWaiter:
    """An engine that waits until `keys` have come up, each of them once.

    One that has and was spilled since is not asked for again: who took its room needs it more.
    """

    session: Session
    keys: dict[PageKey, None]
    deadline_seconds: float
    answer: asyncio.Future[None]

    def cold(self) -> Iterator[PageKey]:
        """Yield those of the keys that are cold, as far as asked."""
        return (key for key in self.keys if self._is_cold(key))

    def forget(self, keys: Iterable[PageKey]) -> None:
        """Wait for these no more."""
        for key in keys:
            self.keys.pop(key, None)

    def forget_lost(self) -> None:
        """Wait no more for pages that are gone, up to the first that is not."""
        self.forget(list(takewhile(lambda key: not self._is_cold(key), self.keys)))

    def _is_cold(self, key: PageKey) -> bool:
        page = self.session.index.get(key.layer, key.block)
        return page is not None and page.place.tier is Tier.COLD


@dataclass(slots=True, eq=False)
class ParkWaiter:
    """An engine that waits until its session is durable; `flushing` once only the sync is left."""

    session: Session
    engine_id: int
    deadline_seconds: float
    answer: asyncio.Future[None]
    flushing: bool = False

    @property
    def lasts(self) -> bool:
        """Whether the engine still has the session."""
        return self.session.engine_id == self.engine_id


class Waiters:
    """All that wait on one mover. `trouble` is the last thing that went wrong, or "".

    `lacks_space`: it was want of space, which may end by itself, and nothing else.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._clock = store.clock
        self._stopping = False
        self.trouble = ""
        self.lacks_space = False
        self.rooms: list[RoomWaiter] = []
        self.promotions: list[PromotionWaiter] = []
        self.parks: list[ParkWaiter] = []

    def stop(self) -> None:
        """Tell everybody that the daemon is stopping, now and from now on."""
        self._stopping = True
        self._fail_all()

    def tell(self, now_seconds: float) -> None:
        """Answer who has what it waits for, and who has waited long enough."""
        self._answer_rooms(now_seconds)
        self._answer_promotions(now_seconds)
        self._answer_parks(now_seconds)

    def deadline(self, seconds: float, seconds_max: float = WAIT_SECONDS_MAX) -> float:
        """Return the moment `seconds` from now. Raises InvalidArgument."""
        if not 0.0 < seconds <= seconds_max:
            raise InvalidArgument(f"deadline is {seconds} s, must be 0 to {seconds_max:g}")
        return self._clock.monotonic() + seconds

    def new_answer(self) -> asyncio.Future[None]:
        """Return what a caller may wait on. Raises DaemonUnavailable."""
        if self._stopping:
            raise DaemonUnavailable("the daemon is stopping")
        return asyncio.get_running_loop().create_future()

    def arrived(self, moves: Iterable[Move]) -> None:
        """Pages have moved: nobody waits any more for those that came up."""
        keys = [move.key for move in moves if move.destination.tier is Tier.WARM]
        for waiter in self.promotions:
            waiter.forget(keys)

    def _answer_rooms(self, now_seconds: float) -> None:
        pools = self._store.placement.pools[Tier.WARM]
        promised: Counter[SlabPool] = Counter()
        for waiter in list(self.rooms):
            promised.update(waiter.needs)
            closed = waiter.session.state is SessionState.CLOSED
            if closed or waiter.answer.done() or pools.make_room(promised):
                self.answer(waiter.answer)
            elif now_seconds >= waiter.deadline_seconds:
                self.answer(waiter.answer, TierFull(self._why_full()))
            else:
                continue
            self.rooms.remove(waiter)

    def _answer_promotions(self, now_seconds: float) -> None:
        for waiter in list(self.promotions):
            waiter.forget_lost()
            overdue = now_seconds >= waiter.deadline_seconds
            if overdue or not waiter.keys or waiter.answer.done():
                self.answer(waiter.answer)
                self.promotions.remove(waiter)

    def _answer_parks(self, now_seconds: float) -> None:
        ledger = self._store.ledger
        for waiter in list(self.parks):
            if not waiter.lasts or waiter.answer.done():
                self.end_park(waiter, DaemonUnavailable("the engine has left the session"))
            elif ledger.failed:
                kind = StorageFull if ledger.waiting else StorageError
                self.end_park(waiter, kind(f"cold takes no more: {ledger.failed}"))
            elif now_seconds >= waiter.deadline_seconds:
                self.end_park(waiter, DeadlineExceeded(self._why_not_kept(waiter.session)))

    def _why_not_kept(self, session: Session) -> str:
        left = session.index.unbacked_count
        return f"the session is not on disk yet: {left} pages are left. {self.trouble}".strip()

    def end_park(self, waiter: ParkWaiter, error: TierdError | None = None) -> None:
        """Take the session from its engine, or tell it why not."""
        self.parks.remove(waiter)
        if error is None and waiter.lasts:
            self._store.finish_suspend(waiter.session)
        self.answer(waiter.answer, error)

    def end_if_removed(self, waiter: ParkWaiter) -> bool:
        """Look whether all that was copied is still there, and say whether it is not.

        What is in RAM is then to be copied anew; where that is not all, the wait ends.
        """
        keeper, session = self._store.keeper, waiter.session
        keeper.look()
        gone = keeper.removed_blocks(session)
        if gone and not session.index.unbacked_count:
            why = f"{gone} blocks of the session are not kept: somebody removed their files"
            self.end_park(waiter, StorageError(why))
        return gone > 0 or session.index.unbacked_count > 0

    def answer(self, answer: asyncio.Future[None], error: TierdError | None = None) -> None:
        """Let a caller go on, or raise `error` in it."""
        if answer.done():  # the call was cancelled
            return
        if error is None:
            answer.set_result(None)
        else:
            answer.set_exception(error)

    def _fail_all(self) -> None:
        answers = [room.answer for room in self.rooms]
        answers += [promotion.answer for promotion in self.promotions]
        for answer in answers + [park.answer for park in self.parks]:
            self.answer(answer, DaemonUnavailable("the daemon is stopping"))
        self.rooms.clear()
        self.promotions.clear()
        self.parks.clear()

    def refused_by_cold(self, keys: Sequence[PageKey]) -> TierdError:
        """Return why cold does not take these pages of a session that is to be kept.

        TierFull where it wants for room; StorageError where its disk fails.
        """
        pages = f"{len(keys)} pages, {format_size(self._store.traffic.slots_bytes(keys))}"
        if self.trouble and not self.lacks_space:
            return StorageError(
                f"the cold tier's disk fails, so the session is not kept: {pages}, are not on it: "
                f"{self.trouble}"
            )
        budget = self._store.placement.pools[Tier.COLD].budget
        lacks = f"the cold tier has no room to keep the session: {pages}, more"
        if self.trouble:
            return TierFull(f"{lacks}, and its disk takes none: {self.trouble}")
        return TierFull(
            f"{lacks}, and {format_size(budget.limit_bytes)} are the cap: drop another (tierd "
            f"sessions --drop) or raise --cold-cap"
        )

    def _why_full(self) -> str:
        retired = self._store.retired_bytes(Tier.WARM)
        if self.trouble:
            return f"no room in warm: the cold disk fails: {self.trouble}"
        if retired:
            return f"no room in warm: {retired} bytes wait for engines to end their steps"
        if held_seconds := self._store.keeper.claims_seconds:
            return (
                f"no room in warm: for {held_seconds:.0f} s more its slots are held for engines "
                "of before the restart"
            )
        moving = self._store.placement.moving.values()
        if spilling := [m.slot_bytes for m in moving if m.destination.tier is Tier.COLD]:
            return (
                f"no room in warm yet: its disk has not taken {len(spilling)} pages, "
                f"{format_size(sum(spilling))}, that make room; try again"
            )
        kept_bytes = self._store.keeper.kept_bytes()
        kept, drop = "", ""
        if kept_bytes:
            kept = f": kept sessions hold {format_size(kept_bytes)} of it"
            drop = ", drop one of those (tierd sessions --drop)"
        return (
            f"no room in warm, and nothing in it can be spilled: the cold tier is full{kept}; wait "
            f"for other jobs to end{drop}, or give the daemon a larger --warm or --cold-cap"
        )
