"""Backups: a kept session that found no room on disk is copied there once there is some.

    in RAM only → all of it copied → flushed, with sync → kept

Invariants:
  nothing is dropped for it, and nothing copied while not all of the session finds room
  a session is in RAM only, whatever has been copied, until the flush that was synced has returned
  with the disk failing, and without room, there is one try in AGAIN_SECONDS
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tierd.flusher import Flusher, Group
from tierd.memory.slabs import SlabPool
from tierd.sessions import Session
from tierd.store import Store
from tierd.types import CodecId, PageKey, Tier

# A try that the disk refuses holds the mover up for a second: that is a tenth of the time at most.
AGAIN_SECONDS = 10.0


@dataclass(frozen=True, slots=True, eq=False)
class Backup:
    """A session all of which is copied, and which waits for the sync."""

    session: Session


class Backups:
    """The sessions of one store that are in RAM only. `on_kept` is told of each that is no more."""

    def __init__(self, store: Store, flusher: Flusher) -> None:
        self.on_kept: Callable[[Session], None] = lambda session: None
        self._store = store
        self._flusher = flusher
        self._syncing: Backup | None = None
        self._again_at_seconds = float("-inf")

    def next_keys(self, now_seconds: float, *, troubled: bool) -> Iterator[PageKey] | None:
        """Return pages to copy now, of one session; asks for a session's sync once it has none.

        None: there are none to copy now.

        `troubled`: the disk failed last, so that these may be all for a while.
        """
        keeper = self._store.keeper
        if not keeper.ram_only or now_seconds < self._again_at_seconds:
            return None
        if troubled:
            self._again_at_seconds = now_seconds + AGAIN_SECONDS
        for session in keeper.ram_only.values():
            resting = self._at_rest(session)
            if resting and self._has_room(session, resting):
                return self._store.traffic.at_rest(keeper.unbacked(session))
            if resting.total() < session.index.unbacked_count:
                return None  # the rest is on its way
            if not session.index.unbacked_count and self._syncing is None:
                self._syncing = Backup(session)
                keeper.record(session, on_disk=True)
                self._flusher.add_waiter(self._syncing)
        if self._syncing is None:
            self._again_at_seconds = now_seconds + AGAIN_SECONDS
        return None

    def settle(self, group: Group, now_seconds: float) -> None:
        """Take in a flush: the session that waited for it is kept, or waits on."""
        backup = self._syncing
        if backup is None or backup not in group.waiters:
            return
        self._syncing = None
        if group.error is not None:
            self._again_at_seconds = now_seconds + AGAIN_SECONDS
        elif self._store.keeper.ram_only.get(backup.session.number) is backup.session:
            self._store.keeper.on_disk(backup.session)
            self.on_kept(backup.session)

    def _at_rest(self, session: Session) -> Counter[CodecId]:
        """Return how many pages of each codec are in RAM alone, and not on the move."""
        moving = Counter(
            move.source.codec
            for key, move in self._store.placement.moving.items()
            if key.session == session.number and move.source.tier is Tier.WARM
        )
        return session.index.unbacked_by_codec() - moving

    def _has_room(self, session: Session, pages: Counter[CodecId]) -> bool:
        placement = self._store.placement
        needs: Counter[SlabPool] = Counter()
        for codec, count in pages.items():
            needs[placement.pool(Tier.COLD, session, codec)] += count
        return placement.pools[Tier.COLD].make_room(needs)
