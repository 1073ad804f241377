"""The device port: buffers, pinned host memory, streams, events and copies of one GPU.

What each call promises is CUDA's, no more: work on one stream runs in order, work on two
streams in any order unless an event stands between them; a copy reads its source and
writes its target when it runs, not when it is asked for. There is no wait for the whole
device, and no wait without a limit.

Each record and wait carries a label, one of the caller's own: it names what is late in an
error, and the fake can leave that one out, to show that a test sees it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """Bytes on the device, or pinned on the host; `tensor` is uint8 [size_bytes] of them.

    `address` is absolute and a multiple of 64. Valid until `Device.free`.
    """

    address: int
    size_bytes: int
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of equal size: `count` of `row_bytes`, each `source_stride` bytes after the last.

    They go to `target_stride` bytes apart. A stride is at least a row. `source`, `target`:
    addresses of the first row.
    """

    source: int
    source_stride: int
    target: int
    target_stride: int
    row_bytes: int
    count: int


class Stream(Protocol):
    """A queue of work on the device. `name` is for messages."""

    @property
    def name(self) -> str:
        """What this stream is for."""


class Event(Protocol):
    """A point in a stream: the last one recorded. Before any record it counts as reached."""

    @property
    def name(self) -> str:
        """What has happened once this event is reached."""


class Device(Protocol):
    """One device. Used by one thread. Errors are DeviceFailed unless said otherwise."""

    @property
    def name(self) -> str:
        """The device's name, for reports."""

    @property
    def torch_device(self) -> torch.device:
        """Where torch makes tensors for this device's kernels."""

    @property
    def compute(self) -> Stream:
        """The stream that torch's own operations, the model's, run on."""

    # -- memory -------------------------------------------------------------------
    def allocate(self, size_bytes: int) -> Buffer:
        """Return device memory; its bytes are undefined. Raises HotBudgetExceeded."""

    def allocate_host(self, size_bytes: int) -> Buffer:
        """Return pinned host memory; its bytes are undefined."""

    def free(self, buffer: Buffer) -> None:
        """Give a buffer back. No work on it may be left on any stream."""

    def register(self, address: int, size_bytes: int) -> None:
        """Pin host memory that is mapped already; both are multiples of 4096.

        Raises DeviceFailed if the driver refuses; nothing is pinned then.
        """

    def unregister(self, address: int) -> None:
        """Unpin what `register` pinned at this address. No copy of it may be left."""

    # -- streams and events -------------------------------------------------------
    def new_stream(self, name: str, *, urgent: bool = False) -> Stream:
        """Return a stream of its own order; the device prefers an urgent one's work."""

    def new_event(self, name: str) -> Event:
        """Return an event not yet recorded."""

    def record(self, event: Event, stream: Stream, label: str) -> None:
        """Let the event be reached once all that is on the stream now has run."""

    def wait(self, stream: Stream, event: Event, label: str) -> None:
        """Hold what is put on the stream from now on until the event, as last recorded, is reached.

        The host does not wait.
        """

    def is_reached(self, event: Event) -> bool:
        """Return whether the event is reached. Never waits."""

    def wait_host(self, event: Event, seconds: float, label: str) -> None:
        """Wait here until the event is reached, for `seconds` at most, else raise DeviceFailed."""

    # -- work ---------------------------------------------------------------------
    def copy_in(self, stream: Stream, source: int, target: int, size_bytes: int) -> None:
        """Put a copy from host address `source` to device address `target` on a stream.

        Of host memory that is not pinned the copy is right too, but may hold the host up.
        """

    def copy_in_rows(self, stream: Stream, rows: Rows) -> None:
        """Put one copy of host rows to device rows on a stream.

        As for all copies, the host bytes from the first to the last are pinned by one
        `register`, or none of them is.
        """

    def copy_out(self, stream: Stream, source: int, target: int, size_bytes: int) -> None:
        """Put a copy from device address `source` to host address `target` on a stream."""

    def launch(self, stream: Stream, kernel: Callable[[], None]) -> None:
        """Put a kernel on a stream: a call that only launches torch's or Triton's operations.

        On a GPU it is called at once, with the stream as torch's current one; on the fake
        when its turn comes. So it may change nothing but device memory.
        """

    def follow(self, stream: Stream) -> None:
        """Let the caller's torch operations from here on come after all that is on `compute`.

        Nothing to do on a GPU, where they run on that stream; the fake runs them at once,
        so it must let the stream run empty. `stream` must be `compute`.
        """

    def close(self) -> None:
        """Free what is left. Idempotent. No work may be left on any stream."""

    def check_integrity(self) -> None:
        """Raise AssertionError unless what was allocated and registered adds up."""
