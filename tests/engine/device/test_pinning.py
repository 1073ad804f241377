"""Pinning: whole regions or none, the setting that stands in the way by name, and the figures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tierd.errors import DeviceFailed
from tierd.units import MIB
from tierd_engine.device.fake import FakeDevice, Refusals
from tierd_engine.device.pinning import (
    PIECE_BYTES,
    HostLimits,
    Pins,
    read_limits,
)

FREE = HostLimits(None, None)
SLOT = 12 * 4096


def test_a_region_is_pinned_in_pieces_of_whole_slots() -> None:
    device = FakeDevice()
    pins = Pins(device, FREE)
    slots = PIECE_BYTES // SLOT + 10
    assert pins.add(1 << 30, slots * SLOT, SLOT)
    assert pins.pinned_bytes == device.registered_bytes == slots * SLOT
    edge = PIECE_BYTES // SLOT
    addresses = (1 << 30) + np.arange(slots, dtype=np.int64) * SLOT
    pieces = pins.pieces_of(addresses).tolist()
    assert pieces == [1 << 30] * edge + [(1 << 30) + edge * SLOT] * (slots - edge)
    around = np.array([0, (1 << 30) - 1, (1 << 30) + slots * SLOT], np.int64)
    assert pins.pieces_of(around).tolist() == [0, 0, 0]
    assert pins.add(1 << 30, slots * SLOT, SLOT), "added twice is added once"
    pins.check_integrity()
    pins.close()
    pins.close()
    assert device.registered_bytes == pins.pinned_bytes == 0


def test_a_refused_piece_rolls_its_region_back_and_leaves_the_others() -> None:
    device = FakeDevice(refusals=Refusals(registered_bytes_max=3 * PIECE_BYTES))
    pins = Pins(device, HostLimits(64 * MIB, None))
    assert pins.add(1 << 30, PIECE_BYTES)
    assert not pins.add(2 << 30, 3 * PIECE_BYTES)
    assert device.registered_bytes == PIECE_BYTES
    figures = pins.figures()
    assert (figures.pinned_bytes, figures.pageable_bytes) == (PIECE_BYTES, 3 * PIECE_BYTES)
    assert "RLIMIT_MEMLOCK is 64" in figures.reason and "ulimit -l" in figures.reason
    assert "\n" not in figures.reason
    pins.check_integrity()
    pins.remove(2 << 30)
    pins.remove(2 << 30)
    assert pins.figures().pageable_bytes == 0


def test_where_memlock_is_no_limit_the_driver_is_quoted() -> None:
    device = FakeDevice(refusals=Refusals(registered_bytes_max=0))
    pins = Pins(device, FREE)
    assert not pins.add(4096, 8192)
    assert "the driver does not pin" in pins.reason and "--warm" in pins.reason


def test_a_cgroup_too_small_is_refused_before_anything_is_pinned() -> None:
    device = FakeDevice()
    pins = Pins(device, HostLimits(None, 100 * MIB))
    assert not pins.add(1 << 30, 96 * MIB)
    assert "memory.max is 100" in pins.reason and device.registered_bytes == 0
    assert pins.add(2 << 30, 32 * MIB)


def test_where_pinning_is_required_a_refusal_is_an_error_and_leaves_nothing() -> None:
    device = FakeDevice(refusals=Refusals(registered_bytes_max=PIECE_BYTES))
    pins = Pins(device, HostLimits(4096, None), required=True)
    with pytest.raises(DeviceFailed, match="RLIMIT_MEMLOCK"):
        pins.add(1 << 30, 2 * PIECE_BYTES)
    assert device.registered_bytes == 0 and pins.figures().pageable_bytes == 0
    pins.check_integrity()


def test_limits_are_the_tightest_around_the_process(tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "groups"
    (groups / "a" / "b").mkdir(parents=True)
    (groups / "memory" / "x").mkdir(parents=True)
    proc.mkdir()
    (proc / "cgroup").write_text("4:memory:/x\n2:cpu,cpuacct:/y\n0::/a/b\n")
    (proc / "status").write_text("Name:\tx\nCapEff:\t0000000000000000\n")
    assert read_limits(proc, groups).cgroup_bytes is None
    (groups / "a" / "memory.max").write_text("5000\n")
    (groups / "a" / "b" / "memory.max").write_text("max\n")
    (groups / "memory" / "x" / "memory.limit_in_bytes").write_text("7000\n")
    assert read_limits(proc, groups).cgroup_bytes == 5000
    (proc / "status").write_text("CapEff:\t0000000000004000\n")
    assert read_limits(proc, groups).memlock_bytes is None, "CAP_IPC_LOCK lifts it"
