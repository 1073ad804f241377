"""The probe tells gds, compat and posix apart by what a read did, and never waits for ever."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.engine.device.stubs import CuFile, kvikio_modules
from tierd.errors import DeviceUnavailable
from tierd_engine.device import probing
from tierd_engine.device.coldpath import PathKind
from tierd_engine.device.exploring import RandomChooser
from tierd_engine.device.fake import FakeDevice
from tierd_engine.device.fakepath import FakePath, Fault
from tierd_engine.device.kvikiopath import KvikioPath
from tierd_engine.device.probing import (
    ColdPaths,
    counted_reads,
    counted_writes,
    probe_folder,
)

STATS = """GDS Version: 1.11.1.6
NVFS statistics(ver: 4.0)
IO stats: Enabled, peer IO stats: Disabled
Reads				: n=26 ok=24 err=2 readMiB=104 io_state_err=0
Writes				: n=9 ok=7 err=2 writeMiB=3 io_state_err=0
"""


def counter() -> object:
    numbers = itertools.count()
    return lambda: next(numbers)


@pytest.mark.parametrize("seed", range(5))
def test_whole_bytes_that_the_driver_counted_are_gds(seed: int, tmp_path: Path) -> None:
    device = FakeDevice(RandomChooser(seed))
    paths = ColdPaths(device, FakePath(device), counts=counter())  # type: ignore[arg-type]
    found = probe_folder(paths, tmp_path)
    assert found.kind is PathKind.GDS and found.reason == ""
    assert list(tmp_path.iterdir()) == []
    device.check_integrity()
    assert device.pending == 0


@pytest.mark.parametrize(("counts", "reason"), [(lambda: 7, "none"), (lambda: None, "not loaded")])
def test_whole_bytes_that_nobody_counted_are_compat_and_not_used(
    counts: object, reason: str, tmp_path: Path
) -> None:
    device = FakeDevice()
    paths = ColdPaths(device, FakePath(device), counts=counts)  # type: ignore[arg-type]
    found = probe_folder(paths, tmp_path)
    assert found.kind is PathKind.COMPAT and reason in found.reason
    with (tmp_path / "slab").open("wb+") as file:
        assert paths.path_for(file.fileno()) is None


@pytest.mark.parametrize(
    ("fault", "reason"),
    [(Fault.ERROR, "input/output"), (Fault.SHORT, "were read"), (Fault.WRONG, "not the file's"),
     (Fault.HANG, "did not end within 5 s")],
)  # fmt: skip
def test_each_fault_is_posix_with_its_reason(fault: Fault, reason: str, tmp_path: Path) -> None:
    device = FakeDevice()
    path = FakePath(device, every=fault)
    paths = ColdPaths(device, path, counts=counter())  # type: ignore[arg-type]
    found = probe_folder(paths, tmp_path)
    assert found.kind is PathKind.POSIX and reason in found.reason
    path.let_go()
    device.check_integrity()


def test_a_disk_is_probed_once_and_a_path_that_is_not_there_says_why(tmp_path: Path) -> None:
    device = FakeDevice()
    path = FakePath(device)
    paths = ColdPaths(device, path, counts=counter())  # type: ignore[arg-type]
    probe_folder(paths, tmp_path)
    probe_folder(paths, tmp_path)
    assert path.started == 1 and len(paths.figures()) == 1
    assert paths.figures()[0]["kind"] == "gds"
    none = ColdPaths(device, None, "kvikio cannot be used: no module")
    assert probe_folder(none, tmp_path).reason == "kvikio cannot be used: no module"


def test_the_drivers_counts_are_read_or_absent(tmp_path: Path) -> None:
    stats = tmp_path / "stats"
    assert counted_reads(stats) is None
    stats.write_text(STATS)
    assert counted_reads(stats) == 24 and counted_writes(stats) == 7
    stats.write_text("Reads				: err=0 io_state_err=0\n")
    assert counted_reads(stats) is None


@pytest.mark.parametrize("seed", range(5))
def test_a_folders_disk_is_written_to_as_well_and_read_back(seed: int, tmp_path: Path) -> None:
    device = FakeDevice(RandomChooser(seed))
    paths = ColdPaths(device, FakePath(device), counts=counter(), write_counts=counter())  # type: ignore[arg-type]
    found = probe_folder(paths, tmp_path)
    assert found.writes is PathKind.GDS and found.writes_reason == ""
    assert paths.figures()[0]["writes"] == "gds" and list(tmp_path.iterdir()) == []
    device.check_integrity()
    assert device.pending == 0


@pytest.mark.parametrize(
    ("fault", "counts", "kind", "reason"),
    [(None, lambda: 7, PathKind.COMPAT, "did none of the writes"),
     (None, lambda: None, PathKind.COMPAT, "does not count its writes"),
     (Fault.ERROR, counter(), PathKind.POSIX, "input/output"),
     (Fault.SHORT, counter(), PathKind.POSIX, "were written"),
     (Fault.WRONG, counter(), PathKind.POSIX, "does not hold the bytes"),
     (Fault.HANG, counter(), PathKind.POSIX, "a write did not end within 5 s")],
)  # fmt: skip
def test_a_write_that_is_no_good_is_said_apart_from_reads(
    fault: Fault | None, counts: object, kind: PathKind, reason: str, tmp_path: Path
) -> None:
    device = FakeDevice()
    path = FakePath(device, every_write=fault)
    paths = ColdPaths(device, path, counts=counter(), write_counts=counts)  # type: ignore[arg-type]
    found = probe_folder(paths, tmp_path)
    assert found.kind is PathKind.GDS and found.writes is kind and reason in found.writes_reason
    with (tmp_path / "slab").open("wb+") as file:
        assert paths.path_for(file.fileno()) is not None
        assert paths.write_path_for(file.fileno()) is None
    path.let_go()
    device.check_integrity()


def test_a_disk_that_reads_go_the_cpus_way_from_is_not_written_to(tmp_path: Path) -> None:
    device = FakeDevice()
    path = FakePath(device)
    found = probe_folder(ColdPaths(device, path, counts=lambda: None), tmp_path)
    assert found.kind is PathKind.COMPAT and found.writes is None and path.writes_started == 0
    assert found.figures()["writes"] is None


@pytest.fixture
def kvikio(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """A stand-in for kvikio's modules; yields what was set in its defaults."""
    modules = kvikio_modules()
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    yield modules["kvikio.defaults"].settings  # type: ignore[attr-defined]
    CuFile.gate.set()


def test_kvikios_calls_read_an_open_file_by_its_descriptor(
    kvikio: dict[str, int], tmp_path: Path
) -> None:
    (tmp_path / "slab").write_bytes(bytes(range(256)) * 64)
    fd = os.open(tmp_path / "slab", os.O_RDONLY)
    (tmp_path / "slab").unlink()  # its name does not matter
    path = KvikioPath()
    assert kvikio == {"gds_threshold": 4096, "num_threads": 8}
    target = torch.zeros(4096, dtype=torch.uint8)
    read = path.start(fd, 8192, target)
    assert read.wait(10) and read.error == ""
    assert bytes(target.numpy()) == bytes(range(256)) * 16
    CuFile.short = 1
    read = path.start(fd, 0, target)
    assert read.wait(10) and read.error == "direct read: 4095 of 4096 bytes were read"
    CuFile.error = RuntimeError("cuFile failed")
    read = path.start(fd, 0, target)
    assert read.wait(10) and read.error == "direct read: cuFile failed"
    read = path.start(9999, 0, target)
    assert read.wait(10) and "Bad file descriptor" in read.error
    CuFile.error = None
    CuFile.gate.clear()
    assert not path.start(fd, 0, target).wait(0.02)
    path.close()
    os.close(fd)


def test_kvikios_calls_write_an_open_file_by_its_descriptor(
    kvikio: dict[str, int], tmp_path: Path
) -> None:
    (tmp_path / "slab").write_bytes(bytes(16384))
    fd = os.open(tmp_path / "slab", os.O_RDWR)
    (tmp_path / "slab").unlink()
    path = KvikioPath()
    source = torch.full((4096,), 7, dtype=torch.uint8)
    write = path.start_write(fd, 8192, source)
    assert write.wait(10) and write.error == ""
    assert os.pread(fd, 16384, 0) == bytes(8192) + bytes([7]) * 4096 + bytes(4096)
    target = torch.zeros(4096, dtype=torch.uint8)
    read = path.start(fd, 8192, target)
    assert read.wait(10) and torch.equal(target, source)
    CuFile.short = 512
    write = path.start_write(fd, 0, source)
    assert write.wait(10) and write.error == "direct write: 3584 of 4096 bytes were written"
    CuFile.error = RuntimeError("cuFile failed")
    write = path.start_write(fd, 0, source)
    assert write.wait(10) and write.error == "direct write: cuFile failed"
    CuFile.error, CuFile.short = None, 0
    CuFile.gate.clear()
    stuck = [path.start_write(fd, 0, source) for _ in range(2)]
    CuFile.gate.set()
    assert all(write.wait(10) for write in stuck)
    path.close()
    os.close(fd)


def test_a_read_waits_for_no_write(kvikio: dict[str, int], tmp_path: Path) -> None:
    (tmp_path / "slab").write_bytes(bytes(16384))
    fd = os.open(tmp_path / "slab", os.O_RDWR)
    path = KvikioPath()
    CuFile.gate.clear()
    writes = [path.start_write(fd, 0, torch.ones(4096, dtype=torch.uint8)) for _ in range(8)]
    target = torch.ones(4096, dtype=torch.uint8)
    read = path.start(fd, 8192, target)
    for _ in range(1000):  # its bytes come, while no write has ended
        if not target.any():
            break
        assert not read.wait(0.01)
    assert not target.any() and not any(write.wait(0) for write in writes)
    CuFile.gate.set()
    assert read.wait(10) and all(write.wait(10) for write in writes)
    path.close()
    os.close(fd)


def test_kvikio_that_is_not_there_is_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvikio", None)
    with pytest.raises(DeviceUnavailable, match="kvikio cannot be used"):
        KvikioPath()


def test_kvikio_whose_libraries_are_not_there_is_a_typed_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = "raise RuntimeError('Failure finding \"libcufile.so.0\":\\n attempts')\n"
    (tmp_path / "kvikio.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "kvikio"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(DeviceUnavailable, match=r'finding "libcufile\.so\.0":$'):
        KvikioPath()


def test_the_probes_time_has_its_bound() -> None:
    assert probing.PROBE_SECONDS <= 5
