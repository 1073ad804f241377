"""How long it takes to keep a session, and to bring it up by a hint: whole, as a daemon does it.

A real store and mover over a durable cold tier: each page copied with its digest, journal and
manifest written, all of it synced; then every page read back to warm, checked. Two lengths, for
what a daemon does a page must not grow with the session: the longer one's time a page over the
shorter one's is printed.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import xxhash

from tierd.clock import SystemClock
from tierd.codec.layout import HEADER_BYTES, page_layout
from tierd.disk.ledger import Ledger
from tierd.disk.posix import PosixDisk
from tierd.disk.slabfiles import SlabFiles
from tierd.lanes import LANES, ThreadLanes
from tierd.memory.slabmemory import MemfdBacking
from tierd.mover import BATCH_BYTES, Mover
from tierd.pools import TierParts
from tierd.sessions import Session
from tierd.store import Store
from tierd.types import CodecId, Namespace, Tier
from tierd.units import GIB, MIB, format_size
from tierd_engine.bench.diskrig import ENGINE, GEOMETRIES, register_engine_at_rest
from tierd_engine.bench.fio import Limit

BLOCKS = (128, 512)  # of SmolLM2: 32,768 and 131,072 tokens
GROWTH_BAR = 1.5
_DEADLINE_SECONDS = 60.0
_LOOK_SECONDS = 0.002  # between two looks at whether the pages are up


@dataclass(frozen=True, slots=True)
class KeepRow:
    """One session: its pages and their bytes, and how long it took. `plain`: the disk's, by a loop
    of as many bytes that syncs nothing and keeps no books."""

    blocks: int
    pages: int
    total_bytes: int
    keep_seconds: float
    hint_seconds: float
    write_plain_bytes_per_second: float
    read_plain_bytes_per_second: float


@dataclass(frozen=True, slots=True)
class Keeping:
    """Rows by length, ascending."""

    rows: tuple[KeepRow, ...]

    @property
    def growth(self) -> float:
        """Time a page of the longest over that of the shortest: the worse of keeping and hint."""
        first, last = self.rows[0], self.rows[-1]
        share = first.pages / last.pages
        return share * max(
            last.keep_seconds / first.keep_seconds, last.hint_seconds / first.hint_seconds
        )

    @property
    def holds(self) -> bool:
        """Whether the time a page does not grow with the session."""
        return self.growth <= GROWTH_BAR


class KeepRig:
    """A durable store of one session, whose encoded pages are all in RAM."""

    def __init__(self, folder: Path, blocks: int) -> None:
        geometry = GEOMETRIES["135m"]
        self.blocks, self.namespace = blocks, Namespace(geometry, "bench", CodecId.INT8)
        self.layout = page_layout(geometry, CodecId.INT8)
        self.pages = blocks * geometry.layers
        self.total_bytes = self.pages * self.layout.slot_bytes
        self.disk = PosixDisk(str(folder), ephemeral=False)
        ledger = Ledger.open(self.disk, new_uuid=lambda: os.urandom(16), clock=SystemClock())
        self.store = Store(
            warm=TierParts(MemfdBacking(), self.total_bytes + 256 * MIB, 64 * MIB),
            cold=TierParts(SlabFiles(self.disk, ledger), self.total_bytes + GIB, 256 * MIB),
            ledger=ledger,
            clock=SystemClock(),
        )
        register_engine_at_rest(self.store)

    def fill(self) -> Session:
        """Return a new session, block 0 to the last in RAM, all with the same made-up bytes."""
        store, tokens = self.store, self.blocks * self.namespace.geometry.block_tokens
        session = store.open_session(ENGINE, self.namespace, tokens)
        codecs = [CodecId.INT8] * session.layers
        plan = store.plan_demotion(
            ENGINE, session.number, range(self.blocks), self.blocks, codecs=codecs,
            include_first=True,
        )  # fmt: skip
        digests = []
        for _, place in plan.pages():
            layout = page_layout(self.namespace.geometry, place.codec)
            payload = bytes(layout.payload_bytes)
            start = place.slot * layout.slot_bytes + HEADER_BYTES
            store.placement.warm_memory.mapping(place.slab).buffer[start : start + len(payload)] = (
                payload
            )
            digests.append(xxhash.xxh3_128_digest(payload))
        store.commit(ENGINE, plan.reservation, b"".join(digests))
        return session

    async def measure(self) -> tuple[float, float]:
        """Return the seconds that keeping the session takes, and those of a hint for all of it."""
        lanes = ThreadLanes()
        mover = Mover(self.store, lanes)
        running = asyncio.ensure_future(mover.run())
        session = self.fill()
        tokens = np.zeros(self.blocks * self.namespace.geometry.block_tokens, "<u4").tobytes()
        start = time.perf_counter()
        await mover.suspend(
            ENGINE, session.number, tokens, self.blocks, deadline_seconds=_DEADLINE_SECONDS
        )
        keep_seconds = time.perf_counter() - start
        for key in self.store.traffic.pages_in(Tier.WARM, session, range(self.blocks)):
            assert self.store.traffic.fall_back(key), f"{key} was not kept"
        self.store.reclaim()
        start = time.perf_counter()
        mover.hint("bench", session.number, deadline_seconds=_DEADLINE_SECONDS)
        while session.index.pages_in(Tier.WARM) < self.pages:
            assert time.perf_counter() - start < _DEADLINE_SECONDS, "the pages did not come up"
            await asyncio.sleep(_LOOK_SECONDS)
        hint_seconds = time.perf_counter() - start
        await mover.stop()
        await running
        lanes.stop()
        return keep_seconds, hint_seconds

    def close(self) -> None:
        """Close the store and the disk."""
        self.store.close()
        self.disk.close()


def bench_keep(folder: Path | None, lengths: Sequence[int] = BLOCKS) -> Keeping:
    """Measure a session of each length in a folder of `folder` that is removed afterwards."""
    rows = []
    for number, blocks in enumerate((lengths[0], *lengths)):  # the first warms up
        with tempfile.TemporaryDirectory(prefix="tierd-bench-", dir=folder) as made:
            rig = KeepRig(Path(made) / "cold", blocks)
            limit = Limit(
                Path(made), BATCH_BYTES, LANES, rig.total_bytes // BATCH_BYTES * BATCH_BYTES
            )
            try:
                written = limit.write(plain=True)
                keep_seconds, hint_seconds = asyncio.run(rig.measure())
                read = limit.read(plain=True)
            finally:
                rig.close()
            if number:
                rows.append(KeepRow(blocks, rig.pages, rig.total_bytes, keep_seconds,
                                    hint_seconds, written, read))  # fmt: skip
    return Keeping(tuple(rows))


def keep_to_dict(found: Keeping) -> dict[str, object]:
    """Return what --json prints."""
    return {"keep": [asdict(row) for row in found.rows], "keep_growth": found.growth}


def print_keep(found: Keeping) -> None:
    """Print figure, limit and ratio of each row, and how the time a page grows."""
    print("keep: a session kept, durable as it returns, and brought up by a hint")
    for row in found.rows:
        print(
            f"  {row.pages:,} pages, {format_size(row.total_bytes)}: kept in "
            f"{row.keep_seconds:.2f} s, {row.total_bytes / row.keep_seconds / 1e9:.2f} GB/s, plain "
            f"loop {row.write_plain_bytes_per_second / 1e9:.2f}; up in {row.hint_seconds:.2f} s, "
            f"{row.total_bytes / row.hint_seconds / 1e9:.2f} GB/s, plain loop "
            f"{row.read_plain_bytes_per_second / 1e9:.2f}"
        )
    verdict = "holds" if found.holds else "MISSED"
    print(
        f"  time a page, the longest over the shortest: {found.growth:.2f}   limit {GROWTH_BAR}   "
        f"{verdict}"
    )
