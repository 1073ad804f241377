"""The schedule explorer: runs a case over many orders of a fake device's work, or over all.

A case takes a chooser, makes its fake device with it, and fails by raising. What is found
is repeated by its seed, or by its list of choices.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tierd.errors import TierdError
from tierd_engine.device.fake import HOST, Chooser

Case = Callable[[Chooser], object]
# A stream that is hardly ever chosen runs only when the host waits for it; one that nearly
# always is runs as far as it can. Most lost orders show when one starves another.
_WEIGHTS = (0.001, 0.1, 1.0, 10.0, 1000.0)


@dataclass(frozen=True, slots=True)
class Found:
    """A failure, and what repeats it: a seed, or choices."""

    error: Exception
    how: str


class RandomChooser:
    """Draws a weight for each stream and the host, then chooses by weight."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._weights: dict[str, float] = {}

    def choose(self, options: Sequence[str]) -> int:
        """See Chooser."""
        weights = []
        for name in options:
            if name not in self._weights:
                self._weights[name] = self._random.choice(_WEIGHTS)
            weights.append(self._weights[name])
        return self._random.choices(range(len(options)), weights)[0]


class ListedChooser:
    """Follows a list of choices, then always takes the first option; notes how many there were."""

    def __init__(self, choices: Sequence[int]) -> None:
        self._listed = list(choices)
        self.taken: list[int] = []
        self.counts: list[int] = []

    def choose(self, options: Sequence[str]) -> int:
        """See Chooser."""
        number = len(self.taken)
        choice = self._listed[number] if number < len(self._listed) else 0
        self.taken.append(choice)
        self.counts.append(len(options))
        return choice


def explore_random(case: Case, seeds: Iterable[int]) -> Found | None:
    """Run the case once a seed; return the first failure, None if there is none."""
    for seed in seeds:
        found = _failure(case, RandomChooser(seed), f"seed {seed}")
        if found is not None:
            return found
    return None


@dataclass(frozen=True, slots=True)
class Explored:
    """How many orders were run, whether those are all there are, and the first failure."""

    orders: int
    is_all: bool
    found: Found | None


def explore_all(case: Case, orders_max: int) -> Explored:
    """Run the case in every order, depth first, `orders_max` of them at most."""
    choices: list[int] | None = []
    orders = 0
    while choices is not None and orders < orders_max:
        chooser = ListedChooser(choices)
        found = _failure(case, chooser, f"choices {choices}")
        orders += 1
        if found is not None:
            return Explored(orders, False, found)
        choices = _next(chooser.taken, chooser.counts)
    return Explored(orders, choices is None, None)


def _next(taken: Sequence[int], counts: Sequence[int]) -> list[int] | None:
    """Return the choices that lead to the next order; None after the last."""
    for last in range(len(taken) - 1, -1, -1):
        if taken[last] + 1 < counts[last]:
            return [*taken[:last], taken[last] + 1]
    return None


def _failure(case: Case, chooser: Chooser, how: str) -> Found | None:
    try:
        case(chooser)
    except (AssertionError, TierdError) as error:
        return Found(error, how)
    return None


__all__ = [
    "HOST",
    "Explored",
    "Found",
    "ListedChooser",
    "RandomChooser",
    "explore_all",
    "explore_random",
]
