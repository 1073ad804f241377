"""Direct cold writes: each fault ends in right bytes on the disk or a typed error, in any order."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.device.directrig import LAYERS, PAGES, Rig, require_encoded
from tests.engine.device.test_encoder import BLOCKS, addresses, write_blocks
from tests.engine.test_coldwrite import GEOMETRY as WIRE_GEOMETRY
from tests.engine.test_coldwrite import WARM_BYTES, Engine, lend_all_of_warm
from tests.wirerig import INT8, MAX_TOKENS, small_config
from tierd.client import Client
from tierd.daemon import EmbeddedDaemon
from tierd.disk.slotlocks import locked_ranges
from tierd.errors import CodecError, StorageError
from tierd.types import CodecId
from tierd_engine.arena import hot_block_bytes
from tierd_engine.coldwrite import ColdWriter
from tierd_engine.device.arena import DeviceArena
from tierd_engine.device.coldpath import PathKind
from tierd_engine.device.coldstaging import PinnedStaging
from tierd_engine.device.directwrite import DirectWrites
from tierd_engine.device.encoder import DeviceEncoder
from tierd_engine.device.exploring import RandomChooser, explore_random
from tierd_engine.device.fake import Chooser, FakeDevice, FirstChooser, Refusals
from tierd_engine.device.fakepath import FakePath, FakeWrite, Fault
from tierd_engine.device.fences import Fence
from tierd_engine.device.kernels import HostKernels
from tierd_engine.device.probing import ColdPaths

SEEDS = range(60)
FENCES = [
    Fence.RECORD_WRITTEN, Fence.WAIT_WRITTEN, Fence.RECORD_DEMAND, Fence.WAIT_DEMAND,
    Fence.RECORD_COPIED_OUT, Fence.WAIT_COPIED_OUT, Fence.RECORD_SLOTS_WHOLE,
    Fence.WAIT_SLOTS_WHOLE,
]  # fmt: skip


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


@pytest.mark.parametrize("label", [Fence.WAIT_COPIED_OUT, Fence.WAIT_SLOTS_WHOLE])
def test_an_interrupted_wait_leaves_chunks_that_can_be_used_again(
    label: Fence, tmp_path: Path
) -> None:
    def case(chooser: Chooser) -> None:
        rig = Rig(chooser, tmp_path)
        wait, left = rig.device.wait_host, [label]

        def interrupted(event: Any, seconds: float, asked: str) -> None:
            if asked in left:
                left.remove(label)
                raise KeyboardInterrupt
            wait(event, seconds, asked)

        rig.device.wait_host = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            rig.demote(rig.demotion())
        assert rig.path.writes_started == 0 and not rig.direct.given_up
        rig.demote(rig.demotion(), seed=2)
        rig.close()

    assert explore_random(case, range(12)) is None


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
        rig.writer.write(loan, plan, source, rig.encoder.encode, require_encoded)
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


WIRE_BLOCKS = 10


def device_engine(client: Client, device: FakeDevice, faults: Mapping[int, Fault]) -> Engine:
    """Return a session of a real daemon, hot on a device, whose disk takes pages from there."""
    budget = WIRE_BLOCKS * hot_block_bytes(WIRE_GEOMETRY)
    arena = DeviceArena(device, WIRE_GEOMETRY, budget, blocks_max=WIRE_BLOCKS)
    encoder = DeviceEncoder(device, HostKernels(), arena, device.new_event("none"), digests=True)
    reads, writes = itertools.count(), itertools.count()
    path = FakePath(device, write_faults=faults)
    paths = ColdPaths(
        device, path, counts=lambda: next(reads), write_counts=lambda: next(writes)
    )  # fmt: skip
    return Engine(
        client, arena=arena, encode=encoder.encode, direct=DirectWrites(device, encoder, paths),
        staging=lambda size_bytes: PinnedStaging(device, size_bytes),
    )  # fmt: skip


@pytest.mark.parametrize("faults", [{}, {0: Fault.ERROR, 3: Fault.SHORT}], ids=["whole", "failing"])
@pytest.mark.parametrize("is_ephemeral", [True, False], ids=["ephemeral", "durable"])
def test_a_daemon_keeps_what_a_disk_took_from_vram(
    is_ephemeral: bool, faults: dict[int, Fault], tmp_path: Path
) -> None:
    config = small_config(
        tmp_path, warm_bytes=WARM_BYTES, **{"cold.ephemeral": is_ephemeral}
    )  # fmt: skip
    device = FakeDevice(RandomChooser(11))
    with EmbeddedDaemon(config) as daemon, Client.connect(daemon.socket) as client:
        lend_all_of_warm(client)
        engine = device_engine(client, device, faults)
        engine.demote([3, 1, 2])
        engine.demote([0, 4, 5, 6, 7, 8, 9], first=True)
        engine.check(range(WIRE_BLOCKS))
        direct = engine.cold.figures()["direct"]
        assert direct["pages"] > 0 and direct["errors"] == len(faults)
        assert client.stats()["direct_demotions"] == 2 * WIRE_BLOCKS
        tokens = np.arange(WIRE_BLOCKS * WIRE_GEOMETRY.block_tokens, dtype=np.uint32)
        engine.handle.suspend(tokens, WIRE_BLOCKS)
        number = engine.handle.id
        engine.cold.close()
    if is_ephemeral:
        return
    with EmbeddedDaemon(config) as daemon, Client.connect(daemon.socket) as client:
        engine.client = client
        engine.handle = client.resume(number, INT8, MAX_TOKENS)
        assert engine.handle.sealed_blocks == WIRE_BLOCKS
        engine.check(range(WIRE_BLOCKS))
