"""Budget: bytes that all pools of a tier may use together, taken a whole slab at a time."""

from __future__ import annotations


class ByteBudget:
    """Bytes that all pools of a tier may use together.

    `awaited_bytes` of them are for slabs of an earlier run that engines may yet bring.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.peak_bytes = 0
        self.awaited_bytes = 0

    @property
    def remaining_bytes(self) -> int:
        """Bytes that new slabs can still take."""
        return max(0, self.unused_bytes - self.awaited_bytes)

    @property
    def unused_bytes(self) -> int:
        """Bytes that slabs of an earlier run can still take."""
        return self.limit_bytes - self.used_bytes

    def await_slabs(self) -> None:
        """Keep all that is unused for slabs of an earlier run: how many there are is not known."""
        self.awaited_bytes = self.unused_bytes

    def arrived(self, size_bytes: int) -> None:
        """A slab that was awaited is about to take its bytes."""
        self.awaited_bytes = max(0, self.awaited_bytes - size_bytes)

    def stop_awaiting(self) -> None:
        """No slab of an earlier run will come any more. Idempotent."""
        self.awaited_bytes = 0

    def take(self, size_bytes: int) -> None:
        """Take bytes. The caller has looked at `remaining_bytes`, or at `unused_bytes`."""
        assert 0 <= size_bytes <= self.unused_bytes, f"{size_bytes=} {self.unused_bytes=}"
        self.used_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def give(self, size_bytes: int) -> None:
        """Give bytes back."""
        assert 0 <= size_bytes <= self.used_bytes, f"{size_bytes=} {self.used_bytes=}"
        self.used_bytes -= size_bytes

    def check_integrity(self) -> None:
        """Raise AssertionError unless 0 <= used <= peak <= limit, and awaited is within it."""
        used, peak, limit = self.used_bytes, self.peak_bytes, self.limit_bytes
        assert 0 <= used <= peak <= limit, f"{used=} {peak=} {limit=} bytes"
        assert 0 <= self.awaited_bytes <= limit, f"{self.awaited_bytes=} {limit=}"
