"""Direct cold writes: each fault ends in right bytes on the disk or a typed error, in any order."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.device.test_encoder import BLOCKS, addresses, write_blocks
from tests.engine.device.world import GEOMETRY, Slots, Validity, World
from tierd.client import Demotion
from tierd.codec import encode_pages
from tierd.codec.devicedigest import device_digests
from tierd.codec.layout import HEADER_BYTES, page_layout
from tierd.disk.header import SlotHeader, verify_slot
from tierd.disk.slotlocks import locked_ranges
from tierd.errors import CodecError, StorageError
from tierd.types import CodecId, Namespace
from tierd_engine.arena import HotArena, hot_block_bytes
from tierd_engine.coldwrite import ColdWriter
from tierd_engine.device.arena import DeviceArena
from tierd_engine.device.coldpath import PathKind
from tierd_engine.device.coldstaging import PinnedStaging
from tierd_engine.device.directwrite import DirectWrites
from tierd_engine.device.encoder import DeviceEncoder
from tierd_engine.device.exploring import RandomChooser, explore_random
from tierd_engine.device.fake import Chooser, FakeDevice, FirstChooser, Refusals
from tierd_engine.device.fakepath import FakePath, FakeWork, FakeWrite, Fault
from tierd_engine.device.fences import Fence
from tierd_engine.device.kernels import HostKernels
from tierd_engine.device.probing import ColdPaths
from tierd_engine.device.stager import Stager, layer_pieces

SEEDS = range(60)
LAYERS = GEOMETRY.layers
PAGES = BLOCKS * LAYERS
CHUNK_PAGES = 2  # so a demotion of six pages is three chunks: one is used again
FENCES = [
    Fence.RECORD_WRITTEN, Fence.WAIT_WRITTEN, Fence.RECORD_DEMAND, Fence.WAIT_DEMAND,
    Fence.RECORD_COPIED_OUT, Fence.WAIT_COPIED_OUT, Fence.RECORD_SLOTS_WHOLE,
    Fence.WAIT_SLOTS_WHOLE,
]  # fmt: skip


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
                    loan, demotion, source, self.encoder.encode, _require_encoded
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


def _require_encoded(status: np.ndarray, blocks: Sequence[int], codec: CodecId) -> None:
    if status.any():
        raise CodecError("a page cannot be encoded")


def whole(chooser: Chooser, folder: Path, **options: Any) -> None:
    """Demote twice while a step's reads and copies are under way; nothing is to be noticed."""
    rig = Rig(chooser, folder, **options)
    rig.begin_copies()
    in_flight = rig.stager.counts.copies
    rig.demote(rig.demotion())
    rig.begin_read()
    rig.demote(rig.demotion(), seed=2)
    order = [line.split(":")[0] for line in rig.device.trace]
    first_out = order.index("copy out")
    assert order[:first_out].count("copy in") >= in_flight, "demotion went before demand"
    counts = rig.direct.counts
    assert (counts.errors, counts.mismatches, counts.deadlines) == (0, 0, 0)
    assert counts.pages == 2 * PAGES and rig.staged_pages == 0
    assert counts.bytes == 2 * PAGES * rig.layout.slot_bytes
    result = rig.paths.result(rig.fds[0])
    assert result.writes is PathKind.GDS and result.writes_reason == ""
    rig.close()


@pytest.mark.parametrize("codec", [CodecId.RAW, CodecId.INT8, CodecId.FP8])
def test_pages_go_from_vram_to_the_disk_as_the_cpu_writes_them(
    codec: CodecId, tmp_path: Path
) -> None:
    assert explore_random(lambda c: whole(c, tmp_path, codec=codec), range(12)) is None


@pytest.mark.parametrize("fence", FENCES)
def test_the_explorer_sees_each_fence_left_out(fence: Fence, tmp_path: Path) -> None:
    assert explore_random(lambda c: whole(c, tmp_path, fence=fence), SEEDS) is not None


def test_the_explorer_sees_the_wait_for_a_write_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeWrite, "wait", lambda self, seconds: True)
    assert explore_random(lambda chooser: whole(chooser, tmp_path), SEEDS) is not None


def test_the_explorer_sees_the_wait_for_reads_left_out(tmp_path: Path) -> None:
    assert explore_random(lambda c: whole(c, tmp_path, waits=False), SEEDS) is not None


def test_the_explorer_sees_a_chunk_used_again_too_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ColdWriter, "_await", lambda self, chunk: None)
    assert explore_random(lambda chooser: whole(chooser, tmp_path), SEEDS) is not None


@pytest.mark.parametrize("fault", [Fault.ERROR, Fault.SHORT])
@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_write_that_fails_is_done_again_by_the_cpu(fault: Fault, at: int, tmp_path: Path) -> None:
    def case(chooser: Chooser) -> None:
        rig = Rig(chooser, tmp_path, faults={at: fault})
        rig.demote(rig.demotion())
        rig.demote(rig.demotion(), seed=2)
        counts = rig.direct.counts
        assert counts.errors == 1 and not rig.direct.given_up
        assert 0 < rig.staged_pages <= rig.chunk_pages
        assert counts.pages + rig.staged_pages == 2 * PAGES
        assert rig.writer.counts.failures == 0 and rig.writer.can_write
        rig.close()

    assert explore_random(case, range(10)) is None


def test_writes_that_always_fail_are_given_up(tmp_path: Path) -> None:
    rig = Rig(RandomChooser(3), tmp_path, every=Fault.ERROR)
    for seed in range(3):
        rig.demote(rig.demotion(), seed=seed)
    assert rig.direct.given_up == "3 direct writes failed in a row: input/output error"
    assert rig.direct.counts.pages == 0 and rig.staged_pages == 3 * PAGES
    assert rig.path.writes_started < 3 * PAGES
    rig.close()


def test_a_first_write_that_is_not_on_the_disk_is_found_and_no_second_is_made(
    tmp_path: Path,
) -> None:
    def case(chooser: Chooser) -> None:
        rig = Rig(chooser, tmp_path, faults={0: Fault.WRONG})
        rig.demote(rig.demotion())
        rig.demote(rig.demotion(), seed=2)
        figures = rig.direct.figures()
        assert figures["mismatches"] == 1 and figures["chunks"] == 1
        assert rig.writer.counts.pages == 2 * PAGES
        (row,) = rig.paths.figures()
        assert row["kind"] == "gds" and row["writes"] == "posix"
        assert "bytes do not match their digest" in row["writes_reason"]
        rig.close()

    assert explore_random(case, range(10)) is None


def test_the_explorer_sees_the_reading_back_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ColdWriter, "_read_back", lambda self, chunk, part: "")
    case = {"faults": {0: Fault.WRONG}}
    assert explore_random(lambda c: whole(c, tmp_path, **case), range(3)) is not None


@pytest.mark.parametrize(("counts", "reason"), [(lambda: 7, "none"), (lambda: None, "not loaded")])
def test_writes_that_nobody_counted_are_compat_and_no_second_is_made(
    counts: Callable[[], int | None], reason: str, tmp_path: Path
) -> None:
    rig = Rig(RandomChooser(4), tmp_path, counts=counts)
    rig.demote(rig.demotion())
    rig.demote(rig.demotion(), seed=2)
    assert rig.direct.counts.chunks == 1 and rig.direct.counts.mismatches == 0
    (row,) = rig.paths.figures()
    assert row["writes"] == "compat" and reason in row["writes_reason"]
    rig.close()


@pytest.mark.parametrize("hung", [0, 1, 2, 4])
def test_a_write_that_hangs_costs_its_plan_keeps_its_slots_and_the_next_goes_by_the_cpu(
    hung: int, tmp_path: Path
) -> None:
    def case(chooser: Chooser) -> None:
        rig = Rig(chooser, tmp_path, faults={hung: Fault.HANG})
        plan = rig.demotion()
        with pytest.raises(StorageError, match="from VRAM in time"):
            rig.demote(plan)
        rig.writer.check_integrity()
        rig.writer.failed()
        assert rig.direct.counts.deadlines == 1 and "did not end in time" in rig.direct.given_up
        assert rig.writer.can_write and rig.writer.counts.failures == 0
        assert locked_ranges(rig.fds[0], 0, 1 << 20) and locked_ranges(rig.fds[1], 0, 1 << 20)
        before = rig.writer.counts.pages, rig.direct.counts.pages
        rig.demote(rig.demotion(), seed=2)
        rig.path.let_go()  # garbage, to slots that are nobody's
        rig.demote(rig.demotion(), seed=3)
        after = rig.writer.counts.pages, rig.direct.counts.pages
        assert after == (before[0] + 2 * PAGES, before[1])
        assert rig.direct.figures()["lost_chunks"] >= 1
        rig.close()

    assert explore_random(case, range(10)) is None


def test_memory_under_a_hung_write_is_not_freed(tmp_path: Path) -> None:
    rig = Rig(FirstChooser(), tmp_path, every=Fault.HANG)
    with pytest.raises(StorageError, match="from VRAM in time"):
        rig.demote(rig.demotion())
    rig.writer.close()
    rig.path.let_go()  # it reads its source: from freed memory, that fails
    rig.device.drain()
    rig.device.host_access()
    assert not rig.path.hung


def test_the_hung_writes_memory_freed_would_be_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(RandomChooser(2), tmp_path, every=Fault.HANG)
    with pytest.raises(StorageError, match="from VRAM in time"):
        rig.demote(rig.demotion())
    rig.direct._under_way.clear()
    rig.writer.close()
    with pytest.raises(AssertionError, match="not live device memory"):
        rig.path.let_go()
        rig.device.run_until(lambda: False)


def test_a_lock_goes_when_its_writes_have_ended(tmp_path: Path) -> None:
    rig = Rig(RandomChooser(9), tmp_path)
    rig.demote(rig.demotion())
    assert not locked_ranges(rig.fds[0], 0, 1 << 20) and not locked_ranges(rig.fds[1], 0, 1 << 20)
    rig.close()


def test_an_interruption_leaves_no_write_under_way(tmp_path: Path) -> None:
    def case(chooser: Chooser) -> None:
        for at in range(3):
            rig = Rig(chooser, tmp_path)
            left = [at]

            def interrupt(seconds: float, rig: Rig = rig, left: list[int] = left) -> bool:
                left[0] -= 1
                if left[0] == -1:
                    raise KeyboardInterrupt
                return rig._wait(seconds)

            rig.direct._after_reads = interrupt
            with pytest.raises(KeyboardInterrupt):
                rig.demote(rig.demotion())
            rig.writer.check_integrity()
            assert not locked_ranges(rig.fds[0], 0, 1 << 20) and not rig.direct.given_up
            rig.demote(rig.demotion(), seed=2)
            rig.close()

    assert explore_random(case, range(6)) is None


def test_a_page_that_cannot_be_encoded_is_said_before_any_write(tmp_path: Path) -> None:
    rig = Rig(RandomChooser(6), tmp_path)
    slots = write_blocks(rig.arena, seed=1)
    values = rig.arena.values
    rig.device.launch(
        rig.device.compute, lambda: values[slots[1], 0, 0, 3].fill_(float("nan"))
    )  # fmt: skip
    rig.arena.record_written()
    source = addresses(rig.arena, slots).reshape(BLOCKS, LAYERS)
    plan = rig.demotion()
    with pytest.raises(CodecError), rig.writer.lent(plan) as loan:
        rig.writer.write(loan, plan, source, rig.encoder.encode, _require_encoded)
    rig.writer.check_integrity()
    for slot in slots:
        rig.arena.release(slot)
    rig.demote(rig.demotion(), seed=2)
    rig.close()


def test_without_room_in_vram_the_cpu_writes(tmp_path: Path) -> None:
    rig = Rig(RandomChooser(7), tmp_path)
    used = sum(buffer.size_bytes for buffer in rig.device._buffers.values())
    rig.device._refusals = Refusals(device_bytes_max=used + 3 * rig.writer._chunk_bytes)
    rig.writer._staging = PinnedStaging(rig.device, 2 * rig.writer._chunk_bytes)
    rig.writer._threads = None
    assert not rig.direct._open(rig.writer._chunk_bytes, 2) and rig.direct.total_bytes == 0
    assert "no room for slots in VRAM" in rig.direct.given_up
    rig.device._refusals = Refusals()
    rig.writer._staging = None
    rig.demote(rig.demotion())
    assert rig.staged_pages == PAGES
    rig.close()


def test_a_codec_that_the_gpu_does_not_encode_goes_by_the_cpu(tmp_path: Path) -> None:
    rig = Rig(RandomChooser(8), tmp_path)
    rig.encoder._kernels = HostKernels(frozenset())
    rig.demote(rig.demotion())
    assert rig.staged_pages == PAGES and rig.path.writes_started == 0
    rig.close()


def test_reads_that_are_late_are_waited_for_once(tmp_path: Path) -> None:
    rig = Rig(RandomChooser(10), tmp_path)
    waits: list[float] = []
    rig.direct._after_reads = lambda seconds: bool(waits.append(seconds))
    for seed in range(2):
        rig.demote(rig.demotion(), seed=seed)
    assert waits == [2.0] and rig.direct.counts.pages == 2 * PAGES
    rig.close()
