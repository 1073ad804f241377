"""The slab pools of one tier: one pool per namespace and slot size, one budget for all.

Invariants:
  the pools' slabs together are the budget's used bytes, which never pass its limit
  a pool without slabs and without a session is not kept
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from tierd.memory.budget import ByteBudget
from tierd.memory.slabs import (
    SLABS_PER_TIER_MIN,
    Runs,
    SlabBacking,
    SlabNumbering,
    SlabPool,
    SlotRef,
    smallest_budget,
)
from tierd.types import Tier


@dataclass(frozen=True, slots=True)
class TierParts:
    """What a tier is made of: who makes its slabs, how many bytes, how large a slab at most."""

    backing: SlabBacking
    budget_bytes: int
    slab_bytes: int


class TierPools:
    """All slots of one tier."""

    def __init__(self, tier: Tier, parts: TierParts, ids: SlabNumbering) -> None:
        self.tier = tier
        self.budget = ByteBudget(parts.budget_bytes)
        self._backing = parts.backing
        self._slab_bytes = min(parts.slab_bytes, parts.budget_bytes // SLABS_PER_TIER_MIN)
        self._ids = ids
        self._pools: dict[tuple[bytes, int], SlabPool] = {}

    def __iter__(self) -> Iterator[SlabPool]:
        return iter(self._pools.values())

    def pool(self, namespace_digest: bytes, slot_bytes: int) -> SlabPool:
        """Return the pool of these slots; made, still without slabs, where there is none."""
        key = (namespace_digest, slot_bytes)
        if key not in self._pools:
            self._pools[key] = SlabPool(
                self.tier,
                slot_bytes,
                namespace_digest,
                self.budget,
                max(self._slab_bytes, slot_bytes),
                self._backing,
                self._ids,
            )
        return self._pools[key]

    def slots_max(self, slot_bytes: int) -> int:
        """Return how many slots of this size the whole tier could hold."""
        return self.budget.limit_bytes // slot_bytes

    def shortage_bytes(self, needs: Mapping[SlabPool, int], *, empty: bool = False) -> int:
        """Return the bytes of slots that these pools lack to hand out all of `needs` together.

        They share the budget's rest, which goes a whole slab at a time. `empty`: as if the
        tier held nothing.
        """
        remaining_bytes = self.budget.limit_bytes if empty else self.budget.remaining_bytes
        lacking_bytes = 0
        for pool, slots in needs.items():
            lacking = slots if empty else slots - pool.counts().free
            added, remaining_bytes = pool.slots_within(remaining_bytes, lacking, empty=empty)
            lacking_bytes += max(0, lacking - added) * pool.slot_bytes
        return lacking_bytes

    def smallest_bytes(self, needs: Mapping[SlabPool, int]) -> int:
        """Return a budget within which all of `needs` can be reserved, whatever slabs it makes."""
        needed_bytes = sum(pool.slot_bytes * slots for pool, slots in needs.items())
        return smallest_budget(needed_bytes, len(needs))

    def make_room(self, needs: Mapping[SlabPool, int]) -> bool:
        """Say whether all of `needs` can be reserved; takes empty slabs back if it must."""
        if not self.shortage_bytes(needs):
            return True
        freed_bytes = sum(
            pool.release_empty_slabs()
            for pool in self._pools.values()
            if len(needs) > 1 or pool not in needs
        )
        return freed_bytes > 0 and not self.shortage_bytes(needs)

    def make_available(self, pool: SlabPool, slots: int) -> bool:
        """Say whether `pool` can reserve `slots`; takes empty slabs from others if it must."""
        return self.make_room({pool: slots})

    def reserve(self, pool: SlabPool, slots: int, runs: Runs | None = None) -> list[SlotRef]:
        """Reserve all `slots`, or none: then the list is empty. `runs`: as neighbours.

        Raises TierFull or StorageError when a slab within the budget cannot be made.
        """
        if not self.make_available(pool, slots):
            return []
        return pool.reserve(slots) if runs is None else pool.reserve_runs(slots, runs)

    def reclaim(self, safe_epoch: int) -> int:
        """Free the slots retired before `safe_epoch`; return how many."""
        return sum(pool.reclaim(safe_epoch) for pool in self._pools.values())

    def trim(self, namespaces: Collection[bytes]) -> None:
        """Give back the empty slabs, and the pools, of all but these namespaces."""
        for key, pool in list(self._pools.items()):
            if key[0] not in namespaces:
                pool.release_empty_slabs()
                if pool.capacity_bytes() == 0:
                    del self._pools[key]

    def check_integrity(self) -> None:
        """Raise AssertionError if a pool is inconsistent or the budget does not add up."""
        for pool in self._pools.values():
            pool.check_integrity()
        pools_bytes = sum(pool.capacity_bytes() for pool in self._pools.values())
        assert pools_bytes == self.budget.used_bytes <= self.budget.limit_bytes, (
            f"{self.tier!r}: pools {pools_bytes}, used {self.budget.used_bytes} "
            f"of {self.budget.limit_bytes} bytes"
        )
