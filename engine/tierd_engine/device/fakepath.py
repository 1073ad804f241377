"""A fake of direct cold reads: real files, faults by number, bytes that come when chosen.

A read is two operations of a stream of its own on the fake device: half-way its target is
poison. So a chooser decides when bytes land, as it does for copies.
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
    """What befalls a read. HANG: it does not end before `let_go`, and then writes garbage."""

    ERROR = "error"
    SHORT = "short"
    WRONG = "wrong"
    HANG = "hang"


@dataclass(eq=False, slots=True)
class FakeRead:
    """A read on the fake device."""

    device: FakeDevice
    error: str = ""
    ended: bool = False

    def wait(self, seconds: float) -> bool:
        """See PathRead. What can never end fails at once."""
        if seconds == 0:
            self.device.host_access()
            return self.ended
        return self.device.run_until(lambda: self.ended)


@dataclass(eq=False, slots=True)
class FakePath:
    """Reads files into a fake device. `faults`: by the read's number, from 0; `every`: of all."""

    device: FakeDevice
    faults: Mapping[int, Fault] = field(default_factory=dict)
    every: Fault | None = None
    started: int = 0
    hung: list[Callable[[], None]] = field(default_factory=list)

    _stream: FakeStream = field(init=False)

    def __post_init__(self) -> None:
        self._stream = self.device.new_stream("disk")

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

    def let_go(self) -> None:
        """Let hung reads write now: garbage, to where their bytes should have gone."""
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
