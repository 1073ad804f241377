"""What tests of disks share: aligned buffers, and a disk of each kind."""

from __future__ import annotations

import mmap
from pathlib import Path

from tierd.disk.memory import MemoryDisk
from tierd.disk.ports import DiskPort
from tierd.disk.posix import PosixDisk
from tierd.disk.simulated import SimulatedDisk

PAGE = 4096
SIZE = 16 * PAGE


def make(kind: str, folder: Path) -> DiskPort:
    if kind == "memory":
        return MemoryDisk()
    if kind == "simulated":
        return SimulatedDisk(seed=1)
    return PosixDisk(str(folder), ephemeral=kind == "ephemeral")


def aligned(size: int, fill: int = 0) -> memoryview:
    buffer = memoryview(mmap.mmap(-1, size))
    buffer[:] = bytes([fill]) * size
    return buffer


def read(disk: DiskPort, handle: int, offset: int, size: int) -> bytes:
    buffer = aligned(size, 0xEE)
    disk.read_into(handle, offset, buffer)
    return bytes(buffer)
