"""The store: what is kept, where, for whom. Synchronous; one thread, the daemon's loop, calls it.

It puts together the sessions, the life of pages (placement.py), the slots lent
to engines (demotions.py) and the hints (hints.py). It never waits and does no
I/O: the mover copies between tiers in threads and reports back through
`begin_move`, `finish_move`, `abort_move` and `damaged`.

Invariants:
  a session in RUNNING or IDLE has a registered engine; a SUSPENDED one has none
  each slot of a tier is free, retired, a page's, a lent demotion's, or a move's
  what an engine holds ends with it: sessions, demotions, epoch
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from tierd import census
from tierd.clock import Clock
from tierd.demotions import Demotion, DemotionPlan, Demotions, RoomNeeded, split_digests
from tierd.errors import (
    BudgetTooSmall,
    InvalidArgument,
    LayoutMismatch,
    NotFound,
    PageMiss,
    StaleGeneration,
    TierFull,
)
from tierd.hints import DEADLINE_SECONDS_MAX, Hint, HintBook, Wish
from tierd.memory.memfd import Mapping
from tierd.placement import Move, Placement
from tierd.policy import Candidate, Rank, choose_spills, choose_victims, session_rank
from tierd.pools import TierParts
from tierd.sessions import Session, SessionBook
from tierd.types import CodecId, Namespace, PageKey, Place, SessionState, Tier

# A decode step takes at most about a second; an engine silent for five is between requests.
IDLE_SECONDS = 5.0
TOKEN_BYTES = 4  # token ids are uint32


@dataclass(frozen=True, slots=True)
class SlabInfo:
    """One slab as an engine may map it. `fd` belongs to the store: pass it on, never close it."""

    slab: int
    tier: Tier
    slot_bytes: int
    slots: int
    fd: int


class Store:
    """Sessions, pages, demotions, hints and epochs of one daemon.

    `warm` needs a MemfdBacking, `cold` a SlabFiles. `new_number` makes session ids.
    """

    def __init__(
        self,
        *,
        warm: TierParts,
        cold: TierParts,
        store_uuid: bytes,
        clock: Clock,
        new_number: Callable[[], int] = lambda: secrets.randbits(64),
    ) -> None:
        self.placement = Placement(warm, cold, store_uuid, self._announce)
        self.hints = HintBook()
        self.clock = clock
        self.engines: dict[int, int] = {}  # engine id → pid
        self.book = SessionBook(new_number)
        self.demotions = Demotions()
        self.counts: Counter[str] = Counter()

    # -- engines ------------------------------------------------------------------
    def register_engine(self, engine_id: int, pid: int, epoch_page: Mapping) -> None:
        """Let an engine take part. `epoch_page`, which it writes, is the store's to close."""
        assert engine_id not in self.engines, f"engine {engine_id} is registered twice"
        self.engines[engine_id] = pid
        self.placement.epochs.add_engine(engine_id, epoch_page)

    def drop_engine(self, engine_id: int) -> None:
        """Forget a dead engine and free all it held; suspended sessions stay.

        Call it only when the process is gone or has promised to touch no slot
        any more. Unknown ids are ignored: a death is often seen twice.
        """
        if self.engines.pop(engine_id, None) is None:
            return
        self.placement.epochs.drop_engine(engine_id)
        for session in self.book.of_engine(engine_id):
            self.close_session(session.number, engine_id=engine_id)
        for demotion in [d for d in self.demotions if d.engine_id == engine_id]:
            self._release(demotion)
        self.reclaim()

    # -- sessions -----------------------------------------------------------------
    def open_session(self, engine_id: int, namespace: Namespace, max_tokens: int) -> Session:
        """Raises NotFound (engine), InvalidArgument (size), TierFull (too many sessions)."""
        self._check_engine(engine_id)
        session = self.book.new(namespace, self.clock.monotonic())
        session.give(engine_id, max_tokens, self.placement.epochs.now)
        self.book.add(session)
        return session

    def resume_session(
        self, engine_id: int, number: int, namespace: Namespace, max_tokens: int
    ) -> Session:
        """Give a suspended session to an engine, every page published in a new page table.

        Its `token_ids` and `sealed_blocks` say what it holds. Raises NotFound,
        LayoutMismatch (another namespace), StaleGeneration (not suspended),
        InvalidArgument (size).
        """
        session = self.session(number)
        if session.state is not SessionState.SUSPENDED:
            raise StaleGeneration(f"session {session.id} is {session.state}, not suspended")
        if namespace.digest() != session.namespace_digest:
            raise LayoutMismatch(f"session {session.id} holds KV of another namespace")
        self._check_engine(engine_id)
        session.give(engine_id, max_tokens, self.placement.epochs.now)
        self._touch(session)
        self.hints.session_used(number)
        return session

    def suspend_session(
        self, engine_id: int, number: int, token_ids: bytes, sealed_blocks: int
    ) -> None:
        """Keep a session without its engine: its first `sealed_blocks` blocks and token ids.

        All pages of these blocks must be committed; later blocks are dropped.
        `token_ids`: uint32 little endian, at least those of the sealed blocks.
        Raises NotFound, InvalidArgument, PageMiss (names the first page missing).
        """
        session = self.session(number, engine_id=engine_id)
        tokens, rest = divmod(len(token_ids), TOKEN_BYTES)
        if rest or tokens > session.max_blocks * session.block_tokens:
            raise InvalidArgument(f"suspend: {len(token_ids)} bytes of token ids do not fit")
        if not 0 <= sealed_blocks * session.block_tokens <= tokens:
            raise InvalidArgument(f"suspend: {sealed_blocks} blocks sealed of {tokens} tokens")
        for block in range(sealed_blocks):
            missing = set(range(session.layers)) - set(session.index.layers_of(block))
            if missing:
                layer = min(missing)
                raise PageMiss(
                    f"suspend: layer {layer} of block {block} is not below hot",
                    layer=layer,
                    block=block,
                )
        self._drop_from(session, sealed_blocks)
        session.token_ids = bytes(token_ids)
        session.sealed_blocks = sealed_blocks
        session.last_used_seconds = self.clock.monotonic()
        for demotion in self.demotions.of_session(session):
            self._release(demotion)
        session.take_back(SessionState.SUSPENDED)

    def close_session(self, number: int, *, engine_id: int | None = None) -> None:
        """Drop a session and all it holds; `engine_id` None is an operator, who may close any.

        Raises NotFound, also when another engine owns it.
        """
        session = self.session(number, engine_id=engine_id)
        if engine_id is None:
            self.demotions.revoke_blocks(session, 0)  # its engine lives, and may be writing
        else:
            for demotion in self.demotions.of_session(session):
                self._release(demotion)
        self._drop_from(session, 0)
        session.take_back(SessionState.CLOSED)
        self.book.remove(session)
        self.hints.session_closed(number)
        self.reclaim()

    def truncate(
        self, engine_id: int, number: int, first_block: int, *, damaged_layer: int | None = None
    ) -> int:
        """Drop all pages of blocks >= first_block; return how many.

        `damaged_layer`: the engine found that page of `first_block` damaged; it
        is counted. Demotions of these blocks are revoked. Raises NotFound, InvalidArgument.
        """
        session = self.session(number, engine_id=engine_id)
        if not 0 <= first_block <= session.max_blocks:
            raise InvalidArgument(f"truncate: block {first_block} is out of range")
        if damaged_layer is not None and session.index.get(damaged_layer, first_block):
            self.counts["corrupt"] += 1
        self._touch(session)
        self.demotions.revoke_blocks(session, first_block)
        return self._drop_from(session, first_block)

    def session(self, number: int, *, engine_id: int | None = None) -> Session:
        """Return a session. Raises NotFound, also when it is not `engine_id`'s."""
        return self.book.find(number, engine_id)

    def sessions(self) -> list[Session]:
        """Return all sessions, oldest first."""
        return list(self.book)

    # -- demotion -----------------------------------------------------------------
    def plan_demotion(
        self,
        engine_id: int,
        number: int,
        hot_blocks: Sequence[int],
        need_blocks: int,
        *,
        codec: CodecId | None = None,
        include_first: bool = False,
    ) -> DemotionPlan:
        """Lend warm slots for up to `need_blocks` of `hot_blocks`, at least one.

        Block 0 (the attention sinks) goes only with `include_first`, always raw.
        `codec` overrides the namespace's: RAW for pages that it cannot encode.
        Raises RoomNeeded when not one block fits now, BudgetTooSmall when it never
        can, InvalidArgument when there is nothing to demote, NotFound, TierFull.
        """
        session = self.session(number, engine_id=engine_id)
        own = session.namespace.codec
        if codec not in (None, own, CodecId.RAW):
            raise InvalidArgument(f"codec must be {own.name} or RAW here")
        if need_blocks < 1 or not all(0 <= b < session.max_blocks for b in hot_blocks):
            raise InvalidArgument("plan_demotion: a block or the count is out of range")
        self.demotions.admit(engine_id)
        self._touch(session)
        lent = self.demotions.blocks_of(session)
        below = {block for block in hot_blocks if block in lent or session.index.layers_of(block)}
        victims = choose_victims(hot_blocks, need_blocks, below, include_first=include_first)
        if not victims:
            raise InvalidArgument("plan_demotion: none of these blocks can be demoted")
        chosen: dict[int, list[Place]] = {}
        for block in victims:
            page_codec = CodecId.RAW if block == 0 else codec or own
            places = self.placement.reserve(Tier.WARM, session, page_codec, session.layers)
            if not places:
                break
            chosen[block] = places
        if not chosen:
            first_codec = CodecId.RAW if victims[0] == 0 else codec or own
            raise self._no_room(session, first_codec, len(victims))
        return self.demotions.lend(engine_id, session, chosen, self.clock.monotonic())

    def _no_room(self, session: Session, codec: CodecId, blocks: int) -> TierFull | BudgetTooSmall:
        pool = self.placement.pool(Tier.WARM, session, codec)
        warm_slots = self.placement.pools[Tier.WARM].slots_max(pool.slot_bytes)
        if warm_slots < session.layers:
            smallest_bytes = session.layers * pool.slot_bytes
            return BudgetTooSmall(
                f"the warm tier cannot hold one block: it needs {smallest_bytes} bytes",
                smallest_bytes=smallest_bytes,
            )
        # A quarter of warm at most, so that one plan does not turn the whole tier over.
        blocks = min(blocks, max(1, warm_slots // session.layers // 4))
        return RoomNeeded("the warm tier is full", pool=pool, slots=blocks * session.layers)

    def commit(self, engine_id: int, reservation: int, digests: bytes) -> None:
        """Publish a plan's pages. `digests`: 16 bytes (xxh3-128 of the payload) a page, in order.

        Raises InvalidArgument (length; the plan stays open), StaleGeneration
        (unknown or used; or expired or revoked: its slots are free now).
        """
        demotion = self.demotions.find(engine_id, reservation)
        plan, session = demotion.plan, demotion.session
        page_digests = split_digests(plan, digests)
        if demotion.revoked:
            self._release(demotion)
            raise StaleGeneration(f"demotion {reservation} was revoked; its pages are not kept")
        self.demotions.settle(demotion)
        for (key, place), digest in zip(plan.pages(), page_digests, strict=True):
            self.placement.publish(session, key, place, digest)
        session.index.bump()
        self._touch(session)
        self.counts["demotions"] += len(page_digests)

    def abort(self, engine_id: int, reservation: int) -> None:
        """Give a plan's slots back: the engine writes them no more. Raises StaleGeneration."""
        self._release(self.demotions.find(engine_id, reservation))

    def engines_of(self, namespace_digest: bytes) -> set[int]:
        """Return the engines that have a session in a namespace."""
        owners = (s.engine_id for s in self.book if s.namespace_digest == namespace_digest)
        return {engine_id for engine_id in owners if engine_id is not None}

    def slab_for(self, engine_id: int, slab: int) -> SlabInfo:
        """Return a slab of a namespace in which this engine has a session. Raises NotFound."""
        mine = {session.namespace_digest for session in self.book.of_engine(engine_id)}
        for tier, pools in self.placement.pools.items():
            for pool in pools:
                if pool.namespace_digest in mine and slab in pool.slabs():
                    fd = self.placement.slab_fd(tier, slab)
                    return SlabInfo(slab, tier, pool.slot_bytes, pool.slabs()[slab], fd)
        raise NotFound(f"no slab {slab}")

    # -- hints --------------------------------------------------------------------
    def hint(
        self,
        client_id: str,
        number: int,
        *,
        deadline_seconds: float,
        first_token: int = 0,
        last_token: int | None = None,
        confidence: float = 1.0,
        priority: int = 0,
    ) -> Hint:
        """Ask for the cold pages of tokens first_token to last_token (inclusive; None: all).

        `deadline_seconds` from now. The hint's `awaited` pages are those to move.
        Raises NotFound, InvalidArgument (also for a running session: its pages
        are wanted anyway), TierFull (limits).
        """
        session = self.session(number)
        if session.state is SessionState.RUNNING:
            raise InvalidArgument(f"session {session.id} is running: a hint cannot help it")
        if not 0.0 < deadline_seconds <= DEADLINE_SECONDS_MAX:
            raise InvalidArgument(f"hint: the deadline must be 0 to {DEADLINE_SECONDS_MAX:g} s")
        if first_token < 0 or (last_token is not None and last_token < first_token):
            raise InvalidArgument(f"hint: tokens {first_token} to {last_token} are no range")
        now_seconds = self.clock.monotonic()
        self.hints.admit(client_id, now_seconds)
        end = session.max_blocks if last_token is None else last_token // session.block_tokens + 1
        first = first_token // session.block_tokens
        wish = Wish(
            client_id, number, first, end, now_seconds + deadline_seconds, confidence, priority
        )
        blocks = [b for b in session.index.blocks_in(Tier.COLD) if first <= b < end]
        return self.hints.open(wish, self.pages_in(Tier.COLD, session, blocks), now_seconds)

    def cancel_hint(self, client_id: str, hint_id: int) -> None:
        """Raises NotFound (unknown, settled, or another client's)."""
        self.hints.cancel(client_id, hint_id)

    def drop_client(self, client_id: str) -> None:
        """Cancel a departed client's open hints and forget its score."""
        self.hints.drop_client(client_id)

    # -- moves: for the mover -------------------------------------------------------
    def choose_spills(self, need_bytes: int, below: Rank) -> list[PageKey]:
        """Return warm pages of sessions ranked under `below` whose spill frees `need_bytes`."""
        moving: Collection[PageKey] = self.placement.moving
        return choose_spills(map(self._candidate, self.book), need_bytes, below, moving)

    def rank(self, session: Session) -> Rank:
        """Return when a session's pages leave, compared with others'."""
        deadline = self.hints.deadline_of(session.number)
        return session_rank(session.state, session.last_used_seconds, deadline)

    def _candidate(self, session: Session) -> Candidate:
        def page_bytes(layer: int, block: int) -> int:
            page = session.index.get(layer, block)
            assert page is not None
            return self.placement.slot_bytes(session, page.place.codec)

        return Candidate(
            rank=self.rank(session),
            session=session.number,
            blocks=session.index.blocks_in(Tier.WARM),
            layers_of=lambda block: session.index.layers_in(Tier.WARM, block),
            page_bytes=page_bytes,
        )

    def pages_in(self, tier: Tier, session: Session, blocks: Sequence[int]) -> list[PageKey]:
        """Return the pages of `blocks` that are in `tier`, block by block."""
        return [
            PageKey(session.number, layer, block)
            for block in blocks
            for layer in session.index.layers_in(tier, block)
        ]

    def begin_move(self, key: PageKey, to: Tier) -> Move | None:
        """Hold a page's slot and one in the other tier; None if that has no room."""
        return self.placement.begin_move(self.session(key.session), key, to)

    def finish_moves(self, moves: Sequence[Move]) -> None:
        """The bytes are there: publish each page at its new place, unless it has gone."""
        now_seconds = self.clock.monotonic()
        for move in moves:
            if not self.placement.finish_move(move):
                continue
            if move.destination.tier is Tier.COLD:
                self.counts["spills"] += 1
                self.hints.page_spilled(move.key)
            else:
                self.counts["promotions"] += 1
                self.hints.page_arrived(move.key, now_seconds)

    def abort_move(self, move: Move) -> None:
        """The bytes are not there; the page stays where it was."""
        self.placement.abort_move(move)

    def damaged(self, move: Move) -> None:
        """The source's bytes are not the page's: it is lost, never copied.

        A suspended session keeps a prefix without gaps: it loses the blocks from there on.
        """
        session, key, orphaned = move.session, move.key, move.orphaned
        self.placement.abort_move(move)
        self.counts["corrupt"] += 1
        if orphaned:
            return
        if session.state is SessionState.SUSPENDED:
            self._drop_from(session, key.block)
            session.sealed_blocks = key.block
        else:
            self._drop_pages(session, [key])

    def evict(self, need_bytes: int) -> int:
        """Drop the newest blocks of the least wanted suspended sessions; return bytes freed.

        The last resort when cold is full. A session that lost blocks resumes
        with those before them and its token ids.
        """
        suspended = [s for s in self.book if s.state is SessionState.SUSPENDED]
        freed_bytes = 0
        for session in sorted(suspended, key=self.rank):
            while freed_bytes < need_bytes and session.sealed_blocks:
                session.sealed_blocks -= 1
                block = session.sealed_blocks
                for _, place in session.pages_from(block):
                    freed_bytes += self.placement.slot_bytes(session, place.codec)
                self.counts["evictions"] += self._drop_from(session, block)
        return freed_bytes

    # -- house ----------------------------------------------------------------------
    def tick(self) -> None:
        """Notice activity and idleness, expire what is overdue, reclaim. Often, but not hot."""
        now_seconds = self.clock.monotonic()
        for engine_id in self.engines:
            if self.placement.epochs.active(engine_id):
                for session in self.book.of_engine(engine_id):
                    self._touch(session)
        for session in self.book:
            silent_seconds = now_seconds - session.last_used_seconds
            if session.state is SessionState.RUNNING and silent_seconds >= IDLE_SECONDS:
                session.state = SessionState.IDLE
        self.counts["expired"] += self.demotions.expire(now_seconds)
        self.hints.expire(now_seconds)
        self.reclaim()

    def reclaim(self) -> None:
        """Free retired slots, and the slabs of namespaces that have no session."""
        safe_epoch = self.placement.epochs.safe_epoch()
        for session in self.book:
            if session.table is not None:
                # First: an engine that was taken for dead must see it before its bytes change.
                session.table.set_reclaimed(safe_epoch)
        self.placement.reclaim(safe_epoch)
        self.placement.trim({session.namespace_digest for session in self.book})

    def stats(self) -> dict[str, Any]:
        """Return counts and bytes as plain values; census.py has the shape."""
        return census.stats(self)

    def check_integrity(self) -> None:
        """Raise AssertionError, terms printed, if a page, slot or byte is unaccounted for."""
        census.check_integrity(self)

    def close(self) -> None:
        """Drop engines, sessions, slabs: all but the slots of a hung copy. Idempotent."""
        for engine_id in list(self.engines):
            self.drop_engine(engine_id)
        for session in self.book:
            self.close_session(session.number)
        self.reclaim()

    def _announce(self, epoch: int) -> None:
        for session in self.book:
            if session.table is not None:
                session.table.set_epoch(epoch)

    def _check_engine(self, engine_id: int) -> None:
        if engine_id not in self.engines:
            raise NotFound(f"no engine {engine_id}")

    def _touch(self, session: Session) -> None:
        session.last_used_seconds = self.clock.monotonic()
        if session.state is SessionState.IDLE:
            session.state = SessionState.RUNNING
            self.hints.session_used(session.number)

    def _release(self, demotion: Demotion) -> None:
        self.demotions.settle(demotion)
        self.placement.release(demotion.session, [place for _, place in demotion.plan.pages()])

    def _drop_from(self, session: Session, first_block: int) -> int:
        keys = [key for key, _ in session.pages_from(first_block)]
        self._drop_pages(session, keys)
        return len(keys)

    def _drop_pages(self, session: Session, keys: Sequence[PageKey]) -> None:
        self.placement.drop(session, keys)
        for key in keys:
            self.hints.page_lost(key, self.clock.monotonic())
