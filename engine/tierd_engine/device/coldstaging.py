"""Staging of the cold writer on a device: pinned memory, so that encoded pages are copied at speed.

The encoder waits for its copies (encoder.py); then the bytes are the host's, and a disk's.
"""

from __future__ import annotations

from tierd.units import SECTOR_BYTES
from tierd_engine.device.port import Buffer, Device


class PinnedStaging:
    """Pinned memory that begins at a multiple of 4 KiB, as O_DIRECT wants it. See Staging."""

    def __init__(self, device: Device, size_bytes: int) -> None:
        self._device = device
        self._buffer: Buffer | None = device.allocate_host(size_bytes + SECTOR_BYTES)
        start = -self._buffer.address % SECTOR_BYTES
        self.address = self._buffer.address + start
        self.view: memoryview = self._buffer.tensor.numpy().data[start : start + size_bytes]

    def close(self) -> None:
        """Give it back. Idempotent."""
        if self._buffer is not None:
            self._device.free(self._buffer)
            self._buffer = None
