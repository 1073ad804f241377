"""Traffic: pages on the move between warm and cold, and those that leave for good.

The mover asks here what should move, begins it, and reports what came of it.

Invariants:
  a move ends in `finish`, `abort` or `damaged`, once
  a suspended session keeps a prefix without gaps, whatever is lost
  nothing that must outlive the daemon is evicted
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby

from tierd.adoption import Found
from tierd.clock import Clock
from tierd.hints import HintBook
from tierd.index import Page
from tierd.keeping import Keeper
from tierd.memory.slabs import SlabPool
from tierd.moves import Move
from tierd.placement import Placement
from tierd.policy import UNUSED, Candidate, Rank, choose_spills, session_rank
from tierd.sessions import Session, SessionBook
from tierd.types import PageKey, Place, SessionState, Tier
from tierd.units import RUN_BYTES

LOOK_BYTES = 32 << 20  # what the next batches may carry, so that a layer's pages meet


class Traffic:
    """The moves of one store."""

    def __init__(
        self,
        book: SessionBook,
        placement: Placement,
        hints: HintBook,
        keeper: Keeper,
        clock: Clock,
    ) -> None:
        self._book = book
        self._placement = placement
        self._hints = hints
        self._keeper = keeper
        self._clock = clock
        self.counts: Counter[str] = Counter()
        # Told of published pages that are lost, and why; the engine computes them anew.
        self.on_lost: Callable[[Session, Sequence[PageKey], str], None] = lambda *lost: None

    def choose_spills(self, need_bytes: int, below: Rank) -> list[PageKey]:
        """Return warm pages of sessions ranked under `below` whose spill frees `need_bytes`.

        None of a namespace whose slots are held after a restart: they would not be free.
        """
        moving: Collection[PageKey] = self._placement.moving
        digests = {session.namespace_digest for session in self._book}
        held = {digest for digest in digests if self._placement.holds_warm(digest)}
        spillable = [s for s in self._book if s.namespace_digest not in held]
        return choose_spills(map(self._candidate, spillable), need_bytes, below, moving)

    def has_unused(self) -> bool:
        """Return whether warm holds pages of sessions that nobody runs or awaits, to be spilled."""
        return bool(self.choose_spills(1, UNUSED))

    def rank(self, session: Session) -> Rank:
        """Return when a session's pages leave, compared with others'."""
        deadline = self._hints.deadline_of(session.number)
        return session_rank(session.state, session.last_used_seconds, deadline)

    def _candidate(self, session: Session) -> Candidate:
        def page_bytes(layer: int, block: int) -> int:
            page = session.index.get(layer, block)
            assert page is not None
            return self._placement.slot_bytes(session, page.place.codec)

        return Candidate(
            rank=self.rank(session),
            session=session.number,
            blocks=session.index.blocks_in(Tier.WARM),
            layers_of=lambda block: session.index.layers_in(Tier.WARM, block),
            page_bytes=page_bytes,
        )

    def slots_bytes(self, keys: Collection[PageKey]) -> int:
        """Return the bytes of these pages' slots, those below hot."""
        sizes_bytes = 0
        for key in keys:
            session = self._book.find(key.session)
            if page := session.index.get(key.layer, key.block):
                sizes_bytes += self._placement.slot_bytes(session, page.place.codec)
        return sizes_bytes

    def pages_in(self, tier: Tier, session: Session, blocks: Sequence[int]) -> list[PageKey]:
        """Return the pages of `blocks` that are in `tier`, block by block."""
        return [
            PageKey(session.number, layer, block)
            for block in blocks
            for layer in session.index.layers_in(tier, block)
        ]

    def leaving(self, session: Session, blocks: range) -> list[PageKey]:
        """Return the warm pages of `blocks` that a spill under way takes to cold."""
        return [
            key
            for key, move in self._placement.moving.items()
            if key.session == session.number
            and key.block in blocks
            and move.destination.tier is Tier.COLD
            and not move.keeps_source
        ]

    def at_rest(self, keys: Iterable[PageKey]) -> Iterator[PageKey]:
        """Yield those of these pages that are not on the move, as far as asked."""
        return (key for key in keys if key not in self._placement.moving)

    def worth(self, keys: Iterable[PageKey], need_bytes: int) -> list[PageKey]:
        """Return the first of these pages, whose slots are `need_bytes` together or just beyond.

        No more of them are looked at: a session has tens of thousands, and each batch asks.
        """
        chosen: list[PageKey] = []
        if need_bytes <= 0:
            return chosen
        for key in keys:
            chosen.append(key)
            need_bytes -= self.slots_bytes([key])
            if need_bytes <= 0:
                break
        return chosen

    def in_runs(self, keys: Iterable[PageKey]) -> list[PageKey]:
        """Return the first LOOK_BYTES of keys that stand block by block, so that I/Os can be long.

        A layer's pages of the next few blocks of a session follow one another, RUN_BYTES
        together: slots are given out in this order, and a step reads a layer at a time.
        """
        ordered: list[PageKey] = []
        for _, found in groupby(self.worth(keys, LOOK_BYTES), lambda key: key.session):
            pages = list(found)
            # Of the last page, for the first block's are raw.
            blocks_of_run = -(-RUN_BYTES // max(1, self.slots_bytes(pages[-1:])))
            blocks = dict.fromkeys(key.block for key in pages)
            group = {block: number // blocks_of_run for number, block in enumerate(blocks)}
            ordered += sorted(pages, key=lambda key: (group[key.block], key.layer, key.block))
        return ordered

    def by_warm_pool(
        self, session: Session, keys: Iterable[PageKey], limit_bytes: int
    ) -> dict[SlabPool, list[PageKey]]:
        """Return the first of a session's cold pages, to `limit_bytes`, by their warm pool."""
        pools: dict[SlabPool, list[PageKey]] = {}
        for key in self.worth(self.in_runs(keys), limit_bytes):
            page = session.index.get(key.layer, key.block)
            assert page is not None and page.place.tier is Tier.COLD, f"{key} is not cold"
            pool = self._placement.pool(Tier.WARM, session, page.place.codec)
            pools.setdefault(pool, []).append(key)
        return pools

    def begin_moves(
        self, keys: Sequence[PageKey], to: Tier, *, keeps_source: bool = False
    ) -> list[Move]:
        """Hold pages' slots and as many in the other tier, of the first it has room for."""
        pages = [(self._book.find(key.session), key) for key in keys]
        return self._placement.begin_moves(pages, to, keeps_source=keeps_source)

    def fall_back(self, key: PageKey) -> bool:
        """Spill a page at once if its bytes are in cold already; say whether they were."""
        session = self._book.find(key.session)
        page = session.index.get(key.layer, key.block)
        if page is None or page.backing is None:
            return False
        self._placement.fall_back(session, key)
        self.counts["spills"] += 1
        self._hints.page_spilled(key)
        return True

    def record(self, moves: Sequence[Move]) -> None:
        """The bytes are in cold: tell the ledger. A flush goes between this and `finish_moves`."""
        self._placement.record(moves)

    def finish(self, moves: Sequence[Move]) -> None:
        """The bytes are there: publish each page at its new place, unless it has gone."""
        now_seconds = self._clock.monotonic()
        finished = self._placement.finish_moves(moves)
        moved = [move for move in finished if not move.keeps_source]
        self.counts["backups"] += len(finished) - len(moved)
        spilled = [move.key for move in moved if move.destination.tier is Tier.COLD]
        self.counts["spills"] += len(spilled)
        self.counts["promotions"] += len(moved) - len(spilled)
        for key in spilled:
            self._hints.page_spilled(key)
        if len(spilled) < len(moved):
            for move in moved:
                if move.destination.tier is Tier.WARM:
                    self._hints.page_arrived(move.key, now_seconds)

    def abort(self, move: Move) -> None:
        """The bytes are not there; the page stays where it was."""
        self._placement.abort_move(move)
        if move.source.tier is Tier.WARM and not move.orphaned:
            self._hints.page_arrived(move.key, self._clock.monotonic())

    def adopt(self, session: Session, found: Found) -> None:
        """Make a session's pages those of its old page table, as far as they are right.

        What the ledger has of it stands in its index already. A warm page whose bytes are in
        cold too has it behind it; a cold one that the table does not name was given up. A block
        comes back whole or not at all: an engine that has it hot still can then demote it again.
        """
        index = session.index
        given_up = [
            PageKey(session.number, layer, block)
            for (layer, block), page in index
            if (layer, block) not in found.warm
            # A spill is in the ledger before it is in the table: a torn entry was becoming this.
            and (layer, block) not in found.torn
            and found.cold.get((layer, block)) != page.place
        ]
        self._placement.drop(session, given_up)
        for (layer, block), page in found.warm.items():
            if block < session.max_blocks and self._placement.claim_warm(session, page.place):
                behind = index.get(layer, block)
                same = behind is not None and behind.digest == page.digest
                if behind is not None and not same:
                    self._placement.drop(session, [PageKey(session.number, layer, block)])
                backing = behind.place if behind is not None and same else None
                index.set(layer, block, Page(page.place, page.digest, backing))
        self._tell_lost(session, found)
        # A daemon that died while it published a block, or gave one up, left a part of it.
        partial = [block for block in index.blocks_from(0) if not index.holds([block])]
        rest = [PageKey(session.number, layer, b) for b in partial for layer in index.layers_of(b)]
        self._placement.drop(session, rest)
        self.counts["adoptions"] += len(index)

    def _tell_lost(self, session: Session, found: Found) -> None:
        """Say which pages the old table named that are not the session's again."""
        warm = {key: page.place for key, page in found.warm.items()}
        why = dict(found.wrong)
        for key, place in {**warm, **found.cold}.items():
            if session.index.get(*key) is None:
                unclaimed = "its slot is not held for it any more"
                unknown = "the ledger does not have it where the page table names it"
                reason = unclaimed if place.tier is Tier.WARM else unknown
                why[key] = found.refused.get(place.slab, reason)
        lost = [PageKey(session.number, *key) for key in why if session.index.get(*key) is None]
        if lost:
            lost.sort(key=lambda key: (key.block, key.layer))
            self.on_lost(session, lost, why[lost[0].layer, lost[0].block])

    def damaged(self, move: Move) -> None:
        """The source's bytes are not the page's: it is lost, never copied.

        A suspended session keeps a prefix without gaps: it loses the blocks from there on.
        """
        session, key, orphaned = move.session, move.key, move.orphaned
        self._placement.abort_move(move)
        self.counts["corrupt"] += 1
        if orphaned:
            return
        self.on_lost(session, [key], f"its {move.source.tier.name.lower()} bytes are not its own")
        if move.source.tier is Tier.COLD:
            self._placement.condemn(session, key, "read back other than it was written")
            self._hints.page_lost(key, self._clock.monotonic())
        else:
            self.drop_pages(session, [key])
        if session.state is SessionState.SUSPENDED:
            self.drop_from(session, key.block)
            self._keeper.cut(session, key.block)

    def evict(self, need_bytes: int) -> int:
        """Free bytes of cold without losing what must be kept; return how many.

        First go cold copies of pages that are warm, of the most wanted sessions
        first: those stay warm longest. Then, where nothing is durable anyway,
        the newest blocks of the least wanted suspended sessions, which resume
        with those before them and their token ids.
        """
        freed_bytes = 0
        for session in sorted(self._book, key=self.rank, reverse=True):
            if session.state is not SessionState.SUSPENDED and freed_bytes < need_bytes:
                kept = session.sealed_blocks if session.kept and self._keeper.durable else 0
                may_go = partial(_is_from, kept)
                freed_bytes += self._placement.drop_backings(
                    session, need_bytes - freed_bytes, may_go
                )
        if self._keeper.durable:
            return freed_bytes
        suspended = [s for s in self._book if s.state is SessionState.SUSPENDED]
        for session in sorted(suspended, key=self.rank):
            while freed_bytes < need_bytes and session.sealed_blocks:
                block = session.sealed_blocks - 1
                for _, place in session.pages_from(block):
                    freed_bytes += self._placement.slot_bytes(session, place.codec)
                self.counts["evictions"] += self.drop_from(session, block)
                self._keeper.cut(session, block)
        return freed_bytes

    def drop_from(self, session: Session, first_block: int) -> int:
        """Drop a session's pages of blocks >= first_block; return how many."""
        keys = [key for key, _ in session.pages_from(first_block)]
        self.drop_pages(session, keys)
        return len(keys)

    def drop_pages(self, session: Session, keys: Sequence[PageKey]) -> None:
        """Drop these pages."""
        self._placement.drop(session, keys)
        for key in keys:
            self._hints.page_lost(key, self._clock.monotonic())


def _is_from(first_block: int, block: int, _copy: Place) -> bool:
    return block >= first_block
