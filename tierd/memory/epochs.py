"""Epochs, as in RCU: a retired slot is reused only after every engine has moved past it.

Invariants:
  `now` only rises; a slot retired at e is reusable when e < safe_epoch() <= now
  an engine's word is the epoch its running step entered at, or QUIESCENT
  a dropped engine holds nothing back

An engine reads `now` from a page table, stores it in its word, and only then
reads entries. The daemon unpublishes first and reads the words after. A store
and a load may still pass each other in the processor; the generation that an
engine checks after each copy is what catches that.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tierd.memory.memfd import Mapping
from tierd.units import SECTOR_BYTES

EPOCH_PAGE_BYTES = SECTOR_BYTES
QUIESCENT = 2**64 - 1


def _load(page: Mapping) -> int:
    """Return a page's word: one aligned 8-byte move, never half of a store."""
    return page.buffer[:8].cast("Q")[0]


def _store(page: Mapping, word: int) -> None:
    page.buffer[:8].cast("Q")[0] = word


class EpochWriter:
    """The engine's side: one word in a page that the daemon made. Maps `fd`, does not own it."""

    def __init__(self, fd: int) -> None:
        self._page = Mapping(fd, EPOCH_PAGE_BYTES, writable=True)
        self._inside = False
        _store(self._page, QUIESCENT)

    def enter(self, epoch: int) -> None:
        """Begin a step at `epoch`, as read from the page table. Not re-entrant."""
        assert not self._inside, "a step is already running"
        assert 0 <= epoch < QUIESCENT, epoch
        self._inside = True
        _store(self._page, epoch)

    def leave(self) -> None:
        """End the step: no slot is read any more."""
        assert self._inside, "no step is running"
        _store(self._page, QUIESCENT)
        self._inside = False

    @contextmanager
    def step(self, epoch: int) -> Iterator[None]:
        """Enter, and leave whatever is raised."""
        self.enter(epoch)
        try:
            yield
        finally:
            self.leave()

    def close(self) -> None:
        """Unmap. Idempotent. A step that is running goes on holding its slots."""
        self._page.close()


class EpochClock:
    """The daemon's side. Owns the engines' epoch pages from `add_engine` to `drop_engine`."""

    def __init__(self) -> None:
        self._now = 1
        self._pages: dict[int, Mapping] = {}

    @property
    def now(self) -> int:
        """The current epoch."""
        return self._now

    def retire(self) -> int:
        """Return the epoch at which slots are retired now, and move on to the next."""
        epoch = self._now
        self._now += 1
        return epoch

    def add_engine(self, engine_id: int, page: Mapping) -> None:
        """Wait for this engine from now on."""
        assert engine_id not in self._pages, engine_id
        self._pages[engine_id] = page

    def drop_engine(self, engine_id: int) -> None:
        """Wait no longer for an engine. Unknown ids are ignored."""
        page = self._pages.pop(engine_id, None)
        if page is not None:
            page.close()

    def word(self, engine_id: int) -> int:
        """Return an engine's word."""
        return _load(self._pages[engine_id])

    def active(self, engine_id: int) -> bool:
        """Return whether an engine is inside a step."""
        return engine_id in self._pages and self.word(engine_id) != QUIESCENT

    def safe_epoch(self) -> int:
        """Return the epoch before which retired slots are reusable.

        Words are the engines' to write: one beyond `now` (QUIESCENT is) holds nothing back.
        """
        return min([self._now, *(_load(page) for page in self._pages.values())])

    def check_integrity(self) -> None:
        """Raise AssertionError unless 0 <= safe <= now."""
        safe, now = self.safe_epoch(), self._now
        assert 0 <= safe <= now, f"{safe=} {now=}"

    def close(self) -> None:
        """Drop every engine. Idempotent."""
        for engine_id in list(self._pages):
            self.drop_engine(engine_id)
