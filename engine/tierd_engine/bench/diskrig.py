"""A store for the disk benchmark: pages of one session that are spilled and read back."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import xxhash

from tierd.carry import Batch
from tierd.clock import SystemClock
from tierd.codec.layout import HEADER_BYTES, page_layout
from tierd.disk.headerrows import place_rows, seal_rows
from tierd.disk.slabfiles import SlabFiles
from tierd.disk.volatile import VolatileLedger
from tierd.lanes import ThreadLanes
from tierd.memory.epochs import EPOCH_PAGE_BYTES
from tierd.memory.memfd import Mapping, create_memfd
from tierd.memory.slabmemory import MemfdBacking
from tierd.mover import BATCH_BYTES
from tierd.pools import TierParts
from tierd.sessions import Session
from tierd.store import Store
from tierd.types import CodecId, DType, Geometry, Namespace, PageKey, Tier
from tierd_engine.bench.benchdisks import CountingDisk

# Llama-3.1-8B and SmolLM2-135M: int8 pages of 516 KiB and 103 KiB and a header.
GEOMETRIES = {
    "8b": Geometry(32, kv_heads=8, head_dim=128, dtype=DType.BFLOAT16, block_tokens=256),
    "135m": Geometry(30, kv_heads=3, head_dim=64, dtype=DType.BFLOAT16, block_tokens=256),
}
ENGINE = 1
_TEMPLATES = 8


def register_engine_at_rest(store: Store) -> None:
    """Give a store the engine ENGINE, which never runs a step: no slot waits for it."""
    fd = create_memfd("bench-epoch", EPOCH_PAGE_BYTES)
    epoch_page = Mapping(fd, EPOCH_PAGE_BYTES, writable=True)
    epoch_page.buffer[:8] = b"\xff" * 8
    os.close(fd)
    store.register_engine(ENGINE, os.getpid(), epoch_page)


class UncheckedBatch(Batch):
    """Carries pages without looking at their bytes, to tell what looking costs."""

    def _unsound(self, first: int, end: int) -> set[int]:
        rows = self._rows[first:end]
        place_rows(rows, [move.destination for move in self.moves[first:end]])
        seal_rows(rows)
        return set()


class DiskRig:
    """A store whose warm tier holds `total_bytes` of pages of one session, all spilled and read."""

    def __init__(self, disk: CountingDisk, geometry: Geometry, total_bytes: int) -> None:
        self.namespace = Namespace(geometry, "bench", CodecId.INT8)
        self.layout = page_layout(geometry, CodecId.INT8)
        self.blocks = max(1, total_bytes // (geometry.layers * self.layout.slot_bytes))
        self.total_bytes = self.blocks * geometry.layers * self.layout.slot_bytes
        self.disk = disk
        ledger = VolatileLedger(bytes(16))
        room_bytes = self.total_bytes + (512 << 20)  # the ends of slabs
        self.store = Store(
            warm=TierParts(MemfdBacking(), room_bytes, 64 << 20),
            cold=TierParts(SlabFiles(self.disk, ledger), 2 * room_bytes, 256 << 20),
            ledger=ledger,
            clock=SystemClock(),
        )
        register_engine_at_rest(self.store)
        draw = np.random.default_rng(0)
        payloads = [draw.bytes(self.layout.payload_bytes) for _ in range(_TEMPLATES)]
        self._templates = [(data, xxhash.xxh3_128_digest(data)) for data in payloads]

    def fill(self) -> Session:
        """Return a new session whose pages are all warm."""
        store, tokens = self.store, (self.blocks + 1) * self.namespace.geometry.block_tokens
        session = store.open_session(ENGINE, self.namespace, tokens)
        blocks = range(1, self.blocks + 1)
        plan = store.plan_demotion(ENGINE, session.number, blocks, self.blocks)
        digests = []
        for number, (_, place) in enumerate(plan.pages()):
            payload, digest = self._templates[number % _TEMPLATES]
            start = place.slot * self.layout.slot_bytes + HEADER_BYTES
            memory = store.placement.warm_memory.mapping(place.slab).buffer
            memory[start : start + len(payload)] = payload
            digests.append(digest)
        store.commit(ENGINE, plan.reservation, b"".join(digests))
        return session

    def allocate(self, session: Session) -> None:
        """Make the cold slabs, as fio's file is made before its time runs."""
        pool = self.store.placement.pool(Tier.COLD, session, CodecId.INT8)
        pool.abort(pool.reserve(self.total_bytes // self.layout.slot_bytes))

    async def move(self, session: Session, to: Tier, kind: type[Batch] = Batch) -> float:
        """Carry all pages of a session to a tier, in such batches; return bytes per second."""
        source = Tier.WARM if to is Tier.COLD else Tier.COLD
        keys = self.store.traffic.pages_in(source, session, session.index.blocks_in(source))
        assert len(keys) * self.layout.slot_bytes == self.total_bytes
        lanes = ThreadLanes()
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        batches = self._batches(keys, to, kind)
        left = len(keys)
        start = time.perf_counter()

        def begin() -> None:
            while lanes.free() and (batch := next(batches, None)) is not None:
                lanes.begin(batch.carry, partial(land, batch))

        def land(batch: Batch) -> None:
            nonlocal left
            begin()  # first: a lane waits
            assert not any(batch.errors), batch.errors
            self.store.traffic.finish(batch.moves)
            left -= len(batch.moves)
            if not left:
                done.set_result(None)

        begin()
        await done
        seconds = time.perf_counter() - start
        lanes.stop()
        self.store.reclaim()
        return self.total_bytes / seconds

    def _batches(self, keys: Sequence[PageKey], to: Tier, kind: type[Batch]) -> Iterator[Batch]:
        count = -(-BATCH_BYTES // self.layout.slot_bytes)
        for first in range(0, len(keys), count):
            moves = self.store.traffic.begin_moves(keys[first : first + count], to)
            assert len(moves) == len(keys[first : first + count]), "the rig has room for all"
            yield kind(moves, to, self.store.placement, self.store.clock, float("inf"))

    def drop(self, session: Session) -> None:
        """Close a session; its cold slabs are given back."""
        self.store.close_session(session.number, engine_id=ENGINE)
        self.store.reclaim()

    def close(self) -> None:
        """Close the store and the disk."""
        self.store.close()
        self.disk.close()


def there_and_back(rig: DiskRig, kind: type[Batch]) -> tuple[float, float]:
    """Return the bytes per second of a spill and of its cold read, in such batches."""
    session = rig.fill()
    rig.allocate(session)
    written = asyncio.run(rig.move(session, Tier.COLD, kind))
    read = asyncio.run(rig.move(session, Tier.WARM, kind))
    rig.drop(session)
    return written, read
