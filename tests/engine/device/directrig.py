"""A cold writer over slab files and a fake device, no daemon: what is on the disk is checked."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.engine.device.test_encoder import BLOCKS, addresses, write_blocks
from tests.engine.device.world import GEOMETRY, Slots, Validity, World
from tierd.client import Demotion
from tierd.codec import encode_pages
from tierd.codec.devicedigest import device_digests
from tierd.codec.layout import HEADER_BYTES, page_layout
from tierd.disk.header import SlotHeader, verify_slot
from tierd.errors import CodecError
from tierd.types import CodecId, Namespace
from tierd_engine.arena import HotArena, hot_block_bytes
from tierd_engine.coldwrite import ColdWriter
from tierd_engine.device.arena import DeviceArena
from tierd_engine.device.coldstaging import PinnedStaging
from tierd_engine.device.directwrite import DirectWrites
from tierd_engine.device.encoder import DeviceEncoder
from tierd_engine.device.fake import Chooser, FakeDevice, Refusals
from tierd_engine.device.fakepath import FakePath, FakeWork, Fault
from tierd_engine.device.fences import Fence
from tierd_engine.device.kernels import HostKernels
from tierd_engine.device.probing import ColdPaths
from tierd_engine.device.stager import Stager, layer_pieces

LAYERS = GEOMETRY.layers
PAGES = BLOCKS * LAYERS
CHUNK_PAGES = 2  # so a demotion of six pages is three chunks: one is used again


class StrictPath(FakePath):
    """Fails where a write begins while a read that was asked for before has not ended."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.reads: list[FakeWork] = []

    def start(self, fd: int, offset: int, target: torch.Tensor) -> Any:
        self.reads.append(super().start(fd, offset, target))
        return self.reads[-1]

    def start_write(self, fd: int, offset: int, source: torch.Tensor) -> Any:
        assert all(read.ended for read in self.reads), "demotion went before demand"
        return super().start_write(fd, offset, source)


class Rig:
    """A cold writer with a direct path over two slab files, no daemon; checks what is on disk."""

    def __init__(
        self, chooser: Chooser, folder: Path, *, codec: CodecId = CodecId.INT8,
        fence: Fence | None = None, faults: Mapping[int, Fault] | None = None,
        every: Fault | None = None, counts: Callable[[], int | None] | None = None,
        refusals: Refusals | None = None, waits: bool = True,
    ) -> None:  # fmt: skip
        self.device = FakeDevice(chooser, without=fence, refusals=refusals)
        budget = BLOCKS * hot_block_bytes(GEOMETRY)
        self.arena = DeviceArena(self.device, GEOMETRY, budget, blocks_max=BLOCKS)
        self.arena.poison()
        self.layout = page_layout(GEOMETRY, codec)
        self.path = StrictPath(self.device, write_faults=faults or {}, every_write=every)
        reads, writes = itertools.count(), itertools.count()
        self.paths = ColdPaths(
            self.device, self.path, counts=lambda: next(reads),
            write_counts=counts or (lambda: next(writes)),
        )  # fmt: skip
        self.fds = []
        for number in range(2):
            file = folder / f"slab {number}"
            file.unlink(missing_ok=True)  # a lock of a case before stands on the file itself
            file.write_bytes(bytes(64 * self.layout.slot_bytes))
            self.fds.append(os.open(file, os.O_RDWR))
        self.world = World(cold_blocks=0)
        self.stager = Stager(
            self.device, self.world.reader, self.world.layout.slot_bytes,
            Validity(), chunk_bytes=self.world.layout.slot_bytes,
        )  # type: ignore[arg-type]  # fmt: skip
        self.encoder = DeviceEncoder(
            self.device, HostKernels(), self.arena, self.stager.demand, digests=True
        )
        self.direct = DirectWrites(
            self.device, self.encoder, self.paths, self._wait if waits else lambda seconds: True
        )
        namespace = Namespace(GEOMETRY, "weights", codec)
        self.handle: Any = SimpleNamespace(namespace=namespace, store_uuid=b"u" * 16, number=7)
        client: Any = SimpleNamespace(slab=self._slab, lost=False)
        self.writer = ColdWriter(
            client, self.handle, chunk_bytes=CHUNK_PAGES * self.layout.slot_bytes,
            staging=lambda size_bytes: PinnedStaging(self.device, size_bytes), direct=self.direct,
        )  # fmt: skip
        # The writer's chunk holds at least one raw page: as many of this codec's as that is.
        self.chunk_pages = self.writer._chunk_bytes // self.layout.slot_bytes
        self._first = 0

    def _wait(self, seconds: float) -> bool:
        return all(read.wait(seconds) for read in self.path.reads)

    def _slab(self, number: int) -> Any:
        return SimpleNamespace(fd=self.fds[number], slot_bytes=self.layout.slot_bytes, direct=False)

    def demotion(self) -> Demotion:
        """Return the loan of the next slots: of two slabs, in pieces, out of order."""
        numbers = np.arange(PAGES, dtype=np.uint32)[::-1].reshape(BLOCKS, LAYERS)
        first, self._first = self._first, self._first + 2 * PAGES
        return Demotion(
            reservation=1, blocks=[3, 4, 5],
            codec=np.full((BLOCKS, LAYERS), self.layout.codec, np.uint8),
            slab=(numbers % 2).astype(np.uint32),
            slot=(first + numbers + (numbers > 3)).astype(np.uint32),
            generation=np.full((BLOCKS, LAYERS), 5, np.uint32), cold=True,
        )  # fmt: skip

    def begin_read(self) -> None:
        """Ask for what a next step needs of the disk."""
        self.path.start(self.fds[0], 0, self.device.allocate(4096).tensor)

    def begin_copies(self) -> None:
        """Ask for what a next step needs of RAM."""
        pieces = layer_pieces(0, self.world.layers[0], self.stager.chunk_bytes, np.zeros_like)
        self.stager.begin(pieces)

    def demote(self, demotion: Demotion, seed: int = 1, *, is_checked: bool = True) -> None:
        """Demote blocks of random bytes, and compare what is on the disk then."""
        slots = write_blocks(self.arena, seed=seed)
        source = addresses(self.arena, slots).reshape(BLOCKS, LAYERS)
        try:
            with self.writer.lent(demotion) as loan:
                written = self.writer.write(
                    loan, demotion, source, self.encoder.encode, require_encoded
                )
                if is_checked:
                    self.check(demotion, seed, *written)
        finally:
            for slot in slots:
                self.arena.release(slot)
        self.writer.check_integrity()

    def check(
        self, demotion: Demotion, seed: int, digests: np.ndarray, on_device: np.ndarray | None
    ) -> None:  # fmt: skip
        """Compare headers and bytes on the disk with the CPU's."""
        own = HotArena(GEOMETRY, self.arena.budget_bytes, blocks_max=BLOCKS)
        expected = Slots(self.layout, PAGES)
        targets = np.array([expected.address(i) + HEADER_BYTES for i in range(PAGES)], np.int64)
        encode_pages(addresses(own, write_blocks(own, seed)), targets, self.layout)
        for number, (row, layer) in enumerate(itertools.product(range(BLOCKS), range(LAYERS))):
            slab, slot = int(demotion.slab[row, layer]), int(demotion.slot[row, layer])
            size = self.layout.slot_bytes
            data = memoryview(os.pread(self.fds[slab], size, slot * size))
            header = SlotHeader.unpack(data)
            assert (header.slab, header.slot, header.generation) == (slab, slot, 5)
            assert (header.layer, header.block) == (layer, demotion.blocks[row])
            verify_slot(data, header)
            end = HEADER_BYTES + self.layout.payload_bytes
            assert bytes(data[HEADER_BYTES:end]) == expected.payload(number).tobytes()
            assert not any(data[end:])
            assert header.payload_digest == digests[row, layer].tobytes()
            assert on_device is not None and header.device_digest == int(on_device[row, layer])
            (digest,) = device_digests(targets[number : number + 1], self.layout.payload_bytes)
            assert header.device_digest == int(digest)

    @property
    def staged_pages(self) -> int:
        """Pages that the CPU has written."""
        return self.writer.counts.pages - self.direct.counts.pages

    def close(self) -> None:
        """Close everything, and see that nothing was used after."""
        self.stager.abandon()
        self.device.follow(self.device.compute)
        self.writer.close()
        for part in (self.stager, self.encoder, self.arena):
            part.close()
        self.path.let_go()
        self.device.check_integrity()
        for fd in self.fds:
            os.close(fd)


def require_encoded(status: np.ndarray, blocks: Sequence[int], codec: CodecId) -> None:
    if status.any():
        raise CodecError("a page cannot be encoded")
