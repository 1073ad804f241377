"""A durable store against a dict: engines die, daemons are killed and restarted, the power goes.

What a suspension acknowledged is there after anything, with its bytes. After a power cut a
session may also be in a later state that was not acknowledged yet (a truncation, say), but in
one that it really had: never with pages of two of them. A page that was given up since may be
unreadable then; it is noticed. Engines that outlive their daemon hand everything back.

Where all records are lost, fsck rebuilds each session as its last acknowledged suspension kept
it, or a prefix of that if pages of it were given up since.
"""

import contextlib
import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.rig import INT8, INT8_BLOCK, LAYERS, Rig
from tierd.adoption import Offers, inspect
from tierd.carry import Batch
from tierd.codec.layout import HEADER_BYTES, page_layout
from tierd.demotions import Demotion, DemotionPlan
from tierd.disk.fsck import rebuild
from tierd.disk.header import verify_slot
from tierd.disk.simulated import SimulatedDisk
from tierd.errors import InvalidArgument, PageDamaged, TierFull
from tierd.keeping import CLAIM_SECONDS
from tierd.sessions import Session
from tierd.testing import FakeClock
from tierd.types import CodecId, PageKey, SessionState, SlabRecord, Tier

EXAMPLES = int(os.environ.get("TIERD_MODEL_EXAMPLES", "300"))
STEPS = int(os.environ.get("TIERD_MODEL_STEPS", "50"))
BLOCKS = 5
MAX_TOKENS = (BLOCKS + 1) * 16
ENGINES = (1, 2)
Versions = dict[tuple[int, int], int]
engines = st.sampled_from(ENGINES)
picks = st.integers(0, 5)
seldom = st.sampled_from([False] * 3 + [True])


@dataclass
class Kept:
    """A state that a session was kept in: its sealed blocks and their pages' versions.

    Not sure where there was no room on disk for all of it: the daemon's end then takes what of it
    was in RAM alone, also where an engine hands that back, and a power cut may take the whole.
    """

    sealed: int
    versions: Versions
    sure: bool = True


@dataclass
class Known:
    """What the model knows of a session: live pages; states since the last acknowledged one."""

    versions: Versions = field(default_factory=dict)
    history: list[Kept] = field(default_factory=list)
    acknowledged: Kept | None = None

    def cut(self, block: int) -> None:
        self.versions = {key: v for key, v in self.versions.items() if key[1] < block}
        self.cut_kept(block)

    def cut_kept(self, block: int) -> None:
        if self.history and self.history[-1].sealed > block:
            before = self.history[-1].versions
            kept = {key: v for key, v in before.items() if key[1] < block}
            self.history.append(Kept(block, kept, self.history[-1].sure))


class DurableMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, Known] = {}
        self.commits = 0
        self.first_number = 1
        self.boot(SimulatedDisk(1))

    def boot(self, disk: SimulatedDisk) -> None:
        self.disk = disk
        self.rig = Rig(
            8 * INT8_BLOCK, 12 * INT8_BLOCK, disk, durable=True, patient=True,
            first_number=self.first_number,
        )  # fmt: skip
        self.first_number += 100
        self.store = self.rig.store
        self.alive: set[int] = set()
        self.recorded: list[tuple[Demotion, int]] = []  # no flush has shown them yet

    @initialize()
    def start(self) -> None:
        for engine in ENGINES:
            self.register(engine)
        self.open(1)

    def pick(self, number: int, *, owned: bool) -> Session | None:
        states = (SessionState.RUNNING, SessionState.IDLE) if owned else (SessionState.SUSPENDED,)
        sessions = [s for s in self.store.sessions() if s.state in states]
        return sessions[number % len(sessions)] if sessions else None

    # -- engines and sessions ------------------------------------------------
    @rule(engine=engines)
    def register(self, engine: int) -> None:
        if engine not in self.alive:
            self.rig.engine(engine)
            self.alive.add(engine)

    @rule(engine=engines, sure=seldom)
    def die(self, engine: int, sure: bool) -> None:
        if sure and engine in self.alive:
            owned = [s for s in self.store.sessions() if s.engine_id == engine]
            self.store.drop_engine(engine)
            self.alive.discard(engine)
            for session in owned:
                self.let_go(session)

    def let_go(self, session: Session) -> None:
        known = self.known[session.number]
        if known.history:
            known.versions = dict(known.history[-1].versions)
        else:
            del self.known[session.number]

    @rule(engine=engines)
    def open(self, engine: int) -> None:
        if engine in self.alive and len(self.store.sessions()) < 4:
            session = self.rig.session(engine, INT8, BLOCKS + 1)
            self.known[session.number] = Known()

    @rule(
        pick=picks, blocks=st.integers(1, BLOCKS), writes_cold=st.booleans(), at_once=st.booleans()
    )
    def demote(self, pick: int, blocks: int, writes_cold: bool, at_once: bool) -> None:
        session = self.pick(pick, owned=True)
        if session is None:
            return
        with contextlib.suppress(TierFull, InvalidArgument):
            plan = self.store.plan_demotion(
                session.engine_id, session.number, range(blocks), blocks, include_first=True,
                writes_cold=writes_cold,
            )  # fmt: skip
            self.commits += 1
            digests = self.rig.write(session, plan, self.commits)
            recorded = self.store.commit(session.engine_id, plan.reservation, digests)
            assert (recorded is not None) == (plan.tier is Tier.COLD)
            if recorded is not None:
                self.recorded.append((recorded, self.commits))
            else:
                self.published(session, plan, self.commits)
            if at_once:
                self.finish_commits()

    @rule()
    def finish_commits(self) -> None:
        """A flush shows what was recorded, whatever became of its session since."""
        self.rig.ledger.flush()
        recorded, self.recorded = self.recorded, []
        for demotion, version in recorded:
            if self.store.finish_commit(demotion, None) is None:
                self.published(demotion.session, demotion.plan, version)

    def published(self, session: Session, plan: DemotionPlan, version: int) -> None:
        versions = self.known[session.number].versions
        versions |= {(key.layer, key.block): version for key, _ in plan.pages()}

    @rule(pick=picks)
    def suspend(self, pick: int) -> None:
        session = self.pick(pick, owned=True)
        if session is None:
            return
        sealed = 0
        while session.index.holds([sealed]):
            sealed += 1
        ids = np.arange(sealed * 16 + 3, dtype="<u4").tobytes()
        known = self.known[session.number]
        self.store.begin_suspend(session.engine_id, session.number, ids, sealed)
        known.cut(sealed)
        if not known.history:  # else it is kept as before until all of it is on disk
            known.history.append(Kept(sealed, dict(known.versions), sure=False))
        if self.carry(session, list(self.store.keeper.unbacked(session)), keeps_source=True):
            self.store.settle_suspend(session)
            self.store.placement.cold_files.sync()
            self.rig.ledger.flush(sync=True)
            self.rig.ledger.keep(session.number)
            self.store.finish_suspend(session)
            known.acknowledged = Kept(sealed, dict(known.versions))
            known.history = [known.acknowledged]

    @rule(pick=picks, engine=engines)
    def resume(self, pick: int, engine: int) -> None:
        session = self.pick(pick, owned=False)
        if session is not None and engine in self.alive:
            self.store.resume_session(engine, session.number, INT8, MAX_TOKENS)

    @rule(pick=picks, discard=st.booleans(), sure=seldom)
    def close(self, pick: int, discard: bool, sure: bool) -> None:
        session = self.pick(pick, owned=True)
        if session is None or not sure:
            return
        self.store.close_session(session.number, engine_id=session.engine_id, discard=discard)
        if discard:
            del self.known[session.number]
        else:
            self.let_go(session)

    @rule(pick=picks, block=st.integers(0, BLOCKS), sure=seldom)
    def truncate(self, pick: int, block: int, sure: bool) -> None:
        session = self.pick(pick, owned=True)
        if session is not None and (sure or block > 1):
            self.store.truncate(session.engine_id, session.number, block)
            self.known[session.number].cut(block)

    # -- moves ---------------------------------------------------------------
    def carry(self, session: Session, keys: Any, *, keeps_source: bool = False) -> bool:
        """Copy pages to cold, through record and flush; say whether there was room for all."""
        moves = self.store.traffic.begin_moves(keys, Tier.COLD, keeps_source=keeps_source)
        batch = Batch(moves, Tier.COLD, self.store.placement, self.rig.clock, 1e9)
        batch.carry()
        assert batch.errors == [None] * len(moves)
        self.store.traffic.record(moves)
        self.rig.ledger.flush()
        self.store.traffic.finish(moves)
        return len(moves) == len(keys)

    @rule(pick=picks, owned=st.booleans(), first=st.integers(0, 9), many=st.integers(1, 6))
    def spill(self, pick: int, owned: bool, first: int, many: int) -> None:
        session = self.pick(pick, owned=owned)
        if session is not None and not session.dormant:
            keys = self.rig.pages(session, Tier.WARM)[first : first + many]
            self.carry(session, [key for key in keys if not self.store.traffic.fall_back(key)])

    @rule(pick=picks, owned=st.booleans(), first=st.integers(0, 9), many=st.integers(1, 6))
    def promote(self, pick: int, owned: bool, first: int, many: int) -> None:
        session = self.pick(pick, owned=owned)
        if session is not None:
            self.store.keeper.wake(session)
            keys = self.rig.pages(session, Tier.COLD)[first : first + many]
            moves = self.store.traffic.begin_moves(keys, Tier.WARM)
            batch = Batch(moves, Tier.WARM, self.store.placement, self.rig.clock, 1e9)
            batch.carry()
            assert batch.errors == [None] * len(moves)
            self.store.traffic.finish(moves)

    @rule(need_bytes=st.integers(1, 4 * INT8_BLOCK))
    def evict(self, need_bytes: int) -> None:
        self.store.traffic.evict(need_bytes)

    @rule(seconds=st.sampled_from([0.0, 1.0, CLAIM_SECONDS]))
    def tick(self, seconds: float) -> None:
        self.rig.clock.advance(seconds)
        self.store.tick()
        self.rig.ledger.flush()

    @rule()
    def snapshot(self) -> None:
        self.rig.ledger.snapshot()

    # -- the daemon's end ----------------------------------------------------
    @rule(sure=st.booleans())
    def killed_and_handed_back(self, sure: bool) -> None:
        """The daemon is killed; the engines live, and give the next one what they have."""
        if not sure:
            return
        self.rig.ledger.flush()
        on_disk = {s.number: self.on_disk(s) for s in self.store.sessions()}
        alive, offers = self.alive, {engine: Offers() for engine in self.alive}
        owned = [s for s in self.store.sessions() if s.engine_id is not None]
        for session in owned:
            mine = offers[session.engine_id]
            mine.add_table(session.number, session.table.fd)
            for pool in self.store.placement.pools[Tier.WARM]:
                for slab, slots in pool.slabs().items():
                    record = SlabRecord(slab, pool.namespace_digest, pool.slot_bytes, slots)
                    mine.add_slab(record, self.store.placement.warm_memory.fd(slab))
        self.store.close()
        self.boot(self.disk.kill())
        for engine in alive:
            self.register(engine)
        for session in owned:
            mine = offers[session.engine_id]
            for slab in mine.slabs.values():
                self.store.placement.hold_warm_slab(slab.record, slab.fd)
            found = inspect(mine, session.number, INT8, self.rig.ledger.store_uuid, BLOCKS + 1)
            assert not found.wrong
            self.store.adopt_session(session.engine_id, session.number, INT8, MAX_TOKENS, found)
        for mine in offers.values():
            mine.close()
        self.left_by_kill(on_disk)

    def left_by_kill(self, on_disk: dict[int, int]) -> None:
        """A kept session is as it was; a refused suspension's is what of it was on disk, no less.

        Its engine was told that it is not kept, and goes on with all pages. What it hands back
        lies in RAM as before, and need not outlive it: the restart has cut what is kept by then,
        for it cannot know whether the engine comes.
        """
        for session in self.store.sessions():
            known = self.known[session.number]
            if not known.history:
                continue
            latest = known.history[-1]
            whole = on_disk[session.number]
            there = latest.sealed if latest.sure else min(whole, latest.sealed)
            assert session.sealed_blocks == there, f"{session.sealed_blocks=} {whole=} {latest=}"
            known.cut_kept(there)
            if session.engine_id is None:  # there is nobody who has more of it
                known.versions = dict(known.history[-1].versions)

    @rule(keep=st.randoms(use_true_random=False), cut=st.booleans(), sure=seldom)
    def all_stops(self, keep: Any, cut: bool, sure: bool) -> None:
        """Engines and daemon die; with `cut` the disk loses any part of what was not synced."""
        if not sure:
            return
        if not cut:
            self.rig.ledger.flush()
        on_disk = {s.number: self.on_disk(s) for s in self.store.sessions()}
        self.store.close()
        pending = range(self.disk.pending())
        kept = [number for number in pending if keep.random() < 0.5]
        self.boot(self.disk.crash(keep=kept) if cut else self.disk.kill())
        before, self.known = self.known, {}
        there = {session.number: session for session in self.store.sessions()}
        for number, known in before.items():
            if known.history and number not in there:
                assert cut and not any(state.sure for state in known.history), f"{number} was kept"
            elif known.history:
                whole = None if cut else on_disk[number]
                self.known[number] = self.recovered(there[number], known, whole)
        for number in set(there) - set(self.known):
            assert cut, "a session that was discarded is back"
            self.store.close_session(number)

    def on_disk(self, session: Session) -> int:
        """Return how many of a session's kept blocks, from the first, are whole on disk."""
        if session.dormant:
            return session.sealed_blocks
        for block in range(session.sealed_blocks):
            pages = [session.index.get(layer, block) for layer in range(LAYERS)]
            if not all(p and (p.place.tier is Tier.COLD or p.backing) for p in pages):
                return block
        return session.sealed_blocks

    def recovered(self, session: Session, known: Known, whole: int | None) -> Known:
        """Return what the model knows of a session that came back; in a state it had.

        whole: the blocks that a kill left on disk; None after a power cut.
        """
        self.store.keeper.wake(session)
        found: Versions = {}
        damaged = False
        for (layer, block), page in session.index:
            key = PageKey(session.number, layer, block)
            version = self.version_on_disk(session, key, page)
            damaged |= version is None
            if version is not None:
                found[layer, block] = version
        sealed = session.sealed_blocks
        latest = known.history[-1]
        states = known.history if whole is None else [latest]
        fits = [
            state
            for state in states
            if sealed <= state.sealed and found.items() <= state.versions.items()
        ]
        assert fits, f"{sealed=} {found=} {known.history=}"
        if whole is not None:
            there = latest.sealed if latest.sure else min(whole, latest.sealed)
            assert sealed == there, f"{sealed=} {whole=} {latest=}"
        only = len(states) == 1 and latest.sure
        assert not only or (sealed == latest.sealed and not damaged), f"{sealed=} {latest=}"
        assert whole is None or not damaged, f"{sealed=} {latest=}"
        if damaged:
            gone = min(b for (_, b), _ in session.index if not self.whole(session, found, b))
            self.store.traffic.drop_from(session, gone)
            self.store.keeper.cut(session, gone)
            found = {key: v for key, v in found.items() if key[1] < gone}
        sure = whole is None or latest.sure  # what a kill left in the page cache may yet go
        return Known(found, [Kept(session.sealed_blocks, dict(found), sure)], known.acknowledged)

    @rule(superblock=st.booleans(), sure=seldom)
    def all_records_are_lost(self, superblock: bool, sure: bool) -> None:
        """Engines and daemon die, journal and snapshots are lost: fsck rebuilds what was kept."""
        if not sure:
            return
        self.rig.ledger.flush()
        self.store.close()
        disk = self.disk.kill()
        for name in [*disk.names("journal"), *disk.names("snap")]:
            disk.remove(name)
        if superblock and disk.names("kept"):  # else nothing need say which store this was
            disk.remove("superblock")
        report = rebuild(disk, FakeClock())
        assert report.sound or (report.strays and not report.restored), report
        self.boot(disk)
        before, self.known = self.known, {}
        there = {session.number: session for session in self.store.sessions()}
        assert set(there) == {number for number, known in before.items() if known.acknowledged}
        for number, session in there.items():
            self.known[number] = self.rebuilt(session, before[number], dict(report.lost))

    def rebuilt(self, session: Session, known: Known, lost: dict[int, int]) -> Known:
        """Return what the model knows of a session that was rebuilt."""
        self.store.keeper.wake(session)
        kept, sealed = known.acknowledged, session.sealed_blocks
        assert kept is not None
        assert sealed == kept.sealed or lost[session.number] == sealed * 16, f"{sealed=} {kept=}"
        assert sealed == kept.sealed or known.history != [kept], f"{sealed=} {kept=}"
        found = {
            (layer, block): self.version_on_disk(
                session, PageKey(session.number, layer, block), page
            )
            for (layer, block), page in session.index
        }
        assert found == {key: v for key, v in kept.versions.items() if key[1] < sealed}, found
        return Known(dict(found), [Kept(sealed, dict(found))], kept)

    def whole(self, session: Session, found: Versions, block: int) -> bool:
        return all((layer, block) in found for layer in range(LAYERS))

    def version_on_disk(self, session: Session, key: PageKey, page: Any) -> int | None:
        """Return the version whose bytes a cold page has, None if they are noticed to be none."""
        layout = page_layout(session.namespace.geometry, page.place.codec)
        slot = bytearray(layout.slot_bytes)
        files = self.store.placement.cold_files
        files.read_slot(page.place.slab, page.place.slot, layout.slot_bytes, memoryview(slot))
        expected = self.store.placement.header(session, key, page.place, page.digest)
        try:
            verify_slot(memoryview(slot), expected)
        except PageDamaged:
            return None
        payload = bytes(slot[HEADER_BYTES : HEADER_BYTES + layout.payload_bytes])
        for version in range(self.commits, 0, -1):
            if payload == self.rig.payload(session, key, page.place.codec, version):
                return version
        raise AssertionError(f"{key}: bytes that were never written")

    # -- what must hold ------------------------------------------------------
    @invariant()
    def the_store_is_consistent(self) -> None:
        self.store.check_integrity()

    @invariant()
    def the_pages_are_the_models_and_so_are_their_bytes(self) -> None:
        for session in self.store.sessions():
            if session.dormant:
                continue
            versions = self.known[session.number].versions
            assert {key for key, _ in session.index} == set(versions), session.id
            for (layer, block), page in session.index:
                key = PageKey(session.number, layer, block)
                codec = CodecId(page.place.codec)
                expected = self.rig.payload(session, key, codec, versions[layer, block])
                assert self.rig.bytes_of(session, layer, block) == expected, (key, page)

    @precondition(lambda self: self.alive)
    @invariant()
    def every_kept_session_is_there(self) -> None:
        there = {session.number for session in self.store.sessions()}
        assert {number for number, known in self.known.items() if known.history} <= there

    def teardown(self) -> None:
        self.store.close()
        for writer in self.rig.epochs.values():
            writer.close()


TestDurableMachine = DurableMachine.TestCase
TestDurableMachine.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=STEPS,
    suppress_health_check=list(HealthCheck),
)
