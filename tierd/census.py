"""The census: the store counted, for `stats`, and counted twice, for `check_integrity`.

Shape of `stats` (bytes and pages are ints; "tiers" has "warm" and "cold"):

    tiers: {tier: pages, bytes, capacity_bytes, used_bytes, peak_bytes, slabs,
                  reserved_slots, retired_slots, backup_pages, backup_bytes}
        `bytes` of cold are of its pages and of `backup_bytes`: cold copies of pages that are
        warm, `backup_pages`, which are counted in warm's `pages`
    demotions, direct_demotions, spills, backups, promotions, evictions, misses, corrupt,
        expired: pages (expired: demotions) since the start; a direct demotion is one of the
        demotions, that its engine wrote to cold itself; a backup is a cold copy of a page
        that stays warm
    demotions_open, moves_open, orphans, engines, epoch
    sessions: {running, idle, suspended}
    hints: {useful, late, wasted, cancelled, opened, open, clients}
    troubles: {disk | ledger | snapshot | manifest | folder: why it fails just now}
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from tierd.index import STORED_TIERS
from tierd.memory.slabs import SlabPool
from tierd.types import SessionState, Tier

if TYPE_CHECKING:
    from tierd.store import Store

COUNTERS = (
    "demotions", "direct_demotions", "spills", "backups", "promotions", "evictions", "misses",
    "corrupt", "expired",
)  # fmt: skip


def stats(store: Store) -> dict[str, Any]:
    """Return the dict whose shape the module's docstring gives."""
    states = Counter(session.state for session in store.book)
    removed = store.keeper.removed.trouble  # a look may be newer than the mover's last pass
    return {
        "tiers": {tier.name.lower(): _tier(store, tier) for tier in STORED_TIERS},
        **{name: store.counts[name] for name in COUNTERS},
        "demotions_open": len(store.demotions),
        "moves_open": len(store.placement.moving),
        "orphans": len(store.placement.orphans),
        "engines": len(store.engines),
        "epoch": store.placement.epochs.now,
        "sessions": {
            state.value: states[state] for state in SessionState if state != SessionState.CLOSED
        },
        "hints": store.hints.stats(),
        "troubles": {**store.troubles, **({"folder": removed} if removed else {})},
    }


def _tier(store: Store, tier: Tier) -> dict[str, int]:
    pools = store.placement.pools[tier]
    counts = [(pool, pool.counts()) for pool in pools]
    pages = sum(session.index.pages_in(tier) for session in store.book)
    if tier is Tier.COLD:
        pages += sum(store.keeper.cold_pages(s) for s in store.book if s.dormant)
    backed = [(s, s.index.backed_by_codec()) for s in store.book] if tier is Tier.COLD else []
    return {
        "pages": pages,
        "bytes": sum(pool.slot_bytes * count.resident for pool, count in counts),
        "capacity_bytes": pools.budget.limit_bytes,
        "used_bytes": pools.budget.used_bytes,
        "peak_bytes": pools.budget.peak_bytes,
        "slabs": sum(len(pool.slabs()) for pool in pools),
        "reserved_slots": sum(count.reserved for _, count in counts),
        "retired_slots": sum(count.retired for _, count in counts),
        "backup_pages": sum(codecs.total() for _, codecs in backed),
        "backup_bytes": sum(
            store.placement.slot_bytes(session, codec) * found
            for session, codecs in backed
            for codec, found in codecs.items()
        ),
    }


def check_integrity(store: Store) -> None:
    """Raise AssertionError unless every slot has exactly the owner it should have."""
    for session in store.book:
        session.check_integrity()
        engine = session.engine_id
        assert engine is None or engine in store.engines, (
            f"session {session.id} is owned by engine {engine}, which is gone"
        )
    store.demotions.check_integrity()
    store.hints.check_integrity()
    store.keeper.check_integrity()
    resident, reserved = _owned_slots(store)
    for tier in STORED_TIERS:
        pools = store.placement.pools[tier]
        pools.check_integrity()
        for pool in pools:
            _check_pool(pool, resident, reserved)
    known = {pool for tier in STORED_TIERS for pool in store.placement.pools[tier]}
    lost = (set(resident) | set(reserved)) - known
    assert not lost, f"pools with pages or demotions, but no longer kept: {lost}"


def _owned_slots(store: Store) -> tuple[Counter[SlabPool], Counter[SlabPool]]:
    placement = store.placement
    resident: Counter[SlabPool] = Counter()
    reserved: Counter[SlabPool] = Counter()
    places: set[tuple[int, int]] = set()
    for session in store.book:
        for _, page in session.index:
            for place in page.places():
                resident[placement.pool(place.tier, session, place.codec)] += 1
                places.add((place.slab, place.slot))
    pages = sum(len(session.index) + session.index.backed_count for session in store.book)
    assert len(places) == pages, f"{pages} pages and backings share {len(places)} slots"
    for pool, slots in _unlooked_slots(store).items():
        resident[pool] += slots
    for demotion in store.demotions:
        for _, place in demotion.plan.pages():
            reserved[placement.pool(place.tier, demotion.session, place.codec)] += 1
    for move in (*placement.moving.values(), *placement.orphans):
        to = move.destination
        reserved[placement.pool(to.tier, move.session, to.codec)] += 1
        if move.orphaned:
            resident[placement.pool(move.source.tier, move.session, to.codec)] += 1
        else:
            found = move.session.index.get(move.key.layer, move.key.block)
            assert found is not None and found.place == move.source, (
                f"move of {move.key} from {move.source}, but the page is {found}"
            )
    return resident, reserved


def _unlooked_slots(store: Store) -> Counter[SlabPool]:
    """Count the cold slots of dormant and unclaimed sessions: the ledger alone has them."""
    pool_of = {slab: pool for pool in store.placement.pools[Tier.COLD] for slab in pool.slabs()}
    dormant = {session.number for session in store.book if session.dormant}
    slots: Counter[SlabPool] = Counter()
    for number in dormant | set(store.keeper.unclaimed):
        for slab in store.ledger.pages_of(number)["slab"].tolist():
            slots[pool_of[slab]] += 1
    return slots


def _check_pool(pool: SlabPool, resident: Counter[SlabPool], reserved: Counter[SlabPool]) -> None:
    counts = pool.counts()
    assert counts.resident == resident[pool] and counts.reserved == reserved[pool], (
        f"pool of {pool.slot_bytes}-byte slots, {pool.tier!r}: {counts}; "
        f"owned: resident {resident[pool]}, reserved {reserved[pool]}"
    )
