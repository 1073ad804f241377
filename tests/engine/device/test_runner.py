"""A whole job on a device: the runner opens it, the report tells of it, and it is closed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.folders import tiny_folder
from tierd.config import embedded_config
from tierd.daemon import EmbeddedDaemon
from tierd.errors import DeviceUnavailable, HotBudgetExceeded, InvalidArgument
from tierd_engine import hf, runner
from tierd_engine.device.exploring import RandomChooser
from tierd_engine.device.fake import FakeDevice
from tierd_engine.device.opening import DeviceName, fake_rig, resolve_device
from tierd_engine.device.pinning import HostLimits, Pins
from tierd_engine.runner import JobSpec, prepare_job, run_job

TEXT = "The quick brown fox jumps over the lazy dog. " * 8


class Quiet:
    """A job's listener that does not listen."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """Stand in for the CUDA device that the runner opens."""
    device = FakeDevice(RandomChooser(1))
    limits = HostLimits(None, None)
    monkeypatch.setattr(runner, "resolve_device", lambda name: DeviceName.CUDA)
    monkeypatch.setattr(runner, "open_rig", lambda name: fake_rig(device, Pins(device, limits)))
    return device


def run(folder: Path, **changes: Any) -> dict[str, Any]:
    spec = JobSpec(
        str(folder), TEXT, "Why?", max_new_tokens=6, ignore_eos=True, block_tokens=16, hot="20%",
        warm="100%", verify=True, device="cuda", **changes,
    )  # fmt: skip
    job = prepare_job(spec)
    with EmbeddedDaemon(embedded_config(warm_bytes=2 * job.sizes.warm_budget_bytes)) as daemon:
        return run_job(job, socket=daemon.socket, events=Quiet()).to_dict()  # type: ignore[arg-type]


def test_a_job_in_float32_and_raw_gives_the_models_own_tokens(
    device: FakeDevice, tmp_path: Path
) -> None:
    report = run(tiny_folder(tmp_path / "model"), codec="raw", dtype="float32", guard=False)
    assert report["verify"]["tokens_identical"] is True
    assert report["verify"]["logit_difference_max"] < 3e-4
    section = report["device"]
    assert section["name"] == "fake" and section["pinned_bytes"] > 0
    assert section["streamed_bytes"] > 0 and section["copies"] > 0
    assert report["hot"]["peak_bytes"] <= report["hot"]["budget_bytes"]
    assert device.pending == 0 and device.registered_bytes == 0
    device.check_integrity()


def test_a_job_is_in_bfloat16_on_a_device_and_guarded(device: FakeDevice, tmp_path: Path) -> None:
    report = run(tiny_folder(tmp_path / "model"))
    assert report["dtype"] == "bfloat16" and report["codec"] == "int8"
    assert report["checks"]["integrity"] is True
    assert device.pending == 0 and device.registered_bytes == 0


def test_a_resumed_job_promotes_and_its_answer_is_the_models_own(
    device: FakeDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_folder(tmp_path / "model")
    spec = JobSpec(
        str(folder), TEXT, "Why?", max_new_tokens=6, ignore_eos=True, block_tokens=16, hot="40%",
        warm="100%", verify=True, device="cuda", codec="raw", dtype="float32", keep=True,
    )  # fmt: skip
    warm = 2 * prepare_job(spec).sizes.warm_budget_bytes
    with EmbeddedDaemon(embedded_config(warm_bytes=warm)) as daemon:
        first = run_job(
            prepare_job(spec, daemon.socket),
            socket=daemon.socket,
            events=Quiet(),  # type: ignore[arg-type]
        ).to_dict()
        assert first["hot"]["promoted_hot_blocks"] == 0
        again = FakeDevice(RandomChooser(2))
        pins = Pins(again, HostLimits(None, None))
        monkeypatch.setattr(runner, "open_rig", lambda name: fake_rig(again, pins))
        more = replace(
            spec, document="", prompt="More?", keep=False, codec=None, block_tokens=None,
            resume=first["session"]["id"],
        )  # fmt: skip
        second = run_job(
            prepare_job(more, daemon.socket),
            socket=daemon.socket,
            events=Quiet(),  # type: ignore[arg-type]
        ).to_dict()
    assert second["hot"]["promoted_hot_blocks"] > 0
    assert second["verify"]["tokens_identical"] is True
    assert second["hot"]["peak_bytes"] <= second["hot"]["budget_bytes"]
    assert second["checks"]["recomputed_tokens"] == 0
    assert again.pending == 0 and again.registered_bytes == 0
    again.check_integrity()


def test_a_job_that_fails_gives_the_device_back(
    device: FakeDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "_decode", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(tiny_folder(tmp_path / "model"))
    assert device.pending == 0 and device.registered_bytes == 0


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("to", DeviceUnavailable, "weights do not fit into fake"),
        ("forward", HotBudgetExceeded, "no memory left for a step of .* give a smaller --hot"),
    ],
)
def test_a_gpu_whose_memory_is_full_is_one_line(
    name: str, kind: type[Exception], said: str, device: FakeDevice, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\n Tried to allocate")

    def load(*arguments: Any) -> Any:
        model = own(*arguments)
        setattr(model, name, fail)
        return model

    own = hf.load_model
    monkeypatch.setattr(hf, "load_model", load)
    with pytest.raises(kind, match=said):
        run(tiny_folder(tmp_path / "model"))
    assert device.pending == 0 and device.registered_bytes == 0


def test_weights_in_8_bits_are_refused_with_a_device(device: FakeDevice, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="--weights int8 runs on the CPU"):
        run(tiny_folder(tmp_path / "model"), weights="int8")


def test_a_device_that_is_not_there_is_refused_before_the_model_is_read() -> None:
    try:
        resolve_device(DeviceName.CUDA)
    except DeviceUnavailable:
        with pytest.raises(DeviceUnavailable, match="--device cuda"):
            prepare_job(JobSpec("/no/such/model", TEXT, "Why?", device="cuda"))
    else:
        pytest.skip("there is a GPU here")
