"""Quarantine log: which slots were given up and why, as lines of text for people.

    quarantine.log    64 KiB, a line a slot, each sector filled up with newlines

The journal and the snapshots are what the store goes by; this file is told on
the side and its failures harm nothing. When it is full it begins anew.

Invariants:
  a sector holds whole lines
  the next line stands at the first sector that is blank, or at the start
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence

from tierd.disk.ports import DiskPort
from tierd.errors import NotFound, StorageError
from tierd.units import KIB, SECTOR_BYTES

NAME = "quarantine.log"
LOG_BYTES = 64 * KIB
LINE_BYTES_MAX = 400  # ten or more to a sector


class QuarantineLog:
    """The file, made at the first line. One thread at a time, but for `note`: any, no I/O."""

    def __init__(self, disk: DiskPort) -> None:
        self._disk = disk
        self._handle = 0
        self._offset = 0
        self._noted: list[str] = []
        self.size_bytes = 0  # of the file; 0: there is none

    def find(self) -> None:
        """Open the file of an earlier run, if there is one. Raises StorageError."""
        try:
            handle = self._disk.open(NAME)
        except NotFound:
            return
        size_bytes = self._disk.size_bytes(handle)
        if size_bytes != LOG_BYTES:
            self._disk.delete(handle)
            return
        self._handle, self.size_bytes = handle, size_bytes
        data = memoryview(mmap.mmap(-1, LOG_BYTES))
        self._disk.read_into(handle, 0, data)
        blank = (at for at in range(0, LOG_BYTES, SECTOR_BYTES) if data[at] == 0)
        self._offset = next(blank, 0)

    def note(self, line: str) -> None:
        """Let a line be written once the journal has what it says."""
        self._noted.append(line)

    def write_noted(self) -> None:
        """Append the lines noted; those that cannot be written are given up."""
        lines, self._noted = self._noted, []
        if lines:
            with contextlib.suppress(StorageError):  # for people; the journal has it
                self.write(lines)

    def write(self, lines: Sequence[str]) -> None:
        """Append lines. Raises StorageFull, StorageError."""
        if not self._handle:
            self._handle = self._disk.create(NAME, LOG_BYTES)
            self.size_bytes = LOG_BYTES
        sector = memoryview(mmap.mmap(-1, SECTOR_BYTES))
        for text in _sectors(lines):
            sector[:] = text
            self._disk.write(self._handle, self._offset, [sector])
            self._offset = (self._offset + SECTOR_BYTES) % LOG_BYTES

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._handle:
            self._disk.release(self._handle)
            self._handle = 0


def quarantine_line(epoch: int, slab: int, slot: int, reason: str) -> str:
    """Return a line: what was given up, at which start of the store, and why."""
    words = reason.encode("ascii", "replace").decode()
    plain = "".join(letter if letter.isprintable() else "?" for letter in words)
    return f"epoch {epoch} slab {slab:08x} slot {slot}: {plain}"[: LINE_BYTES_MAX - 1]


def _sectors(lines: Sequence[str]) -> list[bytes]:
    """Return lines as sectors of whole ones, filled up with newlines."""
    sectors: list[bytes] = []
    text = b""
    for line in lines:
        encoded = line.encode() + b"\n"
        if text and len(text) + len(encoded) > SECTOR_BYTES:
            sectors.append(text.ljust(SECTOR_BYTES, b"\n"))
            text = b""
        text += encoded
    return [*sectors, text.ljust(SECTOR_BYTES, b"\n")] if text else sectors


def read_lines(disk: DiskPort) -> list[str]:
    """Return the log's lines. Raises NotFound, StorageError."""
    handle = disk.open(NAME)
    try:
        size_bytes = disk.size_bytes(handle) // SECTOR_BYTES * SECTOR_BYTES
        if not size_bytes:
            raise StorageError(f"{NAME} was cut")
        data = memoryview(mmap.mmap(-1, size_bytes))
        disk.read_into(handle, 0, data)
    finally:
        disk.release(handle)
    text = bytes(data).replace(b"\0", b"\n").decode("ascii", "replace")
    return [line for line in text.split("\n") if line]
