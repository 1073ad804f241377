"""Sectors and names of a simulated disk, and the changes to them that a power cut may lose.

Invariants:
  an inode's sectors lie below its size, the durable ones below its durable size once settled
  applying a change touches what is durable alone
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tierd.units import SECTOR_BYTES

TORN_BYTES = 512  # the least that a drive writes at once


Names = dict[str, "Inode | None"]


@dataclass(slots=True, eq=False)
class Inode:
    """A file's bytes by sector: as read now, before the last write, and as after a power cut."""

    size_bytes: int = 0
    durable_bytes: int = 0
    dropped: bool = False  # a sync lost what was pending: current is not what will be durable
    current: dict[int, bytes] = field(default_factory=dict)
    previous: dict[int, bytes] = field(default_factory=dict)
    durable: dict[int, bytes] = field(default_factory=dict)

    def resize(self, size_bytes: int) -> None:
        """Change the size as read now."""
        self.size_bytes = size_bytes
        for sectors in (self.current, self.previous):
            _cut(sectors, size_bytes)

    def settle(self) -> None:
        """Be what is durable: the machine has started again."""
        _cut(self.durable, self.durable_bytes)
        self.size_bytes, self.current = self.durable_bytes, dict(self.durable)
        self.previous.clear()
        self.dropped = False

    def check_integrity(self) -> None:
        """Raise AssertionError if a sector lies beyond the end."""
        end = self.size_bytes // SECTOR_BYTES
        assert all(sector < end for sector in self.current), f"{max(self.current)=} {end=}"


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """One pending change: sectors or the size of a file, or names of a folder."""

    inode: Inode | None = None
    sector: int = -1  # -1: `size_bytes` or `names`
    data: bytes = b""
    size_bytes: int = 0
    names: Names = field(default_factory=dict)


def crash_choices(pending: int, limit: int, draw: random.Random) -> Iterator[frozenset[int]]:
    """Yield at most `limit` different subsets of `pending` changes for `crash`, the telling first.

    Nothing, everything, each prefix, each alone, each missing alone, then drawn ones; all
    2**pending where they are fewer.
    """
    every = frozenset(range(pending))
    seen: set[frozenset[int]] = set()
    telling = [frozenset(), every, *(frozenset(range(n)) for n in range(1, pending))]
    telling += [frozenset([n]) for n in every] + [every - {n} for n in every]
    count_max = min(limit, 2**pending)
    while len(seen) < count_max:
        if telling:
            choice = telling.pop(0)
        elif 2**pending <= 2 * limit:
            telling = [_bits(n, pending) for n in range(2**pending)]
            continue
        else:
            choice = _bits(draw.getrandbits(pending), pending)
        if choice not in seen:
            seen.add(choice)
            yield choice


def _bits(number: int, count: int) -> frozenset[int]:
    return frozenset(n for n in range(count) if number >> n & 1)


class Copies:
    """Copies of what is durable of files, one each."""

    def __init__(self) -> None:
        self._copies: dict[Inode, Inode] = {}

    def of(self, inode: Inode) -> Inode:
        if inode not in self._copies:
            self._copies[inode] = Inode(
                durable_bytes=inode.durable_bytes, durable=dict(inode.durable)
            )
        return self._copies[inode]


def apply_names(names: dict[str, Inode], changed: Names) -> None:
    for name, inode in changed.items():
        if inode is None:
            names.pop(name, None)
        else:
            names[name] = inode


def apply_bytes(inode: Inode, change: Change) -> None:
    if change.sector >= 0:
        inode.durable[change.sector] = change.data
    else:
        inode.durable_bytes = change.size_bytes
        if change.size_bytes == 0:  # cut; before a file has its size its sectors may be there
            inode.durable.clear()


def torn_change(change: Change, durable: Mapping[int, bytes], draw: random.Random) -> Change:
    """Return the change with some of the old bytes in place of the new."""
    old = durable.get(change.sector, bytes(SECTOR_BYTES))
    pieces = [
        (change.data if draw.random() < 0.5 else old)[start : start + TORN_BYTES]
        for start in range(0, SECTOR_BYTES, TORN_BYTES)
    ]
    return Change(inode=change.inode, sector=change.sector, data=b"".join(pieces))


def read_sectors(sectors: Mapping[int, bytes], offset: int, buffer: memoryview) -> None:
    buffer[:] = bytes(len(buffer))
    overlay(sectors, offset, buffer)


def overlay(sectors: Mapping[int, bytes], offset: int, buffer: memoryview) -> None:
    """Copy those of `sectors` that lie in the buffer's range."""
    first = offset // SECTOR_BYTES
    wanted = range(first, first + len(buffer) // SECTOR_BYTES)
    for sector in wanted if len(wanted) <= len(sectors) else sectors:
        if sector in wanted and sector in sectors:
            start = (sector - first) * SECTOR_BYTES
            buffer[start : start + SECTOR_BYTES] = sectors[sector]


def _cut(sectors: dict[int, bytes], size_bytes: int) -> None:
    end = size_bytes // SECTOR_BYTES
    for sector in [sector for sector in sectors if sector >= end]:
        del sectors[sector]
