"""The hot arena never holds more than its budget."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tierd.errors import BudgetTooSmall, HotBudgetExceeded
from tierd.types import DType, Geometry
from tierd_engine.arena import HotArena, hot_block_bytes

GEOMETRY = Geometry(layers=3, kv_heads=2, head_dim=20, dtype=DType.BFLOAT16, block_tokens=16)


def test_an_allocation_beyond_the_budget_is_a_typed_error() -> None:
    arena = HotArena(GEOMETRY, 2 * hot_block_bytes(GEOMETRY) + 100, blocks_max=9)
    arena.allocate()
    arena.allocate()
    with pytest.raises(HotBudgetExceeded, match="2 blocks"):
        arena.allocate()
    assert arena.peak_bytes <= arena.budget_bytes
    arena.check_integrity()


def test_a_budget_below_one_block_names_the_smallest_that_works() -> None:
    smallest = hot_block_bytes(GEOMETRY)
    with pytest.raises(BudgetTooSmall, match=str(smallest)) as raised:
        HotArena(GEOMETRY, smallest - 1, blocks_max=9)
    assert raised.value.smallest_bytes == smallest


def test_views_address_the_bytes_that_the_raw_layout_names() -> None:
    arena = HotArena(GEOMETRY, 2 * hot_block_bytes(GEOMETRY), blocks_max=9)
    arena.values[1, 2, 1, 5, 7] = 3.5
    layout = arena.layout
    offset = arena.page_address(1, 2) - arena.base_address
    offset += layout.head_bytes + layout.values + (5 * GEOMETRY.head_dim + 7) * 2
    stored = arena._storage[offset : offset + 2].view(torch.bfloat16)
    assert float(stored[0]) == 3.5


def test_poison_fills_free_slots_only() -> None:
    arena = HotArena(GEOMETRY, 2 * hot_block_bytes(GEOMETRY), blocks_max=9)
    used = arena.allocate()
    arena.keys[used] = 1.0
    arena.poison()
    assert torch.isfinite(arena.keys[used]).all()
    assert torch.isnan(arena.keys[1 - used].float()).all()


@given(st.lists(st.booleans(), max_size=60))
def test_slots_are_conserved_under_any_sequence(actions: list[bool]) -> None:
    arena = HotArena(GEOMETRY, 5 * hot_block_bytes(GEOMETRY), blocks_max=9)
    held: list[int] = []
    for allocate in actions:
        if allocate and arena.free_slots:
            held.append(arena.allocate())
        elif held:
            arena.release(held.pop(0))
        arena.check_integrity()
    assert len(set(held)) == len(held) == arena.used_slots
