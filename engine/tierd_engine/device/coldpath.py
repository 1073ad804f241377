"""The port of direct cold I/O: bytes of a slab file put into device memory, or taken from it.

`kvikiopath` is GPUDirect Storage, `fakepath` one with faults. Not ordered by any stream: a
read may write to its target from `start` until it has ended, whenever that is; so may a write
read its source, and write to its file.
"""

from __future__ import annotations

import enum
from typing import Protocol

import torch


class PathKind(enum.StrEnum):
    """How bytes of a disk get into VRAM, and from there to it.

    GDS: by DMA, past RAM. COMPAT: kvikio works, but copies through RAM. POSIX: tierd's own cold
    reader and writer, and copies from and to pinned memory.
    """

    GDS = "gds"
    COMPAT = "compat"
    POSIX = "posix"


class PathRead(Protocol):
    """One read under way."""

    def wait(self, seconds: float) -> bool:
        """Wait until it has ended, `seconds` at most; return whether it has. 0 only asks."""

    @property
    def error(self) -> str:
        """Why the target does not hold all bytes asked for; "" if it does. Once it has ended."""


class PathWrite(Protocol):
    """One write under way."""

    def wait(self, seconds: float) -> bool:
        """Wait until it has ended, `seconds` at most; return whether it has. 0 only asks."""

    @property
    def error(self) -> str:
        """Why the file does not hold all bytes given; "" if it does. Once it has ended."""


class ColdPath(Protocol):
    """Who reads and writes. Called by one thread; nothing here waits for a disk."""

    def start(self, fd: int, offset: int, target: torch.Tensor) -> PathRead:
        """Begin to read uint8 [size] at `offset` of an open file; all are multiples of 4 KiB.

        Errors come with the read. The target stays valid until it has ended.
        """

    def start_write(self, fd: int, offset: int, source: torch.Tensor) -> PathWrite:
        """Begin to write uint8 [size] at `offset` of a file that is open for writing.

        As `start`; the source stays valid, and unchanged, until the write has ended.
        """

    def close(self) -> None:
        """Take no more work. What is stuck is left to end by itself."""
