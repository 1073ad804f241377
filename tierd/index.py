"""The index of one session: which page lies where, with which digest.

The page table in shared memory is its mirror: an entry is published when the
page is set and gone when it is dropped, never later. `attach` and `detach`
give and take the mirror when an engine comes and goes.

Invariants:
  each page is in exactly one tier, warm or cold; a warm one may have a cold copy behind it
  the pages by tier and block are the pages by (layer, block), counted otherwise
  so are those that are in RAM alone: warm, with no copy behind them
  an attached table holds these pages and no others
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from tierd.memory.pagetable import PageTableReader, PageTableWriter
from tierd.types import CodecId, Place, Tier

STORED_TIERS = (Tier.WARM, Tier.COLD)


class Page(NamedTuple):
    """A published page: where it is, and the xxh3-128 digest (16 bytes) of its payload.

    `backing`: the cold slot that holds the same bytes, of a warm page that has one. Sealed
    pages never change, so a backing is never stale, and a spill to it copies nothing.
    """

    place: Place
    digest: bytes
    backing: Place | None = None

    def places(self) -> list[Place]:
        """Return every place whose slot is this page's."""
        return [self.place] if self.backing is None else [self.place, self.backing]


class SessionIndex:
    """(layer, block) → Page of one session, mirrored in its page table while it has one."""

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self._pages: dict[tuple[int, int], Page] = {}
        self._by_block: dict[Tier, dict[int, set[int]]] = {tier: {} for tier in STORED_TIERS}
        self._backed: Counter[CodecId] = Counter()
        self._unbacked: dict[int, set[int]] = {}  # layers by block
        self._unbacked_codecs: Counter[CodecId] = Counter()
        self._table: PageTableWriter | None = None

    def __len__(self) -> int:
        return len(self._pages)

    def __iter__(self) -> Iterator[tuple[tuple[int, int], Page]]:
        return iter(self._pages.items())

    @property
    def backed_count(self) -> int:
        """Warm pages that have a cold copy."""
        return self._backed.total()

    def backed_by_codec(self) -> Counter[CodecId]:
        """Return how many warm pages of each codec have a cold copy."""
        return +self._backed

    @property
    def unbacked_count(self) -> int:
        """Warm pages that have no cold copy."""
        return self._unbacked_codecs.total()

    def unbacked_by_codec(self) -> Counter[CodecId]:
        """Return how many warm pages of each codec have no cold copy."""
        return +self._unbacked_codecs

    def unbacked(self) -> Iterator[tuple[int, int]]:
        """Yield (layer, block) of warm pages that have no cold copy, block by block, lazily."""
        for block in sorted(self._unbacked):
            for layer in sorted(self._unbacked[block]):
                yield layer, block

    def unbacked_blocks(self) -> int:
        """Return how many blocks have a warm page without a cold copy."""
        return len(self._unbacked)

    def attach(self, table: PageTableWriter) -> None:
        """Mirror into `table` (empty so far) from now on; every page is published in it."""
        assert self._table is None, "index has a table already"
        self._table = table
        if self._pages:
            table.publish_all(list(self._pages), [page.place for page in self._pages.values()])
        table.bump_version()

    def detach(self) -> None:
        """Take every entry out of the table and let it go; the pages stay."""
        if self._table is None:
            return
        for layer, block in self._pages:
            self._table.unpublish(layer, block)
        self._table.bump_version()
        self._table = None

    def get(self, layer: int, block: int) -> Page | None:
        """Return the page, or None."""
        return self._pages.get((layer, block))

    def set(self, layer: int, block: int, page: Page) -> None:
        """Publish a page, in place of the one before it if there is one. Publish in batches,
        then call `bump`."""
        if self._keep(layer, block, page) and self._table is not None:
            self._table.publish(layer, block, page.place)

    def set_all(self, pages: Mapping[tuple[int, int], Page]) -> None:
        """Publish pages by (layer, block), as `set` each of them."""
        moved = [key for key, page in pages.items() if self._keep(*key, page)]
        if self._table is not None and moved:
            self._table.publish_all(moved, [pages[key].place for key in moved])

    def _keep(self, layer: int, block: int, page: Page) -> bool:
        """Take a page in; say whether its place is new."""
        tier = page.place.tier
        assert page.backing is None or tier is Tier.WARM, f"({layer}, {block}) {page}"
        before = self._pages.get((layer, block))
        self._pages[layer, block] = page
        if before is not None:
            self._uncount_copies(layer, block, before)
        if page.backing is not None:
            self._backed[page.place.codec] += 1
        elif tier is Tier.WARM:
            self._unbacked_codecs[page.place.codec] += 1
            _add(self._unbacked, layer, block)
        if before is not None:
            if before.place.tier is tier:
                return before.place != page.place
            _remove(self._by_block[before.place.tier], layer, block)
        _add(self._by_block[tier], layer, block)
        return True

    def drop(self, layer: int, block: int) -> Page:
        """Unpublish a page and return it. Call `bump` after the batch."""
        page = self._forget(layer, block)
        assert page is not None, f"page ({layer}, {block}) is not in the index"
        if self._table is not None:
            self._table.unpublish(layer, block)
        return page

    def bump(self) -> None:
        """Tell readers that a batch of changes is complete."""
        if self._table is not None:
            self._table.bump_version()

    def pages_in(self, tier: Tier) -> int:
        """Return how many pages are in `tier`."""
        return sum(len(layers) for layers in self._by_block[tier].values())

    def blocks_in(self, tier: Tier) -> list[int]:
        """Return the blocks with a page in `tier`, oldest first."""
        return sorted(self._by_block[tier])

    def layers_in(self, tier: Tier, block: int) -> list[int]:
        """Return the layers of `block` whose page is in `tier`, ascending."""
        return sorted(self._by_block[tier].get(block, ()))

    def blocks_from(self, first_block: int) -> list[int]:
        """Return the blocks >= first_block with any page, oldest first."""
        blocks = {block for tier in STORED_TIERS for block in self._by_block[tier]}
        return sorted(block for block in blocks if block >= first_block)

    def layers_of(self, block: int) -> list[int]:
        """Return the layers of `block` with a page in any tier, ascending."""
        return sorted(
            layer for tier in STORED_TIERS for layer in self._by_block[tier].get(block, ())
        )

    def holds(self, blocks: Iterable[int]) -> bool:
        """Say whether every page of every one of `blocks` is here."""
        warm, cold = (self._by_block[tier] for tier in STORED_TIERS)
        return all(
            len(warm.get(block, ())) + len(cold.get(block, ())) == self.layers for block in blocks
        )

    def _forget(self, layer: int, block: int) -> Page | None:
        page = self._pages.pop((layer, block), None)
        if page is not None:
            self._uncount_copies(layer, block, page)
            _remove(self._by_block[page.place.tier], layer, block)
        return page

    def _uncount_copies(self, layer: int, block: int, page: Page) -> None:
        if page.backing is not None:
            self._backed[page.place.codec] -= 1
        elif page.place.tier is Tier.WARM:
            self._unbacked_codecs[page.place.codec] -= 1
            _remove(self._unbacked, layer, block)

    def check_integrity(self) -> None:
        """Raise AssertionError if the counts or the mirror differ from the pages."""
        counted = {tier: self.pages_in(tier) for tier in STORED_TIERS}
        assert sum(counted.values()) == len(self._pages), (
            f"index: {counted} by tier, {len(self._pages)} pages"
        )
        backed = Counter(p.place.codec for p in self._pages.values() if p.backing is not None)
        assert backed == self._backed, f"index: {backed} backed, {self._backed=}"
        unbacked = {
            key: page.place.codec
            for key, page in self._pages.items()
            if page.place.tier is Tier.WARM and page.backing is None
        }
        assert set(self.unbacked()) == unbacked.keys(), f"index: {unbacked=} {self._unbacked=}"
        assert Counter(unbacked.values()) == self._unbacked_codecs, f"{self._unbacked_codecs=}"
        for (layer, block), page in self._pages.items():
            assert layer in self._by_block[page.place.tier].get(block, ()), (
                f"index: page ({layer}, {block}) {page.place} is not counted in its tier"
            )
        if self._table is not None:
            self._check_table(self._table)

    def _check_table(self, table: PageTableWriter) -> None:
        reader = PageTableReader(table.fd)
        try:
            view = reader.read(reader.max_blocks)
            published = int((view.tier != 0).sum())
            assert published == len(self._pages), (
                f"page table: {published} entries, {len(self._pages)} pages"
            )
            for (layer, block), page in self._pages.items():
                fields = (view.tier, view.codec, view.slab, view.slot, view.generation)
                entry = tuple(int(field[layer, block]) for field in fields)
                place = page.place
                own = (place.tier, place.codec, place.slab, place.slot, place.generation)
                assert entry == tuple(map(int, own)), (
                    f"page table ({layer}, {block}): entry {entry}, index {own}"
                )
        finally:
            reader.close()


def _add(layers_by_block: dict[int, set[int]], layer: int, block: int) -> None:
    if block in layers_by_block:
        layers_by_block[block].add(layer)
    else:
        layers_by_block[block] = {layer}


def _remove(layers_by_block: dict[int, set[int]], layer: int, block: int) -> None:
    layers = layers_by_block[block]
    layers.remove(layer)
    if not layers:
        del layers_by_block[block]
