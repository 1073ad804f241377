"""Loans: slots are planned, lent, committed and given back; the life of demotions.py's records.

    plan → commit | abort                       of warm slots, and of a cold tier that does not last
    plan → commit → flush → finish | release    of cold slots, where cold outlives the daemon

A demotion to cold is durable as a spill is: the bytes are in the slot when it is committed, the
ledger is told, and the page is published only when a flush has shown it to the next daemon. The
slab then waits for the next sync with all that was written to it.

Invariants:
  a slot that is given back is lent to nobody while a lock stands on it (disk/slotlocks.py)
  what the ledger was told of a demotion that is not published, it is told to forget
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence

from tierd.clock import Clock
from tierd.demotions import Demotion, DemotionPlan, Demotions, split_device_digests, split_digests
from tierd.errors import InvalidArgument, StaleGeneration, StorageError, TierdError, TierFull
from tierd.keeping import Keeper
from tierd.lending import block_codecs, check_codecs, lend_blocks, no_room
from tierd.placement import Placement
from tierd.policy import choose_victims
from tierd.sessions import Session
from tierd.types import CodecId, Tier


class Loans:
    """The demotions of one store. `touch` is told of each session that is used."""

    def __init__(
        self,
        placement: Placement,
        keeper: Keeper,
        clock: Clock,
        counts: Counter[str],
        touch: Callable[[Session], None],
    ) -> None:
        self.demotions = Demotions()
        self._placement = placement
        self._ledger = placement.ledger
        self._keeper = keeper
        self._clock = clock
        self._counts = counts
        self._touch = touch

    def plan(
        self,
        engine_id: int,
        session: Session,
        hot_blocks: Sequence[int],
        need_blocks: int,
        *,
        codecs: Sequence[CodecId] | None = None,
        include_first: bool = False,
        writes_cold: bool = False,
    ) -> DemotionPlan:
        """Lend slots for some of the hot blocks; arguments and errors as Store.plan_demotion."""
        page_codecs = check_codecs(session, codecs)
        if need_blocks < 1 or not all(0 <= b < session.max_blocks for b in hot_blocks):
            raise InvalidArgument("plan_demotion: a block or the count is out of range")
        self.demotions.admit(engine_id)
        self._touch(session)
        lent = self.demotions.blocks_of(session)
        below = {block for block in hot_blocks if block in lent or session.index.layers_of(block)}
        victims = choose_victims(hot_blocks, need_blocks, below, include_first=include_first)
        if not victims:
            again = self.demotions.lent_among(session, hot_blocks)
            if again is None:
                raise InvalidArgument("plan_demotion: none of these blocks can be demoted")
            return again.plan  # the engine asks anew: the reply was lost on its way
        chosen = lend_blocks(self._placement, session, victims, page_codecs, Tier.WARM)
        if not chosen and writes_cold and not self._ledger.failed:
            with contextlib.suppress(TierFull, StorageError):  # then room in warm is waited for
                chosen = lend_blocks(self._placement, session, victims, page_codecs, Tier.COLD)
        if not chosen:
            first = block_codecs(victims[0], page_codecs)
            raise no_room(self._placement, session, first, len(victims))
        session.page_codecs = page_codecs
        if not session.recorded:
            self._keeper.record(session)
        return self.demotions.lend(engine_id, session, chosen, self._clock.monotonic())

    def commit(
        self, engine_id: int, reservation: int, digests: bytes, device_digests: bytes = b""
    ) -> Demotion | None:
        """Publish a plan's pages. `digests`: 16 bytes (xxh3-128 of the payload) a page, in order.
        `device_digests`: 8 bytes a page, or none at all (tierd/codec/devicedigest.py).

        Returns None; but a demotion to cold that outlives the daemon, which is recorded now:
        `finish` publishes it, when a flush has shown it to the next daemon. Raises
        InvalidArgument (length; the plan stays open), StaleGeneration (unknown or used; or
        expired or revoked: its slots are free now), StorageError (the ledger takes no more).
        """
        demotion = self.demotions.find(engine_id, reservation)
        plan = demotion.plan
        page_digests = split_digests(plan, digests)
        page_device_digests = split_device_digests(plan, device_digests)
        if demotion.recorded:
            raise StaleGeneration(f"demotion {reservation} is being committed already")
        if demotion.revoked:
            self.release(demotion)
            raise _revoked(demotion)
        if plan.tier is Tier.COLD:
            self._placement.cold_files.written_by_others({p.slab for _, p in plan.pages()})
            if self._ledger.failed:
                self.release(demotion)
                raise StorageError(f"cold takes no more: {self._ledger.failed}")
            if self._keeper.durable:
                demotion.digests = page_digests
                places = zip(plan.pages(), page_digests, strict=True)
                self._placement.record_pages([(*page, digest) for page, digest in places])
                return demotion
        self._publish(demotion, page_digests, page_device_digests)
        return None

    def finish(self, demotion: Demotion, error: TierdError | None) -> TierdError | None:
        """Publish a recorded demotion, unless its flush failed; return why it is not published."""
        digests, demotion.digests = demotion.digests, []
        if error is not None and not demotion.revoked:
            self._forget(demotion)
        if error is not None or demotion.revoked:
            self.release(demotion)
            return error or _revoked(demotion)
        self._publish(demotion, digests, [None] * len(digests))
        return None

    def _publish(
        self, demotion: Demotion, digests: Sequence[bytes], device_digests: Sequence[int | None]
    ) -> None:
        plan, session = demotion.plan, demotion.session
        self.demotions.settle(demotion)
        for (key, place), digest, device_digest in zip(
            plan.pages(), digests, device_digests, strict=True
        ):
            self._placement.publish(session, key, place, digest, device_digest)
        session.index.bump()
        self._touch(session)
        self._counts["demotions"] += len(digests)
        if plan.tier is Tier.COLD:
            self._counts["direct_demotions"] += len(digests)

    def release(self, demotion: Demotion) -> None:
        """Give a demotion's slots back; those of a recorded one when its flush has reported."""
        if demotion.recorded:
            if not demotion.revoked:
                self._forget(demotion)
            demotion.revoked = True
            return
        self.demotions.settle(demotion)
        self._placement.give_back(demotion.session, [place for _, place in demotion.plan.pages()])

    def revoke(self, session: Session, first_block: int) -> None:
        """Revoke a session's demotions that hold a block >= first_block."""
        for demotion in self.demotions.revoke_blocks(session, first_block):
            if demotion.recorded:
                self._forget(demotion)

    def _forget(self, demotion: Demotion) -> None:
        self._placement.forget(demotion.session, [key for key, _ in demotion.plan.pages()])


def _revoked(demotion: Demotion) -> StaleGeneration:
    number = demotion.plan.reservation
    return StaleGeneration(f"demotion {number} was revoked; its pages are not kept")
