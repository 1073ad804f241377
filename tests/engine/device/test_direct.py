"""Direct cold reads: each fault ends in right bytes or a typed miss, in any order; none hangs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.engine.device.coldfiles import LAYOUT, ColdFile, Rig
from tierd.errors import DeadlineExceeded, PageDamaged
from tierd_engine import coldread
from tierd_engine.device import direct
from tierd_engine.device.direct import DirectCold, DirectCounts
from tierd_engine.device.exploring import RandomChooser, explore_random
from tierd_engine.device.fake import Chooser, FakeDevice, FirstChooser
from tierd_engine.device.fakepath import FakePath, FakeRead, Fault
from tierd_engine.device.fences import Fence
from tierd_engine.device.stager import Piece

SEEDS = range(60)
FENCES = [
    Fence.RECORD_LANDING_READ, Fence.WAIT_LANDING_READ, Fence.RECORD_CHECKED, Fence.WAIT_CHECKED,
]  # fmt: skip


def rig_of(
    chooser: Chooser, folder: Path, faults: Mapping[int, Fault] | None = None,
    every: Fault | None = None, *, fence: Fence | None = None,
    no_digest: frozenset[int] = frozenset(),
) -> tuple[Rig, FakePath]:  # fmt: skip
    """Return a rig that has read every unit once. `faults`, `every`: of its reads from here on."""
    device = FakeDevice(chooser, without=fence)
    path = FakePath(device)
    rig = Rig(device, ColdFile(folder, without=no_digest), path)
    rig.step()
    rig.direct.begin()
    path.faults, path.every, path.started = faults or {}, every, 0
    rig.schedule()
    rig.direct.counts, rig.reader.pages_read = DirectCounts(), 0
    return rig, path


def test_a_unit_is_the_cpus_first_and_goes_direct_from_then_on(tmp_path: Path) -> None:
    def case(chooser: Chooser) -> None:
        rig, path = rig_of(chooser, tmp_path)
        for _ in range(2):
            rig.step()
        assert rig.direct.counts.units == 10 and rig.reader.pages_read == 0
        assert rig.direct.counts.bytes == 20 * LAYOUT.slot_bytes and path.started >= 10
        assert not rig.direct.given_up
        rig.close()

    assert explore_random(case, range(25)) is None


def test_where_nothing_can_go_direct_compiled_threads_read(tmp_path: Path) -> None:
    rig = Rig(FakeDevice(FirstChooser()), ColdFile(tmp_path), None)
    for _ in range(2):
        rig.step()
    assert rig.reader._is_pooled and rig.direct.counts == DirectCounts()
    rig.close()


@pytest.mark.parametrize("fence", FENCES)
def test_the_explorer_sees_each_fence_left_out(fence: Fence, tmp_path: Path) -> None:
    def case(chooser: Chooser) -> None:
        rig, _ = rig_of(chooser, tmp_path, fence=fence)
        for _ in range(3):
            rig.step()
        counts = rig.direct.counts
        assert counts.mismatches == counts.errors == counts.deadlines == 0, "it was not whole"
        rig.close()

    assert explore_random(case, SEEDS) is not None


@pytest.mark.parametrize("fault", [Fault.ERROR, Fault.SHORT, Fault.WRONG])
def test_one_fault_costs_a_read_by_the_cpu_and_nothing_else(fault: Fault, tmp_path: Path) -> None:
    def case(chooser: Chooser) -> None:
        rig, _ = rig_of(chooser, tmp_path, faults={2: fault})
        for _ in range(3):
            rig.step()
        counts = rig.direct.counts
        assert (counts.errors, counts.mismatches) == ((0, 1) if fault is Fault.WRONG else (1, 0))
        # By the CPU: the failed unit at once, and in the two steps after.
        assert rig.reader.pages_read == 2 * 3 and counts.units == 3 * 4
        assert not rig.direct.given_up
        rig.close()

    assert explore_random(case, range(15)) is None


@pytest.mark.parametrize("fault", [Fault.ERROR, Fault.SHORT, Fault.WRONG])
def test_a_path_that_always_fails_is_given_up(fault: Fault, tmp_path: Path) -> None:
    rig, path = rig_of(RandomChooser(3), tmp_path, every=fault)
    for _ in range(4):
        rig.step()
    assert "3 direct reads failed in a row" in rig.direct.given_up
    assert rig.direct.figures()["units"] == 0 and path.started <= 6
    rig.close()


@pytest.mark.parametrize("hung", [0, 1, 4])
def test_a_read_that_hangs_ends_at_the_deadline_and_its_late_bytes_harm_nobody(
    hung: int, tmp_path: Path
) -> None:
    def case(chooser: Chooser) -> None:
        rig, path = rig_of(chooser, tmp_path, faults={hung: Fault.HANG})
        rig.step()
        counts = rig.direct.counts
        assert counts.deadlines == 1 and "did not end within 2 s" in rig.direct.given_up
        path.let_go()  # garbage, to where its bytes should have gone
        for _ in range(2):
            rig.step()
        rig.schedule()
        rig.step()
        assert rig.direct.figures()["lost_chunks"] >= 1
        rig.close()

    assert explore_random(case, range(15)) is None


def test_memory_under_a_hung_read_is_not_freed(tmp_path: Path) -> None:
    rig, path = rig_of(FirstChooser(), tmp_path, every=Fault.HANG)
    rig.step()
    rig.close()
    path.let_go()  # a write to freed memory would be seen
    rig.device.check_integrity()


def test_pages_without_a_device_digest_go_the_cpus_way(tmp_path: Path) -> None:
    rig, _ = rig_of(RandomChooser(1), tmp_path, no_digest=frozenset({0, 5}))
    for _ in range(2):
        rig.step()
    assert rig.direct.counts.units == 2 * 3 and rig.reader.pages_read == 2 * 4
    rig.close()


def test_a_slot_that_holds_another_page_by_now_is_a_typed_miss(tmp_path: Path) -> None:
    rig, _ = rig_of(RandomChooser(2), tmp_path)
    rig.file.put(4, rig.file.slot(7))
    rig.direct.schedule(rig.units)  # forget what was read ahead
    with pytest.raises(PageDamaged, match="holds another page") as raised:
        rig.step()
    assert raised.value.block == 4 and rig.direct.counts.mismatches == 1
    rig.stager.abandon()
    rig.file.put(4, rig.file.slot(4))
    rig.schedule()
    rig.step()
    rig.close()


def test_a_cpu_read_that_hangs_too_is_a_typed_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, _ = rig_of(RandomChooser(5), tmp_path, every=Fault.ERROR)
    monkeypatch.setattr(coldread, "READ_DEADLINE_SECONDS", 0.0)
    with pytest.raises(DeadlineExceeded, match="did not answer"):
        rig.step()
    monkeypatch.undo()
    rig.stager.abandon()
    rig.schedule()
    rig.step()
    rig.close()


def test_a_step_given_up_leaves_its_landed_units_free(tmp_path: Path) -> None:
    def case(chooser: Chooser) -> None:
        rig, _ = rig_of(chooser, tmp_path)
        for taken in (0, 1, 2):
            rig.stager.begin([Piece(0, LAYOUT, 2, ())] * 5)
            for _ in range(taken):
                rig.stager.take()
                rig.stager.release()
            rig.stager.abandon()
            rig.direct.check_integrity()
            rig.schedule()
        rig.step()
        rig.close()

    assert explore_random(case, range(10)) is None


def whole_steps(chooser: Chooser, folder: Path, **faults: Any) -> None:
    """Two steps in which nothing is to be noticed."""
    rig, path = rig_of(chooser, folder, **faults)
    for _ in range(2):
        rig.step()
        path.let_go()
    counts = rig.direct.counts
    assert counts.mismatches == counts.errors == 0, "it was not whole"
    rig.close()


def test_the_explorer_sees_the_wait_for_a_read_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeRead, "wait", lambda self, seconds: True)
    assert explore_random(lambda chooser: whole_steps(chooser, tmp_path), SEEDS) is not None


def test_the_explorer_sees_the_comparison_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DirectCold, "_matches", lambda self, pending: True)
    found = explore_random(lambda c: whole_steps(c, tmp_path, faults={3: Fault.WRONG}), range(3))
    assert found is not None


def test_the_explorer_sees_a_chunk_used_again_under_a_hung_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct._Pending, "has_ended", True)
    rig, path = rig_of(RandomChooser(1), tmp_path, {1: Fault.HANG})
    rig.step()
    rig.close()  # which frees the memory that the read may write to
    path.let_go()
    with pytest.raises(AssertionError, match="used after free"):
        rig.device.check_integrity()
