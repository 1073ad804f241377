"""Fakes of tierd's ports, public: a clock that stands still, disks that forget and fail."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterator

from tierd.disk.faults import FOR_EVER, Fault, FaultKind, PowerCut
from tierd.disk.memory import MemoryDisk
from tierd.disk.sectors import crash_choices
from tierd.disk.simulated import SimulatedDisk
from tierd.errors import TierdError


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


def failing(
    error: TierdError,
    numbers: Container[int],
    *,
    operations: Container[str] = ("create", "read", "write"),
) -> Callable[[str, int], None]:
    """Return a MemoryDisk's `fail` that raises `error` at the `numbers`-th of `operations`.

    range(3, 4) is the third one once, range(3, 2**63) every one from the third on.
    """
    seen = 0

    def fail(operation: str, _count: int) -> None:
        nonlocal seen
        if operation not in operations:
            return
        seen += 1
        if seen in numbers:
            raise error

    return fail


@contextlib.contextmanager
def seed_told(seed: object) -> Iterator[None]:
    """Add the seed to whatever is raised inside, so that a failed test can be repeated."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"seed {seed!r} repeats this")
        raise


__all__ = [
    "FOR_EVER",
    "FakeClock",
    "Fault",
    "FaultKind",
    "MemoryDisk",
    "PowerCut",
    "SimulatedDisk",
    "crash_choices",
    "failing",
    "seed_told",
]
