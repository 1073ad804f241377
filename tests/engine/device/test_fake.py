"""The fake device: CUDA's order and no more, poison, refusals; and the explorer over it."""

from __future__ import annotations

import numpy as np
import pytest

from tierd.errors import DeviceFailed
from tierd_engine.device.exploring import RandomChooser, explore_all, explore_random
from tierd_engine.device.fake import POISON, Chooser, FakeDevice, Refusals, bytes_at
from tierd_engine.device.port import Rows

CHUNK, PIECES = 64, 5
LABELS = ("filled", "filled by host", "read")


def pipeline(chooser: Chooser, without: str | None = None, *, torn: bool = True) -> FakeDevice:
    """Copy pieces through two chunks, sum each on the compute stream; check the sums."""
    device = FakeDevice(chooser, without=without, torn_copies=torn)
    copies = device.new_stream("in")
    source = np.arange(PIECES * CHUNK, dtype=np.uint8)
    chunks = [device.allocate(CHUNK) for _ in range(2)]
    filled = [device.new_event(f"filled {i}") for i in range(2)]
    read = [device.new_event(f"read {i}") for i in range(2)]
    sums: list[int] = []
    for piece in range(PIECES):
        i = piece % 2
        device.wait(copies, read[i], "read")
        device.copy_in(copies, source.ctypes.data + piece * CHUNK, chunks[i].address, CHUNK)
        device.record(filled[i], copies, "filled")
        device.wait(device.compute, filled[i], "filled")
        device.launch(device.compute, lambda i=i: sums.append(int(chunks[i].tensor.sum())))  # type: ignore[misc]
        device.record(read[i], device.compute, "read")
    end = device.new_event("end")
    device.record(end, device.compute, "filled by host")
    device.wait_host(end, 1.0, "filled by host")
    assert sums == [int(part.sum()) for part in source.reshape(PIECES, CHUNK)]
    device.check_integrity()
    return device


def test_the_pipeline_holds_in_random_orders_and_in_all() -> None:
    assert explore_random(pipeline, range(200)) is None
    explored = explore_all(lambda chooser: pipeline(chooser, torn=False), 5000)
    assert explored.is_all and explored.found is None
    assert explored.orders > 10


@pytest.mark.parametrize("label", LABELS)
def test_the_explorer_finds_a_label_left_out(label: str) -> None:
    found = explore_random(lambda chooser: pipeline(chooser, label), range(200))
    assert found is not None
    seed = int(found.how.removeprefix("seed "))
    with pytest.raises((AssertionError, DeviceFailed)):  # and it can be repeated
        pipeline(RandomChooser(seed), label)
    assert explore_all(lambda chooser: pipeline(chooser, label, torn=False), 5000).found


def test_labels_are_counted_whether_left_out_or_not() -> None:
    assert set(pipeline(RandomChooser(1)).labels) == set(LABELS)


def test_a_copy_reads_its_source_when_it_runs() -> None:
    device = FakeDevice()
    source = np.zeros(8, np.uint8)
    target = device.allocate(8)
    device.copy_in(device.compute, source.ctypes.data, target.address, 8)
    source[:] = 7
    device.follow(device.compute)
    assert target.tensor.tolist() == [7] * 8


def test_a_wait_holds_for_the_last_record_before_it() -> None:
    device = FakeDevice()
    other, event, ran = device.new_stream("other"), device.new_event("event"), []
    device.wait(device.compute, event, "never recorded: no wait")
    device.launch(device.compute, lambda: ran.append(1))
    device.follow(device.compute)
    device.launch(other, lambda: ran.append(2))
    device.record(event, other, "late")
    device.wait(device.compute, event, "late")
    device.launch(device.compute, lambda: ran.append(3))
    device.follow(device.compute)
    assert ran == [1, 2, 3]


def test_an_event_that_cannot_be_reached_is_an_error_with_its_label() -> None:
    device = FakeDevice(without="lost")
    other = device.new_stream("other")
    first, second = device.new_event("first"), device.new_event("second")
    device.record(first, other, "a")
    device.wait(other, second, "b")
    device.wait_host(first, 1.0, "x")
    second.marker = type(first.marker)()  # type: ignore[misc]  # of a stream that never runs
    device.wait(other, second, "c")
    device.record(first, other, "d")
    with pytest.raises(DeviceFailed, match="y: first is not reached within 1 s"):
        device.wait_host(first, 1.0, "y")


def test_memory_is_poison_at_first_and_after_free_and_a_late_copy_fails() -> None:
    device = FakeDevice()
    buffer = device.allocate(100)
    assert buffer.tensor.tolist() == [POISON] * 100
    source = np.ones(100, np.uint8)
    device.copy_in(device.compute, source.ctypes.data, buffer.address, 100)
    device.free(buffer)
    with pytest.raises(AssertionError, match="not live"):
        device.follow(device.compute)
    bytes_at(buffer.address, 1)[0] = 0
    with pytest.raises(AssertionError, match="used after free"):
        device.check_integrity()


def test_pinning_is_refused_beyond_the_limit() -> None:
    device = FakeDevice(refusals=Refusals(registered_bytes_max=8192))
    device.register(4096, 8192)
    with pytest.raises(DeviceFailed, match="does not pin"):
        device.register(65536, 4096)
    device.unregister(4096)
    assert device.registered_bytes == 0


def test_a_copy_of_which_a_part_is_pinned_is_refused() -> None:
    device = FakeDevice()
    host = np.zeros(4 * 4096, np.uint8)
    start = host.ctypes.data + -host.ctypes.data % 4096
    target = device.allocate(8192)
    device.register(start, 4096)
    device.copy_in(device.compute, start, target.address, 4096)
    assert device.pageable_bytes == 0
    device.copy_in(device.compute, start + 4096, target.address, 4096)
    assert device.pageable_bytes == 4096
    with pytest.raises(AssertionError, match="in part"):
        device.copy_in(device.compute, start, target.address, 8192)
    device.follow(device.compute)


def test_rows_are_gathered() -> None:
    device = FakeDevice()
    source = np.arange(64, dtype=np.uint8)
    target = device.allocate(32)
    rows = Rows(source.ctypes.data + 2, 16, target.address, 8, 4, 3)
    device.copy_in_rows(device.compute, rows)
    device.follow(device.compute)
    got = target.tensor.reshape(4, 8)
    assert got[:3, :4].tolist() == [[2, 3, 4, 5], [18, 19, 20, 21], [34, 35, 36, 37]]
    assert bool((got[:3, 4:] == POISON).all()) and bool((got[3] == POISON).all())


def test_a_kernel_may_not_enqueue() -> None:
    device = FakeDevice()
    event = device.new_event("event")
    device.launch(device.compute, lambda: device.record(event, device.compute, "inside"))
    with pytest.raises(AssertionError, match="only launch"):
        device.follow(device.compute)
