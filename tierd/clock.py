"""Time as a port: the system's, or a test's (tierd.testing.FakeClock)."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds that only rise; safe to read from any thread."""

    def monotonic(self) -> float:
        """Return seconds since some fixed moment."""
        ...


class SystemClock:
    """The machine's monotonic clock."""

    def monotonic(self) -> float:
        """Return seconds since some fixed moment."""
        return time.monotonic()
