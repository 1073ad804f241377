"""A fake device: streams as queues, run in an order that a chooser decides, poison on free.

Invariants:
  an operation runs only as the first of its stream, and after the events it waits for
  a copy reads its source when it runs; half-way its target is poison
  what is freed is poison, and a copy that touches it fails
  operations run inside `is_reached`, `wait_host`, `follow`, `host_access` only

Device memory is host memory, so kernels of the CPU take its addresses. Operations that run
only where the host looks lose no order: work on memory that the host does not look at
has the same result whether it ran earlier or runs now, in each order that queues and
events allow. A test that itself writes what copies read calls `host_access` before.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from tierd.errors import DeviceFailed
from tierd.units import CACHE_LINE_BYTES, SECTOR_BYTES, round_up
from tierd_engine.device.port import Buffer, Event, Rows, Stream

POISON = 0xFF  # NaN in every float dtype
HOST = "host"  # the chooser's other option: let the host go on


class Chooser(Protocol):
    """Decides what runs next."""

    def choose(self, options: Sequence[str]) -> int:
        """Return the number of one option: streams by name, or HOST. Called with two or more."""


class FirstChooser:
    """Runs no more than the host waits for."""

    def choose(self, options: Sequence[str]) -> int:
        """Return the host's turn if it can go on, else the oldest stream's."""
        return 0


@dataclass(eq=False, slots=True)
class _Work:
    """One operation on a stream. `run` None: a marker or a wait, which touch no memory."""

    run: Callable[[], None] | None = None
    after: _Work | None = None
    label: str = ""
    done: bool = False


@dataclass(eq=False, slots=True)
class FakeStream:
    """A queue."""

    name: str
    queue: deque[_Work] = field(default_factory=deque)


@dataclass(eq=False, slots=True)
class FakeEvent:
    """The marker last recorded."""

    name: str
    marker: _Work | None = None


@dataclass(frozen=True, slots=True)
class Refusals:
    """What the device refuses: more bytes than these, pinned or allocated, at once."""

    registered_bytes_max: int | None = None
    device_bytes_max: int | None = None


class FakeDevice:
    """Runs on the CPU. `without`: the label whose records and waits are left out.

    `torn_copies`: a copy is two operations, so that others may run half-way. `follows` False:
    `follow` returns at once, as on a GPU, for a caller that only launches until `drain`.
    """

    def __init__(
        self,
        chooser: Chooser | None = None,
        *,
        without: str | None = None,
        refusals: Refusals | None = None,
        torn_copies: bool = True,
        follows: bool = True,
    ) -> None:
        self.name = "fake"
        self.torch_device = torch.device("cpu")
        self._chooser: Chooser = chooser or FirstChooser()
        self._without = without
        self._refusals = refusals or Refusals()
        self._torn_copies, self._follows = torn_copies, follows
        self.compute = FakeStream("compute")
        self._streams = [self.compute]
        self._buffers: dict[int, Buffer] = {}
        self._freed: list[Buffer] = []
        self._registered: dict[int, int] = {}
        self._running = False
        self.labels: Counter[str] = Counter()  # of records and waits asked for, left out or not
        self.trace: list[str] = []  # "stream: label" of each copy and kernel, as it ran
        self.copied_in_bytes = self.copied_out_bytes = self.pageable_bytes = 0
        self.copies = 0

    # -- memory -------------------------------------------------------------------
    def allocate(self, size_bytes: int) -> Buffer:
        """See Device. The bytes are poison."""
        limit = self._refusals.device_bytes_max
        used = sum(buffer.size_bytes for buffer in self._buffers.values())
        if limit is not None and used + size_bytes > limit:
            raise DeviceFailed(f"the device has no {size_bytes} bytes left")
        with torch.inference_mode(False):  # asked for in a step, it is written to outside one
            raw = torch.empty(round_up(size_bytes, SECTOR_BYTES) + SECTOR_BYTES, dtype=torch.uint8)
        start = -raw.data_ptr() % SECTOR_BYTES
        tensor = raw[start : start + size_bytes]
        tensor.fill_(POISON)
        buffer = Buffer(tensor.data_ptr(), size_bytes, tensor)
        assert buffer.address % CACHE_LINE_BYTES == 0
        self._buffers[buffer.address] = buffer
        return buffer

    def allocate_host(self, size_bytes: int) -> Buffer:
        """See Device. The bytes are poison."""
        return self.allocate(size_bytes)

    def free(self, buffer: Buffer) -> None:
        """See Device. The memory is kept until `close`, as poison, so that a late use shows."""
        self._buffers.pop(buffer.address)
        buffer.tensor.fill_(POISON)
        self._freed.append(buffer)

    def register(self, address: int, size_bytes: int) -> None:
        """See Device."""
        assert address % SECTOR_BYTES == size_bytes % SECTOR_BYTES == 0, f"{address=} {size_bytes=}"
        limit = self._refusals.registered_bytes_max
        if limit is not None and self.registered_bytes + size_bytes > limit:
            raise DeviceFailed(f"the driver does not pin {size_bytes} bytes more")
        for start, size in self._registered.items():
            overlaps = start < address + size_bytes and address < start + size
            assert not overlaps, f"{address=} {size_bytes=} overlaps {start=} {size=}"
        self._registered[address] = size_bytes

    def unregister(self, address: int) -> None:
        """See Device."""
        del self._registered[address]

    @property
    def registered_bytes(self) -> int:
        """Bytes that `register` holds pinned."""
        return sum(self._registered.values())

    # -- streams and events -------------------------------------------------------
    def new_stream(self, name: str, *, urgent: bool = False) -> FakeStream:
        """See Device."""
        stream = FakeStream(name)
        self._streams.append(stream)
        return stream

    def new_event(self, name: str) -> FakeEvent:
        """See Device."""
        return FakeEvent(name)

    def record(self, event: Event, stream: Stream, label: str) -> None:
        """See Device."""
        assert isinstance(event, FakeEvent) and isinstance(stream, FakeStream)
        if self._is_left_out(label):
            return
        event.marker = _Work(label=label)
        stream.queue.append(event.marker)

    def wait(self, stream: Stream, event: Event, label: str) -> None:
        """See Device."""
        assert isinstance(event, FakeEvent) and isinstance(stream, FakeStream)
        if not self._is_left_out(label):
            stream.queue.append(_Work(after=event.marker, label=label))

    def is_reached(self, event: Event) -> bool:
        """See Device. Some work may run before the answer."""
        assert isinstance(event, FakeEvent)
        self._let_run(lambda: True)
        return event.marker is None or event.marker.done

    def wait_host(self, event: Event, seconds: float, label: str) -> None:
        """See Device. Fails at once if the event can never be reached."""
        assert isinstance(event, FakeEvent)
        if self._is_left_out(label):
            return
        marker = event.marker
        if not self._let_run(lambda: marker is None or marker.done):
            raise DeviceFailed(f"{label}: {event.name} is not reached within {seconds:g} s")

    def _is_left_out(self, label: str) -> bool:
        assert not self._running, "a kernel may only launch"
        self.labels[label] += 1
        return label == self._without

    # -- work ---------------------------------------------------------------------
    def copy_in(self, stream: Stream, source: int, target: int, size_bytes: int) -> None:
        """See Device."""
        self.copy_in_rows(stream, Rows(source, size_bytes, target, size_bytes, size_bytes, 1))

    def copy_in_rows(self, stream: Stream, rows: Rows) -> None:
        """See Device."""
        self.copied_in_bytes += rows.row_bytes * rows.count
        host = rows.source, (rows.count - 1) * rows.source_stride + rows.row_bytes
        device = rows.target, (rows.count - 1) * rows.target_stride + rows.row_bytes
        self._copy(stream, rows, host, device)

    def copy_out(self, stream: Stream, source: int, target: int, size_bytes: int) -> None:
        """See Device."""
        self.copied_out_bytes += size_bytes
        rows = Rows(source, size_bytes, target, size_bytes, size_bytes, 1)
        self._copy(stream, rows, (target, size_bytes), (source, size_bytes))

    def _copy(
        self, stream: Stream, rows: Rows, host: tuple[int, int], device: tuple[int, int]
    ) -> None:
        assert isinstance(stream, FakeStream) and not self._running
        assert rows.row_bytes > 0 and rows.count > 0
        assert min(rows.source_stride, rows.target_stride) >= rows.row_bytes, rows
        self.copies += 1
        if not self._require_one_piece(*host):
            self.pageable_bytes += rows.row_bytes * rows.count
        self.require_live(*device)

        def poison() -> None:
            self.require_live(*device)
            for row in range(rows.count):
                target = rows.target + row * rows.target_stride
                bytes_at(target, rows.row_bytes)[:] = POISON

        def copy() -> None:
            self.require_live(*device)
            for row in range(rows.count):
                source = bytes_at(rows.source + row * rows.source_stride, rows.row_bytes)
                bytes_at(rows.target + row * rows.target_stride, rows.row_bytes)[:] = source
            self.trace.append(f"{stream.name}: copy of {rows.row_bytes * rows.count}")

        if self._torn_copies:
            stream.queue.append(_Work(poison))
        stream.queue.append(_Work(copy))

    def _require_one_piece(self, address: int, size_bytes: int) -> bool:
        """Return whether it is pinned. The driver refuses a copy of which only a part is."""
        pieces = [(b.address, b.size_bytes) for b in self._buffers.values()]
        for start, size in [*self._registered.items(), *pieces]:
            if start < address + size_bytes and address < start + size:
                is_inside = start <= address and address + size_bytes <= start + size
                assert is_inside, f"{size_bytes} bytes at {address:#x} are pinned in part"
                return True
        return False

    def require_live(self, address: int, size_bytes: int) -> None:
        """Raise AssertionError unless these bytes are inside one buffer that is not freed."""
        for buffer in self._buffers.values():
            inside = buffer.address <= address
            if inside and address + size_bytes <= buffer.address + buffer.size_bytes:
                return
        raise AssertionError(f"{size_bytes} bytes at {address:#x} are not live device memory")

    def launch(self, stream: Stream, kernel: Callable[[], None]) -> None:
        """See Device."""
        assert isinstance(stream, FakeStream) and not self._running

        def run() -> None:
            kernel()
            self.trace.append(f"{stream.name}: kernel")

        stream.queue.append(_Work(run))

    def follow(self, stream: Stream) -> None:
        """See Device."""
        assert stream is self.compute
        if self._follows:
            self.drain()

    def drain(self) -> None:
        """Let the compute stream run empty. Fails if it never will."""
        if not self._let_run(lambda: not self.compute.queue):
            raise DeviceFailed("compute: what is on it waits for what never comes")

    def run_until(self, condition: Callable[[], bool]) -> bool:
        """Run work until the condition holds; False: it never will."""
        return self._let_run(condition)

    def host_access(self) -> None:
        """Let any work run that may have run before the host looks at memory, or changes it."""
        self._let_run(lambda: True)

    def _let_run(self, may_go_on: Callable[[], bool]) -> bool:
        """Run work until the host may go on, and as much more as is chosen; False: it never may."""
        assert not self._running, "a kernel may only launch"
        while True:
            self._pass_markers()
            options = [HOST] if may_go_on() else []
            ready = [s for s in self._streams if s.queue and s.queue[0].run is not None]
            options += [stream.name for stream in ready]
            if not options:
                return False
            number = self._chooser.choose(options) if len(options) > 1 else 0
            if options[number] == HOST:
                return True
            self._run(ready[number - (options[0] == HOST)])

    def _pass_markers(self) -> None:
        """Take what touches no memory off the queues: it never matters that it is late."""
        moved = True
        while moved:
            moved = False
            for stream in self._streams:
                while stream.queue and stream.queue[0].run is None:
                    work = stream.queue[0]
                    if work.after is not None and not work.after.done:
                        break
                    work.done = moved = True
                    stream.queue.popleft()

    def _run(self, stream: FakeStream) -> None:
        work = stream.queue.popleft()
        assert work.run is not None
        self._running = True
        try:
            work.run()
        finally:
            self._running = False
        work.done = True

    @property
    def pending(self) -> int:
        """Operations that have not run."""
        return sum(len(stream.queue) for stream in self._streams)

    def close(self) -> None:
        """See Device."""
        self._buffers.clear()
        self._freed.clear()

    def check_integrity(self) -> None:
        """Raise AssertionError unless freed memory is still poison and names tell streams apart."""
        for buffer in self._freed:
            assert bool((buffer.tensor == POISON).all()), f"{buffer.address:#x} used after free"
        names = [stream.name for stream in self._streams]
        assert len(set(names)) == len(names), f"{names=}"
        sizes = self._registered.values()
        assert all(size > 0 for size in sizes), f"{self._registered=}"


def bytes_at(address: int, size_bytes: int) -> npt.NDArray[np.uint8]:
    """Return a writable view of mapped memory; the caller keeps it mapped."""
    import ctypes

    return np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(address))
