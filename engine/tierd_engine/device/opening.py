"""Opening a device for a job: which one, what is missing for it, and its links' first rates."""

from __future__ import annotations

import enum
import importlib.util
import time
from dataclasses import dataclass

import torch

from tierd.errors import DeviceUnavailable, InvalidArgument
from tierd.units import MIB
from tierd_engine.device.kernels import HostKernels, PageKernels, TritonKernels
from tierd_engine.device.pinning import Pins
from tierd_engine.device.port import Device
from tierd_engine.device.probing import ColdPaths
from tierd_engine.device.split import Rates, starting_rates

# Far above any cache, and done in 20 ms at 25 GB/s.
_PROBE_BYTES = 64 * MIB
_PROBES = 4
# 256 MiB at 64 MiB/s, the slowest link we promise for, and as much again.
_PROBE_SECONDS = 10.0
_NEEDED = {"cupy": "CuPy", "triton": "Triton"}


class DeviceName(enum.StrEnum):
    """Where a job's model and hot tier are. AUTO: a CUDA device if there is one, else the CPU."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"

    @classmethod
    def parse(cls, text: str) -> DeviceName:
        """Return the device named `text`. Raises InvalidArgument."""
        try:
            return cls(text)
        except ValueError:
            raise InvalidArgument(f"device {text!r} is none of auto, cpu, cuda") from None


@dataclass(frozen=True, slots=True)
class DeviceRig:
    """A device and what goes with it: one a job. `close` it before slabs are unmapped.

    `paths` None: nobody was asked to bring cold pages to the device past RAM.
    """

    device: Device
    kernels: PageKernels
    pins: Pins
    rates: Rates
    paths: ColdPaths | None = None

    def close(self) -> None:
        """Unpin everything and give the device back. No work may be left on it."""
        if self.paths is not None:
            self.paths.close()
        self.pins.close()
        self.device.close()


def what_is_missing() -> str:
    """Return why no CUDA device can be used, one line; "" if one can, as far as is known."""
    if not torch.cuda.is_available():
        if torch.version.cuda is None:
            return "this build of torch is for the CPU; a CUDA build is needed"
        return "torch finds no CUDA device: is the driver there (nvidia-smi)?"
    for module, name in _NEEDED.items():
        if importlib.util.find_spec(module) is None:
            return f"{name} is not installed: install tierd with the extra cuda12 or cuda13"
    return ""


def resolve_device(name: DeviceName) -> DeviceName:
    """Return CPU or CUDA. Raises DeviceUnavailable where CUDA was asked for and cannot be used."""
    if name is DeviceName.CPU:
        return name
    missing = what_is_missing()
    if missing and name is DeviceName.CUDA:
        raise DeviceUnavailable(f"--device cuda: {missing}; or give --device cpu")
    return DeviceName.CPU if missing else DeviceName.CUDA


def open_rig(name: DeviceName) -> DeviceRig | None:
    """Return a device with what goes with it; None for the CPU. Raises DeviceUnavailable."""
    if resolve_device(name) is DeviceName.CPU:
        return None
    from tierd_engine.device.cupyport import CupyDevice

    device = CupyDevice()
    return DeviceRig(
        device, TritonKernels(), Pins(device), measured_rates(device), cold_paths(device)
    )


def cold_paths(device: Device) -> ColdPaths:
    """Return the direct paths of a CUDA device: kvikio's, or none and the reason."""
    from tierd_engine.device.kvikiopath import KvikioPath

    try:
        return ColdPaths(device, KvikioPath())
    except DeviceUnavailable as error:
        return ColdPaths(device, None, str(error))


def fake_rig(device: Device, pins: Pins | None = None, paths: ColdPaths | None = None) -> DeviceRig:
    """Return a rig over a device whose memory is the host's."""
    return DeviceRig(device, HostKernels(), pins or Pins(device), Rates(1.0, 1.0), paths)


def measured_rates(device: Device) -> Rates:
    """Copy pinned memory in, read as much from RAM, and return what the split starts from."""
    host, there = device.allocate_host(_PROBE_BYTES), device.allocate(_PROBE_BYTES)
    stream, ended = device.new_stream("probe"), device.new_event("the probe's copies")
    host.tensor.zero_()
    began = time.perf_counter()
    for _ in range(_PROBES):
        device.copy_in(stream, host.address, there.address, _PROBE_BYTES)
    device.record(ended, stream, "record: probe")
    device.wait_host(ended, _PROBE_SECONDS, "wait: probe")
    link = _PROBES * _PROBE_BYTES / (time.perf_counter() - began)
    words = host.tensor.view(torch.int64)
    began = time.perf_counter()
    for _ in range(_PROBES):
        words.sum()
    dram = _PROBES * _PROBE_BYTES / (time.perf_counter() - began)
    device.free(there)
    device.free(host)
    return starting_rates(dram, link)
