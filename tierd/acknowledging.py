"""Acknowledging: what a caller waits for is in the ledger before it hears of it.

    recorded     written: the next daemon knows of it, unless the power goes
    ended        a kept session's end, durable: no start brings the session back

An end is said to the ledger and synced. Where the ledger waits for space it takes no record, and
the superblock notes the end first (unstarted.py): only then does the session end here. What
cannot be made durable is refused, and the session stays; or, if the disk fails too late for that,
the caller is told what the next start finds.

Invariants:
  a kept session's end is durable when its caller hears ok
  between the superblock's note and the session's end here no flush is begun
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from tierd.errors import DeadlineExceeded, NotFound, StorageError, StorageFull
from tierd.flusher import Flusher, Group, SessionEnd
from tierd.store import Store
from tierd.waiters import Waiters

RECORD_SECONDS = 1.0  # a write to the page cache takes well under a millisecond


class Acknowledgements:
    """Those that wait for one ledger. All methods are for the event loop's thread."""

    def __init__(
        self, store: Store, flusher: Flusher, waiters: Waiters, wake: Callable[[], None]
    ) -> None:
        self._store = store
        self._flusher = flusher
        self._waiters = waiters
        self._wake = wake

    async def recorded(self) -> None:
        """Return once the ledger has written what it was told: a restart then knows of it.

        A ledger that has failed, or a disk that hangs, holds nobody up for long.
        """
        if not self._store.keeper.durable or self._store.ledger.failed:
            return
        answer = self._waiters.new_answer()
        self._flusher.add_recorded(answer)
        self._wake()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(answer, RECORD_SECONDS)

    async def close_session(
        self,
        number: int,
        *,
        engine_id: int | None = None,
        discard: bool = False,
        deadline_seconds: float = 10.0,
    ) -> None:
        """As Store.close_session; the end of a kept session is durable when this returns.

        Raises StorageFull, StorageError, DeadlineExceeded: what then is, the message says.
        """
        session = self._store.session(number, engine_id=engine_id)
        ledger = self._store.ledger
        gone_for_good = session.kept and (engine_id is None or discard)
        if not gone_for_good or not self._store.keeper.durable:
            self._store.close_session(number, engine_id=engine_id, discard=discard)
            return
        end = SessionEnd(number, engine_id, self._waiters.new_answer())
        if ledger.failed and not ledger.waiting:
            raise self._refusal(end, StorageError(ledger.failed))
        if not ledger.waiting:
            self._end(end)
        self._flusher.add_end(end)
        self._wake()
        try:
            await asyncio.wait_for(end.answer, deadline_seconds)
        except TimeoutError:
            raise DeadlineExceeded(
                f"the cold tier's disk does not answer: session {number:016x} may be gone after a "
                "restart, or not"
            ) from None

    def settle(self, group: Group) -> None:
        """Take in a flush, or the superblock's notes: sessions end here, callers hear of it."""
        for end in group.ends:
            error = end.error or group.error
            if error is not None:
                self._waiters.answer(end.answer, self._refusal(end, error))
                continue
            noted_only = not end.ended
            if noted_only:
                self._end(end)
            if noted_only and not self._store.ledger.waiting:
                self._flusher.add_end(end)  # it began meanwhile: the journal is to say so too
            else:
                self._waiters.answer(end.answer)

    def _end(self, end: SessionEnd) -> None:
        end.ended = True
        with contextlib.suppress(NotFound):  # it has ended meanwhile
            session = self._store.session(end.number)
            # An engine that has died meanwhile has left the session suspended.
            owner = end.engine_id if session.engine_id == end.engine_id else None
            self._store.close_session(end.number, engine_id=owner, discard=True)

    def _refusal(self, end: SessionEnd, error: StorageError) -> StorageError:
        """Return what the caller is told: what became of the session, and what to do."""
        full = isinstance(error, StorageFull)
        name = f"session {end.number:016x}"
        if end.ended and full:
            told = (
                f"{name} is gone here, and a restart brings back what is left of it until the disk "
                f"has room to note its end: make room outside the cold folder ({error})"
            )
        elif end.ended:
            told = f"{name} is gone here, and a restart may bring back what is left of it: {error}"
        elif full:
            told = (
                f"{name} stays: the disk is full, and has no room to note its end; make room "
                f"outside the cold folder, then drop it again ({error})"
            )
        elif self._store.ledger.waiting:
            told = (
                f"{name} stays until the daemon ends, and may be gone after that: its end could "
                f"not be noted for certain; once the disk works, drop it again ({error})"
            )
        else:
            told = (
                f"{name} stays: the cold tier takes no record of its end, and a restart would "
                f"bring it back; start the daemon again, then drop it ({error})"
            )
        return type(error)(told)
