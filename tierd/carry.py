"""Carry: copy pages between warm memory and cold files, in a lane's thread.

Nothing of the store is changed here: a batch reads the slots its moves hold,
writes the ones they hold, and notes for each move what came of it. Slots that
are neighbours on disk go in one I/O.

Invariants:
  a warm page's digest is checked before it is written, so damage never spreads
  a cold page's header and digest are checked before the warm slot is its page
  `errors` has one entry a move once `carry` has returned
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np

from tierd.clock import Clock
from tierd.codec.layout import HEADER_BYTES
from tierd.disk.header import verify_slot
from tierd.disk.headerrows import (
    as_bytes,
    check_slots,
    fill_rows,
    header_rows,
    place_rows,
    seal_rows,
)
from tierd.errors import PageDamaged, StorageError, StorageFull
from tierd.moves import Move, pool_key
from tierd.placement import Placement
from tierd.types import Place, Tier

# A disk is at its full speed from about 1 MiB an I/O, but after each I/O a lane waits for the
# interpreter's lock: pages of 108 KiB spill at 0.70 of fio's speed in I/Os of 1 MiB, at 0.80 in
# 2 MiB, at 0.90 in 4 MiB. That is a whole batch of the mover's.
IO_BYTES = 4 << 20


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
        self._header_of = placement.header

    def carry(self) -> None:
        """Copy every page; blocks."""
        started_seconds = self._clock.monotonic()
        self.errors = [None] * len(self.moves)
        if self.moves:
            self._pack_headers()
            if self.to is Tier.COLD:
                self._down()
            else:
                self._up()
        self.seconds = self._clock.monotonic() - started_seconds

    def _runs(self, numbers: Sequence[int], places: Sequence[Place]) -> Iterator[list[int]]:
        """Cut `numbers`, in the order of their places, into neighbours of IO_BYTES together."""
        run: list[int] = []
        size_bytes = 0
        for number in sorted(numbers, key=lambda n: (places[n].slab, places[n].slot)):
            if size_bytes >= IO_BYTES or (run and not _neighbours(places, run[-1], number)):
                yield run
                run, size_bytes = [], 0
            run.append(number)
            size_bytes += self.moves[number].slot_bytes
        if run:
            yield run

    def _pack_headers(self) -> None:
        """Make every page's header but for its place."""
        self._stored_bytes = np.empty(len(self.moves), np.int64)
        self._rows = header_rows(len(self.moves))
        first = 0
        for _, run in groupby(self.moves, lambda move: pool_key((move.session, move.source))):
            moves = list(run)
            these = slice(first, first + len(moves))
            like = self._header_of(moves[0].session, moves[0].key, moves[0].source, b"")
            keys, digests = [move.key for move in moves], [move.digest for move in moves]
            fill_rows(self._rows[these], like, keys, digests)
            self._stored_bytes[these] = like.stored_bytes
            first = these.stop
        self._headers = as_bytes(self._rows)

    def _down(self) -> None:
        damaged = self._unsound(0, len(self.moves))
        sound = [number for number in range(len(self.moves)) if number not in damaged]
        for run in self._runs(sound, [move.destination for move in self.moves]):
            self._write(run)

    def _unsound(self, first: int, end: int) -> set[int]:
        """Return which of the slots in memory are not the page as it was at its source.

        `errors` say why. The headers of all of `first` to `end` are then those of their
        destinations.
        """
        moves, rows = self.moves[first:end], self._rows[first:end]
        place_rows(rows, [move.source for move in moves])
        slots = np.array([move.warm_address for move in moves], np.int64)
        sound = check_slots(rows, slots, self._stored_bytes[first:end])
        unsound = {
            number
            for number in (first + np.flatnonzero(~sound)).tolist()
            if not self._is_sound(number)
        }
        place_rows(rows, [move.destination for move in moves])
        seal_rows(rows)
        return unsound

    def _is_sound(self, number: int) -> bool:
        """Say whether a slot is the page as it was at its source: slower, and finds the reason."""
        move = self.moves[number]
        expected = self._header_of(move.session, move.key, move.source, move.digest)
        try:
            verify_slot(move.warm, expected)
        except PageDamaged as error:
            self.errors[number] = error
            return False
        return True

    def _write(self, run: list[int]) -> None:
        buffers = []
        for number in run:
            buffers += [self._header(number), self.moves[number].warm[HEADER_BYTES:]]
        first = self.moves[run[0]]
        place = first.destination
        try:
            self._files.write_slots(place.slab, place.slot, first.slot_bytes, buffers)
        except StorageError as error:
            if len(run) == 1 or isinstance(error, StorageFull):
                self._note(run, error)
            else:  # one bad place must not cost its neighbours
                for number in run:
                    self._write([number])

    def _up(self) -> None:
        wrong: set[int] = set()
        for run in self._runs(range(len(self.moves)), [move.source for move in self.moves]):
            try:
                self._read(run)
            except StorageError:
                wrong.update(run)
        wrong |= self._unsound(0, len(self.moves))
        for number in wrong:
            # One more try: a transient error or a bit lost on the way differs; damage does not.
            self._read_again(number)
        for number, move in enumerate(self.moves):
            if self.errors[number] is None:
                move.warm[:HEADER_BYTES] = self._header(number)

    def _read(self, run: list[int]) -> None:
        first = self.moves[run[0]]
        place = first.source
        into = [self.moves[number].warm for number in run]
        self._files.read_slots(place.slab, place.slot, first.slot_bytes, into)

    def _read_again(self, number: int) -> None:
        self.errors[number] = None
        try:
            self._read([number])
        except StorageError as error:
            self.errors[number] = error
        else:
            self._unsound(number, number + 1)

    def _header(self, number: int) -> memoryview:
        return self._headers[number * HEADER_BYTES : (number + 1) * HEADER_BYTES]

    def _note(self, run: list[int], error: StorageError) -> None:
        for number in run:
            self.errors[number] = error


def _neighbours(places: Sequence[Place], number: int, following: int) -> bool:
    """Return whether two slots lie one after the other on disk."""
    place, other = places[number], places[following]
    return place.slab == other.slab and place.slot + 1 == other.slot
