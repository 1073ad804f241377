"""Keeping: what of a session outlives its engine, and its daemon.

    suspend → kept → resume → suspend …      kept anew
                     resume → close, or the engine dies: as it was kept before
    discard, close by an operator            gone

The ledger holds each session and each cold page. After a restart a session is
dormant: its pages are looked up only when somebody needs them, so that a
million of them cost a start nothing. What an engine had beyond what was kept is
unclaimed: it waits a while for that engine, then it goes.

Invariants:
  a session's record stands in the ledger, with the blocks that are kept of it
  a dormant session has no page in the index; what the ledger has is all it has
  what was kept stays kept until every page of what is to be kept in its place is on disk
  a session that was never kept is in the book only while an engine owns it
  it is recorded before it may have a page: a restart holds slots for those it knows
  a suspended session with a page in RAM alone is among `ram_only`, unless all ends with the daemon
  one of these is not parked in the ledger: nobody was told that it is kept; but one that was,
    and whose files somebody removed since
  while a session is unclaimed, no warm slab is made: the budget is for those that it may bring
  what somebody removed from the folder is said to be kept for LOOK_SECONDS at most
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tierd.clock import Clock
from tierd.coldcap import used_slabs
from tierd.disk.records import SessionRecord
from tierd.disk.slabfiles import slab_name
from tierd.disk.volatile import LedgerPort, PageRows
from tierd.errors import StorageError, TierFull
from tierd.index import Page, SessionIndex
from tierd.layercodecs import better_codecs
from tierd.placement import Placement
from tierd.sessions import Session, SessionBook
from tierd.types import CodecId, PageKey, Place, SessionState, Tier

# An engine looks for its daemon at each step, and breaks one off after 10 s without it.
CLAIM_SECONDS = 20.0
# A look takes 6 us a slab: of 1,000, which are 250 GiB, 6 ms.
LOOK_SECONDS = 1.0
RUNNING, PARKED = "running", "parked"


@dataclass(frozen=True, slots=True)
class Removed:
    """What somebody removed of the cold folder under the daemon: it ends with the daemon.

    `why`: of what all that is kept stands in; "": nothing. `slabs`: whose files are gone.
    """

    why: str = ""
    slabs: frozenset[int] = frozenset()

    @property
    def trouble(self) -> str:
        """One line for people, or ""."""
        if self.why or not self.slabs:
            return self.why
        names = [slab_name(slab) for slab in sorted(self.slabs)]
        more = ", ..." * (len(names) > 3)
        return (
            f"somebody removed {', '.join(names[:3])}{more}: what stood there is not kept; under "
            "the next daemon a resume computes it anew"
        )


class Keeper:
    """The kept sessions of one store. `removed`: what is there no more, as of the last look."""

    def __init__(
        self, book: SessionBook, placement: Placement, ledger: LedgerPort, clock: Clock
    ) -> None:
        self._book = book
        self._placement = placement
        self._ledger = ledger
        self._clock = clock
        self.unclaimed: dict[int, Session] = {}  # dormant, with an engine's pages
        self.ram_only: dict[int, Session] = {}  # suspended, and not all of it on disk, synced
        self._claims_end_seconds = math.inf
        self.removed = Removed()
        self._look_at_seconds = -math.inf

    @property
    def durable(self) -> bool:
        """Whether a kept session outlives the daemon."""
        return self._ledger.durable

    def restore(self) -> None:
        """Take in what the ledger has from earlier runs. Raises StorageError, TierFull."""
        used = {slab.slab for slab in used_slabs(self._ledger)}
        slabs = self._ledger.slabs()
        for slab in sorted(slabs.values(), key=lambda slab: slab.slab not in used):
            try:
                self._placement.restore_slab(slab)
            except TierFull:
                if slab.slab in used:
                    raise
                self._placement.cold_files.destroy(slab.slab)  # empty, beyond a cap that is smaller
        for record in self._ledger.sessions().values():
            session = self._dormant(record)
            if record.state == RUNNING:
                self.unclaimed[session.number] = session
                # A suspension without its end has pages in RAM alone: their engine may never come.
                self.cut(session, self._kept_prefix(session))
            if session.kept:
                self._book.add(session)
        if self.unclaimed:
            # An engine that comes first and goes on would fill what the next one's slabs need.
            self._placement.pools[Tier.WARM].budget.await_slabs()
        if self.durable:
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
            recorded=True,
        )
        if record.kept:
            session.keep(record.token_ids, record.sealed_blocks)
        return session

    def _kept_prefix(self, session: Session) -> int:
        """Return how many of the kept blocks the ledger has whole, from the first on."""
        blocks = self._ledger.pages_of(session.number)["block"]
        counts = np.bincount(blocks[blocks < session.sealed_blocks], minlength=1)
        gaps = np.flatnonzero(counts < session.layers)
        return min(session.sealed_blocks, int(gaps[0]) if len(gaps) else len(counts))

    def wake(self, session: Session) -> None:
        """Put a dormant session's pages into its index, those that are kept of it."""
        if session.dormant:
            self._claims_end(session)
            session.dormant = False
            self._index(session)

    @property
    def claims_open(self) -> bool:
        """Whether engines of an earlier run may still hand their pages back."""
        return self._clock.monotonic() < self._claims_end_seconds < math.inf

    @property
    def claims_seconds(self) -> float:
        """For how long slots may yet be held for engines of an earlier run."""
        waits = bool(self.unclaimed) and self.claims_open
        return self._claims_end_seconds - self._clock.monotonic() if waits else 0.0

    def claim(self, number: int) -> Session | None:
        """Return an unclaimed session with all its pages, for its engine; or None.

        It is the caller's to enter in the book if it was never kept.
        """
        session = self.unclaimed.pop(number, None)
        if session is None:
            return None
        self._check_awaited()
        session.dormant = False
        self._index(session)
        return session

    def _check_awaited(self) -> None:
        """Let new warm slabs be made once no session is left that may bring old ones."""
        if not self.unclaimed:
            self._placement.pools[Tier.WARM].budget.stop_awaiting()

    def _index(self, session: Session) -> None:
        found = pages_of(self._ledger.pages_of(session.number))
        session.index.set_all({(key.layer, key.block): page for key, page in found})

    def _claims_end(self, session: Session) -> None:
        """An unclaimed session is its engine's no more: only what was kept of it stays."""
        if self.unclaimed.pop(session.number, None) is None:
            return
        self._check_awaited()
        self.release_held(session.namespace_digest)
        rows = self._ledger.pages_of(session.number)
        beyond = rows[rows["block"] >= (session.sealed_blocks if session.kept else 0)]
        self._placement.discard([page.place for _, page in pages_of(beyond)])
        if session.kept:
            self._ledger.truncate(session.number, session.sealed_blocks)
            self.record(session)
        else:
            self._ledger.drop_session(session.number)

    def cold_pages(self, session: Session) -> int:
        """Return how many pages of a session are cold, dormant or not."""
        if session.dormant:
            return len(self._ledger.pages_of(session.number))
        return session.index.pages_in(Tier.COLD)

    def kept_bytes(self) -> int:
        """Return how many bytes of cold must outlive the daemon, once all that is kept is there."""
        if not self.durable:
            return 0
        return sum(self._kept_bytes_of(session) for session in self._book if session.kept)

    def _kept_bytes_of(self, session: Session) -> int:
        if session.dormant:
            codecs = self._ledger.pages_of(session.number)["codec"].tolist()
        else:
            kept = session.pages_from(0)
            codecs = [p.codec for key, p in kept if key.block < session.sealed_blocks]
        return sum(
            pages * self._placement.slot_bytes(session, CodecId(codec))
            for codec, pages in Counter(codecs).items()
        )

    def record(self, session: Session, *, on_disk: bool = False) -> None:
        """Record a session as it is now; a flush with `sync` makes it so.

        One that is in RAM only is not parked, unless all of it is `on_disk` by now: it was never
        acknowledged as kept.
        """
        session.recorded = True
        suspended = session.state is SessionState.SUSPENDED
        parked = suspended and (on_disk or session.number not in self.ram_only)
        state = PARKED if parked else RUNNING
        before = None if session.settled else session.kept_before
        kept = before or (session.token_ids, session.sealed_blocks)
        self._ledger.put_session(SessionRecord(session.number, session.namespace, state, *kept))

    def cut(self, session: Session, first_block: int) -> None:
        """Blocks >= first_block are gone from what a session keeps."""
        token_ids, before = session.kept_before or (b"", 0)
        if before > first_block:
            session.kept_before = token_ids, first_block
        if session.kept and max(session.sealed_blocks, before) > first_block:
            session.sealed_blocks = min(session.sealed_blocks, first_block)
            self.record(session)

    def whole_blocks(self, session: Session) -> int:
        """Return how many of the kept blocks, from the first, have every page."""
        for block in range(session.sealed_blocks):
            if not session.index.holds([block]):
                return block
        return session.sealed_blocks

    def unbacked(self, session: Session) -> Iterator[PageKey]:
        """Yield the pages of a session that are in RAM alone, block by block, as far as asked."""
        return (PageKey(session.number, *key) for key in session.index.unbacked())

    def note_ram_only(self, session: Session) -> None:
        """A session is suspended: if the disk took not all of it, it waits for that."""
        if self.durable and session.index.unbacked_count:
            self.ram_only[session.number] = session

    def on_disk(self, session: Session) -> None:
        """A session waits no more to be on disk: it is, or an engine has it, or it is gone."""
        self.ram_only.pop(session.number, None)

    def ram_only_blocks(self, session: Session) -> int:
        """Return how many of a session's blocks end with the daemon: a page of theirs is in RAM."""
        if not self.durable:
            return 0
        return session.index.unbacked_blocks()

    def look(self) -> None:
        """See what somebody has removed of the cold folder; what is in RAM of it is to be copied
        anew. On the loop's thread; never waits for the disk."""
        self._look_at_seconds = self._clock.monotonic() + LOOK_SECONDS
        if not self.durable:
            return
        why = ""
        try:
            self._ledger.require_there()
        except StorageError as error:
            why = str(error)
        before = self.removed.slabs
        # Where nothing can be written, slabs that are gone are for the look that finds it well.
        self.removed = Removed(why, before if why else self._placement.cold_files.removed())
        if new := self.removed.slabs - before:
            self._write_again(new)

    def _write_again(self, slabs: frozenset[int]) -> None:
        """Let what is in RAM be copied anew whose copy stands in files that are gone."""
        for slab in slabs:
            self._placement.shut_slab(slab)
        for session in self._book:
            if self._placement.drop_backings(session, math.inf, lambda _, copy: copy.slab in slabs):
                session.index.bump()
                if session.state is SessionState.SUSPENDED:
                    self.note_ram_only(session)

    def is_kept(self, session: Session) -> bool:
        """Return whether a session outlives the daemon, all of it but `removed_blocks`."""
        suspended = session.state is SessionState.SUSPENDED
        on_disk = session.number not in self.ram_only and not self.removed.why
        return suspended and self.durable and on_disk

    def removed_blocks(self, session: Session) -> int:
        """Return how many of a session's blocks the next daemon lacks: a file of theirs is gone.

        It has a session up to its first gap.
        """
        if not self.removed.slabs:
            return 0
        rows = self._ledger.pages_of(session.number)
        gone = rows["block"][np.isin(rows["slab"], list(self.removed.slabs))]
        return max(0, session.sealed_blocks - int(gone.min(initial=session.sealed_blocks)))

    def page_codecs(self, session: Session) -> tuple[CodecId, ...]:
        """Return the better codec of each layer's newest and oldest page; () if none is below hot.

        Layers only rise while a guard decides, and fall back to what was asked for without one.
        A block that is raw in every layer tells nothing where another is not: the first always
        is, and one that its codec cannot encode.
        """
        newest, oldest = self._first_encoded(session, True), self._first_encoded(session, False)
        return tuple(
            old if old in better_codecs(new) else new
            for new, old in zip(newest, oldest, strict=True)
        )

    def _first_encoded(self, session: Session, newest_first: bool) -> tuple[CodecId, ...]:
        found: tuple[CodecId, ...] = ()
        for codecs in self._blocks_codecs(session, newest_first):
            found = found or codecs
            if any(codec is not CodecId.RAW for codec in codecs):
                return codecs
        return found

    def _blocks_codecs(self, session: Session, newest_first: bool) -> Iterator[tuple[CodecId, ...]]:
        """Yield the codecs of each whole block but the first."""
        if session.dormant:
            rows = self._ledger.pages_of(session.number)
            blocks = int(rows["block"].max(initial=0)) + 1
            table = np.zeros((blocks, session.layers), np.uint8)
            table[rows["block"], rows["layer"]] = rows["codec"]
            whole = [row for row in table[1:].tolist() if CodecId.NONE not in row]
            for row in reversed(whole) if newest_first else whole:
                yield tuple(map(CodecId, row))
            return
        index, found = session.index, session.index.blocks_from(1)
        for block in reversed(found) if newest_first else found:
            pages = [index.get(layer, block) for layer in index.layers_of(block)]
            if len(pages) == session.layers:
                yield tuple(page.place.codec for page in pages if page is not None)

    def tick(self) -> None:
        """Look at the folder now and then; drop what nobody claims, once the time is over."""
        now_seconds = self._clock.monotonic()
        if now_seconds >= self._look_at_seconds:
            self.look()
        if now_seconds < self._claims_end_seconds:
            return
        self._claims_end_seconds = math.inf
        for session in list(self.unclaimed.values()):
            self._claims_end(session)

    def release_held(self, namespace_digest: bytes) -> None:
        """Let a namespace's held warm slots go once every session that may have some has come."""
        if all(other.namespace_digest != namespace_digest for other in self.unclaimed.values()):
            self._placement.release_held(namespace_digest)

    def check_integrity(self) -> None:
        """Raise AssertionError if a dormant or unclaimed session is anything else too."""
        for session in (*self._book, *self.unclaimed.values()):
            if session.dormant:
                assert session.state is SessionState.SUSPENDED, f"{session.id}: {session.state}"
        for number, session in self.unclaimed.items():
            assert session.dormant and session.number == number, f"{session.id} is not dormant"
        for session in self.ram_only.values():
            assert session.state is SessionState.SUSPENDED, f"{session.id}: {session.state}"
        for session in self._book if self.durable else ():
            if session.state is SessionState.SUSPENDED and session.number not in self.ram_only:
                assert not session.index.unbacked_count, f"{session.id}: in RAM only, and forgotten"


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
