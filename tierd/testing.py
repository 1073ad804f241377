"""Fakes of tierd's ports, public: a clock that stands still, and a disk in memory."""

from __future__ import annotations

from tierd.disk.ports import MemoryDisk


class FakeClock:
    """A clock that moves when told to."""

    def __init__(self, start_seconds: float = 1000.0) -> None:
        self._now_seconds = start_seconds

    def monotonic(self) -> float:
        """Return the time."""
        return self._now_seconds

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        assert seconds >= 0.0, "a monotonic clock does not go back"
        self._now_seconds += seconds


__all__ = ["FakeClock", "MemoryDisk"]
