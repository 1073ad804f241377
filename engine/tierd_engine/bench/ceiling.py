"""The ceiling of our own path: spill and cold read over a disk that answers after a fixed time.

A machine's disk may double and halve its speed between the two sides of a pair; this one does
not. What is missing to its rate is ours: Python's work a page, and a lane that is not ready.
Its rate is measured as a bare loop of as many threads gets it. Two rates: one as high as any
disk's that this was measured on, which shows what our path can do, and the machine's own disk's,
which shows what the digests cost there without the swings.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tierd.carry import Batch
from tierd.codec.layout import page_layout
from tierd.lanes import LANES
from tierd.types import CodecId
from tierd.units import format_size
from tierd_engine.bench.benchdisks import SteadyDisk
from tierd_engine.bench.diskrig import GEOMETRIES, DiskRig, UncheckedBatch, there_and_back

CEILING_BAR = 0.95
CHECKSUM_BAR = 0.03
UNITS = 4
BYTES_PER_SECOND = 3.5e9  # as fast as the disks that this was measured on ever were


@dataclass(frozen=True, slots=True)
class CeilingRow:
    """Medians for pages of one model; ratios and costs are medians of pairs.

    `set_bytes_per_second`: what the disk is to give; `disk_...`: what a bare loop gets of it.
    """

    model: str
    slot_bytes: int
    io_bytes: int
    units: int
    lanes: int
    rounds: int
    set_bytes_per_second: float
    disk_bytes_per_second: float
    write_bytes_per_second: float
    read_bytes_per_second: float
    write_ratio: float
    read_ratio: float
    write_checksum_cost: float
    read_checksum_cost: float


def bench_ceiling(
    folder: Path, model: str, total_bytes: int, rounds: int,
    bytes_per_second: float = BYTES_PER_SECOND,
) -> CeilingRow:  # fmt: skip
    """Measure one model's pages; files are made in `folder`, and nothing is written to them."""
    geometry = GEOMETRIES[model]
    slot_bytes = page_layout(geometry, CodecId.INT8).slot_bytes
    disk = SteadyDisk(str(folder), UNITS, bytes_per_second, slot_bytes)
    rig = DiskRig(disk, geometry, total_bytes)
    try:
        there_and_back(rig, Batch)  # warms up, and tells our size of an I/O
        io_bytes = disk.io_bytes // disk.ios
        found = []
        for number in range(rounds):
            kinds = (Batch, UncheckedBatch) if number % 2 else (UncheckedBatch, Batch)
            speeds = {kind: there_and_back(rig, kind) for kind in kinds}
            (written, read), (bare_written, bare_read) = speeds[Batch], speeds[UncheckedBatch]
            rate = _bare_rate(disk, io_bytes, rig.total_bytes)
            found.append((
                rate, written, read, written / rate, read / rate,
                1 - written / bare_written, 1 - read / bare_read,
            ))  # fmt: skip
    finally:
        rig.close()
    medians = [statistics.median(side) for side in zip(*found, strict=True)]
    return CeilingRow(model, slot_bytes, io_bytes, UNITS, LANES, rounds, bytes_per_second, *medians)


def _bare_rate(disk: SteadyDisk, io_bytes: int, total_bytes: int) -> float:
    """Return the bytes per second of LANES threads that do nothing but wait for the disk."""
    count = -(-total_bytes // io_bytes)
    numbers = iter(range(count))
    mutex = threading.Lock()

    def work() -> None:
        while True:
            with mutex:
                if next(numbers, None) is None:
                    return
            disk.answer(io_bytes)

    threads = [threading.Thread(target=work) for _ in range(LANES)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60.0)
    return count * io_bytes / (time.perf_counter() - start)


def print_ceiling(rows: Sequence[CeilingRow]) -> None:
    """Print our rate, the disk's, their ratio and the digests' cost of each row."""
    print(
        "ceiling: our path over a disk that answers after a fixed time (simulated, no bytes moved)"
    )
    for row in rows:
        print(
            f"{row.model}: pages of {format_size(row.slot_bytes)}, I/Os of "
            f"{format_size(row.io_bytes)}, {row.units} at a time, {row.lanes} lanes, "
            f"median of {row.rounds}; {_rate(row)}"
        )
        for name, ours, ratio, cost in (
            ("spill", row.write_bytes_per_second, row.write_ratio, row.write_checksum_cost),
            ("cold read", row.read_bytes_per_second, row.read_ratio, row.read_checksum_cost),
        ):
            reached, cheap = _verdict(ratio >= CEILING_BAR), _verdict(cost <= CHECKSUM_BAR)
            print(
                f"  {name:9} {ours / 1e9:6.2f} GB/s   disk {row.disk_bytes_per_second / 1e9:5.2f} "
                f"GB/s   ratio {ratio:.2f}   bar {CEILING_BAR} {reached}   "
                f"digests cost {cost:5.1%}   bar {CHECKSUM_BAR:.0%} {cheap}"
            )


def _rate(row: CeilingRow) -> str:
    if row.set_bytes_per_second == BYTES_PER_SECOND:
        return "as fast as any disk that this was measured on"
    return "as fast as this machine's own disk was just now"


def _verdict(holds: bool) -> str:
    return "holds" if holds else "MISSED"
