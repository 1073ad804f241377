"""The flusher: group commit. What was copied to cold becomes findable only when the ledger says so.

    copied → recorded → flushed → published
                        flushed → written down once more → suspended

A flush takes in all that was recorded before it: the moves of several batches,
drops, and the sessions that wait to be durable, or gone for good. One runs at a
time, in a lane; under load the next group gathers meanwhile, so that no timer is
needed. While the ledger waits for space, sessions' ends are noted in its stead.

Invariants:
  a group's moves and arrivals are handed back exactly once, with the flush's error or none
  a session is durable, or gone, when a flush with `sync` that began after its record has returned
  at most one flush or snapshot is under way
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tierd.demotions import Demotion
from tierd.disk.slabfiles import SlabFiles
from tierd.disk.volatile import LedgerPort
from tierd.errors import StorageError, StorageFull
from tierd.lanes import Lanes
from tierd.moves import Move
from tierd.sessions import Session

# A record that no move waits for (a page dropped, a slab added) waits this long at most.
LINGER_SECONDS = 0.02
SNAPSHOT_AGAIN_SECONDS = 10.0  # a disk without room for one gets a try so often
START_AGAIN_SECONDS = 1.0  # so does one without room for this start's journal


class Suspending(Protocol):
    """Who waits for a session to be durable."""

    @property
    def session(self) -> Session:
        """The session."""


@dataclass(frozen=True, slots=True, eq=False)
class Arrival:
    """A recorded demotion to cold, and its engine's call, which ends when it is published."""

    demotion: Demotion
    answer: asyncio.Future[None]


@dataclass(slots=True, eq=False)
class SessionEnd:
    """A kept session that is to be no more, and who waits for that to be durable.

    `engine_id` None: an operator ends it. `ended`: here it is gone, and the ledger was told.
    `error`: why its end could not be noted while the ledger waits.
    """

    number: int
    engine_id: int | None
    answer: asyncio.Future[None]
    ended: bool = False
    error: StorageError | None = None


@dataclass(slots=True, eq=False)
class Group:
    """What one flush makes durable, and what came of it."""

    moves: list[Move] = field(default_factory=list)
    arrivals: list[Arrival] = field(default_factory=list)
    waiters: list[Suspending] = field(default_factory=list)
    recorded: list[asyncio.Future[None]] = field(default_factory=list)
    ends: list[SessionEnd] = field(default_factory=list)
    error: StorageError | None = None
    began_seconds: float = 0.0

    @property
    def is_wanted(self) -> bool:
        """Whether somebody waits for it."""
        return bool(self.moves or self.arrivals or self.waiters or self.recorded or self.ends)


class Flusher:
    """The ledger's only writer. All methods are for the event loop's thread."""

    def __init__(
        self, ledger: LedgerPort, files: SlabFiles, lanes: Lanes, wake: Callable[[], None]
    ) -> None:
        self._ledger = ledger
        self._files = files
        self._lanes = lanes
        self._wake = wake
        self._next = Group()
        self._flying: Group | None = None
        self._landed: list[Group] = []
        self._flushed_seconds = 0.0
        self._snapshot_after_seconds = -math.inf
        self.snapshot_error = ""
        self.manifest_error = ""

    def add(self, moves: Sequence[Move]) -> None:
        """Take moves whose bytes are in cold and in the ledger's hands."""
        self._next.moves.extend(moves)

    def add_arrival(self, arrival: Arrival) -> None:
        """Take a demotion whose bytes are in cold, and which the ledger was told of."""
        self._next.arrivals.append(arrival)

    def add_waiter(self, waiter: Suspending) -> None:
        """Let the next group be synced; `waiter` comes back with it."""
        self._next.waiters.append(waiter)

    def add_recorded(self, answer: asyncio.Future[None]) -> None:
        """Let `answer` be set once the next group is written, or could not be."""
        self._next.recorded.append(answer)

    def add_end(self, end: SessionEnd) -> None:
        """Let the next group be synced, or note the end while the ledger waits."""
        self._next.ends.append(end)

    def overdue(self, now_seconds: float, limit_seconds: float) -> bool:
        """Say whether a flush has gone on for longer than `limit_seconds`."""
        flying = self._flying
        return flying is not None and now_seconds >= flying.began_seconds + limit_seconds

    @property
    def busy(self) -> bool:
        """Whether a flush is under way, or moves or waiters are there for one."""
        return self._flying is not None or self._next.is_wanted

    def take_landed(self) -> list[Group]:
        """Return the groups whose flush has ended since the last call."""
        landed, self._landed = self._landed, []
        return landed

    def begin(self, now_seconds: float) -> bool:
        """Begin a flush if one is due; say whether it did. A lane must be free."""
        if self._flying is not None:
            return False
        if self._ledger.failed:
            return self._begin_notes(now_seconds) or self._begin_start(now_seconds)
        idle = now_seconds >= self._flushed_seconds + LINGER_SECONDS
        snapshot = self._ledger.snapshot_due and now_seconds >= self._snapshot_after_seconds
        lingering = idle and (self._ledger.dirty or snapshot)
        if not (self._next.is_wanted or lingering):
            return False
        group, self._next = self._next, Group()
        self._fly(group, now_seconds)
        return True

    def _fly(self, group: Group, now_seconds: float) -> None:
        group.began_seconds = self._flushed_seconds = now_seconds
        self._flying = group
        self._lanes.begin(lambda: self._flush(group), lambda: self._land(group))

    def _begin_notes(self, now_seconds: float) -> bool:
        """Note ends of sessions where no record can be written."""
        if not self._ledger.waiting or not self._next.ends:
            return False
        group, self._next.ends = Group(ends=self._next.ends), []
        self._fly(group, now_seconds)
        return True

    def _begin_start(self, now_seconds: float) -> bool:
        """Try whether the disk has room by now for what the ledger needs to begin."""
        again = now_seconds >= self._flushed_seconds + START_AGAIN_SECONDS
        if self._ledger.waiting and again:
            self._fly(Group(), now_seconds)
            return True
        return False

    def refuse(self) -> None:
        """Hand back what waits, with the reason: the ledger has failed, or waits for space.

        Sessions' ends can be noted while it waits.
        """
        if not self._ledger.failed:
            return
        group, self._next = self._next, Group()
        if self._ledger.waiting:
            self._next.ends, group.ends = group.ends, []
        if group.is_wanted:
            kind = StorageFull if self._ledger.waiting else StorageError
            group.error = kind(self._ledger.failed)
            self._landed.append(group)

    def _note_ends(self, group: Group) -> None:
        for end in group.ends:
            try:
                self._ledger.forget(end.number)
            except StorageError as error:
                end.error = error

    def _flush(self, group: Group) -> None:
        if group.ends and self._ledger.waiting:
            self._note_ends(group)
            return
        try:
            if group.waiters:
                self._files.sync()
            self._ledger.flush(sync=bool(group.waiters or group.ends))
        except StorageError as error:
            if group.is_wanted or not self._ledger.waiting:
                group.error = error
            return
        for waiter in group.waiters:
            try:
                self._ledger.keep(waiter.session.number)
            except StorageError as error:  # durable all the same: one copy less is no refusal
                self.manifest_error = str(error)
            else:
                self.manifest_error = ""
        if self._ledger.snapshot_due and group.began_seconds >= self._snapshot_after_seconds:
            try:
                self._ledger.snapshot()
            except StorageError as error:  # the journal goes on without; what is flushed stands
                self.snapshot_error = str(error)
                self._snapshot_after_seconds = group.began_seconds + SNAPSHOT_AGAIN_SECONDS
            else:
                self.snapshot_error = ""

    def _land(self, group: Group) -> None:
        assert self._flying is group, "two flushes at once"
        self._flying = None
        self._landed.append(group)
        self._wake()
