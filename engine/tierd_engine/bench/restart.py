"""How long a restart takes: the ledger read, and a store made from it, as a daemon does at start.

The store on disk is synthetic and whole: parked sessions with their token ids,
a row for every page, a slab file (sparse) for every slab, no page's bytes: no
restart reads these. It ends as a kill leaves it: a quarter of a million rows, the
most that may be, stand in the journal beyond the last snapshot.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tierd.clock import SystemClock
from tierd.codec.layout import page_layout
from tierd.disk.ledger import SNAPSHOT_RECORDS, Ledger
from tierd.disk.posix import PosixDisk
from tierd.disk.records import PAGE_ROW, Rows, SessionRecord
from tierd.disk.slabfiles import SlabFiles, slab_name
from tierd.memory.slabmemory import MemfdBacking
from tierd.pools import TierParts
from tierd.store import Store
from tierd.types import CodecId, DType, Geometry, Namespace, SlabRecord
from tierd.units import MIB

BAR_SECONDS = 1.0
SLAB_BYTES = 256 * MIB
BLOCKS_PER_SESSION = 256  # 65,536 tokens
_NAMESPACE = Namespace(
    Geometry(32, kv_heads=8, head_dim=128, dtype=DType.BFLOAT16, block_tokens=256),
    "bench",
    CodecId.INT8,
)


@dataclass(frozen=True, slots=True)
class Restart:
    """Medians of the starts. `steps`: seconds of each step, in order; `load` is the machine's."""

    pages: int
    sessions: int
    slabs: int
    rounds: int
    seconds: float
    steps: dict[str, float] = field(default_factory=dict)
    load: float = 0.0

    @property
    def holds(self) -> bool:
        """Whether a start takes less than the bar."""
        return self.seconds < BAR_SECONDS


def bench_restart(folder: Path | None, pages: int, rounds: int) -> Restart:
    """Make a store of `pages` pages in a folder of `folder`, start it `rounds` times, remove it."""
    with tempfile.TemporaryDirectory(prefix="tierd-bench-", dir=folder) as made:
        sessions, slabs = make_store(Path(made), pages)
        starts = [_start(Path(made), pages) for _ in range(rounds)]
    steps = {name: statistics.median(start[name] for start in starts) for name in starts[0]}
    seconds = statistics.median(sum(start.values()) for start in starts)
    return Restart(pages, sessions, slabs, rounds, seconds, steps, os.getloadavg()[0])


def make_store(folder: Path, pages: int) -> tuple[int, int]:
    """Make a store of parked sessions; return how many they are, and how many slabs."""
    layers = _NAMESPACE.geometry.layers
    slot_bytes = page_layout(_NAMESPACE.geometry, CodecId.INT8).slot_bytes
    slots = SLAB_BYTES // slot_bytes
    blocks = -(-pages // layers)
    with PosixDisk(str(folder), ephemeral=False) as disk:
        ledger = Ledger.open(disk, new_uuid=lambda: os.urandom(16), clock=SystemClock())
        count = -(-blocks * layers // slots)
        slabs = np.array([_add_slab(folder, ledger, slot_bytes, slots) for _ in range(count)])
        first_pages = range(0, blocks * layers, BLOCKS_PER_SESSION * layers)
        in_journal = max(0, blocks * layers - SNAPSHOT_RECORDS + 1000)  # sessions are records too
        is_snapshot_made = False
        for number, first in enumerate(first_pages, start=1):
            own = min(BLOCKS_PER_SESSION * layers, blocks * layers - first)
            if first >= in_journal and not is_snapshot_made:
                ledger.snapshot()
                is_snapshot_made = True
            _park(ledger, number, own // layers, _places(slabs, slots, first, own))
        ledger.flush(sync=True)
        # Not closed: as a kill leaves it.
    return len(first_pages), count


def _add_slab(folder: Path, ledger: Ledger, slot_bytes: int, slots: int) -> int:
    ledger.flush(sync=True)  # ids are reserved durably
    slab = SlabRecord(ledger.take_slab_id(), _NAMESPACE.digest(), slot_bytes, slots)
    with open(folder / slab_name(slab.slab), "xb") as file:
        file.truncate(slab.size_bytes)
    ledger.add_slab(slab)
    return slab.slab


def _places(slabs: npt.NDArray[np.int64], slots: int, first: int, count: int) -> Rows:
    """Return rows with their places and digests: the `first` to first + count of all slots."""
    rows = np.zeros(count, PAGE_ROW)
    index = np.arange(first, first + count)
    rows["slab"], rows["slot"] = slabs[index // slots], index % slots
    rows["generation"], rows["codec"] = 1, int(CodecId.INT8)
    rows["digest"] = np.random.default_rng(first).integers(0, 256, (count, 16), np.uint8)
    return rows


def _park(ledger: Ledger, number: int, blocks: int, rows: Rows) -> None:
    layers, block_tokens = _NAMESPACE.geometry.layers, _NAMESPACE.geometry.block_tokens
    tokens = np.arange(blocks * block_tokens, dtype="<u4").tobytes()
    rows["session"] = number
    rows["block"], rows["layer"] = np.divmod(np.arange(len(rows)), layers)
    ledger.put_session(SessionRecord(number, _NAMESPACE, "running"))
    ledger.commit(rows)
    ledger.put_session(SessionRecord(number, _NAMESPACE, "parked", tokens, blocks))
    ledger.flush()


def _start(folder: Path, pages: int) -> dict[str, float]:
    """Start once, and stop as a kill would; return seconds by step."""
    clock = SystemClock()
    began = time.perf_counter()
    with PosixDisk(str(folder), ephemeral=False) as disk:
        folder_seconds = time.perf_counter() - began
        began = time.perf_counter()
        ledger = Ledger.open(disk, new_uuid=lambda: bytes(16), clock=clock)
        open_seconds = time.perf_counter() - began
        assert ledger.recovery.rows >= pages, ledger.recovery
        began = time.perf_counter()
        store = Store(
            warm=TierParts(MemfdBacking(), 64 * MIB, 4 * MIB),
            cold=TierParts(SlabFiles(disk, ledger), 2**50, SLAB_BYTES),
            ledger=ledger,
            clock=clock,
        )
        store_seconds = time.perf_counter() - began
        store.close()
    steps = dict(ledger.recovery.seconds)
    rest_seconds = open_seconds - sum(steps.values())
    return {"folder": folder_seconds, **steps, "new segment": rest_seconds, "store": store_seconds}


def restart_to_dict(row: Restart) -> dict[str, object]:
    """Return what --json prints."""
    return {
        "restart_seconds": row.seconds,
        "restart_pages": row.pages,
        "restart_steps_seconds": row.steps,
        "restart_load": row.load,
    }


def print_restart(row: Restart) -> None:
    """Print the figure, its limit and the share of each step."""
    verdict = "holds" if row.holds else "MISSED"
    print(
        f"restart: {row.pages:,} pages, {row.sessions} sessions, {row.slabs} slabs, median of "
        f"{row.rounds}, load {row.load:.1f}\n"
        f"  {row.seconds:.2f} s   limit {BAR_SECONDS:.2f} s   "
        f"ratio {row.seconds / BAR_SECONDS:.2f}   {verdict}"
    )
    for name, seconds in _largest_first(row.steps):
        print(f"    {name:12} {seconds * 1000:7.1f} ms   {seconds / row.seconds:4.0%}")


def _largest_first(steps: dict[str, float]) -> Sequence[tuple[str, float]]:
    return sorted(steps.items(), key=lambda step: -step[1])
