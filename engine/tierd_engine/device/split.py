"""How warm pages are shared between the CPU (near) and the link (stream): pure functions.

Both work at once, so the step is shortest when both end together: near's share s of the
bytes at its rate, the rest at the link's: s / near = (1 - s) / link, s = near / (near + link).
What crosses the link is read from the same DRAM, so near's rate starts at what that leaves,
dram - link, and the share at (dram - link) / dram.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

# One step's time is noisy (other jobs, clocks): a quarter of each new measurement is taken.
SMOOTHING = 0.25


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes per second of encoded pages: the CPU's where they lie, and the link's."""

    near: float
    link: float

    @property
    def share(self) -> float:
        """The CPU's share of the bytes, 0 to 1."""
        total = self.near + self.link
        return self.near / total if total > 0 else 0.0


@dataclass(frozen=True, slots=True)
class StepTimes:
    """What a step measured. `stream_seconds` 0: the link was not what the step waited for."""

    near_bytes: int
    near_seconds: float
    stream_bytes: int
    stream_seconds: float


def starting_rates(dram: float, link: float) -> Rates:
    """Return the rates from bandwidths measured apart, bytes per second."""
    return Rates(max(dram - link, 0.0), link)


def corrected_rates(rates: Rates, times: StepTimes) -> Rates:
    """Return the rates after a step. A side that did nothing, or was not timed, stays as it was."""
    near = _smoothed(rates.near, times.near_bytes, times.near_seconds)
    link = _smoothed(rates.link, times.stream_bytes, times.stream_seconds)
    return replace(rates, near=near, link=link)


def _smoothed(rate: float, size_bytes: int, seconds: float) -> float:
    if size_bytes <= 0 or seconds <= 0:
        return rate
    return rate + SMOOTHING * (size_bytes / seconds - rate)


def near_pages(pages: Sequence[int], share: float) -> tuple[int, ...]:
    """Return how many pages of each run, of `pages` each, the CPU takes: `share` of all of them.

    Rounded over the runs together, so that small runs do not all round one way.
    """
    taken, before, total = [], 0, 0
    for count in pages:
        total += count
        after = round(total * min(max(share, 0.0), 1.0))
        mine = min(max(after - before, 0), count)
        taken.append(mine)
        before += mine
    return tuple(taken)
