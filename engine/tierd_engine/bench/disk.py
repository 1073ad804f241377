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
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tierd.carry import Batch
from tierd.disk.headerrows import place_rows
from tierd.lanes import LANES
from tierd.types import DType, Geometry, Tier
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


class _Unchecked(Batch):
    """Carries pages without looking at their bytes, to tell what looking costs."""

    def _unsound(self, first: int, end: int) -> set[int]:
        place_rows(self._rows[first:end], [move.destination for move in self.moves[first:end]])
        return set()


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
