"""Unstarted: what a ledger has until this start's segment is there.

A full disk may hold the segment up for days. The superblock can be written all the same, for its
next file is there: with it slab ids are reserved, and sessions are dropped for good.

    drop     in the superblock, durable → its manifest goes → the caller may be told
    begin    segment → every drop is said in it, synced → the caller writes a superblock without
             them, and then what was said meanwhile

The last two are in this order because a session may be kept anew under a number that was dropped:
an old list would take that too. A crash before the superblock leaves the list, which says once
more what the segment says; nothing else is in the segment by then.

Invariants:
  the superblock's epoch stays: a newer one would say that the journal was closed whole
  a session's number is in the list until the journal's own record of its end is durable
  what was said of a session before it was dropped does not follow that record
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tierd.disk.journal import Journal
from tierd.disk.ports import DiskPort
from tierd.disk.records import (
    Kind,
    Record,
    commit_records,
    drop_records,
    pack_records,
    session_records,
    slab_items,
)
from tierd.disk.recovery import Recovered
from tierd.disk.superblock import DROPPED_MAX, write_superblock
from tierd.errors import StorageFull

_OF_ONE_SESSION = (
    Kind.DROP_PAGES, Kind.TRUNCATE, Kind.TOKENS, Kind.SESSION, Kind.DROP_SESSION,
)  # fmt: skip


class Unstarted:
    """What is on the disk, and what has been noted there since. Under the ledger's `_io`."""

    def __init__(self, disk: DiskPort, found: Recovered) -> None:
        self._disk = disk
        self._superblock = found.superblock  # as it is on the disk
        self._recorded = {*found.image.sessions, *found.manifests.sizes}
        self._tail = list(found.tail)
        self._said: set[int] = set()  # drops that this start's segment has, synced
        self.leftovers = found.leftovers

    def reserve_ids(self, slab_limit: int) -> None:
        """Make durable that slab ids below `slab_limit` are spoken for. Raises StorageError."""
        limit = max(slab_limit, self._superblock.slab_limit)
        newer = replace(self._superblock, slab_limit=limit)
        write_superblock(self._disk, newer)
        self._superblock = newer

    def drop(self, number: int) -> None:
        """Make durable that a session is no more. One that is in RAM alone needs nothing.

        Raises StorageFull (the next start has the session as it was), StorageError (whether it
        has is not known until another superblock is written).
        """
        dropped = self._superblock.dropped
        if number not in self._recorded or number in dropped:
            return
        if len(dropped) == DROPPED_MAX:
            raise StorageFull(f"{DROPPED_MAX} sessions are noted as dropped, and no more can be")
        newer = replace(self._superblock, dropped=tuple(sorted({*dropped, number})))
        write_superblock(self._disk, newer)
        self._superblock = newer

    def begin(self, journal: Journal) -> None:
        """Begin the epoch's segment: what may not be durable, then the drops, all synced.

        Raises StorageFull (it may be tried again), StorageError.
        """
        if not journal.begun:
            journal.begin(self._tail)
            self._tail = []
        unsaid = [number for number in self._superblock.dropped if number not in self._said]
        if unsaid:
            journal.append([pack_records([[Kind.DROP_SESSION, number] for number in unsaid])])
            journal.sync()
            self._said.update(unsaid)


def first_words(found: Recovered, part_bytes: int) -> list[Record]:
    """Return what the ledger says first: what recovery has put into the image, and taken out."""
    records: list[Record] = []
    known = found.image.slabs
    for newer in found.manifests.newer:
        records.append([Kind.DROP_SESSION, newer.session.number])
        # A slab that is not known any more is gone: pruning has noted that.
        here = [slab for slab in newer.slabs if slab.slab in known]
        records += [[Kind.SLAB, *slab_items(slab)] for slab in here]
        records += session_records(newer.session, part_bytes)
        records += commit_records(newer.rows, part_bytes)
    pruned = found.pruned
    for session, keys in pruned.drops:
        records += drop_records(session, keys, part_bytes)
    records += [[Kind.DROP_SESSION, session] for session in pruned.orphans]
    for record in pruned.cut:
        records += session_records(record, part_bytes)
    records += [[Kind.TRUNCATE, session, block] for session, block in pruned.truncated]
    records += [[Kind.DROP_SLAB, slab] for slab in pruned.missing_slabs]
    return records


def without_session(records: Sequence[Record], number: int) -> list[Record]:
    """Return records less those that put this session, which is dropped next.

    The rest of it may stay: without the session it names nothing.
    """
    return [
        record
        for record in records
        if record[0] not in (Kind.TOKENS, Kind.SESSION) or record[1] != number
    ]


def without_last_word(records: Sequence[Record], number: int) -> list[Record]:
    """Return records less the last on a session, if it puts it: it is put anew next.

    While nothing can be written, a session that is put again and again has its token ids once.
    """
    own = [
        index
        for index, record in enumerate(records)
        if record[0] in _OF_ONE_SESSION and record[1] == number
    ]
    gone: set[int] = set()
    while own and records[own[-1]][0] == (Kind.TOKENS if gone else Kind.SESSION):
        gone.add(own.pop())
    return [record for index, record in enumerate(records) if index not in gone]
