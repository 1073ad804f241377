"""Hot arena: the budgeted memory that holds hot blocks in the model's dtype.

Invariants:
  free + used == slot_count
  slot_count * slot_bytes <= budget_bytes, so use can never pass the budget
  a used slot belongs to exactly one block

One slot holds one block (all layers): the static partition keeps the same
share hot in each layer. A page inside a slot has the `raw` page layout, so
demoting with codec raw is a copy. On a host without a GPU the arena is host
RAM that stands in for VRAM; on a GPU it is one buffer there (device/arena.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tierd.codec.layout import PageLayout, page_layout
from tierd.errors import BudgetTooSmall, HotBudgetExceeded
from tierd.memory.regions import anonymous
from tierd.types import CodecId, DType, Geometry
from tierd.units import format_size
from tierd_engine.attention.writing import write_rows

TORCH_DTYPES = {
    DType.FLOAT32: torch.float32,
    DType.BFLOAT16: torch.bfloat16,
    DType.FLOAT16: torch.float16,
}

FEW_TOKENS_MAX = 16  # of a decode step; for a prefill chunk PyTorch's threads are quicker


def hot_block_bytes(geometry: Geometry) -> int:
    """Return the bytes one block takes in the hot tier: all layers, raw layout."""
    return geometry.layers * page_layout(geometry, CodecId.RAW).payload_bytes


class HotArena:
    """Slots of one block each, allocated once, within `budget_bytes`.

    `keys` and `values` are views [slots, layers, kv_heads, block_tokens, head_dim]
    in the model's dtype; they stay valid for the arena's life.
    Raises BudgetTooSmall if not even one slot fits.
    """

    def __init__(self, geometry: Geometry, budget_bytes: int, *, blocks_max: int) -> None:
        self.geometry = geometry
        self.layout: PageLayout = page_layout(geometry, CodecId.RAW)
        self.slot_bytes = hot_block_bytes(geometry)
        self._dtype = TORCH_DTYPES[geometry.dtype]
        # As plain numbers: a decode step asks for them in each layer.
        self._page_shape = geometry.kv_heads, geometry.block_tokens, geometry.head_dim
        self._row_bytes = geometry.head_dim * geometry.dtype.itemsize
        self._page_bytes, self._head_bytes = self.layout.payload_bytes, self.layout.head_bytes
        self._keys_at, self._values_at = self.layout.keys, self.layout.values
        self.budget_bytes = budget_bytes
        self.slot_count = min(budget_bytes // self.slot_bytes, blocks_max)
        if self.slot_count < 1:
            raise BudgetTooSmall(
                f"the hot budget of {format_size(budget_bytes)} does not hold one block; "
                f"the smallest that does is {self.slot_bytes} bytes",
                smallest_bytes=self.slot_bytes,
            )
        # Pages of the system, and torch's CUDA allocator, align to at least 64 bytes.
        self._storage = self._allocate(self.slot_count * self.slot_bytes)
        self.base_address = self._storage.data_ptr()
        assert self.base_address % 64 == 0, self.base_address
        self.keys = self._view(self.layout.keys)
        self.values = self._view(self.layout.values)
        self._free = list(range(self.slot_count - 1, -1, -1))
        self._used: set[int] = set()
        self.peak_bytes = 0

    def _allocate(self, size_bytes: int) -> torch.Tensor:
        return torch.frombuffer(anonymous(size_bytes)[1], dtype=torch.uint8)

    def _view(self, offset_bytes: int) -> torch.Tensor:
        geometry, layout = self.geometry, self.layout
        item = geometry.dtype.itemsize
        typed = self._storage.view(TORCH_DTYPES[geometry.dtype])
        shape = (
            self.slot_count,
            geometry.layers,
            geometry.kv_heads,
            geometry.block_tokens,
            geometry.head_dim,
        )
        strides = (
            self.slot_bytes // item,
            layout.payload_bytes // item,
            layout.head_bytes // item,
            geometry.head_dim,
            1,
        )
        return typed.as_strided(shape, strides, typed.storage_offset() + offset_bytes // item)

    @property
    def used_slots(self) -> int:
        """Slots in use now."""
        return len(self._used)

    @property
    def used_bytes(self) -> int:
        """Bytes of slots in use now."""
        return len(self._used) * self.slot_bytes

    @property
    def free_slots(self) -> int:
        """Slots that `allocate` can still hand out."""
        return len(self._free)

    def allocate(self) -> int:
        """Return a free slot's index. Raises HotBudgetExceeded when the budget is used up."""
        if not self._free:
            raise HotBudgetExceeded(
                f"hot budget of {format_size(self.budget_bytes)} is used up: "
                f"{self.slot_count} blocks of {format_size(self.slot_bytes)} are hot"
            )
        slot = self._free.pop()
        self._used.add(slot)
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return slot

    def release(self, slot: int) -> None:
        """Give a slot back; its bytes may be overwritten at once."""
        self._used.remove(slot)
        self._free.append(slot)

    def write(
        self, slot: int, layer: int, start: int, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Write K and V, [kv_heads, n, head_dim], of a slot's tokens from `start` on.

        A leading 1 is allowed. Of other shapes or dtypes: RuntimeError, or AssertionError.
        """
        shape = keys.shape
        end = start + shape[-2]
        if shape[-2] <= FEW_TOKENS_MAX and self._is_plain(keys) and self._is_plain(values):
            kv_heads, block_tokens, head_dim = self._page_shape
            assert values.shape == shape and shape[-3] == kv_heads and shape[-1] == head_dim
            assert end <= block_tokens
            row = self.row_address(slot, start) + layer * self._page_bytes
            write_rows(keys, values, row + self._keys_at, row + self._values_at, self._head_bytes)
            return
        self.keys[slot, layer, :, start:end] = keys.reshape(shape[-3:])
        self.values[slot, layer, :, start:end] = values.reshape(values.shape[-3:])

    def row_address(self, slot: int, start: int) -> int:
        """Return the absolute address to which `rows_of` adds, for a slot's token."""
        return self.base_address + slot * self.slot_bytes + start * self._row_bytes

    def rows_of(self, layer: int) -> tuple[int, int, int]:
        """Return where a layer's rows stand: keys', values', and from a head to the next."""
        page = layer * self._page_bytes
        return page + self._keys_at, page + self._values_at, self._head_bytes

    def _is_plain(self, part: torch.Tensor) -> bool:
        """Return whether a part of a step can be copied row by row, byte by byte."""
        return part.dtype is self._dtype and part.is_cpu and part.stride(-1) == 1

    def on_host(self, slots: dict[int, int]) -> tuple[HotArena, dict[int, int]]:
        """Return an arena in RAM that holds these blocks, and their slots there. To be read only.

        slots: arena slot by block.
        """
        return self, slots

    def page_address(self, slot: int, layer: int) -> int:
        """Return the absolute address of one page (raw layout)."""
        return self.base_address + slot * self.slot_bytes + layer * self.layout.payload_bytes

    def close(self) -> None:
        """Nothing to do: the memory goes with the arena."""

    def poison(self) -> None:
        """Fill every free slot with NaN bytes, so that a read of what is not there shows."""
        self._poison(self._free)

    def _poison(self, slots: Sequence[int]) -> None:
        for slot in slots:
            start = slot * self.slot_bytes
            self._storage[start : start + self.slot_bytes].fill_(0xFF)

    def check_integrity(self) -> None:
        """Raise AssertionError unless slots and bytes are conserved."""
        free, used = len(self._free), len(self._used)
        assert free + used == self.slot_count, f"{free=} + {used=} != {self.slot_count=}"
        assert not self._used.intersection(self._free), "a slot is both free and used"
        total = self.slot_count * self.slot_bytes
        assert total <= self.budget_bytes, f"{total=} > {self.budget_bytes=}"
        assert self.used_bytes <= self.peak_bytes <= self.budget_bytes
