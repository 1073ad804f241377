"""Opening a device for a job: which one, what is missing for it, and its links' first rates."""

from __future__ import annotations

import enum
import importlib.util
import os
import time
from dataclasses import dataclass
from subprocess import SubprocessError

import torch

from tierd.errors import DeviceUnavailable, InvalidArgument
from tierd.units import CACHE_LINE_BYTES, MIB
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
_ON = ("1", "true", "yes", "on", "y")  # as Triton reads a setting
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
    if os.environ.get("TRITON_INTERPRET", "").lower() in _ON:
        # Interpreted kernels would take the GPU's addresses for the host's, and crash.
        return "TRITON_INTERPRET is set: kernels would not run on the GPU; unset it"
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

    device, kernels = CupyDevice(), TritonKernels()
    require_kernels(device, kernels)
    return DeviceRig(device, kernels, Pins(device), measured_rates(device), cold_paths(device))


def require_kernels(device: Device, kernels: PageKernels) -> None:
    """Launch the smallest kernel once. Raises DeviceUnavailable, DeviceFailed.

    Triton builds its launchers with a C compiler and Python's headers, and its kernels for the
    driver that is there: what of it is missing is said before a job has begun.
    """
    page, found = device.allocate(CACHE_LINE_BYTES), device.allocate(8)
    ended = device.new_event("the first kernel")
    addresses = torch.tensor([page.address], device=device.torch_device)
    out = found.tensor.view(torch.int64)
    refused: tuple[type[Exception], ...] = (
        RuntimeError, OSError, ImportError, SubprocessError, *_tritons_errors(),
    )  # fmt: skip
    try:
        device.launch(device.compute, lambda: kernels.digest(addresses, page.size_bytes, out))
    except refused as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        raise DeviceUnavailable(
            f"Triton cannot launch a kernel: {why} (it needs a C compiler and Python's headers)"
        ) from error
    device.record(ended, device.compute, "record: first kernel")
    device.wait_host(ended, _PROBE_SECONDS, "wait: first kernel")
    device.free(found)
    device.free(page)


def _tritons_errors() -> tuple[type[Exception], ...]:
    """Return what Triton raises that is no RuntimeError."""
    try:
        from triton.errors import TritonError
    except ImportError:
        return ()
    return (TritonError,)


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
