"""The life of pages in the warm and cold tiers.

    reserve → commit | abort           a slot gets its page, or is free again
    publish → retire → reclaim         a page is found, is no longer, and its slot is free
    begin_move → finish | abort        a published page is copied to another tier

What reads or writes a slot outside the event loop's thread (an engine that
encodes, a thread that copies) holds the slot: it is not reused under it, even
when the page it is for has gone. A move whose page is dropped meanwhile is an
orphan: it runs to its end, and only then are both its slots freed.

Invariants, per pool:
  resident slots == indexed pages + sources of orphaned moves
  reserved slots == slots of open demotions + destinations of moves
  at most one move per page, and its source is a resident slot
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from tierd.codec.layout import HEADER_BYTES, page_layout
from tierd.disk.header import SlotHeader
from tierd.disk.slabfiles import SlabFiles
from tierd.index import Page
from tierd.memory.epochs import EpochClock
from tierd.memory.slabs import MemfdBacking, SlabIds, SlabPool, SlotRef
from tierd.pools import TierParts, TierPools
from tierd.sessions import Session
from tierd.types import CodecId, PageKey, Place, Tier


@dataclass(slots=True, eq=False)
class Move:
    """A page on its way from `source` to `destination`, the other of warm and cold.

    `warm` is the warm slot's memory (slot_bytes, writable): what a spill reads
    and a promotion fills. `digest` is the index's. Both slots are held until
    `finish_move` or `abort_move`, whatever becomes of the page: `orphaned`.
    """

    key: PageKey
    session: Session
    source: Place
    destination: Place
    digest: bytes
    warm: memoryview
    slot_bytes: int
    orphaned: bool = False


def slot_of(place: Place) -> SlotRef:
    """Return a place's slot."""
    return SlotRef(place.slab, place.slot, place.generation)


class Placement:
    """Both tiers' pools, the pages in them, the moves between them, and the epochs.

    `announce` is called with each new epoch: it goes into every page table,
    after the entries that the epoch before it saw last are gone. `on_new_slab`
    is told of a namespace's new slab before any page in it is published.
    """

    def __init__(
        self,
        warm: TierParts,
        cold: TierParts,
        store_uuid: bytes,
        announce: Callable[[int], None],
    ) -> None:
        assert isinstance(warm.backing, MemfdBacking) and isinstance(cold.backing, SlabFiles)
        ids = SlabIds()
        self.warm_memory = warm.backing
        self.cold_files = cold.backing
        self.pools = {
            Tier.WARM: TierPools(Tier.WARM, warm, ids),
            Tier.COLD: TierPools(Tier.COLD, cold, ids),
        }
        self.store_uuid = store_uuid
        self.epochs = EpochClock()
        self.moving: dict[PageKey, Move] = {}
        self.orphans: set[Move] = set()
        self.on_new_slab: Callable[[bytes, int], None] | None = None
        self._newest_slab = 0
        self._announce = announce

    # -- pools --------------------------------------------------------------------
    def pool(self, tier: Tier, session: Session, codec: CodecId) -> SlabPool:
        """Return the pool of a session's pages of this codec."""
        return self.pools[tier].pool(session.namespace_digest, self.slot_bytes(session, codec))

    def slot_bytes(self, session: Session, codec: CodecId) -> int:
        """Return the bytes of a slot that holds a session's page of this codec."""
        return page_layout(session.namespace.geometry, codec).slot_bytes

    def slab_fd(self, tier: Tier, slab: int) -> int:
        """Return the fd of a slab; the store keeps it."""
        backing = self.warm_memory if tier is Tier.WARM else self.cold_files
        return backing.fd(slab)

    def reserve(self, tier: Tier, session: Session, codec: CodecId, pages: int) -> list[Place]:
        """Reserve a place for each of `pages` pages; all, or none: then the list is empty."""
        slots = self.pools[tier].reserve(self.pool(tier, session, codec), pages)
        new = sorted({ref.slab for ref in slots if ref.slab > self._newest_slab})
        for slab in new:  # ids only rise
            self._newest_slab = slab
            if self.on_new_slab is not None:
                self.on_new_slab(session.namespace_digest, slab)
        return [Place(tier, codec, ref.slab, ref.slot, ref.generation) for ref in slots]

    def release(self, session: Session, places: Iterable[Place]) -> None:
        """Free reserved places at once: nobody writes them any more."""
        for place in places:
            self.pool(place.tier, session, place.codec).abort(slot_of(place))

    def reclaim(self, safe_epoch: int) -> int:
        """Free the slots retired before `safe_epoch`, which every engine has passed."""
        return sum(pools.reclaim(safe_epoch) for pools in self.pools.values())

    def trim(self, namespaces: Collection[bytes]) -> None:
        """Give back the empty slabs of all but these namespaces."""
        for pools in self.pools.values():
            pools.trim(namespaces)

    # -- pages --------------------------------------------------------------------
    def publish(self, session: Session, key: PageKey, place: Place, digest: bytes) -> None:
        """Make a reserved slot with its payload the page's: header, commit, then the index."""
        header = self.header(session, key, place, digest)
        header.pack_into(self._warm_slot(session, place)[:HEADER_BYTES])
        self.pool(place.tier, session, place.codec).commit(slot_of(place))
        session.index.set(key.layer, key.block, Page(place, digest))

    def drop(self, session: Session, keys: Sequence[PageKey]) -> None:
        """Unpublish pages and retire their slots; those being moved become orphans."""
        gone: list[Place] = []
        for key in keys:
            place = session.index.drop(key.layer, key.block).place
            move = self.moving.get(key)
            if move is None:
                gone.append(place)
            else:
                self._orphan(move)
        session.index.bump()
        self._retire(session, gone)

    def _orphan(self, move: Move) -> None:
        del self.moving[move.key]
        move.orphaned = True
        self.orphans.add(move)

    def _retire(self, session: Session, places: Sequence[Place]) -> None:
        if not places:
            return
        epoch = self.epochs.retire()
        for place in places:
            self.pool(place.tier, session, place.codec).retire(slot_of(place), epoch)
        self._announce(self.epochs.now)

    # -- moves --------------------------------------------------------------------
    def begin_move(self, session: Session, key: PageKey, to: Tier) -> Move | None:
        """Reserve the destination and hold both slots; None if `to` has no room.

        The page must be published in the other tier, and not on the move.
        """
        page = session.index.get(key.layer, key.block)
        assert page is not None and page.place.tier is not to, f"{key} cannot move to {to!r}"
        assert key not in self.moving, f"{key} is on the move already"
        places = self.reserve(to, session, page.place.codec, 1)
        if not places:
            return None
        warm_place = page.place if page.place.tier is Tier.WARM else places[0]
        move = Move(
            key=key,
            session=session,
            source=page.place,
            destination=places[0],
            digest=page.digest,
            warm=self._warm_slot(session, warm_place),
            slot_bytes=self.slot_bytes(session, page.place.codec),
        )
        self.moving[key] = move
        return move

    def finish_move(self, move: Move) -> bool:
        """Publish the copied page at its destination and retire the source.

        Returns False, with both slots given back, if the page was dropped meanwhile.
        """
        if move.orphaned:
            self.abort_move(move)
            return False
        del self.moving[move.key]
        session, key = move.session, move.key
        self.pool(move.destination.tier, session, move.destination.codec).commit(
            slot_of(move.destination)
        )
        session.index.set(key.layer, key.block, Page(move.destination, move.digest))
        session.index.bump()
        self._retire(session, [move.source])
        return True

    def abort_move(self, move: Move) -> None:
        """Leave the page where it was; the destination is free again."""
        self.release(move.session, [move.destination])
        if move.orphaned:
            self.orphans.remove(move)
            self._retire(move.session, [move.source])
        else:
            del self.moving[move.key]

    # -- bytes --------------------------------------------------------------------
    def header(self, session: Session, key: PageKey, place: Place, digest: bytes) -> SlotHeader:
        """Return the header of a page's slot at `place`."""
        layout = page_layout(session.namespace.geometry, place.codec)
        return SlotHeader(
            store_uuid=self.store_uuid,
            slab=place.slab,
            slot=place.slot,
            generation=place.generation,
            codec=place.codec,
            dtype=session.namespace.geometry.dtype,
            layer=key.layer,
            block=key.block,
            session=key.session,
            namespace_digest=session.namespace_digest,
            logical_bytes=session.namespace.geometry.page_bytes,
            stored_bytes=layout.payload_bytes,
            payload_digest=digest,
        )

    def _warm_slot(self, session: Session, place: Place) -> memoryview:
        slot_bytes = self.slot_bytes(session, place.codec)
        start = place.slot * slot_bytes
        return self.warm_memory.mapping(place.slab).buffer[start : start + slot_bytes]
