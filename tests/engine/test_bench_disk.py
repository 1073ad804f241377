"""`scripts/bench disk`, short: both sides move the same bytes, and no torch is needed."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tierd.clock import SystemClock
from tierd.disk.ledger import Ledger
from tierd.disk.posix import PosixDisk
from tierd.errors import StorageError
from tierd.types import Tier
from tierd_engine.bench import restart
from tierd_engine.bench.disk import GEOMETRIES, DiskRig, bench_disk, disk_to_dict, print_disk
from tierd_engine.bench.fio import Limit
from tierd_engine.bench.restart import bench_restart, print_restart, restart_to_dict

SIZE = 8 << 20


def test_all_pages_go_to_disk_and_come_back_in_large_ios(tmp_path: Path) -> None:
    rig = DiskRig(tmp_path, GEOMETRIES["135m"], SIZE)

    async def there_and_back() -> None:
        session = rig.fill()
        rig.allocate(session)
        assert await rig.move(session, Tier.COLD) > 0
        assert session.index.pages_in(Tier.COLD) == rig.total_bytes // rig.layout.slot_bytes
        assert await rig.move(session, Tier.WARM) > 0
        rig.store.check_integrity()
        rig.drop(session)

    asyncio.run(there_and_back())
    assert rig.disk.io_bytes == 2 * rig.total_bytes
    assert rig.disk.io_bytes / rig.disk.ios > 1 << 20
    rig.close()


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
    rows = bench_disk(tmp_path, ["135m"], SIZE, rounds=1)
    assert list(tmp_path.iterdir()) == []
    printed = json.loads(json.dumps(disk_to_dict(rows)))
    assert printed["read_ratio_to_fio"] == rows[0].read_ratio > 0
    assert printed["write_ratio_to_fio"] == rows[0].write_ratio > 0
    print_disk(rows)
    text = capsys.readouterr().out
    assert "apt-get install fio" in text and "ratio" in text and "loop" in text


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
