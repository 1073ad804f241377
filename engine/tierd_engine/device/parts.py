"""Partials of one layer's attention on the device, merged in the order they were asked for.

Invariants:
  0 <= filled <= capacity; what was merged early stands first
  the order of parts is the caller's, so a run repeats bit for bit

For one query a part is small and hundreds fit; for a prefill chunk three do, and they are
merged down as they come. So the memory does not grow with the context.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tierd.types import Geometry
from tierd.units import MIB
from tierd_engine.device.kernels import PageKernels
from tierd_engine.device.port import Buffer, Device

PARTS_BYTES = 32 * MIB
CAPACITY_MIN = 3  # what was merged, the next ones, and near's


@dataclass(frozen=True, slots=True)
class Part:
    """Room for some parts: o float32 [parts, n, heads, head_dim], lse float32 [parts, n, heads]."""

    o: torch.Tensor
    lse: torch.Tensor


class Parts:
    """Used for one layer at a time: `start`, then `reserve` before each launch, then `merged`."""

    def __init__(
        self, device: Device, kernels: PageKernels, geometry: Geometry, heads: int,
        *, size_bytes: int = PARTS_BYTES,
    ) -> None:  # fmt: skip
        self._device, self._kernels = device, kernels
        self._heads, self._head_dim = heads, geometry.head_dim
        self._buffer = device.allocate(size_bytes)
        self._outgrown: list[Buffer] = []  # work that reads them may still be on its way
        self._all = self._whole = Part(*2 * (torch.empty(0),))
        self.capacity = self.filled = 0

    def start(self, n: int) -> None:
        """Begin with no parts, for `n` queries."""
        row_bytes = 4 * n * self._heads * (self._head_dim + 1)
        needed = row_bytes * (CAPACITY_MIN + 1)
        if needed > self._buffer.size_bytes:
            self._outgrown.append(self._buffer)
            self._buffer = self._device.allocate(needed)
        self.capacity = self._buffer.size_bytes // row_bytes - 1
        self.filled = 0
        rows, floats = self.capacity + 1, self._buffer.tensor.view(torch.float32)
        o_end = rows * n * self._heads * self._head_dim
        o = floats[:o_end].view(rows, n, self._heads, self._head_dim)
        lse = floats[o_end : o_end + rows * n * self._heads].view(rows, n, self._heads)
        self._all, self._whole = Part(o[:-1], lse[:-1]), Part(o[-1], lse[-1])

    def pages_each(self, pages: int) -> int:
        """Return how many pages a part of these should cover: 1 if there is room for that."""
        return max(1, -(-pages // (self.capacity - 1)))

    def reserve(self, count: int) -> Part:
        """Return room for the next `count` parts; merges those before where there is none."""
        assert 1 <= count < self.capacity, f"{count=} {self.capacity=}"
        if self.filled + count > self.capacity:
            self._merge_down()
        part = slice(self.filled, self.filled + count)
        self.filled += count
        return Part(self._all.o[part], self._all.lse[part])

    def _merge_down(self) -> None:
        filled, parts, whole = self.filled, self._all, self._whole

        def kernel() -> None:
            self._kernels.merge(parts.o[:filled], parts.lse[:filled], whole.o, whole.lse)
            parts.o[0].copy_(whole.o)
            parts.lse[0].copy_(whole.lse)

        self._device.launch(self._device.compute, kernel)
        self.filled = 1

    def merged(self) -> torch.Tensor:
        """Return o [n, heads, head_dim] float32 of all parts together, once `compute` gets there.

        No part at all gives zeros.
        """
        filled, parts, whole = self.filled, self._all, self._whole
        out = torch.empty(whole.o.shape, dtype=torch.float32, device=self._device.torch_device)

        def kernel() -> None:
            self._kernels.merge(parts.o[:filled], parts.lse[:filled], out, whole.lse)

        self._device.launch(self._device.compute, kernel)
        return out

    @property
    def total_bytes(self) -> int:
        """Bytes on the device."""
        return sum(buffer.size_bytes for buffer in (self._buffer, *self._outgrown))

    def close(self) -> None:
        """Give the memory back; nothing on any stream may use it any more."""
        for buffer in (self._buffer, *self._outgrown):
            self._device.free(buffer)

    def check_integrity(self) -> None:
        """Raise AssertionError unless 0 <= filled <= capacity."""
        assert 0 <= self.filled <= self.capacity, f"{self.filled=} {self.capacity=}"
