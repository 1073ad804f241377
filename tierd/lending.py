"""Lending: which codec each page of a demotion gets, and its slots; all of a block or none.

A block's pages may be of several sizes, one a codec, and each size has its pool.
What several pools need is weighed together: the room for a new slab is there once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain

from tierd.demotions import RoomNeeded
from tierd.errors import BudgetTooSmall, InvalidArgument, TierdError, TierFull
from tierd.layercodecs import better_codecs, describe_codecs, layer_codecs
from tierd.memory.slabs import Runs, SlabPool
from tierd.placement import Placement
from tierd.sessions import Session
from tierd.types import CodecId, Place, Tier
from tierd.units import RUN_BYTES

# Spare room lets a demotion start without waiting for the disk: a few blocks are enough
# to hide a batch; a sixteenth of warm is the most that may lie unused.
SPARE_BLOCKS = 4
SPARE_SHARE = 16

# 4 s on the slowest disk we promise for, of the 30 that a plan has; one block may be more.
COLD_PLAN_BYTES = 256 << 20

Codecs = Sequence[CodecId]  # of a block's layers


def check_codecs(session: Session, codecs: Codecs | None) -> tuple[CodecId, ...]:
    """Return a codec a layer; None: the namespace's. Raises InvalidArgument for a coarser one."""
    own = layer_codecs(session.namespace)
    if codecs is None:
        return own
    if len(codecs) != len(own):
        raise InvalidArgument(f"{len(codecs)} codecs for {len(own)} layers")
    for layer, (codec, least) in enumerate(zip(codecs, own, strict=True)):
        if codec is not least and codec not in better_codecs(least):
            raise InvalidArgument(
                f"layer {layer}: codec {codec.name.lower()} is not {least.name.lower()} "
                "or one that keeps more"
            )
    return tuple(codecs)


def block_codecs(block: int, codecs: tuple[CodecId, ...]) -> tuple[CodecId, ...]:
    """Return the codecs of a block's pages: the first block (attention sinks) is always raw."""
    return (CodecId.RAW,) * len(codecs) if block == 0 else codecs


def needs_of(
    placement: Placement, session: Session, codecs: Codecs, tier: Tier = Tier.WARM
) -> dict[SlabPool, int]:
    """Return the slots that a block needs of each of a tier's pools."""
    needs: Counter[SlabPool] = Counter()
    for codec, pages in sorted(Counter(codecs).items()):
        needs[placement.pool(tier, session, codec)] += pages
    return needs


def lend_blocks(
    placement: Placement, session: Session, blocks: Sequence[int], codecs: tuple[CodecId, ...],
    tier: Tier,
) -> dict[int, list[Place]]:  # fmt: skip
    """Reserve places for the first of `blocks` that there is room for; none is a result.

    Raises TierFull or StorageError when a slab within the budget cannot be made for the first.
    """
    if tier is Tier.COLD:
        lent = _lend_runs(placement, session, blocks, codecs)
        if lent:
            return lent
    lent = {}
    left_bytes = COLD_PLAN_BYTES
    for block in blocks:
        try:
            places = lend_block(placement, session, block_codecs(block, codecs), tier)
        except TierdError:
            if not lent:
                raise
            break
        if not places:
            break
        lent[block] = places
        left_bytes -= sum(placement.slot_bytes(session, place.codec) for place in places)
        if tier is Tier.COLD and left_bytes <= 0:
            break
    return _side_by_side(placement, session, lent, tier) if tier is Tier.COLD else lent


def _side_by_side(
    placement: Placement, session: Session, lent: dict[int, list[Place]], tier: Tier
) -> dict[int, list[Place]]:
    """Return the same places, handed out layer by layer instead of block by block."""
    places = sorted(chain(*lent.values()), key=lambda place: (place.slab, place.slot))
    by_pool: dict[SlabPool, list[Place]] = {}
    for place in reversed(places):
        by_pool.setdefault(placement.pool(tier, session, place.codec), []).append(place)
    dealt: dict[int, list[Place]] = {block: [] for block in lent}
    for pages in zip(*lent.values(), strict=True):
        for block, page in zip(lent, pages, strict=True):
            place = by_pool[placement.pool(tier, session, page.codec)].pop()
            dealt[block].append(place._replace(codec=page.codec))
    return dealt


def _lend_runs(
    placement: Placement, session: Session, blocks: Sequence[int], codecs: tuple[CodecId, ...]
) -> dict[int, list[Place]]:
    """Reserve places in cold so that each layer's pages lie side by side, with those before them
    and room for those to come; all or none.

    A step reads a layer at a time, and few large I/Os cost it less than many: RUN_BYTES are
    neighbours, also where they come a block at a time, which leaves room behind each page.
    The first block's pages, raw ones, are nobody's neighbours.
    """
    block_bytes = sum(placement.slot_bytes(session, codec) for codec in codecs)
    blocks = blocks[: max(1, -(-COLD_PLAN_BYTES // block_bytes))]
    needs = {
        pool: slots * len(blocks)
        for pool, slots in needs_of(placement, session, codecs, Tier.COLD).items()
    }
    if 0 in blocks or not placement.pools[Tier.COLD].make_room(needs):
        return {}
    pools = [placement.pool(Tier.COLD, session, codec) for codec in codecs]
    found: dict[SlabPool, list[Place]] = {}
    for pool, pages in needs.items():
        layers = [layer for layer, own in enumerate(pools) if own is pool]
        behind = [_cold_place(session, layer, blocks[0] - 1) for layer in layers]
        share = pool.available_slots() // len(layers)
        run_slots = max(len(blocks), min(-(-RUN_BYTES // pool.slot_bytes), share))
        codec, runs = codecs[layers[0]], Runs(behind, run_slots)
        try:
            found[pool] = placement.reserve(Tier.COLD, session, codec, pages, runs)
        except TierdError:
            found[pool] = []
        if not found[pool]:
            for places in found.values():
                placement.release(session, places)
            return {}
    rest = {pool: iter(places) for pool, places in found.items()}
    by_layer = [
        [next(rest[pool])._replace(codec=codec) for _ in blocks]
        for pool, codec in zip(pools, codecs, strict=True)
    ]
    return {block: list(of) for block, of in zip(blocks, zip(*by_layer, strict=True), strict=True)}


def _cold_place(session: Session, layer: int, block: int) -> Place | None:
    page = session.index.get(layer, block)
    places = [] if page is None else page.places()
    return next((place for place in places if place.tier is Tier.COLD), None)


def lend_block(
    placement: Placement, session: Session, codecs: Codecs, tier: Tier = Tier.WARM
) -> list[Place]:
    """Reserve a place for each layer's page; all, or none: then the list is empty.

    Raises TierFull or StorageError when a slab within the budget cannot be made.
    """
    needs = needs_of(placement, session, codecs, tier)
    if not placement.pools[tier].make_room(needs):
        return []
    pools = [placement.pool(tier, session, codec) for codec in codecs]
    lent: dict[SlabPool, list[Place]] = {}
    try:
        for pool, pages in needs.items():
            codec = codecs[pools.index(pool)]
            lent[pool] = placement.reserve(tier, session, codec, pages)
            assert lent[pool], f"room for {pages} slots of {pool.slot_bytes} bytes has gone"
    except TierdError:
        for places in lent.values():
            placement.release(session, places)
        raise
    rest = {pool: iter(places) for pool, places in lent.items()}
    return [
        next(rest[pool])._replace(codec=codec) for pool, codec in zip(pools, codecs, strict=True)
    ]


def no_room(
    placement: Placement, session: Session, codecs: Codecs, blocks: int
) -> TierFull | BudgetTooSmall:
    """Return the error that says what room `blocks` such blocks need, or that none can be."""
    pools = placement.pools[Tier.WARM]
    needs = needs_of(placement, session, codecs)
    if pools.shortage_bytes(needs, empty=True):
        smallest_bytes = pools.smallest_bytes(needs)
        return BudgetTooSmall(
            f"the warm tier cannot hold one block of codec "
            f"{describe_codecs(session.namespace.codec, codecs)}: it needs {smallest_bytes} bytes",
            smallest_bytes=smallest_bytes,
        )
    # A quarter of warm at most, so that one plan does not turn the whole tier over.
    block_bytes = sum(pool.slot_bytes * slots for pool, slots in needs.items())
    blocks = min(blocks, max(1, pools.budget.limit_bytes // block_bytes // 4))
    return RoomNeeded(
        "the warm tier is full", {pool: slots * blocks for pool, slots in needs.items()}
    )


def spare_slots(placement: Placement, session: Session, pool: SlabPool) -> int:
    """Return how many free slots of a pool spare the session's next demotion a wait."""
    slots = placement.pools[Tier.WARM].slots_max(pool.slot_bytes)
    pages = needs_of(placement, session, session.page_codecs).get(pool, session.layers)
    return min(slots // SPARE_SHARE, SPARE_BLOCKS * pages)


def spare_needs(placement: Placement, session: Session) -> dict[SlabPool, int]:
    """Return the free slots that each pool of the session's next demotion should have."""
    pools = needs_of(placement, session, session.page_codecs)
    return {pool: spare_slots(placement, session, pool) for pool in pools}
