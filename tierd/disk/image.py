"""The image: what the journal, read to its end, says is in the cold tier. No I/O.

Rows of a session are one sorted array and a list of what is newer, merged when
that has grown by half, or when somebody asks: a commit costs its own rows, a
merge is a few numpy calls, and no step has a Python loop over rows.

Invariants:
  a settled session's rows rise strictly by (block, layer)
  arrays are never changed once they are in: a copy of the image shares them
  a session without rows takes no entry in `pages`
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tierd.disk.records import (
    PAGE_ROW,
    WORD_MAX,
    Keys,
    Kind,
    Record,
    Rows,
    SessionRecord,
    empty_rows,
    integer,
    keys_from,
    page_keys,
    rows_of,
    session_of,
    slab_of,
    text,
    whole_bytes,
)
from tierd.errors import StorageError
from tierd.types import SlabRecord

# Below it a merge costs more in calls than in rows: 4,096 rows sort in 0.2 ms.
_PENDING_ROWS_MIN = 4096


@dataclass(slots=True)
class SessionPages:
    """One session's rows: sorted, and what came after. A tombstone is a row that is not alive."""

    sorted_rows: Rows
    pending: list[tuple[Keys, Rows | None]] = field(default_factory=list)
    pending_rows: int = 0

    def copy(self) -> SessionPages:
        """Return one that changes by itself and shares the arrays."""
        return SessionPages(self.sorted_rows, list(self.pending), self.pending_rows)

    def add(self, rows: Rows) -> None:
        """Take rows; a page that is there already is replaced."""
        self._append(page_keys(rows), rows)

    def drop(self, keys: Keys) -> None:
        """Forget pages; those that are not there are ignored."""
        self._append(keys, None)

    def _append(self, keys: Keys, rows: Rows | None) -> None:
        self.pending.append((keys, rows))
        self.pending_rows += len(keys)
        if self.pending_rows > max(_PENDING_ROWS_MIN, len(self.sorted_rows) // 2):
            self.settle()

    def truncate(self, first_block: int) -> None:
        """Forget every page of blocks >= first_block."""
        rows = self.settle()
        self.sorted_rows = rows[: int(np.searchsorted(rows["block"], first_block))]

    def settle(self) -> Rows:
        """Merge what is newer; return the rows, sorted by (block, layer), read-only."""
        if self.pending:
            keys = np.concatenate([page_keys(self.sorted_rows), *(k for k, _ in self.pending)])
            chosen = last_of_equals(keys)
            parts = [self.sorted_rows, *(_placed(rows, keys) for keys, rows in self.pending)]
            alive = np.concatenate(
                [np.ones(len(self.sorted_rows), bool)]
                + [np.full(len(keys), rows is not None) for keys, rows in self.pending]
            )
            # Tombstones stand as zero rows until here.
            rows = np.concatenate(parts)[chosen[alive[chosen]]]
            rows.flags.writeable = False
            self.sorted_rows, self.pending, self.pending_rows = rows, [], 0
        return self.sorted_rows


def _placed(rows: Rows | None, keys: Keys) -> Rows:
    return np.zeros(len(keys), dtype=PAGE_ROW) if rows is None else rows


def last_of_equals(keys: Keys) -> npt.NDArray[np.intp]:
    """Return the index of the last of each group of equal keys, in the keys' order."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    last = np.ones(len(keys), bool)
    last[:-1] = ordered[1:] != ordered[:-1]
    return order[last]


class Occupancy(NamedTuple):
    """Slots of one slab that hold a page, rising, uint32 [n]; their generations, uint32 [n]."""

    slots: npt.NDArray[np.uint32]
    generations: npt.NDArray[np.uint32]


@dataclass(slots=True)
class Image:
    """Sessions, slabs, rows and bad slots. Not for several threads at once."""

    sessions: dict[int, SessionRecord] = field(default_factory=dict)
    slabs: dict[int, SlabRecord] = field(default_factory=dict)
    pages: dict[int, SessionPages] = field(default_factory=dict)
    bad_slots: dict[int, dict[int, str]] = field(default_factory=dict)  # slab → slot → reason
    slab_limit: int = 0
    _parts: dict[int, list[bytes]] = field(default_factory=dict)  # token ids not yet whole
    _by_slab: dict[int, Occupancy] | None = None  # None: rows have changed

    # -- changes ------------------------------------------------------------------
    def apply(self, record: Record) -> int:
        """Apply one record; return how many rows it touched. Raises StorageError if malformed."""
        kind = Kind(record[0])
        match kind:
            case Kind.COMMIT:
                rows = rows_of(record[1])
                self.commit(rows)
                return len(rows)
            case Kind.DROP_PAGES:
                keys = keys_from(record[2])
                self.drop_pages(record[1], keys)
                return len(keys)
            case Kind.TRUNCATE:
                self.truncate(record[1], integer(record[2], WORD_MAX + 1))
            case Kind.TOKENS | Kind.SESSION:
                self._apply_session(record)
            case Kind.DROP_SESSION:
                self.drop_session(record[1])
            case Kind.SLAB:
                slab = slab_of(record[1:])
                self.slabs[slab.slab] = slab
            case Kind.DROP_SLAB:
                self.drop_slab(record[1])
            case Kind.QUARANTINE:
                self.quarantine(record[1], integer(record[2], WORD_MAX), text(record[3]))
            case Kind.SLAB_LIMIT:
                self.slab_limit = max(self.slab_limit, record[1])
        return 1

    def _apply_session(self, record: Record) -> None:
        kind, number = record[0], record[1]
        if kind == Kind.TOKENS:
            parts = [] if record[2] == 0 else self._parts.get(number, [])
            if sum(map(len, parts)) != record[2]:
                raise StorageError("a session's token ids do not join")
            self._parts[number] = [*parts, whole_bytes(record[3])]
            return
        _, _, namespace, state, sealed_blocks, token_bytes, last = record
        parts = self._parts.pop(number, [])
        tokens = b"".join([*(parts if len(whole_bytes(last)) != token_bytes else []), last])
        if len(tokens) != token_bytes:
            raise StorageError("a session's token ids are not whole")
        self.sessions[number] = session_of([number, namespace, state, sealed_blocks, tokens])

    def commit(self, rows: Rows) -> None:
        """Take rows, which must not change any more."""
        self._by_slab = None
        for part in _by_session(rows):
            self._session_pages(int(part["session"][0])).add(part)

    def _session_pages(self, number: int) -> SessionPages:
        pages = self.pages.get(number)
        if pages is None:
            pages = self.pages[number] = SessionPages(empty_rows())
        return pages

    def drop_pages(self, number: int, keys: Keys) -> None:
        """Forget pages of a session; unknown ones are ignored."""
        if number in self.pages and len(keys):
            self._by_slab = None
            self.pages[number].drop(keys)

    def truncate(self, number: int, first_block: int) -> None:
        """Forget a session's pages of blocks >= first_block."""
        if number in self.pages:
            self._by_slab = None
            self.pages[number].truncate(first_block)

    def drop_session(self, number: int) -> None:
        """Forget a session and its pages."""
        self.sessions.pop(number, None)
        self._parts.pop(number, None)
        if self.pages.pop(number, None) is not None:
            self._by_slab = None

    def drop_slab(self, slab: int) -> None:
        """Forget a slab, whose pages were dropped before."""
        self.slabs.pop(slab, None)
        self.bad_slots.pop(slab, None)

    def quarantine(self, slab: int, slot: int, reason: str) -> None:
        """Note that a slot must not be used any more."""
        self.bad_slots.setdefault(slab, {})[slot] = reason

    # -- looks --------------------------------------------------------------------
    def rows_of_session(self, number: int) -> Rows:
        """Return a session's rows, sorted by (block, layer), read-only."""
        pages = self.pages.get(number)
        return empty_rows() if pages is None else pages.settle()

    def row_counts(self) -> dict[int, int]:
        """Return how many rows each session has, by rising number."""
        return {number: len(self.pages[number].settle()) for number in sorted(self.pages)}

    def column(self, name: str) -> npt.NDArray[Any]:
        """Return one column of every row, sorted by (session, block, layer)."""
        parts = [self.pages[number].settle()[name] for number in sorted(self.pages)]
        return np.concatenate([empty_rows()[name], *parts])

    def all_rows(self) -> Rows:
        """Return every row, sorted by (session, block, layer)."""
        parts = [self.pages[number].settle() for number in sorted(self.pages)]
        return np.concatenate([empty_rows(), *parts])

    def occupancy(self, slab: int) -> Occupancy:
        """Return a slab's slots in use. Costs a look at all rows if any has changed since."""
        if self._by_slab is None:
            self._by_slab = self._occupancies()
        none = np.empty(0, np.uint32)
        return self._by_slab.get(slab) or Occupancy(none, none)

    def _occupancies(self) -> dict[int, Occupancy]:
        """Return the slots in use of every slab: each place is marked, so nothing is sorted."""
        places = Places(self.slabs.values())
        dense = places.of(self.column("slab"), self.column("slot"))
        held = np.full(places.count, -1, np.int64)
        held[dense] = np.arange(len(dense))
        generations = self.column("generation")
        found = {}
        for slab, (start, end) in places.ranges.items():
            slots = np.flatnonzero(held[start:end] >= 0)
            found[slab] = Occupancy(slots.astype(np.uint32), generations[held[start:end][slots]])
        return found

    def copy(self) -> Image:
        """Return an image that changes by itself; cheap, arrays are shared."""
        return Image(
            dict(self.sessions), dict(self.slabs),
            {number: pages.copy() for number, pages in self.pages.items()},
            {slab: dict(slots) for slab, slots in self.bad_slots.items()}, self.slab_limit,
        )  # fmt: skip

    def check_integrity(self) -> None:
        """Raise AssertionError unless rows are sorted, apart, and in slabs that exist."""
        for number, pages in self.pages.items():
            rows = pages.settle()
            keys = page_keys(rows)
            assert bool(np.all(keys[1:] > keys[:-1])), f"session {number:016x}: rows out of order"
            own = rows["session"] == number
            assert bool(np.all(own)), f"session {number:016x} holds another's rows"
        places = Places(self.slabs.values())
        slabs, slots = self.column("slab"), self.column("slot")
        unknown = slabs[~places.known(slabs)]
        assert not len(unknown), f"rows in slabs that are not there: {unknown[:8].tolist()}"
        beyond = int(np.count_nonzero(~places.inside(slabs, slots)))
        assert beyond == 0, f"{beyond} rows in slots beyond the end of a slab"
        taken = int(np.count_nonzero(np.bincount(places.of(slabs, slots))))
        assert taken == len(slabs), f"{len(slabs)} rows in {taken} slots"


def _by_session(rows: Rows) -> list[Rows]:
    """Return rows in parts of one session each, order within a session kept."""
    if not len(rows):
        return []
    sessions = rows["session"]
    if sessions[0] == sessions[-1] and bool(np.all(sessions == sessions[0])):
        return [rows]
    order = np.argsort(sessions, kind="stable")
    ordered = rows[order]
    cuts = np.flatnonzero(ordered["session"][1:] != ordered["session"][:-1]) + 1
    return np.split(ordered, cuts)


class Places:
    """Slots of slabs, numbered through: what names a place twice is found without sorting."""

    def __init__(self, slabs: Iterable[SlabRecord]) -> None:
        self.ranges: dict[int, tuple[int, int]] = {}
        self.count = 0
        for slab in slabs:
            self.ranges[slab.slab] = (self.count, self.count + slab.slots)
            self.count += slab.slots
        # By slab id: ids are below 2**24, and the tables as long as the highest.
        self._first = np.full(max(self.ranges, default=0) + 2, -1, np.int64)
        self._slots = np.zeros(len(self._first), np.int64)
        for number, (start, end) in self.ranges.items():
            self._first[number], self._slots[number] = start, end - start

    def row_of(self, slabs: npt.NDArray[np.uint32]) -> npt.NDArray[np.intp]:
        """Return indices into tables by slab id; the last entry stands for unknown slabs."""
        return np.minimum(slabs, len(self._first) - 1).astype(np.intp)

    def known(self, slabs: npt.NDArray[np.uint32]) -> npt.NDArray[np.bool_]:
        """Return which slabs are there."""
        known: npt.NDArray[np.bool_] = self._first[self.row_of(slabs)] >= 0
        return known

    def inside(
        self, slabs: npt.NDArray[np.uint32], slots: npt.NDArray[np.uint32]
    ) -> npt.NDArray[np.bool_]:
        """Return which slots lie in their slab."""
        inside: npt.NDArray[np.bool_] = slots < self._slots[self.row_of(slabs)]
        return inside

    def of(
        self, slabs: npt.NDArray[np.uint32], slots: npt.NDArray[np.uint32]
    ) -> npt.NDArray[np.int64]:
        """Return the numbers of places that are known and inside."""
        numbers: npt.NDArray[np.int64] = self._first[self.row_of(slabs)] + slots
        return numbers
