"""Faults of a simulated disk: which operation fails, how, by a schedule or by a seed.

Invariants:
  the same seed, faults and operations in the same order give the same faults
  at most one fault strikes an operation: the first scheduled that applies, else a drawn one
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

FOR_EVER = 2**63
_BYTES = frozenset({"read", "write"})
_ALL = frozenset({"create", "open", "read", "write", "sync", "rename", "sync_folder"})


class FaultKind(StrEnum):
    """What goes wrong. A disk that lies says that all went well."""

    IO_ERROR = "io_error"  # nothing is done; StorageError
    FULL = "full"  # nothing is done; StorageFull
    SHORT = "short"  # the first sectors are read or written, then StorageError
    SYNC_DROPS = "sync_drops"  # StorageError; what was pending will never be durable
    BIT_FLIP = "bit_flip"  # a lie: one bit differs, in what is read or in what is stored
    LOST_WRITE = "lost_write"  # a lie: nothing is written
    MISDIRECTED = "misdirected"  # a lie: written elsewhere
    STALE_READ = "stale_read"  # a lie: what stood there before the last write
    SLOW = "slow"  # `seconds` pass first
    NEVER = "never"  # nothing happens until the test lets it
    POWER_CUT = "power_cut"  # nothing is done; PowerCut


_WHERE = {
    FaultKind.IO_ERROR: _ALL,
    FaultKind.FULL: frozenset({"create", "write", "sync"}),
    FaultKind.SHORT: _BYTES,
    FaultKind.SYNC_DROPS: frozenset({"sync"}),
    FaultKind.BIT_FLIP: _BYTES,
    FaultKind.LOST_WRITE: frozenset({"write"}),
    FaultKind.MISDIRECTED: frozenset({"write"}),
    FaultKind.STALE_READ: frozenset({"read"}),
    FaultKind.SLOW: _ALL,
    FaultKind.NEVER: _ALL,
    FaultKind.POWER_CUT: _ALL,
}


class PowerCut(BaseException):
    """The machine stopped. No code under test may handle it, so it is no Exception."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Strikes `count` operations from the `first`-th (from 1) of those that it applies to.

    It applies to operations that can fail so, named `operation` ("" for any),
    on files whose name begins with `prefix`.
    """

    kind: FaultKind
    operation: str = ""
    first: int = 1
    count: int = 1
    prefix: str = ""
    seconds: float = 0.0

    def __post_init__(self) -> None:
        possible = _WHERE[self.kind]
        assert not self.operation or self.operation in possible, f"{self} cannot happen"
        assert self.first >= 1 and self.count >= 1 and self.seconds >= 0.0, self

    def applies(self, operation: str, name: str) -> bool:
        """Return whether this operation counts."""
        if self.operation and operation != self.operation:
            return False
        return operation in _WHERE[self.kind] and name.startswith(self.prefix)


class FaultPlan:
    """Scheduled faults, and `rates`: the probability of a kind at an operation that it fits."""

    def __init__(
        self, draw: random.Random, faults: Sequence[Fault], rates: Mapping[FaultKind, float]
    ) -> None:
        self._draw = draw
        self._seen: list[tuple[Fault, int]] = [(fault, 0) for fault in faults]
        self._rates = dict(rates)

    def add(self, fault: Fault) -> None:
        """Schedule another fault; it counts operations from now on."""
        self._seen.append((fault, 0))

    def clear(self) -> None:
        """Let nothing fail any more."""
        self._seen.clear()
        self._rates.clear()

    def strike(self, operation: str, name: str) -> Fault | None:
        """Return the fault of the next operation, if any. Every fault counts the operation."""
        struck: Fault | None = None
        for index, (fault, seen) in enumerate(self._seen):
            if not fault.applies(operation, name):
                continue
            self._seen[index] = (fault, seen + 1)
            if struck is None and fault.first <= seen + 1 < fault.first + fault.count:
                struck = fault
        for kind, rate in self._rates.items():
            if operation in _WHERE[kind] and self._draw.random() < rate and struck is None:
                struck = Fault(kind)
        return struck
