"""The index of a session and its mirror in the page table."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.index import Page, SessionIndex
from tierd.memory.pagetable import PageTableReader, PageTableWriter
from tierd.types import CodecId, Place, Tier

LAYERS, BLOCKS = 3, 5


def page(tier: Tier, slot: int) -> Page:
    return Page(Place(tier, CodecId.INT8, 1, slot, 1), bytes(16))


def test_pages_by_tier_follow_a_page_that_moves():
    index = SessionIndex(LAYERS)
    index.set(0, 2, page(Tier.WARM, 0))
    index.set(1, 2, page(Tier.WARM, 1))
    index.set(0, 2, page(Tier.COLD, 0))
    assert index.blocks_in(Tier.WARM) == index.blocks_in(Tier.COLD) == [2]
    assert index.layers_in(Tier.WARM, 2) == [1] and index.layers_in(Tier.COLD, 2) == [0]
    assert index.layers_of(2) == [0, 1] and len(index) == 2
    assert not index.holds([2])
    index.set(2, 2, page(Tier.WARM, 2))
    assert index.holds([2]) and index.holds([])
    index.check_integrity()


def test_dropping_a_page_that_is_not_there_is_a_bug():
    with pytest.raises(AssertionError):
        SessionIndex(LAYERS).drop(0, 0)


def test_the_table_is_empty_after_detach_and_whole_after_attach():
    index = SessionIndex(LAYERS)
    index.set(0, 1, page(Tier.WARM, 0))
    table = PageTableWriter(1, LAYERS, BLOCKS)
    reader = PageTableReader(table.fd)
    index.attach(table)
    version = reader.version()
    assert int((reader.read(BLOCKS).tier != 0).sum()) == 1
    index.detach()
    assert not reader.read(BLOCKS).tier.any() and reader.version() > version
    assert index.get(0, 1) is not None
    index.detach()
    reader.close()
    table.close()


changes = st.tuples(
    st.integers(0, LAYERS - 1),
    st.integers(0, BLOCKS - 1),
    st.sampled_from([None, Tier.WARM, Tier.COLD]),
)


@given(st.lists(changes, max_size=40), st.integers(0, 40))
def test_whatever_is_set_and_dropped_the_table_shows_the_pages(steps, attached_at):
    index, model = SessionIndex(LAYERS), {}
    table = PageTableWriter(1, LAYERS, BLOCKS)
    for number, (layer, block, tier) in enumerate(steps):
        if number == attached_at:
            index.attach(table)
        if tier is not None:
            model[layer, block] = page(tier, number)
            index.set(layer, block, model[layer, block])
        elif model.pop((layer, block), None):
            index.drop(layer, block)
        index.check_integrity()
    assert dict(index) == model
    if attached_at < len(steps):
        reader = PageTableReader(table.fd)
        view = reader.read(BLOCKS)
        assert {tuple(map(int, at)) for at in np.argwhere(view.tier)} == set(model)
        reader.close()
    table.close()
