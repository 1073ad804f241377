"""Opening a device: one that is not there is refused before anything is loaded."""

from __future__ import annotations

import subprocess

import pytest
import torch

from tierd.errors import DeviceUnavailable, InvalidArgument
from tierd_engine.device import opening
from tierd_engine.device.fake import FakeDevice
from tierd_engine.device.kernels import HostKernels
from tierd_engine.device.opening import DeviceName, fake_rig, open_rig, resolve_device

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")


@no_gpu
def test_cuda_without_a_gpu_is_refused_and_says_what_is_missing() -> None:
    with pytest.raises(DeviceUnavailable, match=r"--device cuda: .*; or give --device cpu") as no:
        open_rig(DeviceName.CUDA)
    assert no.value.exit_code == 2 and "\n" not in str(no.value)


@no_gpu
def test_auto_without_a_gpu_is_the_cpu() -> None:
    assert resolve_device(DeviceName.AUTO) is DeviceName.CPU
    assert open_rig(DeviceName.AUTO) is None


def test_the_cpu_is_always_there_and_other_names_are_refused() -> None:
    assert open_rig(DeviceName.CPU) is None
    with pytest.raises(InvalidArgument, match="'tpu' is none of auto, cpu, cuda"):
        DeviceName.parse("tpu")


@pytest.mark.parametrize("module", ["cupy", "triton"])
def test_what_else_is_missing_is_named(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = {"cupy": object(), "triton": object()} | {module: None}
    monkeypatch.setattr(opening.importlib.util, "find_spec", lambda name: found[name])
    with pytest.raises(DeviceUnavailable, match="extra cuda12 or cuda13"):
        resolve_device(DeviceName.CUDA)
    assert resolve_device(DeviceName.AUTO) is DeviceName.CPU


def test_interpreted_kernels_are_not_sent_to_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(opening.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(DeviceUnavailable, match="TRITON_INTERPRET is set"):
        resolve_device(DeviceName.CUDA)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert resolve_device(DeviceName.AUTO) is DeviceName.CUDA


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("at 1:2:\nFailed to find C compiler"), "Failed to find C compiler"),
        (subprocess.CalledProcessError(1, ["gcc"]), "gcc"),
        (FileNotFoundError(2, "No such file", "ptxas"), "ptxas"),
    ],
)
def test_a_triton_that_cannot_launch_is_told_before_a_job_begins(
    error: Exception, said: str
) -> None:
    class Kernels(HostKernels):
        def digest(self, *_: object) -> None:
            raise error

    device = FakeDevice()
    device.launch = lambda stream, kernel: kernel()  # type: ignore[method-assign]
    opening.require_kernels(device, HostKernels())
    with pytest.raises(DeviceUnavailable, match=f"Triton cannot launch a kernel: .*{said}") as no:
        opening.require_kernels(device, Kernels())
    assert "\n" not in str(no.value)
    device.check_integrity()


def test_rates_are_measured_with_bounded_waits() -> None:
    device = FakeDevice()
    rates = opening.measured_rates(device)
    assert rates.link > 0 and 0.0 <= rates.share <= 1.0
    assert device.pending == 0
    rig = fake_rig(device)
    rig.close()
