"""The CUDA port: refused without a GPU, and each name that it uses of CuPy is there."""

from __future__ import annotations

import ast
import contextlib
import inspect
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.device.stubs import Runtime, TorchStream, cupy_cuda
from tierd.errors import DeviceFailed, DeviceUnavailable
from tierd_engine.device import cupyport
from tierd_engine.device.fake import FakeDevice
from tierd_engine.device.port import Device, Rows

SOURCE = Path(cupyport.__file__)


def test_both_devices_have_what_the_port_asks_for() -> None:
    asked = {name for name in vars(Device) if not name.startswith("_")}
    for kind in (cupyport.CupyDevice, FakeDevice):
        for name in asked:
            member = inspect.getattr_static(Device, name)
            if callable(member):
                own = inspect.signature(getattr(kind, name)).parameters
                assert list(own) == list(inspect.signature(member).parameters), (kind, name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_is_refused() -> None:
    with pytest.raises(DeviceUnavailable):
        cupyport.CupyDevice()


def test_a_cupy_that_cannot_be_imported_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = "try:\n    import no_such_part\nexcept ImportError as e:\n"
    (tmp_path / "cupy.py").write_text(f"{text}    raise ImportError('===') from e\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "cupy"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(DeviceUnavailable, match=r"needs CuPy: .*No module named 'no_such_part'"):
        cupyport.CupyDevice()


def test_cupy_is_imported_in_this_one_module() -> None:
    package = SOURCE.parent.parent
    importers = set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.partition(".")[0] == "cupy" for name in names):
                importers.add(path.name)
    assert importers == {"cupyport.py"}


def test_nothing_waits_for_the_whole_device() -> None:
    for path in SOURCE.parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                assert "ynchronize" not in node.attr, f"{path.name}:{node.lineno}"


def test_the_names_it_uses_are_in_cupy() -> None:
    cupy = pytest.importorskip("cupy")
    used = {
        node.attr
        for node in ast.walk(ast.parse(SOURCE.read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == "_runtime"
    }
    assert len(used) > 8
    assert all(hasattr(cupy.cuda.runtime, name) for name in used)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    """Put the runtime where CuPy's would be, and a torch that thinks it has a GPU."""
    runtime = Runtime()
    monkeypatch.setattr(cupyport, "_import_cuda", lambda: cupy_cuda(runtime))
    current = SimpleNamespace(cuda_stream=7)
    stubs: dict[str, Any] = {
        "is_available": lambda: True,
        "set_device": lambda number: None,
        "get_device_name": lambda number: "stub",
        "current_stream": lambda number: current,
        "Stream": TorchStream,
        "stream": lambda twin: contextlib.nullcontext(),
    }
    for name, stub in stubs.items():
        monkeypatch.setattr(torch.cuda, name, stub)
    return runtime


def test_calls_reach_the_runtime_with_their_arguments_in_order(cuda: Runtime) -> None:
    device = cupyport.CupyDevice()
    source, target = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
    stream, event = device.new_stream("in", urgent=True), device.new_event("event")
    at, to = source.ctypes.data, target.ctypes.data
    device.copy_in(stream, at, to, 8)
    device.copy_out(device.compute, at + 8, to + 8, 8)
    device.copy_in_rows(stream, Rows(at + 16, 16, to + 16, 8, 4, 3))
    assert target[:16].tolist() == source[:16].tolist()
    rows = [[first + i for i in range(4)] for first in (16, 32, 48)]
    assert target[16:40].reshape(3, 8)[:, :4].tolist() == rows
    device.record(event, stream, "record")
    device.wait(device.compute, event, "wait")
    assert cuda.said[:2] == [("copy", 1, 10), ("copy", 2, 7)]
    assert cuda.said[-2:] == [("record", 99, 10), ("wait", 99, 7)]
    ran: list[int] = []
    device.launch(stream, lambda: ran.append(1))
    device.follow(device.compute)
    assert ran == [1] and device.is_reached(event)
    device.check_integrity()


def test_what_the_runtime_refuses_is_typed_and_waits_are_bounded(cuda: Runtime) -> None:
    device = cupyport.CupyDevice()
    device.register(4096, 4096)
    with pytest.raises(DeviceFailed, match=r"pinning 1\.0 MiB: cudaError 2"):
        device.register(1 << 30, 1 << 20)
    assert list(cuda.pinned) == [4096]
    event = device.new_event("late")
    cuda.status = 600
    with pytest.raises(DeviceFailed, match=r"wait: x: late is not reached within 0\.01 s on stub"):
        device.wait_host(event, 0.01, "wait: x")
    cuda.status = 700
    with pytest.raises(DeviceFailed, match="late: cudaError 700"):
        device.is_reached(event)
    device.close()
    device.close()
    assert cuda.pinned == {}
