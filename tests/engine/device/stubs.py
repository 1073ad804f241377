"""Stand-ins for CuPy and kvikio with the signatures of the real ones: a call that does not bind
fails here as it would there.

The signatures are those of the wheels cupy-cuda12x 13.6.0 and 14.2.0, kvikio-cu12 25.4.0 and
26.10.0; where they differ, the narrower. test_stubs.py compares them with what is installed.
"""

from __future__ import annotations

import ctypes
import os
import threading
from types import ModuleType, SimpleNamespace
from typing import Any

import torch


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(f"cudaError {status}")
        self.status = status


class Runtime:
    """cupy.cuda.runtime on the host's memory; all is done at once. `said`: what was asked."""

    memcpyHostToDevice, memcpyDeviceToHost = 1, 2
    CUDARuntimeError = CUDARuntimeError

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}
        self.said: list[tuple[str, int, int]] = []
        self.status = 0

    def hostRegister(self, ptr: int, size: int, flags: int) -> None:
        if size > 8192:
            raise CUDARuntimeError(2)
        self.pinned[ptr] = flags

    def hostUnregister(self, ptr: int) -> None:
        del self.pinned[ptr]

    def memcpyAsync(self, dst: int, src: int, size: int, kind: int, stream: int) -> None:
        self.said.append(("copy", kind, stream))
        ctypes.memmove(dst, src, size)

    def memcpy2DAsync(
        self, dst: int, dpitch: int, src: int, spitch: int, width: int, height: int, kind: int,
        stream: int,
    ) -> None:  # fmt: skip
        for row in range(height):
            self.memcpyAsync(dst + row * dpitch, src + row * spitch, width, kind, stream)

    def eventRecord(self, event: int, stream: int) -> None:
        self.said.append(("record", event, stream))

    def streamWaitEvent(self, stream: int, event: int, flags: int = 0) -> None:
        self.said.append(("wait", event, stream))

    def eventQuery(self, event: int) -> int:
        return self.status


class Event:
    """cupy.cuda.Event."""

    def __init__(
        self, block: bool = False, disable_timing: bool = False, interprocess: bool = False
    ) -> None:
        self.ptr = 99
        assert disable_timing


class Device:
    """cupy.cuda.Device: a Cython class, whose own signature says nothing."""

    def __init__(self, device: int = 0) -> None:
        self.id = device

    def use(self) -> None:
        pass


class Stream:
    """cupy.cuda.Stream of CuPy 13: no priority."""

    def __init__(self, null: bool = False, non_blocking: bool = False, ptds: bool = False) -> None:
        raise AssertionError("CuPy's streams are not used")


def cupy_cuda(runtime: Runtime) -> Any:
    """Return what stands for cupy.cuda."""
    return SimpleNamespace(runtime=runtime, Event=Event, Device=Device, Stream=Stream)


class TorchStream:
    """torch.cuda.Stream: device, then priority; the lower is the more urgent."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.cuda_stream = 11 + priority


class IOFuture:
    """kvikio's future."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def get(self) -> int:
        assert CuFile.gate.wait(10)
        return self._handle - CuFile.short

    def done(self) -> bool:
        return True


class CuFile:
    """kvikio.CuFile, on the host. `gate` shut: nothing ends; `short`: bytes that are lacking."""

    gate = threading.Event()
    short = 0
    error: Exception | None = None

    def __init__(self, file: Any, flags: str = "r") -> None:
        # What its C++ takes: "w" would truncate, "a" and "+" are refused (cpp/src/file_utils.cpp).
        self._fd = os.open(file, {"r": os.O_RDONLY, "r+": os.O_RDWR}[flags])

    def pread(
        self, buf: Any, size: int | None = None, file_offset: int = 0, task_size: int | None = None
    ) -> IOFuture:
        data = os.pread(self._fd, self._size(buf, size), file_offset)
        buf[: len(data)].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return IOFuture(len(data))

    def pwrite(
        self, buf: Any, size: int | None = None, file_offset: int = 0, task_size: int | None = None
    ) -> IOFuture:
        done = os.pwrite(self._fd, bytes(buf[: self._size(buf, size)].numpy()), file_offset)
        return IOFuture(done)

    def _size(self, buf: Any, size: int | None) -> int:
        if CuFile.error is not None:
            raise CuFile.error
        held = buf.numel() * buf.element_size()
        if size is not None and size > held:
            raise ValueError("Size is greater than the size of the buffer")
        return held if size is None else size

    def close(self) -> None:
        os.close(self._fd)


class Defaults(ModuleType):
    """kvikio.defaults: `set` alone, as from 26.x on. `settings`: what was set."""

    NAMES = ("compat_mode", "num_threads", "task_size", "gds_threshold", "bounce_buffer_size")

    def __init__(self) -> None:
        super().__init__("kvikio.defaults")
        self.settings: dict[str, Any] = {}

    def set(self, *config: Any) -> None:
        if len(config) != 2 or not isinstance(config[0], str):
            raise ValueError("a name and a value")
        if config[0] not in self.NAMES:
            raise KeyError(config[0])
        self.settings[config[0]] = config[1]


def kvikio_modules() -> dict[str, ModuleType]:
    """Return what stands for kvikio's modules, by name; the switches are as at the start."""
    CuFile.gate.set()
    CuFile.short, CuFile.error = 0, None
    module = ModuleType("kvikio")
    module.CuFile = CuFile  # type: ignore[attr-defined]
    module.defaults = Defaults()  # type: ignore[attr-defined]
    return {"kvikio": module, "kvikio.defaults": module.defaults}  # type: ignore[attr-defined]
