"""Carry: copy pages between warm memory and cold files, in a lane's thread.

Nothing of the store is changed here: a batch reads the slots its moves hold,
writes the ones they hold, and notes for each move what came of it.

Invariants:
  a warm page's digest is checked before it is written, so damage never spreads
  a cold page's header and digest are checked before the warm slot is its page
  `errors` has one entry a move once `carry` has returned
"""

from __future__ import annotations

import mmap

from tierd.clock import Clock
from tierd.codec.layout import HEADER_BYTES
from tierd.disk.header import verify_slot
from tierd.errors import PageDamaged, StorageError
from tierd.placement import Move, Placement
from tierd.types import Tier


class Batch:
    """Moves in one direction that one lane carries. `errors[i]` is move i's, or None.

    `seconds` is the time of the copying, by `clock`, for the estimate of bandwidth.
    """

    def __init__(
        self,
        moves: list[Move],
        to: Tier,
        placement: Placement,
        clock: Clock,
        deadline_seconds: float,
    ) -> None:
        self.moves = moves
        self.to = to
        self.size_bytes = sum(move.slot_bytes for move in moves)
        self.deadline_seconds = deadline_seconds
        self.seconds = 0.0
        self.errors: list[PageDamaged | StorageError | None] = []
        self._clock = clock
        self._files = placement.cold_files
        self._header_page = memoryview(mmap.mmap(-1, HEADER_BYTES))  # aligned, for O_DIRECT
        self._headers = [
            (
                placement.header(move.session, move.key, move.source, move.digest),
                placement.header(move.session, move.key, move.destination, move.digest),
            )
            for move in moves
        ]

    def carry(self) -> None:
        """Copy every page; blocks."""
        started_seconds = self._clock.monotonic()
        copy = self._down if self.to is Tier.COLD else self._up
        for number in range(len(self.moves)):
            try:
                copy(number)
            except (PageDamaged, StorageError) as error:
                self.errors.append(error)
            else:
                self.errors.append(None)
        self.seconds = self._clock.monotonic() - started_seconds

    def _down(self, number: int) -> None:
        move, (found, written) = self.moves[number], self._headers[number]
        verify_slot(move.warm, found)
        place = move.destination
        written.pack_into(self._header_page)
        self._files.write_slots(
            place.slab, place.slot, move.slot_bytes, [self._header_page, move.warm[HEADER_BYTES:]]
        )

    def _up(self, number: int) -> None:
        move, (found, written) = self.moves[number], self._headers[number]
        place = move.source
        try:
            self._files.read_slot(place.slab, place.slot, move.slot_bytes, move.warm)
            verify_slot(move.warm, found)
        except (PageDamaged, StorageError):
            # One more try: a transient error or a bit lost on the way differs; damage does not.
            self._files.read_slot(place.slab, place.slot, move.slot_bytes, move.warm)
            verify_slot(move.warm, found)
        written.pack_into(move.warm[:HEADER_BYTES])
