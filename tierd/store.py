"""The store: what is kept, where, for whom. Synchronous; one thread, the daemon's loop, calls it.

It puts together the sessions, what is kept of them (keeping.py), the life of
pages (placement.py), the slots lent to engines (loans.py) and the hints
(hints.py). It never waits and does no I/O: the mover copies between tiers and
flushes the ledger in threads, and reports back to `traffic` (traffic.py).

Invariants:
  a session in RUNNING or IDLE has a registered engine; a SUSPENDED one has none
  an engine's death, or its close, takes nothing that a suspension kept
  each slot of a tier is free, retired, a page's, a lent demotion's, or a move's
  what an engine holds ends with it: sessions, demotions, epoch
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any

from tierd import census
from tierd.adoption import Found
from tierd.clock import Clock
from tierd.demotions import Demotion, DemotionPlan
from tierd.disk.volatile import LedgerPort
from tierd.errors import (
    InvalidArgument,
    LayoutMismatch,
    NotFound,
    StaleGeneration,
    TierdError,
)
from tierd.hints import DEADLINE_SECONDS_MAX, Hint, HintBook, Wish
from tierd.keeping import Keeper
from tierd.loans import Loans
from tierd.memory.memfd import Mapping
from tierd.placement import Placement, SlabInfo
from tierd.pools import TierParts
from tierd.sessions import Session, SessionBook
from tierd.traffic import Traffic
from tierd.types import CodecId, Namespace, PageKey, SessionState, Tier

# A decode step takes at most about a second; an engine silent for five is between requests.
IDLE_SECONDS = 5.0


class Store:
    """Sessions, pages, demotions, hints and epochs of one daemon.

    `warm` needs a MemfdBacking, `cold` a SlabFiles with this `ledger`. `new_number` makes
    session ids. What the ledger has from earlier runs is taken in at once.
    """

    def __init__(
        self,
        *,
        warm: TierParts,
        cold: TierParts,
        ledger: LedgerPort,
        clock: Clock,
        new_number: Callable[[], int] = lambda: secrets.randbits(64),
    ) -> None:
        self.ledger = ledger
        self.placement = Placement(warm, cold, ledger, self._announce)
        self.hints = HintBook()
        self.clock = clock
        self.engines: dict[int, int] = {}  # engine id → pid
        self.book = SessionBook(new_number)
        self.keeper = Keeper(self.book, self.placement, ledger, clock)
        self.keeper.restore()
        self.traffic = Traffic(self.book, self.placement, self.hints, self.keeper, clock)
        self.counts = self.traffic.counts
        self.loans = Loans(self.placement, self.keeper, self.clock, self.counts, self._touch)
        self.demotions = self.loans.demotions
        self.troubles: dict[str, str] = {}  # what fails just now, and why: for `stats`

    # -- engines ------------------------------------------------------------------
    def register_engine(self, engine_id: int, pid: int, epoch_page: Mapping) -> None:
        """Let an engine take part. `epoch_page`, which it writes, is the store's to close."""
        assert engine_id not in self.engines, f"engine {engine_id} is registered twice"
        self.engines[engine_id] = pid
        self.placement.epochs.add_engine(engine_id, epoch_page)

    def drop_engine(self, engine_id: int) -> None:
        """Forget a dead engine and free all it held; what was kept of its sessions stays.

        Call it only when the process is gone or has promised to touch no slot
        any more. Unknown ids are ignored: a death is often seen twice.
        """
        if self.engines.pop(engine_id, None) is None:
            return
        self.placement.epochs.drop_engine(engine_id)
        for session in self.book.of_engine(engine_id):
            self.close_session(session.number, engine_id=engine_id)
        for demotion in [d for d in self.demotions if d.engine_id == engine_id]:
            self.loans.release(demotion)
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
            fields = ", ".join(namespace.differing(session.namespace))
            raise LayoutMismatch(
                f"session {session.id} holds KV of another namespace: it differs in {fields}"
            )
        self._check_engine(engine_id)
        self.keeper.wake(session)
        session.give(engine_id, max_tokens, self.placement.epochs.now)
        self.keeper.on_disk(session)
        self.keeper.record(session)
        self._touch(session)
        self.hints.session_used(number)
        return session

    def adopt_session(
        self, engine_id: int, number: int, namespace: Namespace, max_tokens: int, found: Found
    ) -> Session:
        """Give a session of a dead daemon back to its engine, with the pages that are right.

        Warm ones are those whose held slots can still be claimed, cold ones those that the
        ledger has at the same place. Raises NotFound (engine), StaleGeneration (another
        engine has the session, or the claims are over), LayoutMismatch, InvalidArgument.
        """
        self._check_engine(engine_id)
        if not self.keeper.claims_open:
            raise StaleGeneration("the time to hand pages back after a restart is over")
        claimed = self.keeper.unclaimed.get(number)
        if claimed is None and number in {session.number for session in self.book}:
            raise StaleGeneration(f"session {number:016x} is not waiting for its engine")
        if claimed is not None and claimed.namespace_digest != namespace.digest():
            raise LayoutMismatch(f"session {number:016x} holds KV of another namespace")
        session = self.keeper.claim(number)
        if session is None:
            session = self.book.new(namespace, self.clock.monotonic(), number)
        if not session.kept:
            self.book.add(session)
        session.give(engine_id, max_tokens, self.placement.epochs.now)
        self.traffic.adopt(session, found)
        self.keeper.release_held(session.namespace_digest)
        self.keeper.record(session)
        self._touch(session)
        return session

    def begin_suspend(
        self, engine_id: int, number: int, token_ids: bytes, sealed_blocks: int
    ) -> Session:
        """Note what is to be kept of a session: `sealed_blocks` blocks and its token ids.

        All pages of these blocks must be committed; later blocks are dropped.
        `token_ids`: uint32 little endian, at least those of the sealed blocks.
        Call `settle_suspend` once nothing of it is in RAM alone, and `finish_suspend` when a flush
        with `sync` has returned since; a store that is not durable may do this one at once. Until
        it is settled, the session is still kept as it was before, if it was.
        Raises NotFound, InvalidArgument, PageMiss (names the first page missing).
        """
        session = self.session(number, engine_id=engine_id)
        session.check_suspendable(token_ids, sealed_blocks)
        for demotion in self.demotions.of_session(session):
            self.loans.release(demotion)
        self.keeper.cut(session, sealed_blocks)
        self.traffic.drop_from(session, sealed_blocks)
        if session.kept and session.kept_before is None:
            session.kept_before = session.token_ids, session.sealed_blocks
        session.settled = False
        session.keep(token_ids, sealed_blocks)
        self.keeper.record(session)
        self._touch(session)
        return session

    def settle_suspend(self, session: Session) -> None:
        """All pages are on disk: from the next flush on, what was kept before is no more."""
        session.settled = True
        self.keeper.record(session)

    def finish_suspend(self, session: Session) -> None:
        """Take the session from its engine."""
        session.kept_before, session.settled = None, False
        session.last_used_seconds = self.clock.monotonic()
        for demotion in self.demotions.of_session(session):
            self.loans.release(demotion)
        session.take_back(SessionState.SUSPENDED)
        self.keeper.note_ram_only(session)
        self.keeper.record(session)

    def close_session(
        self, number: int, *, engine_id: int | None = None, discard: bool = False
    ) -> None:
        """End a session. What was kept of it stays, unless `discard` or by an operator.

        `engine_id` None is an operator, who may close any. Raises NotFound, also
        when another engine owns it.
        """
        session = self.session(number, engine_id=engine_id)
        if engine_id is None:
            self.loans.revoke(session, 0)  # its engine lives, and may be writing
        else:
            for demotion in self.demotions.of_session(session):
                self.loans.release(demotion)
        if session.kept and engine_id is not None and not discard:
            self._keep_again(session)
            return
        self.keeper.wake(session)
        self.keeper.on_disk(session)
        self.traffic.drop_from(session, 0)
        self.ledger.drop_session(session.number)
        session.take_back(SessionState.CLOSED)
        self.book.remove(session)
        self.hints.session_closed(number)
        self.reclaim()

    def _keep_again(self, session: Session) -> None:
        """Make a resumed session what its last suspension kept, if need be the one before."""
        if session.kept_before is not None:
            session.keep(*session.kept_before)
            session.kept_before, session.settled = None, False
        blocks = self.keeper.whole_blocks(session)
        self.keeper.cut(session, blocks)
        self.traffic.drop_from(session, blocks)
        self.finish_suspend(session)

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
        self._touch(session)
        condemned = damaged_layer is not None and self._found_damaged(
            session, damaged_layer, first_block
        )
        self.keeper.cut(session, first_block)
        self.loans.revoke(session, first_block)
        return self.traffic.drop_from(session, first_block) + condemned

    def _found_damaged(self, session: Session, layer: int, block: int) -> bool:
        """Count a page that an engine found damaged; say whether it is dropped with its slot."""
        page = session.index.get(layer, block)
        key = PageKey(session.number, layer, block)
        if page is None:
            self.traffic.on_lost(session, [key], "an engine needs it, and it is in no tier")
            return False
        self.counts["corrupt"] += 1
        self.traffic.on_lost(session, [key], "an engine read other bytes than were written")
        if page.place.tier is not Tier.COLD or key in self.placement.moving:
            return False
        self.placement.condemn(session, key, "an engine read other bytes than were written")
        self.hints.page_lost(key, self.clock.monotonic())
        return True

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
        codecs: Sequence[CodecId] | None = None,
        include_first: bool = False,
        writes_cold: bool = False,
    ) -> DemotionPlan:
        """Lend warm slots for up to `need_blocks` of `hot_blocks`, at least one.

        Where warm has none, and `writes_cold` says that the engine can fill them, cold ones.

        Block 0 (the attention sinks) goes only with `include_first`, always raw.
        `codecs`, one a layer, are the namespace's or better ones; None: the namespace's.
        Raises RoomNeeded when not one block fits now, BudgetTooSmall when it never
        can, InvalidArgument when there is nothing to demote, NotFound, TierFull.
        """
        session = self.session(number, engine_id=engine_id)
        return self.loans.plan(
            engine_id, session, hot_blocks, need_blocks,
            codecs=codecs, include_first=include_first, writes_cold=writes_cold,
        )  # fmt: skip

    def commit(
        self, engine_id: int, reservation: int, digests: bytes, device_digests: bytes = b""
    ) -> Demotion | None:
        """Publish a plan's pages, now or by `finish_commit`: see Loans.commit."""
        return self.loans.commit(engine_id, reservation, digests, device_digests)

    def finish_commit(self, demotion: Demotion, error: TierdError | None) -> TierdError | None:
        """Publish a recorded demotion: see Loans.finish."""
        return self.loans.finish(demotion, error)

    def abort(self, engine_id: int, reservation: int) -> None:
        """Give a plan's slots back: the engine writes them no more. Raises StaleGeneration."""
        self.loans.release(self.demotions.find(engine_id, reservation))

    def engines_of(self, namespace_digest: bytes) -> set[int]:
        """Return the engines that have a session in a namespace."""
        owners = (s.engine_id for s in self.book if s.namespace_digest == namespace_digest)
        return {engine_id for engine_id in owners if engine_id is not None}

    def slab_for(self, engine_id: int, slab: int) -> SlabInfo:
        """Return a slab of a namespace in which this engine has a session. Raises NotFound."""
        namespaces = {session.namespace_digest for session in self.book.of_engine(engine_id)}
        return self.placement.slab_info(slab, namespaces)

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

        `deadline_seconds` from now. The hint's `awaited` pages are those to move: those that are
        cold, and those that are on their way there.
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
        self.keeper.wake(session)
        # A session that was kept over a restart has no page table, and no end of it, yet.
        end = max(session.max_blocks, session.sealed_blocks)
        if last_token is not None:
            end = last_token // session.block_tokens + 1
        first = first_token // session.block_tokens
        wish = Wish(
            client_id, number, first, end, now_seconds + deadline_seconds, confidence, priority
        )
        blocks = [b for b in session.index.blocks_in(Tier.COLD) if first <= b < end]
        cold = self.traffic.pages_in(Tier.COLD, session, blocks)
        leaving = self.traffic.leaving(session, range(first, end))
        return self.hints.open(wish, [*cold, *leaving], now_seconds)

    def cancel_hint(self, client_id: str, hint_id: int) -> None:
        """Raises NotFound (unknown, settled, or another client's)."""
        self.hints.cancel(client_id, hint_id)

    def drop_client(self, client_id: str) -> None:
        """Cancel a departed client's open hints and forget its score."""
        self.hints.drop_client(client_id)

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
        self.keeper.tick()
        self.reclaim()

    def reclaim(self) -> None:
        """Free retired slots, and the slabs of namespaces that have no session."""
        safe_epoch = self.placement.epochs.safe_epoch()
        for session in self.book:
            if session.table is not None:
                # First: an engine that was taken for dead must see it before its bytes change.
                session.table.set_reclaimed(safe_epoch)
        self.placement.reclaim(safe_epoch)
        self.placement.unfence()
        self.placement.trim({session.namespace_digest for session in self.book})

    def retired_bytes(self, tier: Tier) -> int:
        """Return the bytes of slots that wait for engines to end their steps."""
        return sum(pool.counts().retired * pool.slot_bytes for pool in self.placement.pools[tier])

    def stats(self) -> dict[str, Any]:
        """Return counts and bytes as plain values; census.py has the shape."""
        return census.stats(self)

    def check_integrity(self) -> None:
        """Raise AssertionError, terms printed, if a page, slot or byte is unaccounted for."""
        census.check_integrity(self)

    def close(self) -> None:
        """Let go of everything. What is durable stays on disk, and with engines that live.

        Otherwise engines, sessions and slabs are dropped: all but the slots of a hung
        copy. Idempotent.
        """
        if self.keeper.durable:
            for session in self.book:
                if session.table is not None:
                    session.table.close()
            self.placement.release_all()
            return
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
