"""The CUDA port: refused without a GPU, and each name that it uses of CuPy is there."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest
import torch

from tierd.errors import DeviceUnavailable
from tierd_engine.device import cupyport
from tierd_engine.device.fake import FakeDevice
from tierd_engine.device.port import Device

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
    assert "priority" in inspect.signature(cupy.cuda.Stream.__init__).parameters
