"""Slots, page table and epochs together: no engine's step ever sees its slot reused."""

import os

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tierd.memory.budget import ByteBudget
from tierd.memory.epochs import EPOCH_PAGE_BYTES, EpochClock, EpochWriter
from tierd.memory.memfd import Mapping, create_memfd
from tierd.memory.pagetable import PageTableReader, PageTableWriter
from tierd.memory.slabmemory import MemfdBacking
from tierd.memory.slabs import SlabIds, SlabPool, SlotRef
from tierd.types import CodecId, Place, Tier

SLOT = 4096
BLOCKS = 4
ENGINES = (1, 2)

engines = st.sampled_from(ENGINES)
blocks = st.integers(0, BLOCKS - 1)


class Reclamation(RuleBasedStateMachine):
    """One page table of BLOCKS pages, six slots, two engines that step, stall, die and return."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = EpochClock()
        self.backing = MemfdBacking()
        self.pool = SlabPool(
            Tier.WARM, SLOT, bytes(16), ByteBudget(6 * SLOT), 2 * SLOT, self.backing, SlabIds()
        )
        self.writer = PageTableWriter(1, 1, BLOCKS)
        self.reader = PageTableReader(self.writer.fd)
        self.published: dict[int, SlotRef] = {}
        self.engines: dict[int, EpochWriter] = {}
        # What each running step may read: (slab, slot) of the pages it found in the table.
        self.steps: dict[int, set[tuple[int, int]]] = {}
        self.writer.set_epoch(self.clock.now)

    @rule(engine=engines)
    def join(self, engine: int) -> None:
        if engine in self.engines:
            return
        fd = create_memfd("epoch", EPOCH_PAGE_BYTES)
        self.engines[engine] = EpochWriter(fd)
        self.clock.add_engine(engine, Mapping(fd, EPOCH_PAGE_BYTES, writable=False))
        os.close(fd)

    @precondition(lambda self: self.engines)
    @rule(engine=engines)
    def die(self, engine: int) -> None:
        self.clock.drop_engine(engine)
        self.steps.pop(engine, None)
        if engine in self.engines:
            self.engines.pop(engine).close()

    @precondition(lambda self: self.engines)
    @rule(engine=engines)
    def begin_step(self, engine: int) -> None:
        if engine in self.engines and engine not in self.steps:
            self.engines[engine].enter(self.reader.epoch())
            view = self.reader.read(BLOCKS)
            there = (view.tier[0] != Tier.NONE).nonzero()[0]
            self.steps[engine] = {(int(view.slab[0, b]), int(view.slot[0, b])) for b in there}

    @precondition(lambda self: self.steps)
    @rule(engine=engines)
    def end_step(self, engine: int) -> None:
        if self.steps.pop(engine, None) is not None:
            self.engines[engine].leave()

    @rule(block=blocks)
    def publish(self, block: int) -> None:
        if block in self.published:
            return
        for slot in self.pool.reserve(1):
            for engine, readable in self.steps.items():
                assert (slot.slab, slot.slot) not in readable, f"{slot} is read by {engine=}"
            self.pool.commit([slot])
            place = Place(Tier.WARM, CodecId.RAW, slot.slab, slot.slot, slot.generation)
            self.writer.publish(0, block, place)
            self.published[block] = slot

    @rule(block=blocks)
    def drop(self, block: int) -> None:
        slot = self.published.pop(block, None)
        if slot is not None:
            self.writer.unpublish(0, block)
            self.pool.retire([slot], self.clock.retire())
            self.writer.set_epoch(self.clock.now)

    @rule()
    def reclaim(self) -> None:
        self.pool.reclaim(self.clock.safe_epoch())

    @rule()
    def release(self) -> None:
        self.pool.release_empty_slabs()
        read = {slab for readable in self.steps.values() for slab, _ in readable}
        assert read <= set(self.pool.slabs()), "an engine's slab was given back under its step"

    @invariant()
    def all_is_counted(self) -> None:
        self.pool.check_integrity()
        self.clock.check_integrity()
        assert self.pool.counts().resident == len(self.published)

    def teardown(self) -> None:
        for engine in list(self.engines):
            self.die(engine)
        assert self.clock.safe_epoch() == self.clock.now
        self.pool.reclaim(self.clock.safe_epoch())
        assert self.pool.counts().retired == 0
        self.reader.close()
        self.writer.close()
        self.backing.close()


Reclamation.TestCase.settings = settings(max_examples=300, stateful_step_count=50)
TestReclamation = Reclamation.TestCase
