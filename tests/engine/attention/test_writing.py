"""write_rows against PyTorch's own assignment, in the arena, with strides as models have them."""

from __future__ import annotations

import pytest
import torch

from tierd.types import DType, Geometry
from tierd_engine.arena import FEW_TOKENS_MAX, TORCH_DTYPES, HotArena, hot_block_bytes

BLOCK = 64


@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("head_dim", [1, 33, 64, 128])
@pytest.mark.parametrize("n", [1, 3, FEW_TOKENS_MAX, FEW_TOKENS_MAX + 1, BLOCK])
@pytest.mark.parametrize("leading", [(), (1,)])
def test_rows_are_written_and_nothing_else(
    dtype: DType, head_dim: int, n: int, leading: tuple[int, ...]
) -> None:
    geometry = Geometry(2, 3, head_dim, dtype, BLOCK)
    arena = HotArena(geometry, 2 * hot_block_bytes(geometry), blocks_max=2)
    arena.allocate()
    slot = arena.allocate()
    arena.keys.fill_(7)
    arena.values.fill_(8)
    start = BLOCK - n
    # As a projection leaves them: [1, n, heads, head_dim] transposed.
    keys, values = (
        torch.randn(*leading, n, 3, head_dim).to(TORCH_DTYPES[dtype]).transpose(-3, -2)
        for _ in range(2)
    )
    expected = [side.clone() for side in (arena.keys, arena.values)]
    expected[0][slot, 1, :, start:] = keys.reshape(3, n, head_dim)
    expected[1][slot, 1, :, start:] = values.reshape(3, n, head_dim)
    arena.write(slot, 1, start, keys, values)
    assert torch.equal(arena.keys, expected[0]) and torch.equal(arena.values, expected[1])


def test_channels_apart_and_other_dtypes_are_written_too() -> None:
    geometry = Geometry(1, 2, 16, DType.BFLOAT16, BLOCK)
    arena = HotArena(geometry, hot_block_bytes(geometry), blocks_max=1)
    slot = arena.allocate()
    keys = torch.randn(16, 2, 1).permute(1, 2, 0)
    values = torch.randn(2, 1, 16).to(torch.bfloat16)
    arena.write(slot, 0, 5, keys, values)
    assert torch.equal(arena.keys[slot, 0, :, 5:6], keys.to(torch.bfloat16))
    assert torch.equal(arena.values[slot, 0, :, 5:6], values)


def test_a_write_past_the_block_is_refused() -> None:
    geometry = Geometry(1, 2, 16, DType.FLOAT32, BLOCK)
    arena = HotArena(geometry, hot_block_bytes(geometry), blocks_max=1)
    slot = arena.allocate()
    part = torch.zeros(2, 2, 16)
    with pytest.raises(AssertionError):
        arena.write(slot, 0, BLOCK - 1, part, part)
