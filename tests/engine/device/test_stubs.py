"""The stubs' signatures are those of the libraries, where these are installed."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.device import stubs
from tierd_engine.device import cupyport, kvikiopath


def names(function: Any) -> list[str]:
    """Return a function's parameters; a Cython one says them in the first line of its text."""
    try:
        found = list(inspect.signature(function).parameters)
    except ValueError:
        line = (function.__doc__ or "").split("\n")[0]
        match = re.search(r"\((.*)\)", line)
        assert match, line
        found = [part.split("=")[0].split()[-1] for part in match.group(1).split(",")]
    return [name for name in found if name != "self"]


def test_cupys_runtime_has_these_parameters() -> None:
    runtime = pytest.importorskip("cupy").cuda.runtime
    for name in ("hostRegister", "hostUnregister", "memcpyAsync", "memcpy2DAsync", "eventRecord",
                 "streamWaitEvent", "eventQuery"):  # fmt: skip
        assert names(getattr(runtime, name)) == names(getattr(stubs.Runtime, name)), name
    assert runtime.memcpyHostToDevice == stubs.Runtime.memcpyHostToDevice
    assert runtime.memcpyDeviceToHost == stubs.Runtime.memcpyDeviceToHost
    assert issubclass(runtime.CUDARuntimeError, RuntimeError)


def test_cupys_events_and_streams_have_these_parameters() -> None:
    cuda = pytest.importorskip("cupy").cuda
    assert names(cuda.Event.__init__) == names(stubs.Event.__init__)
    ours = names(stubs.Stream.__init__)
    assert names(cuda.Stream.__init__)[: len(ours)] == ours
    assert callable(cuda.Device.use)


def test_kvikios_files_have_these_parameters() -> None:
    try:
        kvikio = pytest.importorskip("kvikio", exc_type=ImportError)
    except RuntimeError as error:  # its loader's: libcufile is not there
        pytest.skip(str(error))
    for name in ("__init__", "pread", "pwrite", "close"):
        assert names(getattr(kvikio.CuFile, name)) == names(getattr(stubs.CuFile, name)), name
    assert names(kvikio.defaults.set) == ["config"]


def test_torchs_streams_take_a_device_and_a_priority() -> None:
    assert names(torch.cuda.Stream.__new__)[1:3] == names(stubs.TorchStream.__init__)


@pytest.mark.parametrize("module", [cupyport, kvikiopath])
def test_no_name_of_a_library_is_used_that_a_stub_does_not_have(module: Any) -> None:
    """What is not in a stub is not checked against the library either."""
    allowed = {
        "_runtime": set(dir(stubs.Runtime)),
        "_cuda": {"runtime", "Event", "Device"},
        "_kvikio": {"CuFile"},
        "defaults": {"set"},
    }
    used: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
        if isinstance(node, ast.Attribute):
            owner = node.value
            name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
            used.setdefault(name, set()).add(node.attr)
    checked = {name: used[name] for name in allowed if name in used}
    assert checked, "nothing of the library is used"
    for name, attributes in checked.items():
        assert attributes <= allowed[name], (name, attributes - allowed[name])
