"""A fake of direct cold I/O: real files, faults by number, bytes that move when chosen.

A read is two operations of a stream of its own on the fake device: half-way its target is
poison. So is a write, which reads half of its source in each. So a chooser decides when bytes
move, as it does for copies.
"""

from __future__ import annotations

import enum
import mmap
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from tierd.units import SECTOR_BYTES
from tierd_engine.device.fake import POISON, FakeDevice, FakeStream

_GARBAGE = 0x5A  # not the poison of freed memory, where it would not show


class Fault(enum.Enum):
    """What befalls a read or a write. HANG: it does not end before `let_go`, then moves garbage.

    WRONG: a byte behind the first header is another one, and nobody says so.
    """

    ERROR = "error"
    SHORT = "short"
    WRONG = "wrong"
    HANG = "hang"


@dataclass(eq=False, slots=True)
class FakeWork:
    """A read or a write on the fake device."""

    device: FakeDevice
    error: str = ""
    ended: bool = False

    def wait(self, seconds: float) -> bool:
        """See PathRead, PathWrite. What can never end fails at once."""
        if seconds == 0:
            self.device.host_access()
            return self.ended
        return self.device.run_until(lambda: self.ended)


class FakeRead(FakeWork):
    """A read."""


class FakeWrite(FakeWork):
    """A write."""


@dataclass(eq=False, slots=True)
class FakePath:
    """Reads files into a fake device, and writes them from it.

    `faults`: by the read's number, from 0; `every`: of all; `write_faults`, `every_write`: so too.
    """

    device: FakeDevice
    faults: Mapping[int, Fault] = field(default_factory=dict)
    every: Fault | None = None
    started: int = 0
    write_faults: Mapping[int, Fault] = field(default_factory=dict)
    every_write: Fault | None = None
    writes_started: int = 0
    hung: list[Callable[[], None]] = field(default_factory=list)

    _stream: FakeStream = field(init=False)
    _write_stream: FakeStream = field(init=False)

    def __post_init__(self) -> None:
        self._stream = self.device.new_stream("disk")
        self._write_stream = self.device.new_stream("disk, written")

    def start(self, fd: int, offset: int, target: torch.Tensor) -> FakeRead:
        """See ColdPath."""
        fault = self.faults.get(self.started, self.every)
        self.started += 1
        read = FakeRead(self.device)
        found = np.frombuffer(bytearray(_read(fd, offset, target.numel())), np.uint8)
        data = torch.from_numpy(found)
        if fault is Fault.WRONG and len(data):
            data[min(SECTOR_BYTES, len(data) - 1)] ^= 1  # of a payload: behind the header
        elif fault is Fault.SHORT:
            data = data[: len(data) // 2]
        if len(data) < target.numel():
            read.error = f"{len(data)} of {target.numel()} bytes were read"
        if fault is Fault.ERROR:
            read.error, data = "input/output error", data[:0]

        def begin() -> None:
            target.fill_(POISON)

        def end() -> None:
            target[: len(data)].copy_(data)
            read.ended = True

        def garbage() -> None:
            target.fill_(_GARBAGE)

        stream = self._stream
        if fault is Fault.HANG:
            self.hung.append(lambda: self.device.launch(stream, garbage))
            return read
        self.device.launch(stream, begin)
        self.device.launch(stream, end)
        return read

    def start_write(self, fd: int, offset: int, source: torch.Tensor) -> FakeWrite:
        """See ColdPath. As kvikio does, it opens the file itself: `fd` may be closed before."""
        fault = self.write_faults.get(self.writes_started, self.every_write)
        self.writes_started += 1
        work, size = FakeWrite(self.device), source.numel()
        file = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        half = size // 2 // SECTOR_BYTES * SECTOR_BYTES

        def put(start: int, data: torch.Tensor) -> None:
            os.pwrite(file, bytes(data.numpy()), offset + start)

        def begin() -> None:
            put(0, source[:half])

        def end() -> None:
            if fault is Fault.ERROR:
                work.error = "input/output error"
            elif fault is Fault.SHORT:
                work.error = f"{half} of {size} bytes were written"
            else:
                put(half, source[half:])
            if fault is Fault.WRONG:
                put(SECTOR_BYTES, source[SECTOR_BYTES : SECTOR_BYTES + 1] ^ 1)
            os.close(file)
            work.ended = True

        def garbage() -> None:
            self.device.require_live(source.data_ptr(), size)
            put(0, torch.full((size,), _GARBAGE, dtype=torch.uint8))
            os.close(file)
            work.ended = True

        stream = self._write_stream
        if fault is Fault.HANG:
            self.device.launch(stream, begin)
            self.hung.append(lambda: self.device.launch(stream, garbage))
            return work
        self.device.launch(stream, begin)
        self.device.launch(stream, end)
        return work

    def let_go(self) -> None:
        """Let what hangs move bytes now: garbage, to where the right ones should have gone."""
        for late in self.hung:
            late()
        self.hung.clear()
        self.device.host_access()

    def close(self) -> None:
        """See ColdPath."""


def _read(fd: int, offset: int, size: int) -> bytes:
    try:
        with mmap.mmap(-1, size) as aligned:  # as O_DIRECT wants it
            return bytes(aligned[: os.preadv(fd, [aligned], offset)])
    except OSError:
        return b""
