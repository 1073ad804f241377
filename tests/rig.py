"""A store on fakes for tests: fake clock, memory disk, lanes that run when the test says so.

Pages have made-up bytes that depend on (session, layer, block, version), so
that a page found at the wrong place, or a stale one, is noticed.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np
import xxhash

from tierd.carry import Batch
from tierd.codec.layout import HEADER_BYTES, page_layout
from tierd.demotions import DemotionPlan
from tierd.disk.faults import PowerCut
from tierd.disk.ledger import Ledger
from tierd.disk.posix import PosixDisk
from tierd.disk.simulated import SimulatedDisk
from tierd.disk.slabfiles import SlabFiles
from tierd.disk.volatile import VolatileLedger
from tierd.errors import StorageError
from tierd.memory.epochs import EpochWriter
from tierd.memory.memfd import Mapping, create_memfd
from tierd.memory.slabmemory import MemfdBacking
from tierd.mover import Mover
from tierd.pools import TierParts
from tierd.sessions import Session
from tierd.store import Store
from tierd.testing import FakeClock, MemoryDisk
from tierd.types import CodecId, DType, Geometry, Namespace, PageKey, Place, Tier

LAYERS = 2
# float32 pages of 16 x 128: a raw slot has 20 KiB, an int8 slot 12 KiB.
GEOMETRY = Geometry(LAYERS, kv_heads=1, head_dim=128, dtype=DType.FLOAT32, block_tokens=16)
INT8 = Namespace(GEOMETRY, "weights", CodecId.INT8)
RAW = Namespace(GEOMETRY, "weights", CodecId.RAW)
INT8_SLOT = page_layout(GEOMETRY, CodecId.INT8).slot_bytes
RAW_SLOT = page_layout(GEOMETRY, CodecId.RAW).slot_bytes
INT8_BLOCK = LAYERS * INT8_SLOT


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Let pytest run an async test, 30 s at most."""

    @functools.wraps(test)
    def run(*args: Any, **options: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **options), 30.0))

    return run


class HeldLanes:
    """Lanes whose work waits for `run`. `lanes` says how many may wait."""

    def __init__(self, lanes: int = 2) -> None:
        self.lanes = lanes
        self.held: list[tuple[Callable[[], None], Callable[[], None]]] = []

    def free(self) -> int:
        return self.lanes - len(self.held)

    def begin(self, work: Callable[[], None], report: Callable[[], None]) -> None:
        assert self.free() > 0
        self.held.append((work, report))

    def run(self) -> int:
        """Do all the work that is held; return how much it was."""
        held, self.held = self.held, []
        for work, report in held:
            work()
            report()
        return len(held)

    def stop(self) -> None:
        self.lanes = 0


_made: list[Rig] = []


def close_rigs() -> None:
    """Let go of the memory, files and page tables of every rig since the last call."""
    while _made:
        _made.pop().close()


class Rig:
    """A store with `warm_bytes` and `cold_bytes`, engines 1, 2, ... and pages with known bytes.

    What it holds is let go of when its test ends (conftest.py).
    """

    def __init__(
        self,
        warm_bytes: int = 16 * INT8_BLOCK,
        cold_bytes: int = 1 << 24,
        disk: MemoryDisk | PosixDisk | SimulatedDisk | None = None,
        *,
        durable: bool = False,
        patient: bool = False,
        first_number: int = 1,
    ) -> None:
        self.clock = FakeClock()
        self._failing_writes = 0
        self.disk = disk or MemoryDisk(fail=self._fault)
        numbers = itertools.count(first_number)
        self.ledger: Ledger | VolatileLedger = VolatileLedger(bytes(range(16)))
        if durable:
            self.ledger = Ledger.open(
                self.disk, new_uuid=lambda: bytes(range(16)), clock=self.clock, segment_bytes=65536,
                patient=patient,
            )  # fmt: skip
        self.store = Store(
            warm=TierParts(MemfdBacking(), warm_bytes, 1 << 20),
            cold=TierParts(SlabFiles(self.disk, self.ledger), cold_bytes, 1 << 20),
            ledger=self.ledger,
            clock=self.clock,
            new_number=lambda: next(numbers),
        )
        self.lanes = HeldLanes()
        self.mover = Mover(self.store, self.lanes)
        self.epochs: dict[int, EpochWriter] = {}
        _made.append(self)

    def close(self) -> None:
        """Let go of memory, files and page tables, whatever the store is in the middle of."""
        for session in self.store.book:
            if session.table is not None:
                session.table.close()
        placement = self.store.placement
        placement.warm_memory.release()
        placement.epochs.close()
        for epoch in self.epochs.values():
            epoch.close()
        with contextlib.suppress(PowerCut):  # a simulated machine that has stopped holds nothing
            placement.cold_files.close()

    def _fault(self, operation: str, count: int) -> None:
        if operation == "write" and self._failing_writes:
            self._failing_writes -= 1
            raise StorageError("memory disk: input/output error")

    def fail_writes(self, count: int) -> None:
        """Let the next `count` writes to cold fail."""
        self._failing_writes = count

    def flip_cold_bit(self, place: Place, codec_slot_bytes: int, offset: int) -> None:
        """Damage byte `offset` of a cold slot."""
        handle = self.store.placement.cold_files._handle(place.slab)
        self.disk.flip_bit(handle, (place.slot * codec_slot_bytes + offset) * 8)

    def engine(self, engine_id: int = 1) -> int:
        fd = create_memfd("epoch", 4096)
        self.epochs[engine_id] = EpochWriter(fd)
        self.store.register_engine(engine_id, 1000 + engine_id, Mapping(fd, 4096, writable=False))
        os.close(fd)
        return engine_id

    def session(self, engine_id: int = 1, namespace: Namespace = INT8, blocks: int = 64) -> Session:
        tokens = blocks * namespace.geometry.block_tokens
        return self.store.open_session(engine_id, namespace, tokens)

    def payload(self, session: Session, key: PageKey, codec: CodecId, version: int = 0) -> bytes:
        """Return the made-up bytes of a page."""
        size = page_layout(session.namespace.geometry, codec).payload_bytes
        seed = (key.session, key.layer, key.block, version)
        return np.random.default_rng(seed).bytes(size)

    def write(self, session: Session, plan: DemotionPlan, version: int = 0) -> bytes:
        """Do the engine's part of a demotion: fill the slots, return the digests."""
        digests = b""
        for key, place in plan.pages():
            payload = self.payload(session, key, place.codec, version)
            slot_bytes = page_layout(session.namespace.geometry, place.codec).slot_bytes
            if place.tier is Tier.COLD:
                digests += self.write_cold(session, key, place, payload)
                continue
            start = place.slot * slot_bytes + HEADER_BYTES
            memory = self.store.placement.warm_memory.mapping(place.slab).buffer
            memory[start : start + len(payload)] = payload
            digests += xxhash.xxh3_128_digest(payload)
        return digests

    def write_cold(self, session: Session, key: PageKey, place: Place, payload: bytes) -> bytes:
        """Write a page with its header to a lent cold slot, as an engine does past the store."""
        digest = xxhash.xxh3_128_digest(payload)
        slot_bytes = page_layout(session.namespace.geometry, place.codec).slot_bytes
        slot = self.store.placement.header(session, key, place, digest).pack() + payload
        files = self.store.placement.cold_files
        files.disk.write(
            files._handle(place.slab), place.slot * slot_bytes,
            [memoryview(slot.ljust(slot_bytes, b"\0"))],
        )  # fmt: skip
        return digest

    def demote(
        self, session: Session, blocks: Sequence[int], *, version: int = 0, first: bool = False
    ) -> None:
        """Plan, write and commit; the room must be there."""
        engine_id = session.engine_id
        assert engine_id is not None
        plan = self.store.plan_demotion(
            engine_id, session.number, blocks, len(blocks), include_first=first
        )
        assert sorted(plan.blocks) == sorted(blocks)
        self.store.commit(engine_id, plan.reservation, self.write(session, plan, version))

    def suspend(self, session: Session, blocks: int) -> None:
        """Suspend with `blocks` sealed blocks, all demoted already."""
        tokens = np.arange(blocks * session.block_tokens, dtype="<u4").tobytes()
        assert session.engine_id is not None
        self.suspend_with(session, tokens, blocks)

    def suspend_with(self, session: Session, token_ids: bytes, blocks: int) -> None:
        """Suspend in a store that is not durable: nothing is waited for."""
        assert session.engine_id is not None
        self.store.begin_suspend(session.engine_id, session.number, token_ids, blocks)
        self.store.finish_suspend(session)

    def stored(self, engine_id: int = 1, blocks: int = 4, namespace: Namespace = INT8) -> Session:
        """Return a suspended session whose `blocks` blocks are warm."""
        session = self.session(engine_id, namespace)
        self.demote(session, range(blocks), first=True)
        self.suspend(session, blocks)
        return session

    def move(self, keys: Sequence[PageKey], to: Tier) -> None:
        """Carry pages to a tier, here and now."""
        if to is Tier.COLD:
            keys = [key for key in keys if not self.store.traffic.fall_back(key)]
        moves = self.store.traffic.begin_moves(keys, to)
        held = [move for move in moves if move is not None]
        assert len(held) == len(moves), "no room"
        batch = Batch(held, to, self.store.placement, self.clock, 1e9)
        batch.carry()
        assert batch.errors == [None] * len(held)
        self.store.traffic.finish(held)

    def bytes_of(self, session: Session, layer: int, block: int) -> bytes:
        """Return a page's payload from wherever it is."""
        page = session.index.get(layer, block)
        assert page is not None, f"no page ({layer}, {block})"
        place = page.place
        layout = page_layout(session.namespace.geometry, place.codec)
        slot = bytearray(layout.slot_bytes)
        if place.tier is Tier.WARM:
            start = place.slot * layout.slot_bytes
            memory = self.store.placement.warm_memory.mapping(place.slab).buffer
            slot[:] = memory[start : start + layout.slot_bytes]
        else:
            files = self.store.placement.cold_files
            files.read_slot(place.slab, place.slot, layout.slot_bytes, memoryview(slot))
        return bytes(slot[HEADER_BYTES : HEADER_BYTES + layout.payload_bytes])

    def pages(self, session: Session, tier: Tier) -> list[PageKey]:
        """Return a session's pages in a tier."""
        return self.store.traffic.pages_in(tier, session, session.index.blocks_in(tier))

    def settle(self, passes: int = 50) -> None:
        """Pump and run the lanes until nothing is begun any more."""
        for _ in range(passes):
            self.mover.pump()
            self.store.check_integrity()
            if not self.lanes.run():
                return
        raise AssertionError(f"the mover did not come to rest in {passes} passes")
