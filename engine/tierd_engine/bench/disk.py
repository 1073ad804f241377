"""The cold tier's speed: spill and cold read through our own path, beside fio.

Ours: pages of a real store, moved in batches over the daemon's lanes, each
page's header and digest made or checked on the way (tierd/carry.py). The limit:
fio with O_DIRECT, the same bytes an I/O and as many I/Os at a time as there are
lanes. Both fill newly allocated files, and read back what they filled, one right
after the other. Each round is also run without the digests of the pages' bytes:
what they cost is the loss of speed by them.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import xxhash

from tierd.carry import Batch
from tierd.clock import SystemClock
from tierd.codec.layout import HEADER_BYTES, page_layout
from tierd.disk.posix import PosixDisk
from tierd.disk.slabfiles import SlabFiles
from tierd.disk.volatile import VolatileLedger
from tierd.lanes import LANES, ThreadLanes
from tierd.memory.epochs import EPOCH_PAGE_BYTES
from tierd.memory.memfd import Mapping, create_memfd
from tierd.memory.slabmemory import MemfdBacking
from tierd.mover import BATCH_BYTES
from tierd.pools import TierParts
from tierd.sessions import Session
from tierd.store import Store
from tierd.types import CodecId, DType, Geometry, Namespace, PageKey, Tier
from tierd.units import format_size
from tierd_engine.bench.fio import HOW_TO_GET_FIO, Limit

BAR = 0.85
CHECKSUM_BAR = 0.03
# Llama-3.1-8B and SmolLM2-135M: int8 pages of 516 KiB and 103 KiB and a header.
GEOMETRIES = {
    "8b": Geometry(32, kv_heads=8, head_dim=128, dtype=DType.BFLOAT16, block_tokens=256),
    "135m": Geometry(30, kv_heads=3, head_dim=64, dtype=DType.BFLOAT16, block_tokens=256),
}
_ENGINE = 1
_TEMPLATES = 8


@dataclass(frozen=True, slots=True)
class DiskRow:
    """Medians for pages of one model; `load` is the machine's when it ended.

    A ratio is the median over pairs taken one after the other, not the ratio of medians: a
    shared disk's speed doubles and halves within seconds. The costs are pairs likewise.
    """

    model: str
    slot_bytes: int
    io_bytes: int
    depth: int
    total_bytes: int
    rounds: int
    tool: str
    load: float
    write_bytes_per_second: float
    write_limit_bytes_per_second: float
    read_bytes_per_second: float
    read_limit_bytes_per_second: float
    write_ratio: float
    read_ratio: float
    write_checksum_cost: float
    read_checksum_cost: float

    @property
    def holds(self) -> bool:
        """Whether both ratios reach the bar."""
        return min(self.write_ratio, self.read_ratio) >= BAR


class _CountingDisk(PosixDisk):
    """Counts I/Os, so that the limit is measured at our size of an I/O."""

    ios = 0
    io_bytes = 0

    def scatter(self, handle: int, offset: int, buffers: Sequence[memoryview]) -> None:
        self._count(buffers)
        super().scatter(handle, offset, buffers)

    def write(self, handle: int, offset: int, buffers: Sequence[memoryview]) -> None:
        self._count(buffers)
        super().write(handle, offset, buffers)

    def _count(self, buffers: Sequence[memoryview]) -> None:
        self.ios += 1
        self.io_bytes += sum(map(len, buffers))


class _Unchecked(Batch):
    """Carries pages without looking at their bytes, to tell what looking costs."""

    def _is_sound(self, number: int) -> bool:
        return True


class DiskRig:
    """A store whose warm tier holds `total_bytes` of pages of one session, all spilled and read."""

    def __init__(self, folder: Path, geometry: Geometry, total_bytes: int) -> None:
        self.namespace = Namespace(geometry, "bench", CodecId.INT8)
        self.layout = page_layout(geometry, CodecId.INT8)
        self.blocks = max(1, total_bytes // (geometry.layers * self.layout.slot_bytes))
        self.total_bytes = self.blocks * geometry.layers * self.layout.slot_bytes
        self.disk = _CountingDisk(str(folder), ephemeral=True)
        ledger = VolatileLedger(bytes(16))
        room_bytes = self.total_bytes + (512 << 20)  # the ends of slabs
        self.store = Store(
            warm=TierParts(MemfdBacking(), room_bytes, 64 << 20),
            cold=TierParts(SlabFiles(self.disk, ledger), 2 * room_bytes, 256 << 20),
            ledger=ledger,
            clock=SystemClock(),
        )
        fd = create_memfd("bench-epoch", EPOCH_PAGE_BYTES)
        epoch_page = Mapping(fd, EPOCH_PAGE_BYTES, writable=True)
        epoch_page.buffer[:8] = b"\xff" * 8
        os.close(fd)
        self.store.register_engine(_ENGINE, os.getpid(), epoch_page)
        draw = np.random.default_rng(0)
        payloads = [draw.bytes(self.layout.payload_bytes) for _ in range(_TEMPLATES)]
        self._templates = [(data, xxhash.xxh3_128_digest(data)) for data in payloads]

    def fill(self) -> Session:
        """Return a new session whose pages are all warm."""
        store, tokens = self.store, (self.blocks + 1) * self.namespace.geometry.block_tokens
        session = store.open_session(_ENGINE, self.namespace, tokens)
        blocks = range(1, self.blocks + 1)
        plan = store.plan_demotion(_ENGINE, session.number, blocks, self.blocks)
        digests = []
        for number, (_, place) in enumerate(plan.pages()):
            payload, digest = self._templates[number % _TEMPLATES]
            start = place.slot * self.layout.slot_bytes + HEADER_BYTES
            memory = store.placement.warm_memory.mapping(place.slab).buffer
            memory[start : start + len(payload)] = payload
            digests.append(digest)
        store.commit(_ENGINE, plan.reservation, b"".join(digests))
        return session

    def allocate(self, session: Session) -> None:
        """Make the cold slabs, as fio's file is made before its time runs."""
        pool = self.store.placement.pool(Tier.COLD, session, CodecId.INT8)
        pool.abort(pool.reserve(self.total_bytes // self.layout.slot_bytes))

    async def move(self, session: Session, to: Tier, kind: type[Batch] = Batch) -> float:
        """Carry all pages of a session to a tier, in such batches; return bytes per second."""
        source = Tier.WARM if to is Tier.COLD else Tier.COLD
        keys = self.store.traffic.pages_in(source, session, session.index.blocks_in(source))
        lanes = ThreadLanes()
        landed: asyncio.Queue[Batch] = asyncio.Queue()
        start = time.perf_counter()
        flying, settled = 0, 0
        batches = self._batches(keys, to, kind)
        batch = next(batches, None)
        while batch is not None or flying:
            while batch is not None and lanes.free():
                lanes.begin(batch.carry, partial(landed.put_nowait, batch))
                flying += 1
                batch = next(batches, None)
            done = await landed.get()
            flying -= 1
            settled += len(done.moves)
            assert not any(done.errors), done.errors
            self.store.traffic.finish(done.moves)
        seconds = time.perf_counter() - start
        lanes.stop()
        assert settled * self.layout.slot_bytes == self.total_bytes
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
        self.store.close_session(session.number, engine_id=_ENGINE)
        self.store.reclaim()

    def close(self) -> None:
        """Close the store and the disk."""
        self.store.close()
        self.disk.close()


@contextmanager
def _rig(folder: Path, geometry: Geometry, total_bytes: int) -> Iterator[DiskRig]:
    rig = DiskRig(folder, geometry, total_bytes)
    try:
        yield rig
    finally:
        rig.close()


def bench_disk(
    folder: Path | None, models: Sequence[str], total_bytes: int, rounds: int
) -> list[DiskRow]:
    """Measure each model's pages in a folder of `folder` that is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="tierd-bench-", dir=folder) as made:
        return [_bench(Path(made), model, total_bytes, rounds) for model in models]


def _bench(folder: Path, model: str, total_bytes: int, rounds: int) -> DiskRow:
    with _rig(folder / "cold", GEOMETRIES[model], total_bytes) as rig:
        _round(rig, Batch)  # warms up, and tells our size of an I/O
        io_bytes = rig.disk.io_bytes // rig.disk.ios // 4096 * 4096
        limit = Limit(folder, io_bytes, LANES, rig.total_bytes // io_bytes * io_bytes)
        found = []
        for _ in range(rounds):
            written, read, write_limit, read_limit = _round(rig, Batch, limit)
            bare_written, bare_read, _, _ = _round(rig, _Unchecked)
            found.append((
                written, write_limit, read, read_limit, written / write_limit, read / read_limit,
                1 - written / bare_written, 1 - read / bare_read,
            ))  # fmt: skip
        speeds = [statistics.median(side) for side in zip(*found, strict=True)]
        return DiskRow(
            model, rig.layout.slot_bytes, io_bytes, LANES, rig.total_bytes, rounds, limit.tool,
            os.getloadavg()[0], *speeds,
        )  # fmt: skip


def _round(
    rig: DiskRig, kind: type[Batch], limit: Limit | None = None
) -> tuple[float, float, float, float]:
    """Return bytes/s of a spill, of its cold read, and of the limit right before each (or 0)."""
    session = rig.fill()
    rig.allocate(session)
    write_limit = limit.write() if limit else 0.0
    written = asyncio.run(rig.move(session, Tier.COLD, kind))
    read_limit = limit.read() if limit else 0.0
    read = asyncio.run(rig.move(session, Tier.WARM, kind))
    rig.drop(session)
    return written, read, write_limit, read_limit


def disk_to_dict(rows: Sequence[DiskRow]) -> dict[str, object]:
    """Return what --json prints; the ratios are the worst row's."""
    return {
        "write_ratio_to_fio": min(row.write_ratio for row in rows),
        "read_ratio_to_fio": min(row.read_ratio for row in rows),
        "rows": [asdict(row) for row in rows],
    }


def print_disk(rows: Sequence[DiskRow]) -> None:
    """Print figure, limit and ratio of each row."""
    if any(row.tool != "fio" for row in rows):
        print(HOW_TO_GET_FIO)
    for row in rows:
        print(
            f"{row.model}: pages of {format_size(row.slot_bytes)}, {row.depth} I/Os of "
            f"{format_size(row.io_bytes)} at a time, {format_size(row.total_bytes)} a round, "
            f"median of {row.rounds}, load {row.load:.1f}"
        )
        for name, ours, limit, ratio in (
            ("spill", row.write_bytes_per_second, row.write_limit_bytes_per_second,
             row.write_ratio),
            ("cold read", row.read_bytes_per_second, row.read_limit_bytes_per_second,
             row.read_ratio),
        ):  # fmt: skip
            verdict = "holds" if ratio >= BAR else "MISSED"
            print(
                f"  {name:9} {ours / 1e9:6.2f} GB/s   {row.tool} {limit / 1e9:6.2f} GB/s   "
                f"ratio {ratio:.2f}   bar {BAR} {verdict}"
            )
        costs = (("spill", row.write_checksum_cost), ("cold read", row.read_checksum_cost))
        for name, cost in costs:
            verdict = "holds" if cost <= CHECKSUM_BAR else "MISSED"
            print(f"  {name:9} digests cost {cost:6.1%}   bar {CHECKSUM_BAR:.0%} {verdict}")
