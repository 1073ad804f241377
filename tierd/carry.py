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

import mmap
from collections.abc import Iterator, Sequence

from tierd.clock import Clock
from tierd.codec.layout import HEADER_BYTES
from tierd.disk.header import verify_slot
from tierd.errors import PageDamaged, StorageError, StorageFull
from tierd.placement import Move, Placement
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
        self._headers = [
            placement.header(move.session, move.key, move.source, move.digest) for move in moves
        ]

    def carry(self) -> None:
        """Copy every page; blocks."""
        started_seconds = self._clock.monotonic()
        self.errors = [None] * len(self.moves)
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

    def _down(self) -> None:
        sound = [number for number in range(len(self.moves)) if self._is_sound(number)]
        if not sound:
            return
        headers = memoryview(mmap.mmap(-1, len(self.moves) * HEADER_BYTES))  # aligned, for O_DIRECT
        for run in self._runs(sound, [move.destination for move in self.moves]):
            self._write(run, headers)

    def _is_sound(self, number: int) -> bool:
        try:
            # With its device digest, which the index does not keep: the slot there gets it too.
            self._headers[number] = verify_slot(self.moves[number].warm, self._headers[number])
        except PageDamaged as error:
            self.errors[number] = error
        return self.errors[number] is None

    def _write(self, run: list[int], headers: memoryview) -> None:
        buffers = []
        for number in run:
            header = headers[number * HEADER_BYTES : (number + 1) * HEADER_BYTES]
            header[:] = self._header_there(number)
            buffers += [header, self.moves[number].warm[HEADER_BYTES:]]
        first = self.moves[run[0]]
        place = first.destination
        try:
            self._files.write_slots(place.slab, place.slot, first.slot_bytes, buffers)
        except StorageError as error:
            if len(run) == 1 or isinstance(error, StorageFull):
                self._note(run, error)
            else:  # one bad place must not cost its neighbours
                for number in run:
                    self._write([number], headers)

    def _up(self) -> None:
        for run in self._runs(range(len(self.moves)), [move.source for move in self.moves]):
            try:
                self._read(run)
            except StorageError:
                unread = run
            else:
                unread = [number for number in run if not self._is_sound(number)]
            for number in unread:
                # One more try: a transient error or a bit lost on the way differs; damage does not.
                self._read_again(number)
            for number in run:
                if self.errors[number] is None:
                    self.moves[number].warm[:HEADER_BYTES] = self._header_there(number)

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
            self._is_sound(number)

    def _header_there(self, number: int) -> bytes:
        place = self.moves[number].destination
        return self._headers[number].pack_at(place.slab, place.slot, place.generation)

    def _note(self, run: list[int], error: StorageError) -> None:
        for number in run:
            self.errors[number] = error


def _neighbours(places: Sequence[Place], number: int, following: int) -> bool:
    """Return whether two slots lie one after the other on disk."""
    place, other = places[number], places[following]
    return place.slab == other.slab and place.slot + 1 == other.slot
