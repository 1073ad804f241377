"""The cold tier's speed: spill and cold read through our own path, beside fio.

Ours: pages of a real store, moved in batches over the daemon's lanes, each
page's header and digest made or checked on the way (tierd/carry.py). The limit:
fio with O_DIRECT, the same bytes an I/O and as many I/Os at a time as there are
lanes. Both fill newly allocated files, and read back what they filled, one right
after the other, and which goes first alternates. Beside them a plain loop over
huge pages, which our memory is of and fio's is not: where that is faster, it is
the disk's own limit. What the digests of the pages' bytes cost is the loss of speed by them:
pairs with and without, with nothing between them, and more of these, as the difference is
smaller than the disk's swings. What is ours apart from the disk shows in the ceiling
(ceiling.py).
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tierd.carry import Batch
from tierd.lanes import LANES
from tierd.types import Tier
from tierd.units import SECTOR_BYTES, format_size
from tierd_engine.bench.benchdisks import CountingDisk
from tierd_engine.bench.ceiling import (
    BYTES_PER_SECOND,
    CHECKSUM_BAR,
    CeilingRow,
    bench_ceiling,
)
from tierd_engine.bench.diskrig import GEOMETRIES, DiskRig, UncheckedBatch, there_and_back
from tierd_engine.bench.fio import HOW_TO_GET_FIO, Limit

BAR = 0.85


@dataclass(frozen=True, slots=True)
class DiskRow:
    """Medians for pages of one model; `load` is the machine's when it ended.

    A ratio is the median over pairs taken one after the other, not the ratio of medians: a
    shared disk's speed doubles and halves within seconds. The costs are pairs likewise.
    `write_ratios` and `read_ratios` are all pairs', ascending. `plain`: the loop's.
    `checksum_pairs`: how many pairs tell the costs; `costs`: the 95 % interval of the medians.
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
    write_plain_bytes_per_second: float
    read_plain_bytes_per_second: float
    write_ratio_to_plain: float
    read_ratio_to_plain: float
    write_ratios: list[float]
    read_ratios: list[float]
    checksum_pairs: int
    write_checksum_cost: float
    read_checksum_cost: float
    write_checksum_costs: tuple[float, float]
    read_checksum_costs: tuple[float, float]

    @property
    def holds(self) -> bool:
        """Whether both ratios reach the bar."""
        return min(self.write_ratio, self.read_ratio) >= BAR

    @property
    def fastest_bytes_per_second(self) -> float:
        """What this disk gave at best, to anyone, one way or the other."""
        return max(
            self.write_limit_bytes_per_second, self.write_plain_bytes_per_second,
            self.read_limit_bytes_per_second, self.read_plain_bytes_per_second,
        )  # fmt: skip


def bench_disk(
    folder: Path | None, models: Sequence[str], total_bytes: int, rounds: int
) -> tuple[list[DiskRow], list[CeilingRow]]:
    """Measure each model's pages in a folder of `folder` that is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="tierd-bench-", dir=folder) as made:
        rows = [_bench(Path(made), model, total_bytes, rounds) for model in models]
        ceilings = [
            bench_ceiling(Path(made), row.model, total_bytes, rounds, rate)
            for row in rows
            for rate in (BYTES_PER_SECOND, row.fastest_bytes_per_second)
        ]
    return rows, ceilings


def _bench(folder: Path, model: str, total_bytes: int, rounds: int) -> DiskRow:
    disk = CountingDisk(str(folder / "cold"), ephemeral=True)
    rig = DiskRig(disk, GEOMETRIES[model], total_bytes)
    try:
        there_and_back(rig, Batch)  # warms up, and tells our size of an I/O
        io_bytes = disk.io_bytes // disk.ios // SECTOR_BYTES * SECTOR_BYTES
        limit = Limit(folder, io_bytes, LANES, rig.total_bytes // io_bytes * io_bytes)
        found = [_round(rig, limit, limit_first=number % 2 == 0) for number in range(rounds)]
    finally:
        rig.close()
    costs = _digests_costs(folder, model, min(total_bytes, _COST_BYTES), rounds * _COST_PAIRS)
    columns = list(zip(*found, strict=True))
    medians = [statistics.median(column) for column in columns]
    sides = list(zip(*costs, strict=True))
    told: list[Any] = [len(costs), *(statistics.median(side) for side in sides)]
    told += [median_interval(side) for side in sides]
    spreads = [sorted(columns[number]) for number in _RATIO_COLUMNS]
    return DiskRow(
        model, rig.layout.slot_bytes, io_bytes, LANES, rig.total_bytes, rounds, limit.tool,
        os.getloadavg()[0], *medians, *spreads, *told,
    )  # fmt: skip


_RATIO_COLUMNS = (4, 5)  # of what `_round` returns
# A shared disk's speed swings within seconds: short pairs lie nearer to each other, and many tell
# more. Of 160 pairs of 256 MiB a median's 95 % interval is 2 % wide, of 40 of 1 GiB it is 5 %.
_COST_BYTES = 256 << 20
_COST_PAIRS = 16  # a round


def _digests_costs(
    folder: Path, model: str, total_bytes: int, pairs: int
) -> list[tuple[float, float]]:
    disk = CountingDisk(str(folder / "cold"), ephemeral=True)
    rig = DiskRig(disk, GEOMETRIES[model], total_bytes)
    try:
        there_and_back(rig, Batch)  # warms up
        return [_digests_cost(rig, checked_first=number % 2 == 0) for number in range(pairs)]
    finally:
        rig.close()


def _digests_cost(rig: DiskRig, *, checked_first: bool) -> tuple[float, float]:
    """Return which share of the speed of a spill and of a cold read the digests take."""
    kinds = (Batch, UncheckedBatch) if checked_first else (UncheckedBatch, Batch)
    speeds = {kind: there_and_back(rig, kind) for kind in kinds}
    (written, read), (bare_written, bare_read) = speeds[Batch], speeds[UncheckedBatch]
    return 1 - written / bare_written, 1 - read / bare_read


def median_interval(values: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the median (Efron 1979, percentiles)."""
    drawn = np.random.default_rng(seed).choice(np.asarray(values), (_RESAMPLES, len(values)))
    low, high = np.quantile(np.median(drawn, axis=1), (0.025, 0.975))
    return float(low), float(high)


_RESAMPLES = 2000


def _round(rig: DiskRig, limit: Limit, *, limit_first: bool) -> tuple[float, ...]:
    """Return a DiskRow's speeds and ratios of one round.

    The sides of a pair run one right after the other; in every second round the other first.
    """
    session = rig.fill()
    rig.allocate(session)

    def ours(to: Tier) -> float:
        return asyncio.run(rig.move(session, to))

    if limit_first:
        write_plain, write_limit, written = (
            limit.write(plain=True), limit.write(), ours(Tier.COLD)
        )  # fmt: skip
        read_plain, read_limit, read = limit.read(plain=True), limit.read(), ours(Tier.WARM)
    else:
        written, write_limit, write_plain = (
            ours(Tier.COLD), limit.write(), limit.write(plain=True)
        )  # fmt: skip
        read, read_limit, read_plain = ours(Tier.WARM), limit.read(), limit.read(plain=True)
    rig.drop(session)
    return (
        written, write_limit, read, read_limit, written / write_limit, read / read_limit,
        write_plain, read_plain, written / write_plain, read / read_plain,
    )  # fmt: skip


def disk_to_dict(rows: Sequence[DiskRow], ceilings: Sequence[CeilingRow]) -> dict[str, object]:
    """Return what --json prints; the ratios are the worst row's."""
    return {
        "write_ratio_to_fio": min(row.write_ratio for row in rows),
        "read_ratio_to_fio": min(row.read_ratio for row in rows),
        "rows": [asdict(row) for row in rows],
        "ceiling": [asdict(row) for row in ceilings],
    }


def print_disk(rows: Sequence[DiskRow]) -> None:
    """Print figure, limit and ratio of each row, and how far the ratios of its pairs lie apart."""
    print(
        "disk: our path beside the limit, pairs one after the other; the disk's own swings are in"
    )
    if any(row.tool != "fio" for row in rows):
        print(HOW_TO_GET_FIO)
    for row in rows:
        print(
            f"{row.model}: pages of {format_size(row.slot_bytes)}, {row.depth} I/Os of "
            f"{format_size(row.io_bytes)} at a time, {format_size(row.total_bytes)} a round, "
            f"median of {row.rounds}, load {row.load:.1f}"
        )
        for name, ours, limit, ratio, pairs, plain, of_plain in (
            ("spill", row.write_bytes_per_second, row.write_limit_bytes_per_second,
             row.write_ratio, row.write_ratios, row.write_plain_bytes_per_second,
             row.write_ratio_to_plain),
            ("cold read", row.read_bytes_per_second, row.read_limit_bytes_per_second,
             row.read_ratio, row.read_ratios, row.read_plain_bytes_per_second,
             row.read_ratio_to_plain),
        ):  # fmt: skip
            verdict = "holds" if ratio >= BAR else "MISSED"
            print(
                f"  {name:9} {ours / 1e9:6.2f} GB/s   {row.tool} {limit / 1e9:6.2f} GB/s   "
                f"ratio {ratio:.2f} (pairs {pairs[0]:.2f} to {pairs[-1]:.2f})   bar {BAR} {verdict}"
            )
            print(
                f"            plain loop over huge pages {plain / 1e9:5.2f} GB/s   {of_plain:.2f}"
            )
        for name, cost, (low, high) in (
            ("spill", row.write_checksum_cost, row.write_checksum_costs),
            ("cold read", row.read_checksum_cost, row.read_checksum_costs),
        ):
            verdict = "holds" if cost <= CHECKSUM_BAR else "MISSED"
            print(
                f"  {name:9} digests cost {cost:6.1%} (median of {row.checksum_pairs} pairs, 95 %: "
                f"{low:.1%} to {high:.1%})   bar {CHECKSUM_BAR:.0%} {verdict}"
            )
