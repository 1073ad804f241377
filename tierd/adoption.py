"""Adoption: after a restart an engine hands its pages back, and none has to be computed again.

    offer          the engine passes the fds of its warm slabs and of its page table
    inspect        each entry is checked, in a thread: header, digest, place
    Store.adopt    what is right is the session's again, in a new page table

The dead daemon's page table is the record of what was published; the slot's own
header says which page it is and what it must hash to. A warm slot that no
engine has claimed is lent to nobody before the claims end: the engine that it
belongs to may still be reading it.

Invariants:
  an offered fd is the offers' own, closed with the client's connection
  nothing of the store is looked at here: `inspect` may run in any thread
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import numpy as np

from tierd.codec.layout import page_layout
from tierd.disk.header import SlotHeader, verify_slot
from tierd.errors import CodecError, InvalidArgument, PageDamaged
from tierd.index import Page
from tierd.memory.memfd import Mapping, is_sealed_memfd
from tierd.memory.pagetable import PageTableReader, PageTableView
from tierd.types import CodecId, Namespace, Place, SlabRecord, Tier

OFFERS_MAX = 4096  # of one engine: slabs of 64 MiB, 256 GiB of warm


@dataclass(frozen=True, slots=True)
class OfferedSlab:
    """A warm slab that a dead daemon made: `fd` is its memfd."""

    record: SlabRecord
    fd: int


@dataclass(slots=True)
class Offers:
    """What one engine has handed over so far: slabs by id, page tables' fds by session."""

    slabs: dict[int, OfferedSlab] = field(default_factory=dict)
    tables: dict[int, int] = field(default_factory=dict)

    def add_slab(self, record: SlabRecord, fd: int) -> None:
        """Take a slab; `fd` is copied. Raises InvalidArgument if it is another thing."""
        has_slots = record.slots >= 1 and record.slot_bytes >= 1
        if not has_slots or not is_sealed_memfd(fd, record.size_bytes):
            raise InvalidArgument(f"slab {record.slab}: no sealed memfd of its size")
        self._check_room()
        self._drop(self.slabs.pop(record.slab, None))
        self.slabs[record.slab] = OfferedSlab(record, os.dup(fd))

    def add_table(self, session: int, fd: int) -> None:
        """Take a session's page table; `fd` is copied."""
        self._check_room()
        if session in self.tables:
            os.close(self.tables.pop(session))
        self.tables[session] = os.dup(fd)

    def _check_room(self) -> None:
        if len(self.slabs) + len(self.tables) >= OFFERS_MAX:
            raise InvalidArgument(f"more than {OFFERS_MAX} slabs and page tables are offered")

    def _drop(self, slab: OfferedSlab | None) -> None:
        if slab is not None:
            os.close(slab.fd)

    def copy(self) -> Offers:
        """Return the same with fds of its own, for work that may outlast the client."""
        slabs = {n: OfferedSlab(slab.record, os.dup(slab.fd)) for n, slab in self.slabs.items()}
        return Offers(slabs, {number: os.dup(fd) for number, fd in self.tables.items()})

    def close(self) -> None:
        """Close every fd. Idempotent."""
        while self.slabs:
            self._drop(self.slabs.popitem()[1])
        while self.tables:
            os.close(self.tables.popitem()[1])


@dataclass(slots=True)
class Found:
    """What stands behind an old page table: pages by (layer, block). Cold ones have no digest.

    `wrong`: why a page is not the one that the table names. `refused`: why a slab that was
    offered, by id, could not be taken in.
    """

    warm: dict[tuple[int, int], Page] = field(default_factory=dict)
    cold: dict[tuple[int, int], Place] = field(default_factory=dict)
    torn: set[tuple[int, int]] = field(default_factory=set)  # the daemon died writing these
    wrong: dict[tuple[int, int], str] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)


def inspect(
    offers: Offers, session: int, namespace: Namespace, store_uuid: bytes, blocks: int
) -> Found:
    """Check every entry of a session's old page table, up to `blocks`. Blocks: it hashes pages.

    Raises InvalidArgument (no such table offered, or another geometry).
    """
    if session not in offers.tables:
        raise InvalidArgument(f"no page table of session {session:016x} was offered")
    reader = PageTableReader(offers.tables[session])
    try:
        if reader.layers != namespace.geometry.layers or reader.session != session:
            raise InvalidArgument("the page table offered is another session's")
        view, torn = reader.read_left(min(blocks, reader.max_blocks))
    finally:
        reader.close()
    inspector = _Inspector(offers, session, namespace, store_uuid)
    try:
        found = inspector.look(view)
        found.torn = {(layer, block) for layer, block in np.argwhere(torn).tolist()}
        return found
    finally:
        inspector.close()


class _Inspector:
    """One look at one table, with the slabs it needs mapped."""

    def __init__(
        self, offers: Offers, session: int, namespace: Namespace, store_uuid: bytes
    ) -> None:
        self._offers = offers
        self._session = session
        self._namespace = namespace
        self._digest = namespace.digest()
        self._store_uuid = store_uuid
        self._mappings: dict[int, Mapping] = {}

    def look(self, view: PageTableView) -> Found:
        found = Found()
        for layer, block in np.argwhere(view.tier != Tier.NONE).tolist():
            try:
                place = Place(
                    Tier(int(view.tier[layer, block])),
                    CodecId(int(view.codec[layer, block])),
                    *(
                        int(column[layer, block])
                        for column in (view.slab, view.slot, view.generation)
                    ),
                )
                if place.tier is Tier.COLD:
                    found.cold[layer, block] = place
                else:
                    found.warm[layer, block] = Page(place, self._verified(layer, block, place))
            except (PageDamaged, CodecError, InvalidArgument, ValueError) as error:
                found.wrong[layer, block] = str(error)
        return found

    def _verified(self, layer: int, block: int, place: Place) -> bytes:
        """Return the digest of a warm page. Raises PageDamaged, InvalidArgument."""
        layout = page_layout(self._namespace.geometry, place.codec)
        offered = self._offers.slabs.get(place.slab)
        if offered is None or offered.record.slot_bytes != layout.slot_bytes:
            raise InvalidArgument(f"slab {place.slab} was not offered")
        if offered.record.namespace_digest != self._digest or place.slot >= offered.record.slots:
            raise InvalidArgument(f"slab {place.slab} holds no such page")
        expected = SlotHeader(
            store_uuid=self._store_uuid,
            slab=place.slab,
            slot=place.slot,
            generation=place.generation,
            codec=place.codec,
            dtype=self._namespace.geometry.dtype,
            session=self._session,
            layer=layer,
            block=block,
            namespace_digest=self._digest,
            logical_bytes=self._namespace.geometry.page_bytes,
            stored_bytes=layout.payload_bytes,
            payload_digest=b"",
        )
        if place.slab not in self._mappings:
            size_bytes = offered.record.size_bytes
            self._mappings[place.slab] = Mapping(offered.fd, size_bytes, writable=False)
        start = place.slot * layout.slot_bytes
        slot = self._mappings[place.slab].buffer[start : start + layout.slot_bytes]
        with slot:
            return verify_slot(slot, expected).payload_digest

    def close(self) -> None:
        for mapping in self._mappings.values():
            mapping.close()
