"""The store against a dict, by random steps: no wrong byte, no lost slot, at any moment.

The model knows which version of which page was committed. After each step the
store's own integrity holds, its pages are the model's, and their bytes are
theirs. Two hostile things happen all along: an engine goes on writing into
slots of a demotion that was revoked, and an engine in a step reads every place
that the page table named when the step began.

TIERD_MODEL_EXAMPLES and TIERD_MODEL_STEPS make a longer run.
"""

import contextlib
import os

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)

from tests.rig import GEOMETRY, INT8, INT8_BLOCK, LAYERS, RAW, Rig
from tierd.carry import Batch
from tierd.codec.layout import HEADER_BYTES, page_layout
from tierd.demotions import EXPIRY_SECONDS, DemotionPlan
from tierd.errors import (
    InvalidArgument,
    LayoutMismatch,
    NotFound,
    PageMiss,
    StaleGeneration,
    TierFull,
)
from tierd.memory.pagetable import PageTableReader
from tierd.moves import Move
from tierd.sessions import Session
from tierd.types import CodecId, Namespace, PageKey, Place, SessionState, Tier

EXAMPLES = int(os.environ.get("TIERD_MODEL_EXAMPLES", "200"))
STEPS = int(os.environ.get("TIERD_MODEL_STEPS", "50"))
BLOCKS = 6
ENGINES = (1, 2)
engines = st.sampled_from(ENGINES)
blocks = st.integers(0, BLOCKS - 1)
picks = st.integers(0, 5)  # which of the sessions, demotions or moves that there are
seldom = st.sampled_from([False] * 4 + [True])


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig(warm_bytes=8 * INT8_BLOCK, cold_bytes=8 * INT8_BLOCK)
        self.store = self.rig.store
        self.versions: dict[PageKey, int] = {}
        self.commits = 0
        self.alive: set[int] = set()
        self.lent: dict[int, tuple[int, Session, DemotionPlan, bytes, int]] = {}
        self.flying: list[Move] = []
        self.read: dict[int, dict[Place, tuple[Session, bytes]]] = {}

    # -- the model --------------------------------------------------
    def forget(self, session: Session, first_block: int = 0) -> None:
        for key in list(self.versions):
            if key.session == session.number and key.block >= first_block:
                del self.versions[key]

    def at(self, session: Session, place: Place) -> bytes:
        layout = page_layout(session.namespace.geometry, place.codec)
        if place.tier is Tier.WARM:
            start = place.slot * layout.slot_bytes + HEADER_BYTES
            memory = self.store.placement.warm_memory.mapping(place.slab).buffer
            return bytes(memory[start : start + layout.payload_bytes])
        slot = bytearray(layout.slot_bytes)
        files = self.store.placement.cold_files
        files.read_slot(place.slab, place.slot, layout.slot_bytes, memoryview(slot))
        return bytes(slot[HEADER_BYTES : HEADER_BYTES + layout.payload_bytes])

    @initialize()
    def start(self) -> None:
        for engine in ENGINES:
            self.register(engine)
        self.rig.session(ENGINES[0], INT8, BLOCKS)

    def pick(self, number: int, *, owned: bool = False) -> Session | None:
        """Return one of the sessions; `owned`: of those that an engine owns."""
        sessions = [s for s in self.store.sessions() if s.engine_id is not None or not owned]
        return sessions[number % len(sessions)] if sessions else None

    def kept_blocks(self, session: Session) -> int:
        """Return how many blocks stay of a resumed session when its engine goes."""
        return self.store.keeper.whole_blocks(session) if session.kept else 0

    # -- engines --------------------------------------------------
    @rule(engine=engines)
    def register(self, engine: int) -> None:
        if engine not in self.alive:
            self.rig.engine(engine)
            self.alive.add(engine)

    @rule(engine=engines, sure=seldom)
    def die(self, engine: int, sure: bool) -> None:
        if not sure:
            return
        self.read.pop(engine, None)
        for session in self.store.sessions():
            if session.engine_id == engine:
                self.forget(session, self.kept_blocks(session))
        self.lent = {n: lent for n, lent in self.lent.items() if lent[0] != engine}
        self.store.drop_engine(engine)
        self.alive.discard(engine)

    @rule()
    def more_demotions(self) -> None:
        """Each session gets its first blocks below hot, so that there is something to lose."""
        for pick in range(4):
            self.demote(pick, list(range(BLOCKS)), 2, None, True)

    @rule(engine=engines)
    def begin_step(self, engine: int) -> None:
        if engine not in self.alive or engine in self.read:
            return
        owned = [s for s in self.store.sessions() if s.engine_id == engine]
        readers = [(session, PageTableReader(session.table.fd)) for session in owned]
        epoch = readers[0][1].epoch() if readers else self.store.placement.epochs.now
        self.rig.epochs[engine].enter(epoch)
        self.read[engine] = {}
        for session, reader in readers:
            view = reader.read(BLOCKS)
            for layer, block in np.argwhere(view.tier):
                place = Place(
                    Tier(int(view.tier[layer, block])),
                    CodecId(int(view.codec[layer, block])),
                    int(view.slab[layer, block]),
                    int(view.slot[layer, block]),
                    int(view.generation[layer, block]),
                )
                self.read[engine][place] = (session, self.at(session, place))
            reader.close()

    @rule(engine=engines)
    def end_step(self, engine: int) -> None:
        if self.read.pop(engine, None) is not None:
            self.rig.epochs[engine].leave()

    # -- sessions --------------------------------------------------
    @rule(engine=engines, namespace=st.sampled_from([INT8, RAW]))
    def open(self, engine: int, namespace: Namespace) -> None:
        if len(self.store.sessions()) == 4:
            return
        if engine in self.alive:
            self.rig.session(engine, namespace, BLOCKS)
        else:
            with pytest.raises(NotFound):
                self.rig.session(engine, namespace, BLOCKS)

    @rule(pick=picks, sealed=st.integers(0, BLOCKS), sure=seldom)
    def suspend(self, pick: int, sealed: int, sure: bool) -> None:
        session = self.pick(pick, owned=True)
        if session is None:
            return
        whole = [b for b in range(BLOCKS) if session.index.holds(range(b + 1))]
        if sealed > len(whole):
            with pytest.raises(PageMiss):
                self.rig.suspend(session, sealed)
            sealed = len(whole)
        if not sealed and not sure:
            return
        self.rig.suspend(session, sealed)
        self.forget(session, sealed)
        self.lent = {n: lent for n, lent in self.lent.items() if lent[1] is not session}

    @rule(pick=picks, engine=engines, other=seldom)
    def resume(self, pick: int, engine: int, other: bool) -> None:
        session = self.pick(pick)
        if session is None:
            return
        namespace = Namespace(GEOMETRY, "other") if other else session.namespace
        fits = session.state is SessionState.SUSPENDED and session.namespace == namespace
        try:
            self.store.resume_session(engine, session.number, namespace, BLOCKS * 16)
        except (NotFound, StaleGeneration, LayoutMismatch):
            assert not fits or engine not in self.alive
        else:
            assert fits and engine in self.alive

    @rule(pick=picks, by_owner=st.booleans(), sure=seldom)
    def close(self, pick: int, by_owner: bool, sure: bool) -> None:
        session = self.pick(pick)
        if session is None or not sure:
            return
        owner = session.engine_id if by_owner else None
        kept = self.kept_blocks(session) if owner is not None else 0
        self.store.close_session(session.number, engine_id=owner)
        self.forget(session, kept)
        if owner is not None:
            self.lent = {n: lent for n, lent in self.lent.items() if lent[1] is not session}

    @rule(pick=picks, first=blocks, sure=seldom)
    def truncate(self, pick: int, first: int, sure: bool) -> None:
        session = self.pick(pick, owned=True)
        if session is not None and (first >= BLOCKS // 2 or sure):
            self.store.truncate(session.engine_id, session.number, first)
            self.forget(session, first)

    # -- demotions --------------------------------------------------
    @rule(
        pick=picks,
        hot=st.permutations(range(BLOCKS)),
        need=st.integers(1, 3),
        codecs=st.none() | st.tuples(*[st.sampled_from([CodecId.INT8, CodecId.RAW])] * LAYERS),
        at_once=st.booleans(),
        writes_cold=st.booleans(),
    )
    def demote(
        self, pick: int, hot: list[int], need: int, codecs: tuple[CodecId, ...] | None,
        at_once: bool, writes_cold: bool = False,
    ) -> None:  # fmt: skip
        session = self.pick(pick, owned=True)
        if session is None:
            return
        engine = session.engine_id
        try:
            plan = self.store.plan_demotion(
                engine, session.number, hot, need, codecs=codecs, include_first=True,
                writes_cold=writes_cold,
            )  # fmt: skip
        except (TierFull, InvalidArgument):
            return
        if plan.reservation in self.lent:
            return  # nothing else is left: the plan that is still open is given again
        assert set(plan.blocks) <= set(hot) and len(plan.blocks) <= need
        assert writes_cold or plan.tier is Tier.WARM
        self.commits += 1
        digests = self.rig.write(session, plan, self.commits)
        self.lent[plan.reservation] = (engine, session, plan, digests, self.commits)
        if at_once:
            self.commit(len(self.lent) - 1)

    @rule(pick=picks)
    def write_late(self, pick: int) -> None:
        """A live engine writes what it was lent, as long as it has not answered for it."""
        if self.lent:
            _, session, plan, _, version = list(self.lent.values())[pick % len(self.lent)]
            self.rig.write(session, plan, version)

    @rule(pick=picks)
    def commit(self, pick: int) -> None:
        if not self.lent:
            return
        reservation = list(self.lent)[pick % len(self.lent)]
        engine, _, plan, digests, version = self.lent.pop(reservation)
        try:
            self.store.commit(engine, reservation, digests)
        except StaleGeneration:
            return
        self.versions.update((key, version) for key, _ in plan.pages())
        with pytest.raises(StaleGeneration):
            self.store.commit(engine, reservation, digests)

    @rule(pick=picks)
    def abort(self, pick: int) -> None:
        if self.lent:
            reservation = list(self.lent)[pick % len(self.lent)]
            self.store.abort(self.lent.pop(reservation)[0], reservation)

    # -- moves --------------------------------------------------
    @rule(pick=picks, page=st.integers(0, 2 * BLOCKS * LAYERS), many=st.integers(1, 4))
    def begin_moves(self, pick: int, page: int, many: int) -> None:
        session = self.pick(pick)
        if session is None:
            return
        pages = sorted(session.index, key=lambda entry: entry[0])
        wanted: dict[Tier, list[PageKey]] = {Tier.WARM: [], Tier.COLD: []}
        for (layer, block), found in pages[page % (len(pages) or 1) :][:many]:
            key = PageKey(session.number, layer, block)
            if key not in self.store.placement.moving:
                wanted[Tier.COLD if found.place.tier is Tier.WARM else Tier.WARM].append(key)
        # As the mover does: what has a copy in cold is not copied there again.
        down = [key for key in wanted[Tier.COLD] if not self.store.traffic.fall_back(key)]
        wanted[Tier.COLD] = down
        for to, keys in wanted.items():
            moves = self.store.traffic.begin_moves(keys, to)
            assert [move.key for move in moves] == keys[: len(moves)]
            self.flying += moves

    @rule(pick=picks, fails=seldom, damage=seldom)
    def end_move(self, pick: int, fails: bool, damage: bool) -> None:
        if not self.flying:
            return
        move = self.flying.pop(pick % len(self.flying))
        if fails:
            self.store.traffic.abort(move)
            return
        read_by_a_step = any(move.source in places for places in self.read.values())
        damage = damage and not read_by_a_step and move.source.tier is Tier.WARM
        if damage:
            move.warm[HEADER_BYTES] ^= 1
        batch = Batch([move], move.destination.tier, self.store.placement, self.rig.clock, 1e9)
        batch.carry()
        assert (batch.errors[0] is not None) == damage
        if not damage:
            self.store.traffic.finish([move])
            return
        orphaned = move.orphaned
        self.store.traffic.damaged(move)
        if not orphaned:
            self.versions.pop(move.key)
            if move.session.state is SessionState.SUSPENDED:
                self.forget(move.session, move.key.block)

    @rule(need_bytes=st.integers(1, 3 * INT8_BLOCK), sure=seldom)
    def evict(self, need_bytes: int, sure: bool) -> None:
        if not sure:
            return
        self.store.traffic.evict(need_bytes)
        for session in self.store.sessions():
            if session.state is SessionState.SUSPENDED:
                self.forget(session, session.sealed_blocks)

    # -- hints, time --------------------------------------------------
    @rule(pick=picks, first=blocks)
    def hint(self, pick: int, first: int) -> None:
        session = self.pick(pick)
        if session is not None:
            with contextlib.suppress(InvalidArgument, TierFull):
                self.store.hint("a", session.number, deadline_seconds=5.0, first_token=first * 16)

    @rule(seconds=st.sampled_from([0.0, 1.0, 6.0, EXPIRY_SECONDS + 1, 100.0]))
    def tick(self, seconds: float) -> None:
        self.rig.clock.advance(seconds)
        self.store.tick()

    # -- what must hold --------------------------------------------------
    @invariant()
    def the_store_is_consistent(self) -> None:
        self.store.check_integrity()

    @invariant()
    def the_pages_are_the_models_and_so_are_their_bytes(self) -> None:
        found = set()
        for session in self.store.sessions():
            for (layer, block), page in session.index:
                key = PageKey(session.number, layer, block)
                found.add(key)
                expected = self.rig.payload(session, key, page.place.codec, self.versions[key])
                assert self.at(session, page.place) == expected, (key, page.place)
        assert found == set(self.versions)

    @invariant()
    def a_step_reads_what_was_there_when_it_began(self) -> None:
        for engine, places in self.read.items():
            for place, (session, payload) in places.items():
                assert self.at(session, place) == payload, (engine, place)

    def teardown(self) -> None:
        for move in self.flying:
            self.store.traffic.abort(move)
        self.store.close()
        self.store.tick()
        for tier, figures in self.store.stats()["tiers"].items():
            assert figures["used_bytes"] == 0, (tier, figures)
        for writer in self.rig.epochs.values():
            writer.close()


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=STEPS,
    suppress_health_check=list(HealthCheck),
)
