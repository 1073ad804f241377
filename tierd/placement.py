"""The life of pages in the warm and cold tiers.

    reserve → commit | abort           a slot gets its page, or is free again
    publish → retire → reclaim         a page is found, is no longer, and its slot is free
    begin_moves → record → finish | abort  published pages are copied to another tier
    fall_back, drop_backing            a warm page becomes its cold copy, or loses it
    give_back → unfence                a lent slot is free, once nobody can be writing to it

What reads or writes a slot outside the event loop's thread (an engine that
encodes, a thread that copies) holds the slot: it is not reused under it, even
when the page it is for has gone. A move whose page is dropped meanwhile is an
orphan: it runs to its end, and only then are both its slots freed.

A page that came up from cold leaves its cold copy behind, as its backing: sealed
pages never change, so the next spill of it copies nothing. What the ledger is
told here, it is told in the order of the loop's thread, and before it is published.

Invariants, per pool:
  resident slots == indexed pages and backings + sources of orphaned moves
                    + what the ledger keeps for sessions not looked at yet
  reserved slots == slots of open demotions + destinations of moves
  at most one move per page, its source is a resident slot, and the page has no backing
  the ledger has each page that is cold or backed, and each recorded move's
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from tierd.codec.layout import HEADER_BYTES, page_layout
from tierd.disk.header import SlotHeader
from tierd.disk.records import PAGE_ROW
from tierd.disk.slabfiles import SlabFiles
from tierd.disk.volatile import LedgerPort
from tierd.errors import NotFound, StorageError, TierFull
from tierd.index import Page
from tierd.memory.epochs import EpochClock
from tierd.memory.memfd import Mapping
from tierd.memory.slabmemory import MemfdBacking
from tierd.memory.slabs import Runs, SlabPool
from tierd.moves import Move, pool_key
from tierd.pools import TierParts, TierPools
from tierd.sessions import Session
from tierd.types import CodecId, PageKey, Place, SlabRecord, Tier

_GENERATION_MASK = 2**32 - 1


@dataclass(frozen=True, slots=True)
class SlabInfo:
    """One slab as an engine may map it. `fd` belongs to the store: pass it on, never close it."""

    slab: int
    tier: Tier
    slot_bytes: int
    slots: int
    fd: int


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
        ledger: LedgerPort,
        announce: Callable[[int], None],
    ) -> None:
        assert isinstance(warm.backing, MemfdBacking) and isinstance(cold.backing, SlabFiles)
        self.warm_memory = warm.backing
        self.cold_files = cold.backing
        self.pools = {
            Tier.WARM: TierPools(Tier.WARM, warm, ledger),
            Tier.COLD: TierPools(Tier.COLD, cold, ledger),
        }
        self.ledger = ledger
        self.store_uuid = ledger.store_uuid
        self.epochs = EpochClock()
        self.moving: dict[PageKey, Move] = {}
        self.orphans: set[Move] = set()
        self.fenced: dict[int, set[int]] = {}  # by cold slab: lent, given back, still locked
        self.on_new_slab: Callable[[bytes, int], None] | None = None
        self._newest_slab = 0
        self._announce = announce

    # -- pools --------------------------------------------------------------------
    def pool(self, tier: Tier, session: Session, codec: CodecId) -> SlabPool:
        """Return the pool of a session's pages of this codec."""
        return self.pools[tier].pool(session.namespace_digest, self.slot_bytes(session, codec))

    def slot_bytes(self, session: Session, codec: CodecId) -> int:
        """Return the bytes of a slot that holds a session's page of this codec."""
        known = session.slot_sizes.get(codec)  # asked several times a page: hashing costs more
        if known is None:
            known = page_layout(session.namespace.geometry, codec).slot_bytes
            session.slot_sizes[codec] = known
        return known

    def slab_info(self, slab: int, namespaces: Collection[bytes]) -> SlabInfo:
        """Return a slab of one of these namespaces. Raises NotFound."""
        for tier, pools in self.pools.items():
            backing = self.warm_memory if tier is Tier.WARM else self.cold_files
            for pool in pools:
                if pool.namespace_digest in namespaces and slab in pool.slabs():
                    slots = pool.slabs()[slab]
                    return SlabInfo(slab, tier, pool.slot_bytes, slots, backing.fd(slab))
        raise NotFound(f"no slab {slab}")

    def reserve(
        self, tier: Tier, session: Session, codec: CodecId, pages: int, runs: Runs | None = None
    ) -> list[Place]:
        """Reserve a place for each of `pages` pages; all, or none: then the list is empty."""
        slots = self.pools[tier].reserve(self.pool(tier, session, codec), pages, runs)
        new = {ref.slab for ref in slots if ref.slab > self._newest_slab}
        for slab in sorted(new):  # ids only rise
            self._newest_slab = slab
            if self.on_new_slab is not None:
                self.on_new_slab(session.namespace_digest, slab)
        return [Place(tier, codec, ref.slab, ref.slot, ref.generation) for ref in slots]

    def release(self, session: Session, places: Iterable[Place]) -> None:
        """Free reserved places at once: nobody writes them any more."""
        for pool, slots in self._by_pool([(session, place) for place in places]):
            pool.abort(slots)

    def give_back(self, session: Session, places: Iterable[Place]) -> None:
        """As `release`, of places lent to an engine: what it may be writing to stays fenced."""
        for pool, slots in self._by_pool([(session, place) for place in places]):
            locked = {slab: self._locked(slab, pool) for slab in {slot.slab for slot in slots}}
            busy = [slot for slot in slots if slot.slot in locked[slot.slab]]
            pool.abort([slot for slot in slots if slot.slot not in locked[slot.slab]])
            pool.fence(busy)
            for slot in busy:
                self.fenced.setdefault(slot.slab, set()).add(slot.slot)

    def _locked(self, slab: int, pool: SlabPool) -> Collection[int]:
        """Return the slots of a slab that an engine writes to, or may: of a warm one none."""
        is_cold = pool.tier is Tier.COLD
        return self.cold_files.locked_slots(slab, pool.slot_bytes) if is_cold else ()

    def unfence(self) -> None:
        """Let fenced slots be used that nobody writes to any more."""
        if not self.fenced:
            return
        pool_of = {slab: pool for pool in self.pools[Tier.COLD] for slab in pool.slabs()}
        for slab, fenced in list(self.fenced.items()):
            still = fenced.intersection(self._locked(slab, pool_of[slab]))
            pool_of[slab].unfence(slab, sorted(fenced - still))
            self.fenced[slab] = still
        self.fenced = {slab: fenced for slab, fenced in self.fenced.items() if fenced}

    def _by_pool(
        self, placed: Iterable[tuple[Session, Place]]
    ) -> Iterator[tuple[SlabPool, list[Place]]]:
        """Yield runs of places of one pool, in their order."""
        for (_, tier, codec), run in groupby(placed, pool_key):
            together = list(run)
            yield self.pool(tier, together[0][0], codec), [place for _, place in together]

    def reclaim(self, safe_epoch: int) -> int:
        """Free the slots retired before `safe_epoch`, which every engine has passed."""
        return sum(pools.reclaim(safe_epoch) for pools in self.pools.values())

    def restore_slab(self, slab: SlabRecord) -> None:
        """Take in a cold slab of an earlier run with its pages. Raises StorageError, TierFull."""
        self.cold_files.restore(slab)
        used, generations = self.ledger.occupancy(slab.slab)
        bad = self.ledger.quarantined(slab.slab)
        pool = self.pools[Tier.COLD].pool(slab.namespace_digest, slab.slot_bytes)
        # What an engine was lent by the daemon before, and is writing: not quarantined, fenced.
        locked = self.cold_files.locked_slots(slab.slab, slab.slot_bytes)
        fenced = locked.difference(used.tolist(), bad)
        pool.restore(slab, used, generations, bad | fenced, self._generation_floor())
        if fenced:
            self.fenced[slab.slab] = fenced

    def hold_warm_slab(self, slab: SlabRecord, fd: int) -> None:
        """Take in a warm slab that an engine brought, none of its slots free yet.

        Nothing happens if it is here. Raises TierFull (budget), StorageError.
        """
        pool = self.pools[Tier.WARM].pool(slab.namespace_digest, slab.slot_bytes)
        if slab.slab in pool.slabs():
            return
        pool.hold(slab, self._generation_floor(), lambda: self.warm_memory.adopt(slab, fd))

    def _generation_floor(self) -> int:
        # A slot is not written 4,096 times while a store is started once more: each write of
        # it would be 4,096 slabs of it. So the generations of two runs do not meet.
        return (self.ledger.epoch << 12) & _GENERATION_MASK

    def claim_warm(self, session: Session, place: Place) -> bool:
        """Let a held warm slot be a session's page again; say whether it could be."""
        return self.pool(Tier.WARM, session, place.codec).claim(place)

    def release_held(self, namespace_digest: bytes) -> None:
        """Let the warm slots of a namespace be used that no engine has claimed."""
        for pool in self.pools[Tier.WARM]:
            if pool.namespace_digest == namespace_digest:
                pool.release_held()

    def holds_warm(self, namespace_digest: bytes) -> bool:
        """Whether warm slots of a namespace are held: a spill of its pages makes no room yet."""
        pools = self.pools[Tier.WARM]
        return any(p.holds for p in pools if p.namespace_digest == namespace_digest)

    def discard(self, places: Sequence[Place]) -> None:
        """Retire the cold slots of pages that are in no index."""
        pool_of = {slab: pool for pool in self.pools[Tier.COLD] for slab in pool.slabs()}
        epoch = self.epochs.retire()
        for place in places:
            pool_of[place.slab].retire([place], epoch)
        self._announce(self.epochs.now)

    def shut_slab(self, slab: int) -> None:
        """Put no more pages into a cold slab: its disk has failed it."""
        for pool in self.pools[Tier.COLD]:
            if slab in pool.slabs():
                pool.close_slab(slab)

    def trim(self, namespaces: Collection[bytes]) -> None:
        """Give back the empty slabs of all but these namespaces."""
        for pools in self.pools.values():
            pools.trim(namespaces)

    # -- pages --------------------------------------------------------------------
    def publish(
        self, session: Session, key: PageKey, place: Place, digest: bytes,
        device_digest: int | None = None,
    ) -> None:  # fmt: skip
        """Make a reserved slot with its payload the page's: header, commit, then the index.

        A cold slot's header has been written with its payload.
        """
        if place.tier is Tier.WARM:
            header = replace(self.header(session, key, place, digest), device_digest=device_digest)
            header.pack_into(self._warm_slot(session, place)[:HEADER_BYTES])
        self.pool(place.tier, session, place.codec).commit([place])
        session.index.set(key.layer, key.block, Page(place, digest))

    def drop(self, session: Session, keys: Sequence[PageKey]) -> None:
        """Unpublish pages and retire their slots; those being moved become orphans."""
        gone: list[Place] = []
        forgotten: list[PageKey] = []
        for key in keys:
            page = session.index.drop(key.layer, key.block)
            move = self.moving.get(key)
            if any(place.tier is Tier.COLD for place in page.places()) or (move and move.recorded):
                forgotten.append(key)
            if move is None:
                gone.extend(page.places())
            else:
                self._orphan(move)
        session.index.bump()
        self.forget(session, forgotten)
        self._retire(session, gone)

    def _orphan(self, move: Move) -> None:
        del self.moving[move.key]
        move.orphaned = True
        self.orphans.add(move)

    def condemn(self, session: Session, key: PageKey, reason: str) -> None:
        """Drop a cold page whose bytes came back wrong; its slot is never used again."""
        page = session.index.get(key.layer, key.block)
        assert page is not None and page.place.tier is Tier.COLD, f"{key} is not cold: {page}"
        assert key not in self.moving, f"{key} is on the move"
        session.index.drop(key.layer, key.block)
        session.index.bump()
        self.forget(session, [key])
        self._quarantine(session, page.place, reason)

    def _quarantine(self, session: Session, place: Place, reason: str) -> None:
        self.pool(place.tier, session, place.codec).condemn(place)
        self.ledger.quarantine(place.slab, place.slot, reason)

    def fall_back(self, session: Session, key: PageKey) -> None:
        """Spill a warm page to the cold copy that stands behind it: nothing is copied."""
        page = session.index.get(key.layer, key.block)
        assert page is not None and page.backing is not None, f"{key} has nothing behind it"
        session.index.set(key.layer, key.block, Page(page.backing, page.digest))
        session.index.bump()
        self._retire(session, [page.place])

    def drop_backings(
        self, session: Session, need_bytes: float, may_go: Callable[[int, Place], bool]
    ) -> int:
        """Give up cold copies, by block and place, of warm pages; return bytes freed."""
        gone: list[Place] = []
        keys: list[PageKey] = []
        freed_bytes = 0
        for (layer, block), page in list(session.index) if session.index.backed_count else []:
            if freed_bytes >= need_bytes:
                break
            if (copy := page.backing) is not None and may_go(block, copy):
                session.index.set(layer, block, Page(page.place, page.digest))
                freed_bytes += self.slot_bytes(session, page.place.codec)
                gone.append(copy)
                keys.append(PageKey(session.number, layer, block))
        self.forget(session, keys)
        self._retire(session, gone)
        return freed_bytes

    def forget(self, session: Session, keys: Sequence[PageKey]) -> None:
        """Tell the ledger that these pages are no longer in cold."""
        if keys:
            self.ledger.drop_pages(session.number, [(key.layer, key.block) for key in keys])

    def _retire(self, session: Session, places: Sequence[Place]) -> None:
        self._retire_all([(session, place) for place in places])

    def _retire_all(self, places: Sequence[tuple[Session, Place]]) -> None:
        if not places:
            return
        epoch = self.epochs.retire()
        for pool, slots in self._by_pool(places):
            pool.retire(slots, epoch)
        self._announce(self.epochs.now)

    # -- moves --------------------------------------------------------------------
    def begin_moves(
        self, pages: Sequence[tuple[Session, PageKey]], to: Tier, *, keeps_source: bool = False
    ) -> list[Move]:
        """Reserve the destinations and hold both slots, of the first pages that `to` has room for.

        Each must be published in the other tier, without a backing, and not on the move.
        Raises TierFull or StorageError when a slab that the budget allows cannot be made
        and nothing could be begun.
        """
        assert len({key for _, key in pages}) == len(pages), "a page is named twice"
        moves: list[Move] = []
        found = [(session, key, self._movable(session, key, to)) for session, key in pages]
        for _, run in groupby(found, lambda item: pool_key((item[0], item[2].place))):
            together = list(run)
            session, _, page = together[0]
            places = self._reserve_some(
                to, session, page.place.codec, len(together), raises=not moves
            )
            pages_held = [(key, page) for _, key, page in together[: len(places)]]
            moves += self._hold(session, pages_held, places, keeps_source)
            if len(places) < len(together):
                break
        return moves

    def _movable(self, session: Session, key: PageKey, to: Tier) -> Page:
        page = session.index.get(key.layer, key.block)
        assert page is not None and page.place.tier is not to, f"{key} cannot move to {to!r}"
        assert page.backing is None, f"{key} has a copy in {to!r} already"
        assert key not in self.moving, f"{key} is on the move already"
        return page

    def _reserve_some(
        self, to: Tier, session: Session, codec: CodecId, pages: int, *, raises: bool
    ) -> list[Place]:
        """Reserve places for as many of `pages` as there is room for.

        Where a new slab cannot be made, what is free must do; if that is none and `raises`,
        the error is raised.
        """
        pool = self.pool(to, session, codec)
        if not self.pools[to].make_available(pool, pages):
            pages = min(pages, pool.available_slots())
        try:
            return self.reserve(to, session, codec, pages)
        except (StorageError, TierFull):
            free = min(pages, pool.counts().free)
            if free == 0 and raises:
                raise
            return self.reserve(to, session, codec, free)

    def _hold(
        self,
        session: Session,
        pages: Sequence[tuple[PageKey, Page]],
        places: Sequence[Place],
        keeps_source: bool,
    ) -> list[Move]:
        """Put pages of one pool on the move."""
        slot_bytes = self.slot_bytes(session, places[0].codec) if places else 0
        memories: dict[int, Mapping] = {}
        moves = []
        for (key, page), to in zip(pages, places, strict=True):
            source = page.place
            warm = source if source.tier is Tier.WARM else to
            memory = memories.get(warm.slab)
            if memory is None:
                memory = memories[warm.slab] = self.warm_memory.mapping(warm.slab)
            start = warm.slot * slot_bytes
            move = self.moving[key] = Move(
                key, session, source, to, page.digest, memory.buffer[start : start + slot_bytes],
                memory.address + start, slot_bytes, keeps_source,
            )  # fmt: skip
            moves.append(move)
        return moves

    def record(self, moves: Sequence[Move]) -> None:
        """Tell the ledger of pages whose bytes are on disk now; flush it, then finish them."""
        here = [move for move in moves if not move.orphaned]
        for move in here:
            move.recorded = True
        self.record_pages([(move.key, move.destination, move.digest) for move in here])

    def record_pages(self, pages: Sequence[tuple[PageKey, Place, bytes]]) -> None:
        """As `record`, of pages with their cold places and digests."""
        if not pages:
            return
        keys, places, digests = zip(*pages, strict=True)
        rows = np.zeros(len(pages), PAGE_ROW)
        rows["session"], rows["layer"], rows["block"] = zip(*keys, strict=True)
        _, codec, slab, slot, generation = zip(*places, strict=True)
        rows["slab"], rows["slot"], rows["generation"] = slab, slot, generation
        rows["codec"] = codec
        rows["digest"] = np.frombuffer(b"".join(digests), np.uint8).reshape(rows["digest"].shape)
        self.ledger.commit(rows)

    def finish_moves(self, moves: Sequence[Move]) -> list[Move]:
        """Publish copied pages, the sources retired or both places kept; return which.

        Those whose page was dropped meanwhile are not among them: their slots are given back.
        """
        finished: list[Move] = []
        placed: dict[int, dict[tuple[int, int], Page]] = {}
        sources: list[tuple[Session, Place]] = []
        there = [(move.session, move.destination) for move in moves if not move.orphaned]
        for pool, places in self._by_pool(there):
            pool.commit(places)
        for move in moves:
            if move.orphaned:
                self.abort_move(move)
                continue
            del self.moving[move.key]
            (number, layer, block), to = move.key, move.destination
            if to.tier is Tier.WARM:
                page = Page(to, move.digest, move.source)
            elif move.keeps_source:
                page = Page(move.source, move.digest, to)
            else:
                page = Page(to, move.digest)
                sources.append((move.session, move.source))
            if number not in placed:
                placed[number] = {}
            placed[number][layer, block] = page
            finished.append(move)
        for session in {move.session.number: move.session for move in finished}.values():
            session.index.set_all(placed[session.number])
            session.index.bump()
        self._retire_all(sources)
        return finished

    def abort_move(self, move: Move) -> None:
        """Leave the page where it was; the destination is free again."""
        self.release(move.session, [move.destination])
        if move.orphaned:
            self.orphans.remove(move)
            self._retire(move.session, [move.source])
        else:
            del self.moving[move.key]
            if move.recorded:
                self.forget(move.session, [move.key])

    def release_all(self) -> None:
        """Close memory and files, and change nothing in them: engines may still be reading."""
        self.warm_memory.release()
        self.cold_files.close()
        self.epochs.close()

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
