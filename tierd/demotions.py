"""Demotions: slots lent to an engine that writes pages into them.

    plan → commit                      published; the id is used up
    plan → abort                       the engine gives the slots back
    plan → revoked → commit | abort    it was too slow, or the blocks were truncated;
                                       commit fails, either frees the slots
    plan → commit → recorded → published | revoked
                                       of cold slots, where cold outlives the daemon: the
                                       ledger is told, and what its flush shows is published

Slots are warm ones; cold ones where warm is full, and the engine can write these itself: then
it writes header and payload, and the daemon looks at neither. A page that is not what was
committed is found at its first read, by the digest that the index has, and is a typed miss.

The slots of a live engine are never freed behind its back: it may be writing
them this moment (an engine that was stopped writes when it goes on), and the
bytes would land in another's page. Freeing them on a timer was rejected for
that. So a revoked demotion holds its slots until the engine answers for it,
ends its session, or dies; DEMOTIONS_MAX bounds what an engine can hold so.

Invariants:
  a demotion is used once, by the engine that planned it
  the blocks of a session's open demotions are disjoint, and not in its index
  an open demotion is younger than EXPIRY_SECONDS at each tick, or recorded
  a recorded one's slots stay lent until the flush reports, whatever becomes of its engine
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from tierd.errors import InvalidArgument, StaleGeneration, TierFull
from tierd.memory.slabs import SlabPool
from tierd.sessions import Session
from tierd.types import PageKey, Place, Tier

# The slowest encoder we serve does 0.1 GB/s, a plan is at most a hot tier's half: 30 s is 3 GB.
EXPIRY_SECONDS = 30.0
DEMOTIONS_MAX = 64  # a session pipelines 2 or 3; more are lost replies, freed with the session
DIGEST_BYTES = 16
DEVICE_DIGEST_BYTES = 8


@dataclass(frozen=True, slots=True)
class DemotionPlan:
    """Slots reserved for pages of one session, all of one tier.

    `blocks[i]`'s layer j goes to `places[i][j]`. Digests are committed in that
    order: block by block, layers inside.
    """

    reservation: int
    session: int
    blocks: list[int]
    places: list[list[Place]]

    @property
    def tier(self) -> Tier:
        """Where the slots are."""
        return self.places[0][0].tier

    def pages(self) -> Iterator[tuple[PageKey, Place]]:
        """Iterate over the plan's pages in digest order."""
        for block, layers in zip(self.blocks, self.places, strict=True):
            for layer, place in enumerate(layers):
                yield PageKey(self.session, layer, block), place


@dataclass(slots=True, eq=False)
class Demotion:
    """A plan and who answers for it. `digests`: of a recorded one, in the plan's order."""

    plan: DemotionPlan
    engine_id: int
    session: Session
    expires_seconds: float
    revoked: bool = False
    digests: list[bytes] = field(default_factory=list)

    @property
    def recorded(self) -> bool:
        """Whether the ledger has been told of its pages, and a flush is on its way."""
        return bool(self.digests)


class RoomNeeded(TierFull):
    """Warm has no room now: the slots of `needs` would do. The mover makes them and retries."""

    def __init__(self, message: str, needs: Mapping[SlabPool, int]) -> None:
        super().__init__(message)
        self.needs = needs


class Demotions:
    """All demotions whose slots are still lent."""

    def __init__(self) -> None:
        self._lent: dict[int, Demotion] = {}
        self._planned = 0

    def __iter__(self) -> Iterator[Demotion]:
        return iter(self._lent.values())

    def __len__(self) -> int:
        return len(self._lent)

    def admit(self, engine_id: int) -> None:
        """Raise TierFull if the engine has DEMOTIONS_MAX unanswered."""
        lent = sum(demotion.engine_id == engine_id for demotion in self)
        if lent >= DEMOTIONS_MAX:
            raise TierFull(
                f"engine {engine_id} has {lent} demotions that it neither committed nor aborted"
            )

    def lend(
        self, engine_id: int, session: Session, blocks: dict[int, list[Place]], now_seconds: float
    ) -> DemotionPlan:
        """Record the places of each block as lent to the engine; return the plan."""
        self._planned += 1
        plan = DemotionPlan(self._planned, session.number, list(blocks), list(blocks.values()))
        self._lent[plan.reservation] = Demotion(
            plan, engine_id, session, now_seconds + EXPIRY_SECONDS
        )
        return plan

    def blocks_of(self, session: Session) -> set[int]:
        """Return the blocks that are on their way to warm."""
        return {
            block
            for demotion in self.of_session(session)
            if not demotion.revoked
            for block in demotion.plan.blocks
        }

    def lent_among(self, session: Session, blocks: Collection[int]) -> Demotion | None:
        """Return an open demotion of a session whose blocks are all among `blocks`, or None."""
        for demotion in self.of_session(session):
            is_open = not demotion.revoked and not demotion.recorded
            if is_open and set(demotion.plan.blocks) <= set(blocks):
                return demotion
        return None

    def of_session(self, session: Session) -> list[Demotion]:
        """Return a session's demotions, revoked ones too."""
        return [demotion for demotion in self if demotion.session is session]

    def find(self, engine_id: int, reservation: int) -> Demotion:
        """Raise StaleGeneration if it is not lent to this engine."""
        demotion = self._lent.get(reservation)
        if demotion is None or demotion.engine_id != engine_id:
            raise StaleGeneration(f"demotion {reservation} is not open: used, aborted or unknown")
        return demotion

    def settle(self, demotion: Demotion) -> None:
        """The slots are no longer lent."""
        del self._lent[demotion.plan.reservation]

    def revoke_blocks(self, session: Session, first_block: int) -> list[Demotion]:
        """Revoke a session's demotions that hold a block >= first_block; return which."""
        held = [
            demotion
            for demotion in self.of_session(session)
            if not demotion.revoked and max(demotion.plan.blocks) >= first_block
        ]
        for demotion in held:
            demotion.revoked = True
        return held

    def expire(self, now_seconds: float) -> int:
        """Revoke what is overdue; return how many."""
        overdue = [
            demotion
            for demotion in self
            if not demotion.revoked
            and not demotion.recorded
            and now_seconds >= demotion.expires_seconds
        ]
        for demotion in overdue:
            demotion.revoked = True
        return len(overdue)

    def check_integrity(self) -> None:
        """Raise AssertionError if two open demotions hold a block, or one is in the index."""
        taken: set[tuple[int, int]] = set()
        for demotion in self:
            for block in [] if demotion.revoked else demotion.plan.blocks:
                key = (demotion.session.number, block)
                assert key not in taken, f"block {block} is lent twice in session {key[0]:x}"
                taken.add(key)
                layers = demotion.session.index.layers_of(block)
                assert not layers, f"block {block} is lent and has layers {layers} below hot"


def split_digests(plan: DemotionPlan, digests: bytes) -> list[bytes]:
    """Return one digest per page of the plan. Raises InvalidArgument."""
    pages = sum(map(len, plan.places))
    if len(digests) != pages * DIGEST_BYTES:
        raise InvalidArgument(
            f"commit: {len(digests)} bytes of digests, {pages} pages need {pages * DIGEST_BYTES}"
        )
    return [digests[i : i + DIGEST_BYTES] for i in range(0, len(digests), DIGEST_BYTES)]


def split_device_digests(plan: DemotionPlan, digests: bytes) -> list[int] | list[None]:
    """Return one device digest per page of the plan, or None each. Raises InvalidArgument."""
    pages = sum(map(len, plan.places))
    if not digests:
        return [None] * pages
    if len(digests) != pages * DEVICE_DIGEST_BYTES:
        raise InvalidArgument(
            f"commit: {len(digests)} bytes of device digests, "
            f"{pages} pages need {pages * DEVICE_DIGEST_BYTES}, or none"
        )
    return list(struct.unpack(f"<{pages}Q", digests))
