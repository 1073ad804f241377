"""Pinning of host memory: slabs piece by piece, all of one or none of it, pageable as fallback.

Invariants:
  a region is pinned whole, in pieces that hold whole slots, or not at all
  pinned_bytes + pageable_bytes == the bytes of all regions added
  a region added n times is unpinned by the n-th `remove`, or by `close`

A copy must not cross from one piece to the next (the driver refuses it), so each piece
holds whole slots, and `pieces_of` tells a copy where to end.
"""

from __future__ import annotations

import resource
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tierd.errors import DeviceFailed
from tierd.units import MIB, SECTOR_BYTES, format_size
from tierd_engine.device.port import Device

IntArray = npt.NDArray[np.int64]

# A slab of 64 MiB is one piece: pages of a layer lie far apart in it, and one copy takes them
# together only inside a piece. Pinning one takes some 10 ms: no step is longer held up.
PIECE_BYTES = 64 * MIB
# The kernel needs some of a cgroup's memory to be movable; the rest of the process is not pinned.
_CGROUP_SHARE = 0.9
_CAP_IPC_LOCK = 14  # linux/capability.h
_CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class HostLimits:
    """What the host lets this process pin, bytes; None: no limit."""

    memlock_bytes: int | None
    cgroup_bytes: int | None


def read_limits(proc: Path = Path("/proc/self"), cgroups: Path = _CGROUPS) -> HostLimits:
    """Return the limits of this process: RLIMIT_MEMLOCK and the tightest cgroup around it."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    memlock = None if soft == resource.RLIM_INFINITY or _may_lock_all(proc) else soft
    found = [int(text) for text in _cgroup_limits(proc, cgroups) if text.isdigit()]
    return HostLimits(memlock, min(found, default=None))


def _may_lock_all(proc: Path) -> bool:
    for line in _text(proc / "status").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> _CAP_IPC_LOCK & 1)
    return False


def _cgroup_limits(proc: Path, cgroups: Path) -> list[str]:
    """Return the memory limits of cgroup v2 and v1 as they stand, this process's group first."""
    limits = []
    for line in _text(proc / "cgroup").splitlines():
        _, kinds, inner = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        root, name = (
            (cgroups / "memory", "memory.limit_in_bytes") if kinds else (cgroups, "memory.max")
        )
        path = Path(inner.lstrip("/"))
        limits += [_text(root / folder / name).strip() for folder in (path, *path.parents)]
    return limits


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class PinFigures:
    """For the report. `reason`: why something is not pinned, one line; "" where all is."""

    pinned_bytes: int
    pageable_bytes: int
    reason: str


class Pins:
    """The one owner of this process's pinned regions. Used by one thread.

    `required`: memory that cannot be pinned is an error, not a slower copy.
    """

    def __init__(
        self, device: Device, limits: HostLimits | None = None, *, required: bool = False
    ) -> None:
        self._device = device
        self._limits = read_limits() if limits is None else limits
        self._required = required
        self._pieces: dict[int, list[tuple[int, int]]] = {}  # by region: (address, size)
        self._sizes: dict[int, int] = {}
        self._users: Counter[int] = Counter()
        self._piece_bytes: dict[int, int] = {}
        self.reason = ""

    def add(self, address: int, size_bytes: int, slot_bytes: int = SECTOR_BYTES) -> bool:
        """Pin a mapped region of whole slots; say whether it is. One added before gets a user more.

        With `required` raises DeviceFailed, naming the setting that stands in the way.
        """
        if address in self._sizes:
            assert self._sizes[address] == size_bytes, f"{address=:#x} {size_bytes=}"
            self._users[address] += 1
            return bool(self._pieces[address])
        assert size_bytes % slot_bytes == 0, f"{size_bytes=} {slot_bytes=}"
        piece_bytes = max(slot_bytes, PIECE_BYTES // slot_bytes * slot_bytes)
        self._sizes[address], self._pieces[address] = size_bytes, []
        self._piece_bytes[address] = piece_bytes
        try:
            self._require_room(size_bytes)
            self._pin(address, size_bytes, piece_bytes)
        except DeviceFailed as error:
            self.reason = str(error)
            if self._required:
                del self._sizes[address], self._pieces[address], self._piece_bytes[address]
                raise
        self._users[address] += 1
        return bool(self._pieces[address])

    def _require_room(self, size_bytes: int) -> None:
        limit = self._limits.cgroup_bytes
        needed = self.pinned_bytes + size_bytes
        if limit is not None and needed > limit * _CGROUP_SHARE:
            raise DeviceFailed(
                f"{format_size(needed)} of warm tier are not pinned: the cgroup's memory.max is "
                f"{format_size(limit)}; raise it, or give a smaller --warm"
            )

    def _pin(self, address: int, size_bytes: int, piece_bytes: int) -> None:
        done: list[tuple[int, int]] = []
        try:
            for start in range(0, size_bytes, piece_bytes):
                size = min(piece_bytes, size_bytes - start)
                self._device.register(address + start, size)
                done.append((address + start, size))
        except DeviceFailed as error:
            for start, _ in reversed(done):
                self._device.unregister(start)
            raise DeviceFailed(self._refusal(error, size_bytes)) from error
        self._pieces[address] = done

    def _refusal(self, error: DeviceFailed, size_bytes: int) -> str:
        # Most drivers pin beyond RLIMIT_MEMLOCK, so it refuses nothing by itself; but where the
        # driver refuses, it is the first thing to look at.
        limit = self._limits.memlock_bytes
        needed = self.pinned_bytes + size_bytes
        if limit is not None and needed > limit:
            return (
                f"{format_size(needed)} of warm tier are not pinned: RLIMIT_MEMLOCK is "
                f"{format_size(limit)}; raise it (ulimit -l unlimited, LimitMEMLOCK=infinity, "
                f"docker --ulimit memlock=-1), or give a smaller --warm ({error})"
            )
        return f"{format_size(needed)} of warm tier are not pinned: {error}; give a smaller --warm"

    def pieces_of(self, addresses: IntArray) -> IntArray:
        """Return a number for each slot, equal for two of them iff one copy may take both.

        It is the address of their piece; of memory never added, 0.
        """
        if not self._sizes:
            return np.zeros_like(addresses)
        starts = np.array(sorted(self._sizes), dtype=np.int64)
        sizes = np.array([self._sizes[start] for start in starts.tolist()], dtype=np.int64)
        pieces = np.array([self._copy_bytes(start) for start in starts.tolist()], dtype=np.int64)
        at = np.maximum(np.searchsorted(starts, addresses, side="right") - 1, 0)
        offsets = addresses - starts[at]
        is_inside = (offsets >= 0) & (offsets < sizes[at])
        return np.where(is_inside, starts[at] + offsets // pieces[at] * pieces[at], 0)

    def _copy_bytes(self, address: int) -> int:
        return self._piece_bytes[address] if self._pieces[address] else self._sizes[address]

    def remove(self, address: int) -> None:
        """Give a region up; its last user's unpins it. No copy of it may be left then.

        One never added is ignored.
        """
        self._users[address] -= 1
        if self._users[address] > 0:
            return
        del self._users[address]
        for start, _ in self._pieces.pop(address, []):
            self._device.unregister(start)
        self._sizes.pop(address, None)
        self._piece_bytes.pop(address, None)

    def close(self) -> None:
        """Unpin everything. Idempotent."""
        for address in list(self._sizes):
            self._users[address] = 1
            self.remove(address)

    @property
    def pinned_bytes(self) -> int:
        """Bytes pinned now."""
        return sum(size for pieces in self._pieces.values() for _, size in pieces)

    def figures(self) -> PinFigures:
        """Return the figures of this moment."""
        pinned = self.pinned_bytes
        return PinFigures(pinned, sum(self._sizes.values()) - pinned, self.reason)

    def check_integrity(self) -> None:
        """Raise AssertionError unless each region is pinned whole or not at all."""
        for address, size in self._sizes.items():
            pinned = sum(piece for _, piece in self._pieces[address])
            assert pinned in (0, size), f"{address=:#x} {pinned=} of {size=}"
        assert self._sizes.keys() == self._pieces.keys() == self._piece_bytes.keys()
