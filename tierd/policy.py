"""Policy: who leaves first. Pure functions over small records; nothing here is changed.

Pages leave warm in the order of their predicted next use, furthest first:

    suspended, longest ago first
    idle, longest ago first
    hinted, latest deadline first (whatever its state, unless it runs)
    running, longest ago first

Within a session: oldest block first, all layers of it, so that each layer
keeps the same share, but for a spill of several blocks that ends half-way (the
mover takes a layer of all of them at a time, for they are read so). Exact
decode is a cyclic scan, where every fixed set is as good as any other and each
recency rule (LRU and its kin) scores 0 hits.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from tierd.types import PageKey, SessionState


class Standing(enum.IntEnum):
    """How far off a session's next use is, furthest first."""

    SUSPENDED = 0
    IDLE = 1
    HINTED = 2
    RUNNING = 3


@dataclass(frozen=True, slots=True, order=True)
class Rank:
    """Order of leaving: a lower rank leaves first.

    `seconds`: the last use, or minus the deadline of a hinted session, on the store's clock.
    """

    standing: Standing
    seconds: float


NOTHING_IS_SAFE = Rank(Standing.RUNNING, float("inf"))
UNUSED = Rank(Standing.HINTED, float("-inf"))  # below it: idle and suspended, and no hint


def session_rank(
    state: SessionState, last_used_seconds: float, hint_deadline_seconds: float | None
) -> Rank:
    """Return a session's rank; `hint_deadline_seconds` is its earliest open hint's, or None."""
    if state is SessionState.RUNNING:
        return Rank(Standing.RUNNING, last_used_seconds)
    if hint_deadline_seconds is not None:
        return Rank(Standing.HINTED, -hint_deadline_seconds)
    if state is SessionState.IDLE:
        return Rank(Standing.IDLE, last_used_seconds)
    return Rank(Standing.SUSPENDED, last_used_seconds)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A session with pages that may leave a tier.

    `blocks` oldest first; `layers_of(block)` are the layers to move; `page_bytes(layer,
    block)` what each frees.
    """

    rank: Rank
    session: int
    blocks: Sequence[int]
    layers_of: Callable[[int], Sequence[int]]
    page_bytes: Callable[[int, int], int]


def choose_spills(
    candidates: Iterable[Candidate], need_bytes: int, below: Rank, moving: Collection[PageKey]
) -> list[PageKey]:
    """Return pages whose leaving frees `need_bytes`, or as many as there are.

    Only sessions ranked under `below` give pages; pages in `moving` are left alone.
    """
    chosen: list[PageKey] = []
    freed_bytes = 0
    for key, page_bytes in _leaving(candidates, below):
        if freed_bytes >= need_bytes:
            break
        if key not in moving:
            chosen.append(key)
            freed_bytes += page_bytes
    return chosen


def _leaving(candidates: Iterable[Candidate], below: Rank) -> Iterator[tuple[PageKey, int]]:
    for candidate in sorted(candidates, key=lambda c: (c.rank, c.session)):
        if candidate.rank >= below:
            return
        for block in candidate.blocks:
            for layer in candidate.layers_of(block):
                key = PageKey(candidate.session, layer, block)
                yield key, candidate.page_bytes(layer, block)


def choose_victims(
    hot_blocks: Iterable[int],
    need_blocks: int,
    unavailable: Collection[int],
    *,
    include_first: bool,
) -> list[int]:
    """Return up to `need_blocks` of `hot_blocks` to demote, oldest first.

    Block 0 holds the attention sinks and stays hot unless `include_first`;
    `unavailable` blocks are below the hot tier, or on their way, already.
    """
    first = 0 if include_first else 1
    free = sorted(b for b in set(hot_blocks) if b >= first and b not in unavailable)
    return free[:need_blocks]
