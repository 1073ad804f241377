"""A CUDA GPU behind the device port: CuPy's binding of the runtime, streams shared with torch.

The one module that imports CuPy. Interfaces used, read off the wheels of CuPy 13.6 and 14.2
(cupy.cuda.runtime): hostRegister(ptr, size, flags), hostUnregister(ptr), memcpyAsync(dst, src,
size, kind, stream), memcpy2DAsync(dst, dpitch, src, spitch, width, height, kind, stream),
eventRecord(event, stream), streamWaitEvent(stream, event), eventQuery(event), which returns a
status and raises nothing; Event(disable_timing), Device(number).use(). Of torch: cuda.Stream,
cuda.stream, cuda.current_stream. Streams are torch's, because CuPy 13's have no priority. Both
use the device's primary context, so memory and streams of one are good in the other.

Invariants:
  a side stream does not synchronise with the default stream
  what torch allocates here is used by side streams too: it is freed after their last event
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tierd.errors import DeviceFailed, DeviceUnavailable, HotBudgetExceeded
from tierd.units import CACHE_LINE_BYTES, SECTOR_BYTES, format_size
from tierd_engine.device.port import Buffer, Event, Rows, Stream

_SUCCESS, _NOT_READY = 0, 600  # cudaSuccess, cudaErrorNotReady
_REGISTER_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context of the process
_URGENT = -1  # the driver takes the nearest priority it has
# A layer's q comes down within a few kernels: asked for without a pause for that long, because
# a timer takes 0.16 ms and a step waits once a layer. Then ten times a millisecond.
_SPIN_SECONDS = 2e-3
_POLL_SECONDS = 1e-4


@dataclass(frozen=True, slots=True, eq=False)
class CudaStream:
    """A stream's pointer, and torch's object, which owns it."""

    name: str
    pointer: int
    twin: Any


@dataclass(frozen=True, slots=True, eq=False)
class CudaEvent:
    """An event without timing; CuPy's object owns it."""

    name: str
    owner: Any


class CupyDevice:
    """One CUDA device. `compute` is the stream that is torch's current one at construction."""

    def __init__(self, number: int = 0) -> None:
        self._cuda = _import_cuda()
        self._runtime = self._cuda.runtime
        with _failing("no CUDA device", DeviceUnavailable):
            if not torch.cuda.is_available():
                raise DeviceUnavailable("this build of torch finds no CUDA device")
            self._cuda.Device(number).use()
            torch.cuda.set_device(number)
            self.torch_device = torch.device("cuda", number)
            self.name: str = torch.cuda.get_device_name(number)
            current = torch.cuda.current_stream(number)
        self.compute = CudaStream("compute", current.cuda_stream, current)
        self._buffers: dict[int, Buffer] = {}
        self._registered: dict[int, int] = {}

    # -- memory -------------------------------------------------------------------
    def allocate(self, size_bytes: int) -> Buffer:
        """See Device."""
        try:
            with torch.inference_mode(False):  # asked for in a step, it is written to outside one
                tensor = torch.empty(size_bytes, dtype=torch.uint8, device=self.torch_device)
        except torch.OutOfMemoryError as error:
            free = torch.cuda.mem_get_info(self.torch_device)[0]
            raise HotBudgetExceeded(
                f"{self.name} has {format_size(free)} free, and {format_size(size_bytes)} are "
                "needed: give a smaller --hot"
            ) from error
        return self._kept(tensor)

    def allocate_host(self, size_bytes: int) -> Buffer:
        """See Device."""
        with _failing(f"{format_size(size_bytes)} of pinned memory"), torch.inference_mode(False):
            return self._kept(torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True))

    def _kept(self, tensor: torch.Tensor) -> Buffer:
        buffer = Buffer(tensor.data_ptr(), tensor.numel(), tensor)
        assert buffer.address % CACHE_LINE_BYTES == 0, buffer.address
        self._buffers[buffer.address] = buffer
        return buffer

    def free(self, buffer: Buffer) -> None:
        """See Device."""
        del self._buffers[buffer.address]

    def register(self, address: int, size_bytes: int) -> None:
        """See Device."""
        assert address % SECTOR_BYTES == size_bytes % SECTOR_BYTES == 0, f"{address=} {size_bytes=}"
        with _failing(f"pinning {format_size(size_bytes)}"):
            self._runtime.hostRegister(address, size_bytes, _REGISTER_PORTABLE)
        self._registered[address] = size_bytes

    def unregister(self, address: int) -> None:
        """See Device."""
        del self._registered[address]
        with _failing("unpinning"):
            self._runtime.hostUnregister(address)

    # -- streams and events -------------------------------------------------------
    def new_stream(self, name: str, *, urgent: bool = False) -> CudaStream:
        """See Device."""
        with _failing(f"stream {name}"):
            # One of 32 that torch keeps of each priority, all non-blocking, in turn: a session
            # has five, so none of its own is another of them.
            make: Any = torch.cuda.Stream  # it has no types
            twin = make(self.torch_device, priority=_URGENT if urgent else 0)
        return CudaStream(name, twin.cuda_stream, twin)

    def new_event(self, name: str) -> CudaEvent:
        """See Device."""
        with _failing(f"event {name}"):
            return CudaEvent(name, self._cuda.Event(disable_timing=True))

    def record(self, event: Event, stream: Stream, label: str) -> None:
        """See Device."""
        assert isinstance(event, CudaEvent) and isinstance(stream, CudaStream)
        with _failing(label):
            self._runtime.eventRecord(event.owner.ptr, stream.pointer)

    def wait(self, stream: Stream, event: Event, label: str) -> None:
        """See Device."""
        assert isinstance(event, CudaEvent) and isinstance(stream, CudaStream)
        with _failing(label):
            self._runtime.streamWaitEvent(stream.pointer, event.owner.ptr)

    def is_reached(self, event: Event) -> bool:
        """See Device."""
        assert isinstance(event, CudaEvent)
        status = int(self._runtime.eventQuery(event.owner.ptr))
        if status not in (_SUCCESS, _NOT_READY):
            raise DeviceFailed(f"{event.name}: {self._runtime.CUDARuntimeError(status)}")
        return status == _SUCCESS

    def wait_host(self, event: Event, seconds: float, label: str) -> None:
        """See Device."""
        # Not eventSynchronize: it has no limit, and a GPU that fell off the bus never answers.
        began = time.monotonic()
        while not self.is_reached(event):
            waited = time.monotonic() - began
            if waited > seconds:
                raise DeviceFailed(
                    f"{label}: {event.name} is not reached within {seconds:g} s on {self.name}"
                )
            if waited > _SPIN_SECONDS:
                time.sleep(_POLL_SECONDS)

    # -- work ---------------------------------------------------------------------
    def copy_in(self, stream: Stream, source: int, target: int, size_bytes: int) -> None:
        """See Device."""
        self._copy(stream, source, target, size_bytes, self._runtime.memcpyHostToDevice)

    def copy_in_rows(self, stream: Stream, rows: Rows) -> None:
        """See Device."""
        assert isinstance(stream, CudaStream)
        with _failing(f"copy on {stream.name}"):
            self._runtime.memcpy2DAsync(
                rows.target, rows.target_stride, rows.source, rows.source_stride,
                rows.row_bytes, rows.count, self._runtime.memcpyHostToDevice, stream.pointer,
            )  # fmt: skip

    def copy_out(self, stream: Stream, source: int, target: int, size_bytes: int) -> None:
        """See Device."""
        self._copy(stream, source, target, size_bytes, self._runtime.memcpyDeviceToHost)

    def _copy(self, stream: Stream, source: int, target: int, size_bytes: int, kind: int) -> None:
        assert isinstance(stream, CudaStream) and size_bytes > 0
        with _failing(f"copy on {stream.name}"):
            self._runtime.memcpyAsync(target, source, size_bytes, kind, stream.pointer)

    def launch(self, stream: Stream, kernel: Callable[[], None]) -> None:
        """See Device."""
        assert isinstance(stream, CudaStream)
        with torch.cuda.stream(stream.twin):
            kernel()

    def follow(self, stream: Stream) -> None:
        """See Device. The caller must not have made another stream torch's current one."""
        assert stream is self.compute
        now = torch.cuda.current_stream(self.torch_device).cuda_stream
        assert now == self.compute.pointer, (
            "torch's current stream is another one than at the start"
        )

    def close(self) -> None:
        """See Device."""
        for address in list(self._registered):
            self.unregister(address)
        self._buffers.clear()

    def check_integrity(self) -> None:
        """Raise AssertionError unless buffers and registrations are whole."""
        assert all(buffer.address == at for at, buffer in self._buffers.items())
        assert all(size > 0 for size in self._registered.values()), f"{self._registered=}"


def _import_cuda() -> Any:
    try:
        import cupy
    except ImportError as error:
        why = (str(error.__cause__ or error).strip().splitlines() or [""])[-1]
        raise DeviceUnavailable(
            f"a CUDA device needs CuPy: install tierd with the extra cuda12 or cuda13 ({why})"
        ) from error
    return cupy.cuda


@contextlib.contextmanager
def _failing(
    what: str, kind: type[DeviceFailed] | type[DeviceUnavailable] = DeviceFailed
) -> Iterator[None]:
    """Raise the runtime's errors, of CuPy and of torch, as one of this tree's."""
    try:
        yield
    except (RuntimeError, OSError, MemoryError) as error:
        raise kind(f"{what}: {error}") from error
