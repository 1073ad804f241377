"""A small world for the device's parts: warm slots of random pages, a reader, and a daemon's hand.

Pages are tiny (16 tokens, one KV head), so that a step is hundreds of operations and takes
milliseconds; their float64 originals are the reference.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tests.engine.attention.pages import Pages, make_pages
from tierd.codec.layout import HEADER_BYTES, PageLayout, page_layout
from tierd.types import CodecId, DType, Geometry
from tierd_engine.attention.plan import LayerPlan, PageRun, StepPlan
from tierd_engine.coldread import ColdPage, ColdUnit
from tierd_engine.device.fake import POISON, bytes_at

TOKENS, D, HEADS = 16, 16, 2
GEOMETRY = Geometry(layers=2, kv_heads=1, head_dim=D, dtype=DType.FLOAT32, block_tokens=TOKENS)
SCALE = D**-0.5


@dataclass
class Slots:
    """Warm slots in host memory, page-aligned."""

    layout: PageLayout
    count: int
    memory: Any = None
    base: int = 0

    def __post_init__(self) -> None:
        self.memory = np.full(self.count * self.layout.slot_bytes + 4096, POISON, np.uint8)
        self.base = self.memory.ctypes.data + -self.memory.ctypes.data % 4096

    def address(self, slot: int) -> int:
        return self.base + slot * self.layout.slot_bytes

    def payload(self, slot: int) -> Any:
        return bytes_at(self.address(slot) + HEADER_BYTES, self.layout.payload_bytes)

    def poison(self) -> None:
        self.memory[:] = POISON


class MemoryReader:
    """A cold reader whose disk is memory: `take` fills the next chunk of the ring at once.

    As on a real disk a chunk is refilled when it has been released: with poison at once, with
    its pages when they are taken.
    """

    def __init__(self, layout: PageLayout, units: list[list[Any]], chunks: int = 2) -> None:
        self.layout, self.units, self.chunks = layout, units, chunks
        self.per_unit = max(map(len, units), default=1)
        self.ring = Slots(layout, self.per_unit * chunks)
        self.taken = self.released = 0

    def take(self) -> Any:
        assert self.taken == self.released, "one unit is in use at a time"
        chunk = self.taken % self.chunks
        first = chunk * self.per_unit
        pages = self.units[self.taken % len(self.units)]
        for i, payload in enumerate(pages):
            self.ring.payload(first + i)[:] = payload
        self.taken += 1
        start = self.ring.address(first) + HEADER_BYTES
        return start + np.arange(len(pages), dtype=np.int64) * self.layout.slot_bytes

    def release(self) -> None:
        self.released += 1
        for i in range(self.ring.count):
            self.ring.payload(i)[:] = POISON

    @property
    def total_bytes(self) -> int:
        return len(self.ring.memory)


@dataclass
class Validity:
    """What `require_valid` looks at: `valid` False is the daemon having given slots away."""

    error: Exception | None = None
    calls: int = 0

    def __call__(self) -> None:
        self.calls += 1
        if self.error is not None:
            raise self.error


@dataclass
class World:
    """Warm and cold pages of each layer, and a plan over them. `order`: of slots, a block each."""

    seed: int = 3
    codec: CodecId = CodecId.RAW
    warm_blocks: int = 5
    cold_blocks: int = 3
    geometry: Geometry = GEOMETRY
    unit_pages: int = 2
    order: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        geometry, layers = self.geometry, self.geometry.layers
        self.layout = page_layout(geometry, self.codec)
        blocks = self.warm_blocks + self.cold_blocks
        self.pages: list[Pages] = [
            make_pages(rng, blocks, geometry.kv_heads, geometry.head_dim, geometry.block_tokens,
                       self.codec, geometry.dtype)
            for _ in range(layers)
        ]  # fmt: skip
        self.slots = Slots(self.layout, self.warm_blocks * layers)
        order = self.order or list(range(self.warm_blocks))
        addresses = np.empty((layers, self.warm_blocks), np.int64)
        for layer in range(layers):
            for block in range(self.warm_blocks):
                slot = order[block] * layers + layer  # a block's layers side by side
                self.slots.payload(slot)[:] = self.payload(layer, block)
                addresses[layer, block] = self.slots.address(slot) + HEADER_BYTES
        tokens = np.full(self.warm_blocks, geometry.block_tokens, np.int32)
        units: list[list[Any]] = []
        plans = []
        for layer in range(layers):
            cold = []
            for start in range(0, self.cold_blocks, self.unit_pages):
                stop = min(start + self.unit_pages, self.cold_blocks)
                numbers = range(self.warm_blocks + start, self.warm_blocks + stop)
                units.append([self.payload(layer, block) for block in numbers])
                page = ColdPage(layer, 0, -1, 0, lambda view: None)
                cold.append(ColdUnit(self.layout, (page,) * len(numbers)))
            run = PageRun(self.layout, addresses[layer], tokens)
            plans.append(LayerPlan((run,) if self.warm_blocks else (), tuple(cold)))
        self.layers = tuple(plans)
        self.reader = MemoryReader(self.layout, units or [[]])

    def payload(self, layer: int, block: int) -> Any:
        """The bytes of a page, where no copy was made yet."""
        return bytes_at(int(self.pages[layer].addresses[block]), self.layout.payload_bytes)

    def plan(self) -> StepPlan:
        """Return a plan over warm and cold, without hot blocks."""
        layers = len(self.layers)
        return StepPlan(
            1, (), (), np.empty((layers, 0), np.int64), np.empty(0, np.int64), self.layers, (),
            layers * self.warm_blocks, layers * self.cold_blocks,
            self.warm_blocks + self.cold_blocks,
        )  # fmt: skip

    def keys_values(self, layer: int) -> tuple[Any, Any]:
        """Return float64 K and V of all pages of a layer, [kv_heads, tokens, head_dim]."""
        pages = self.pages[layer]
        shape = (self.geometry.kv_heads, -1, self.geometry.head_dim)
        return tuple(a.swapaxes(0, 1).reshape(shape) for a in (pages.keys, pages.values))  # type: ignore[return-value]


def random_q(seed: int, n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return queries [n, HEADS, D]."""
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.standard_normal((n, HEADS, D)).astype("f4")).to(dtype)
