"""What the store asks of a ledger, and the ledger of a cold tier that dies with its daemon.

    LedgerPort        the durable record of the cold tier: what is where, for whom
    VolatileLedger    keeps nothing: an embedded daemon's files have no names either

Every call but `flush`, `forget`, `keep` and `snapshot` is quick and for the event loop's
thread; these block, and are for a lane.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tierd.disk.records import PAGE_ROW, SessionRecord
from tierd.types import SlabRecord

PageRows = npt.NDArray[np.void]


class LedgerPort(Protocol):
    """Records, in the order in which they are told; durable once a `flush(sync=True)` returns."""

    store_uuid: bytes
    epoch: int

    @property
    def durable(self) -> bool:
        """Whether what it records outlives the process."""

    @property
    def failed(self) -> str:
        """Why it takes no more records, or ""."""

    @property
    def waiting(self) -> str:
        """Why it takes no records yet: the disk is full, and each flush tries again; or ""."""

    @property
    def dirty(self) -> bool:
        """Whether records wait for a flush."""

    @property
    def snapshot_due(self) -> bool:
        """Whether the journal has grown enough for a snapshot."""

    def take_slab_id(self) -> int:
        """Return an id that no slab of this store ever had."""

    def add_slab(self, slab: SlabRecord) -> None:
        """A slab's file is there."""

    def drop_slab(self, slab: int) -> None:
        """A slab's file is gone."""

    def commit(self, rows: PageRows) -> None:
        """These pages' bytes stand in their slots."""

    def drop_pages(self, session: int, pages: Sequence[tuple[int, int]]) -> None:
        """These (layer, block) are no longer a session's."""

    def truncate(self, session: int, first_block: int) -> None:
        """A session has no page of blocks >= first_block."""

    def put_session(self, record: SessionRecord) -> None:
        """What a session is now: running or parked, and what its last suspension kept."""

    def drop_session(self, number: int) -> None:
        """A session is gone, with its pages."""

    def forget(self, number: int) -> None:
        """While it waits: make durable that a session is gone, which `drop_session` says next.

        Blocks. Raises StorageFull: it is not; StorageError: it may be.
        """

    def quarantine(self, slab: int, slot: int, reason: str) -> None:
        """A slot is not to be used again."""

    def keep(self, number: int) -> None:
        """What is kept of a session, and durable, is written down a second time.

        Blocks. Raises StorageError: it is durable all the same.
        """

    def flush(self, *, sync: bool = False) -> None:
        """Write what was recorded; with `sync` make it durable. Raises StorageError."""

    def snapshot(self) -> None:
        """Write the whole record anew and free the journal before it. Raises StorageError."""

    @property
    def require_there(self) -> Callable[[], None]:
        """Raises StorageError if somebody removed the records; never waits for the disk."""

    def sessions(self) -> Mapping[int, SessionRecord]:
        """Return the sessions by number."""

    def slabs(self) -> Mapping[int, SlabRecord]:
        """Return the slabs by id."""

    def pages_of(self, session: int) -> PageRows:
        """Return a session's pages by block and layer."""

    def occupancy(self, slab: int) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
        """Return a slab's used slots and their generations."""

    def quarantined(self, slab: int) -> set[int]:
        """Return the slots of a slab that are not to be used."""

    def metadata_bytes(self) -> int:
        """Return the bytes that the record itself takes of the disk."""

    def close(self) -> None:
        """Write what is left. Idempotent."""


class VolatileLedger:
    """Records nothing, finds nothing: what is cold ends with the daemon."""

    durable = False
    failed = ""
    waiting = ""
    dirty = False
    snapshot_due = False
    epoch = 1

    def __init__(self, store_uuid: bytes) -> None:
        self.store_uuid = store_uuid
        self._slab_ids = itertools.count(1)

    def take_slab_id(self) -> int:
        """Return a fresh id."""
        return next(self._slab_ids)

    def _ignore(self, *facts: Any, **options: Any) -> None:
        """Take note of nothing."""

    add_slab = drop_slab = commit = drop_pages = truncate = _ignore
    put_session = drop_session = forget = quarantine = keep = flush = snapshot = close = _ignore
    require_there = _ignore

    def sessions(self) -> dict[int, SessionRecord]:
        """Return none."""
        return {}

    def slabs(self) -> dict[int, SlabRecord]:
        """Return none."""
        return {}

    def pages_of(self, session: int) -> PageRows:
        """Return none."""
        return np.zeros(0, PAGE_ROW)

    def occupancy(self, slab: int) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
        """Return none."""
        none = np.zeros(0, np.uint32)
        return none, none

    def quarantined(self, slab: int) -> set[int]:
        """Return none."""
        return set()

    def metadata_bytes(self) -> int:
        """Return 0."""
        return 0
