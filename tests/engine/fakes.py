"""Fakes of the daemon's side: one slab in this process, a table of numpy arrays, counted calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from tierd.codec.layout import page_layout
from tierd.errors import TierFull
from tierd.layercodecs import better_codecs, layer_codecs
from tierd.types import CodecId, Namespace, Tier

_FIELDS = {"tier": np.uint8, "codec": np.uint8, "slab": np.uint32, "slot": np.uint32,
           "generation": np.uint32}  # fmt: skip


class FakeTable:
    """Page table entries as arrays [layers, blocks]; `touch` stands for a daemon's change."""

    def __init__(self, layers: int, blocks: int) -> None:
        self.arrays = {name: np.zeros((layers, blocks), kind) for name, kind in _FIELDS.items()}
        self.version_number = 1

    def version(self) -> int:
        return self.version_number

    def epoch(self) -> int:
        return 7

    def reclaimed(self) -> int:
        return 0

    def touch(self) -> None:
        self.version_number += 1

    def read(self, blocks: int) -> Any:
        return SimpleNamespace(
            **{name: array[:, :blocks].copy() for name, array in self.arrays.items()}
        )


@dataclass
class FakeEpochs:
    """Counts steps; a step may not be entered twice."""

    inside: bool = False
    entered: list[int] = field(default_factory=list)

    def enter(self, epoch: int) -> None:
        assert not self.inside
        self.inside = True
        self.entered.append(epoch)

    def leave(self) -> None:
        assert self.inside
        self.inside = False


class FakeSlab:
    """Warm slots of one size in a numpy array."""

    def __init__(self, slot_bytes: int, slots: int) -> None:
        self.slot_bytes, self.slots = slot_bytes, slots
        self.memory = np.zeros(slots * slot_bytes + 4096, dtype=np.uint8)
        base = self.memory.ctypes.data
        self.address = base + (-base) % 4096
        self.fd = -1
        self.free = list(range(slots))


class FakeDaemon:
    """Client and session handle in one; a warm slab for each codec, named by its number."""

    def __init__(self, namespace: Namespace, max_tokens: int, *, warm_slots: int) -> None:
        self.namespace = namespace
        self.geometry = namespace.geometry
        self.slabs = {
            int(codec): FakeSlab(page_layout(self.geometry, codec).slot_bytes, warm_slots)
            for codec in {CodecId.RAW, *layer_codecs(namespace), *better_codecs(namespace.codec)}
        }
        self.table = FakeTable(self.geometry.layers, self.geometry.blocks_for(max_tokens))
        self.epochs = FakeEpochs()
        self.rpc_count = 0
        self.unmapping: list[Any] = []
        self.lost = False
        self.truncations: list[tuple[int, int | None]] = []
        self.aborted = 0
        self.asked: list[Any] = []

    def slab(self, slab_id: int) -> FakeSlab:
        return self.slabs[slab_id]

    def plan_demotion(
        self, hot_blocks: list[int], need_blocks: int, *, codecs: Any = None,
        include_first: bool = False, writes_cold: bool = False, deadline_seconds: float = 10.0,
    ) -> Any:  # fmt: skip
        assert not self.epochs.inside, "demotion inside a step would wait for itself"
        self.rpc_count += 1
        self.asked.append(codecs)
        row = [int(codec) for codec in codecs or layer_codecs(self.namespace)]
        blocks = sorted(hot_blocks)[:need_blocks]
        if not blocks or any(
            len(self.slabs[number].free) < len(blocks) * row.count(number) for number in row
        ):
            raise TierFull("the fake warm tier is full")
        slots = [[self.slabs[number].free.pop(0) for number in row] for _ in blocks]
        shape = (len(blocks), self.geometry.layers)
        return SimpleNamespace(
            blocks=blocks,
            codec=np.broadcast_to(np.array(row, np.uint8), shape),
            slab=np.broadcast_to(np.array(row, np.uint32), shape),
            slot=np.array(slots, np.uint32),
            generation=np.ones(shape, np.uint32),
            cold=False,
        )

    def commit(self, demotion: Any, digests: Any, device_digests: Any = None) -> None:
        self.rpc_count += 1
        assert device_digests is None or device_digests.shape == digests.shape[:2]
        assert digests.shape == (len(demotion.blocks), self.geometry.layers, 16)
        for row, block in enumerate(demotion.blocks):
            entry = self.table.arrays
            entry["tier"][:, block] = Tier.WARM
            entry["codec"][:, block] = demotion.codec[row]
            for name in ("slab", "slot", "generation"):
                entry[name][:, block] = getattr(demotion, name)[row]
        self.table.touch()

    def abort(self, demotion: Any) -> None:
        self.aborted += 1
        for slab, slot in zip(demotion.slab.flat, demotion.slot.flat, strict=True):
            self.slabs[int(slab)].free.append(int(slot))

    def truncate(self, first_block: int, *, damaged_layer: int | None = None) -> None:
        self.truncations.append((first_block, damaged_layer))
        for array in self.table.arrays.values():
            array[:, first_block:] = 0
        self.table.touch()

    def suspend(self, token_ids: Any, sealed_blocks: int, *, wait_seconds: float = 0.0) -> None:
        self.suspended = (list(token_ids), sealed_blocks)

    def close(self) -> None:
        self.closed = True
