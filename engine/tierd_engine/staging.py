"""Staging: the small buffers that encoded or decoded pages pass through.

Their sizes are fixed when a session opens and do not grow with the context;
they are counted apart from the hot budget and shown as `hot.staging_bytes`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from tierd.memory.regions import anonymous
from tierd.types import Geometry
from tierd.units import MIB, SECTOR_BYTES, round_up

RING_CHUNK_BYTES = 8 * MIB
RING_CHUNKS = 4  # one in use, three being filled: 32 MiB, inside design.md's 16-64 MiB
DECODE_STAGING_BYTES = 16 * MIB


class StagingRing:
    """`RING_CHUNKS` page-aligned chunks for encoded pages, each at least one slot large.

    What they are for may cut them otherwise: they lie side by side. `base_address` and views
    stay valid for the ring's life.
    """

    def __init__(self, slot_bytes_max: int, chunk_bytes: int = RING_CHUNK_BYTES) -> None:
        self.chunk_bytes = round_up(max(chunk_bytes, slot_bytes_max), SECTOR_BYTES)
        self.chunks = RING_CHUNKS
        self.base_address, self._view = anonymous(self.chunk_bytes * self.chunks)
        assert self.base_address % SECTOR_BYTES == 0, self.base_address

    @property
    def total_bytes(self) -> int:
        """Bytes of all chunks together."""
        return self.chunk_bytes * self.chunks

    def address(self, chunk: int) -> int:
        """Return the absolute address of a chunk's first byte."""
        return self.base_address + chunk * self.chunk_bytes

    def view(self, start: int, size_bytes: int) -> memoryview:
        """Return a writable view of a part."""
        return self._view[start : start + size_bytes]


class DecodeStaging:
    """Contiguous float32 K and V, [kv_heads, capacity_tokens, head_dim], for prefill.

    Prefill decodes pages here run by run, and attends over each run once.
    """

    def __init__(self, geometry: Geometry, budget_bytes: int = DECODE_STAGING_BYTES) -> None:
        token_bytes = 2 * geometry.kv_heads * geometry.head_dim * 4
        blocks = max(1, budget_bytes // (token_bytes * geometry.block_tokens))
        self.capacity_tokens = blocks * geometry.block_tokens
        shape = (geometry.kv_heads, self.capacity_tokens, geometry.head_dim)
        self.keys = torch.empty(shape, dtype=torch.float32)
        self.values = torch.empty(shape, dtype=torch.float32)
        self.keys_array: npt.NDArray[np.float32] = self.keys.numpy()
        self.values_array: npt.NDArray[np.float32] = self.values.numpy()

    @property
    def total_bytes(self) -> int:
        """Bytes of both buffers."""
        return 2 * self.keys.numel() * 4
