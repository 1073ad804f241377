"""What each link of this machine can do, measured in the same run as the figures beside it."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tierd.errors import TierdError
from tierd.units import GIB, MIB
from tierd_engine.bench.fio import Limit
from tierd_engine.bench.gpucheck.scale import SYNC_SECONDS, Scale, opened
from tierd_engine.device.port import Device

_ROUNDS = 5


def check_links(scale: Scale, folder: Path, _: dict[str, Any]) -> dict[str, Any]:
    """Return bytes per second of PCIe up and down, DRAM, HBM and the folder's disk."""
    with opened(scale) as rig:
        found: dict[str, Any] = {"device": rig.device.name, **_copies(rig.device, scale)}
        found["hbm_bytes_per_second"] = _hbm(rig.device, scale)
        found["pinned"] = rig.pins.reason or "as much as asked for"
    found["dram_bytes_per_second"] = _dram(scale)
    found["nvme_bytes_per_second"], found["nvme"] = _disk(scale, folder)
    return found


def _copies(device: Device, scale: Scale) -> dict[str, float]:
    size = scale.copy_bytes
    host, there = device.allocate_host(size), device.allocate(size)
    stream, ended = device.new_stream("check copies"), device.new_event("the copies")

    def timed(copy: Callable[[], None]) -> float:
        began = time.perf_counter()
        copy()
        device.record(ended, stream, "record: check")
        device.wait_host(ended, SYNC_SECONDS, "wait: check")
        return size / (time.perf_counter() - began)

    def up() -> None:
        device.copy_in(stream, host.address, there.address, size)

    def down() -> None:
        device.copy_out(stream, there.address, host.address, size)

    rates = {}
    for name, copy in {"up": up, "down": down}.items():
        timed(copy)
        rates[f"pcie_{name}_bytes_per_second"] = statistics.median(
            timed(copy) for _ in range(_ROUNDS)
        )
    device.free(there)
    device.free(host)
    return rates


def _hbm(device: Device, scale: Scale) -> float:
    """Return bytes read and written per second by a copy inside the device's memory."""
    source, target = device.allocate(scale.copy_bytes), device.allocate(scale.copy_bytes)
    ended = device.new_event("the copy")
    rates = []
    for _ in range(_ROUNDS + 1):
        began = time.perf_counter()
        for _ in range(8):
            device.launch(device.compute, lambda: _copy(target.tensor, source.tensor))
        device.record(ended, device.compute, "record: check")
        device.wait_host(ended, SYNC_SECONDS, "wait: check")
        rates.append(8 * 2 * scale.copy_bytes / (time.perf_counter() - began))
    device.free(target)
    device.free(source)
    return statistics.median(rates[1:])


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)


def _dram(scale: Scale) -> float:
    words = torch.ones((2 * MIB if scale.is_dry else GIB) // 8, dtype=torch.int64)
    times = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        words.sum()
        times.append(time.perf_counter() - began)
    return words.numel() * 8 / statistics.median(times)


def _disk(scale: Scale, folder: Path) -> tuple[float | None, str]:
    """Return O_DIRECT reads per second in the folder, and by what, or why there is no figure."""
    try:
        with tempfile.TemporaryDirectory(dir=folder) as name:
            limit = Limit(Path(name), MIB, 16, 4 * MIB if scale.is_dry else GIB)
            limit.write()
            return limit.read(), limit.tool
    except (OSError, TierdError) as error:
        return None, str(error)
