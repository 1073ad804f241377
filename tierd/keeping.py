"""Keeping: what of a session outlives its engine, and its daemon.

    suspend → kept → resume → suspend …      kept anew
                     resume → close, or the engine dies: as it was kept before
    discard, close by an operator            gone

The ledger holds each kept session and each cold page. After a restart a
session is dormant: its pages are looked up only when somebody needs them, so
that a million of them cost a start nothing. Pages of a session that was not
kept are unclaimed: they wait a while for their engine, then they go.

Invariants:
  a kept session's record stands in the ledger, with the blocks it still has
  a dormant session has no page in the index; what the ledger has is all it has
  an unclaimed session is in no book
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from tierd.clock import Clock
from tierd.disk.records import SessionRecord
from tierd.disk.volatile import LedgerPort, PageRows
from tierd.index import Page, SessionIndex
from tierd.placement import Placement
from tierd.sessions import Session, SessionBook
from tierd.types import CodecId, PageKey, Place, SessionState, Tier

# An engine tries for 30 s to find its daemon again; after twice that nobody comes.
CLAIM_SECONDS = 60.0


class Keeper:
    """The kept sessions of one store."""

    def __init__(
        self, book: SessionBook, placement: Placement, ledger: LedgerPort, clock: Clock
    ) -> None:
        self._book = book
        self._placement = placement
        self._ledger = ledger
        self._clock = clock
        self.unclaimed: dict[int, int] = {}  # session number → pages
        self._claims_end_seconds = math.inf

    @property
    def durable(self) -> bool:
        """Whether a kept session outlives the daemon."""
        return self._ledger.durable

    def restore(self) -> None:
        """Take in what the ledger has from earlier runs. Raises StorageError, TierFull."""
        for slab in self._ledger.slabs().values():
            self._placement.restore_slab(slab)
        self.unclaimed = dict(self._ledger.owners())
        for record in self._ledger.sessions().values():
            self._book.add(self._dormant(record))
            self.unclaimed.pop(record.number, None)
        self._claims_end_seconds = self._clock.monotonic() + CLAIM_SECONDS

    def _dormant(self, record: SessionRecord) -> Session:
        namespace = record.namespace
        session = Session(
            record.number,
            namespace,
            namespace.digest(),
            SessionIndex(namespace.geometry.layers),
            self._clock.monotonic(),
            dormant=True,
        )
        session.keep(record.token_ids, record.sealed_blocks)
        return session

    def wake(self, session: Session) -> None:
        """Put a dormant session's pages into its index. Nothing to do for others."""
        if session.dormant:
            session.dormant = False
            for key, page in pages_of(self._ledger.pages_of(session.number)):
                session.index.set(key.layer, key.block, page)

    def cold_pages(self, session: Session) -> int:
        """Return how many pages of a session are cold, dormant or not."""
        if session.dormant:
            return session.sealed_blocks * session.layers
        return session.index.pages_in(Tier.COLD)

    def kept_bytes(self) -> int:
        """Return about how many bytes of cold must outlive the daemon (a first block is raw)."""
        if not self.durable:
            return 0
        return sum(
            self._placement.slot_bytes(session, session.namespace.codec)
            * session.sealed_blocks
            * session.layers
            for session in self._book
            if session.kept
        )

    def keep(self, session: Session) -> None:
        """Record a session as it is kept now; a flush with `sync` makes it so."""
        self._ledger.put_session(
            SessionRecord(
                session.number,
                session.namespace,
                "parked",
                session.token_ids,
                session.sealed_blocks,
            )
        )

    def cut(self, session: Session, first_block: int) -> None:
        """Blocks >= first_block are gone from what a session keeps."""
        if session.kept and session.sealed_blocks > first_block:
            session.sealed_blocks = first_block
            self.keep(session)

    def forget(self, session: Session) -> None:
        """A session is gone for good."""
        if session.kept:
            self._ledger.drop_session(session.number)

    def whole_blocks(self, session: Session) -> int:
        """Return how many of the kept blocks, from the first, have every page."""
        for block in range(session.sealed_blocks):
            if not session.index.holds([block]):
                return block
        return session.sealed_blocks

    def unbacked(self, session: Session) -> list[PageKey]:
        """Return the pages of a session that are in RAM alone, block by block."""
        index = session.index
        if index.pages_in(Tier.WARM) == index.backed_count:
            return []
        return [
            PageKey(session.number, layer, block)
            for block in index.blocks_in(Tier.WARM)
            for layer in index.layers_in(Tier.WARM, block)
            if (page := index.get(layer, block)) is not None and page.backing is None
        ]

    def tick(self) -> None:
        """Drop what nobody has claimed."""
        if self.unclaimed and self._clock.monotonic() >= self._claims_end_seconds:
            for number in list(self.unclaimed):
                self.drop_unclaimed(number)

    def drop_unclaimed(self, number: int) -> None:
        """Give up an unclaimed session's pages and their slots."""
        del self.unclaimed[number]
        places = [page.place for _, page in pages_of(self._ledger.pages_of(number))]
        self._placement.discard(places)
        self._ledger.drop_session(number)

    def check_integrity(self) -> None:
        """Raise AssertionError if a dormant or unclaimed session is anything else too."""
        for session in self._book:
            assert session.number not in self.unclaimed, f"session {session.id} is unclaimed"
            if session.dormant:
                assert session.state is SessionState.SUSPENDED, f"{session.id}: {session.state}"


def pages_of(rows: PageRows) -> Iterator[tuple[PageKey, Page]]:
    """Iterate over ledger rows as pages, all cold."""
    for session, block, layer, codec, slab, slot, generation, digest in zip(
        *(
            rows[name].tolist()
            for name in ("session", "block", "layer", "codec", "slab", "slot", "generation")
        ),
        rows["digest"],
        strict=True,
    ):
        place = Place(Tier.COLD, CodecId(codec), slab, slot, generation)
        yield PageKey(session, layer, block), Page(place, digest.tobytes())
