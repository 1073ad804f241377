"""`scripts/bench disk`, short: both sides move the same bytes, and no torch is needed."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tierd.clock import SystemClock
from tierd.codec.layout import page_layout
from tierd.disk.ledger import Ledger
from tierd.disk.posix import PosixDisk
from tierd.errors import StorageError
from tierd.types import CodecId, Tier
from tierd_engine.bench import restart
from tierd_engine.bench.benchdisks import CountingDisk, SteadyDisk
from tierd_engine.bench.ceiling import print_ceiling
from tierd_engine.bench.disk import bench_disk, disk_to_dict, print_disk
from tierd_engine.bench.diskrig import GEOMETRIES, DiskRig
from tierd_engine.bench.fio import Limit
from tierd_engine.bench.keep import Keeping, KeepRow, bench_keep, keep_to_dict, print_keep
from tierd_engine.bench.restart import bench_restart, print_restart, restart_to_dict

SIZE = 8 << 20


def there_and_back(disk: CountingDisk) -> None:
    rig = DiskRig(disk, GEOMETRIES["135m"], SIZE)

    async def carry() -> None:
        session = rig.fill()
        rig.allocate(session)
        assert await rig.move(session, Tier.COLD) > 0
        assert session.index.pages_in(Tier.COLD) == rig.total_bytes // rig.layout.slot_bytes
        assert await rig.move(session, Tier.WARM) > 0
        rig.store.check_integrity()
        rig.drop(session)

    asyncio.run(carry())
    assert disk.io_bytes == 2 * rig.total_bytes
    assert disk.io_bytes / disk.ios > 1 << 20
    rig.close()


def test_all_pages_go_to_disk_and_come_back_in_large_ios(tmp_path: Path) -> None:
    there_and_back(CountingDisk(str(tmp_path), ephemeral=True))


def test_a_steady_disk_takes_its_time_and_gives_each_page_its_header_back(tmp_path: Path) -> None:
    slot_bytes = page_layout(GEOMETRIES["135m"], CodecId.INT8).slot_bytes
    disk = SteadyDisk(str(tmp_path), 2, 1e9, slot_bytes)
    start = time.perf_counter()
    there_and_back(disk)
    assert time.perf_counter() - start >= disk.io_bytes / 1e9


@pytest.mark.parametrize("fio", [False, True])
def test_the_limit_moves_every_byte(tmp_path: Path, monkeypatch, fio: bool) -> None:
    if fio and not shutil.which("fio"):
        pytest.skip("fio is not installed")
    if not fio:
        monkeypatch.setattr(shutil, "which", lambda _: None)
    limit = Limit(tmp_path, io_bytes=1 << 20, depth=2, total_bytes=4 << 20)
    assert limit.tool == ("fio" if fio else "loop")
    assert limit.write() > 0
    assert limit.read() > 0
    assert limit.path.stat().st_blocks * 512 == limit.path.stat().st_size == 4 << 20
    limit.write()


def test_a_disk_that_fails_the_limit_is_named(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    limit = Limit(tmp_path, io_bytes=1 << 20, depth=2, total_bytes=2 << 20)
    limit.write()
    monkeypatch.setattr("os.preadv", lambda *_: (_ for _ in ()).throw(OSError(5, "I/O error")))
    with pytest.raises(StorageError, match="I/O error"):
        limit.read()


def test_the_rows_say_figure_limit_and_ratio(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    rows, ceilings = bench_disk(tmp_path, ["135m"], SIZE, rounds=2)
    assert list(tmp_path.iterdir()) == []
    printed = json.loads(json.dumps(disk_to_dict(rows, ceilings)))
    assert printed["read_ratio_to_fio"] == rows[0].read_ratio > 0
    assert printed["write_ratio_to_fio"] == rows[0].write_ratio > 0
    fixed, own = printed["ceiling"]  # at a rate of its own, and at this disk's
    assert fixed["disk_bytes_per_second"] > 0 and own["disk_bytes_per_second"] > 0
    assert rows[0].read_ratios[0] <= rows[0].read_ratio <= rows[0].read_ratios[-1]
    low, high = rows[0].read_checksum_costs
    assert low <= rows[0].read_checksum_cost <= high and rows[0].checksum_pairs == 32
    print_disk(rows)
    print_ceiling(ceilings)
    text = capsys.readouterr().out
    assert "apt-get install fio" in text and "ratio" in text and "loop" in text
    assert "ceiling" in text and "digests cost" in text


def test_a_session_is_kept_and_comes_up_at_each_length(tmp_path: Path, capsys) -> None:
    found = bench_keep(tmp_path, (2, 4))
    assert list(tmp_path.iterdir()) == []
    assert [row.blocks for row in found.rows] == [2, 4]
    assert all(row.keep_seconds > 0 and row.hint_seconds > 0 for row in found.rows)
    printed = json.loads(json.dumps(keep_to_dict(found)))
    assert printed["keep_growth"] == found.growth and len(printed["keep"]) == 2
    print_keep(found)
    text = capsys.readouterr().out
    assert "120 pages" in text and "limit 1.5" in text


def test_time_a_page_is_compared_by_the_worse_way() -> None:
    rows = [
        KeepRow(1, pages, pages << 16, keep_seconds, hint_seconds, 1.0, 1.0)
        for pages, keep_seconds, hint_seconds in ((100, 1.0, 1.0), (400, 4.0, 7.0))
    ]
    assert Keeping(tuple(rows)).growth == pytest.approx(1.75)
    assert not Keeping(tuple(rows)).holds


def test_a_made_store_starts_whole_from_snapshot_and_journal(tmp_path: Path, capsys) -> None:
    row = bench_restart(tmp_path, pages=20_000, rounds=1)
    assert list(tmp_path.iterdir()) == []
    assert (row.sessions, row.pages) == (3, 20_000)
    assert {"journal", "snapshot", "store"} <= set(row.steps)
    assert abs(sum(row.steps.values()) - row.seconds) < 1e-6
    assert json.loads(json.dumps(restart_to_dict(row)))["restart_seconds"] == row.seconds
    print_restart(row)
    assert "20,000 pages" in capsys.readouterr().out


def test_what_is_made_stands_in_both_snapshot_and_journal(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(restart, "SNAPSHOT_RECORDS", 9_000)
    restart.make_store(tmp_path, 20_000)
    with PosixDisk(str(tmp_path), ephemeral=False) as disk:
        ledger = Ledger.open(disk, new_uuid=lambda: bytes(16), clock=SystemClock())
        assert ledger.recovery.snapshot
        assert 0 < ledger.recovery.records < 9_000
        assert ledger.recovery.rows == 20_000
        assert not ledger.recovery.damage and not ledger.recovery.lost


def test_no_torch_is_needed() -> None:
    code = (
        "import sys; import tierd_engine.bench.disk, tierd_engine.bench.restart;"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
