"""The journal's end: groups at fresh sectors, segments that follow, failures once and for all."""

import pytest

from tests.disk.ledgerrig import SEGMENT_BYTES, UUID
from tierd.disk.frames import ORIGIN, FrameKind, Link, seed_of, unpack_frame
from tierd.disk.journal import (
    GROUP_BYTES_MAX,
    Journal,
    Segment,
    payload_bytes_max,
    segment_name,
    segment_number,
)
from tierd.disk.memory import MemoryDisk
from tierd.disk.window import Window
from tierd.errors import StorageError, StorageFull
from tierd.testing import Fault, FaultKind, SimulatedDisk
from tierd.units import MIB, SECTOR_BYTES


def journal_on(
    disk: MemoryDisk | SimulatedDisk, *, tail: tuple[bytes, ...] = (), size: int = SEGMENT_BYTES
) -> Journal:
    journal = Journal(
        disk, store_uuid=UUID, epoch=4, end=ORIGIN, found=[], next_number=1, segment_bytes=size
    )
    journal.begin(tail)
    return journal


def payloads_in(disk: MemoryDisk | SimulatedDisk, number: int) -> list[bytes]:
    """Return the payloads of a segment in the chain's order, its HEAD's left out."""
    handle = disk.open(segment_name(number))
    size_bytes = disk.size_bytes(handle)
    window = Window(lambda at, piece: disk.read_into(handle, at, piece), size_bytes)
    buffer = bytearray(SECTOR_BYTES)
    disk.read_into(handle, 0, memoryview(buffer))
    frame = unpack_frame(memoryview(buffer), 0, seed_of(UUID))
    assert frame.kind == FrameKind.HEAD
    found = []
    window.pass_by(frame)
    link = frame.link
    while (following := window.find(link, seed_of(UUID))) is not None:
        found.append(following.payload)
        window.pass_by(following)
        link = following.link
    return found


def test_names_are_numbers_in_hexadecimal() -> None:
    assert segment_name(42) == "journal/0000002a"
    assert segment_number("journal/0000002a") == 42


def test_groups_begin_at_sectors_and_no_sector_is_written_twice() -> None:
    written: list[int] = []
    disk = MemoryDisk()
    write = disk.write

    def noting(handle: int, offset: int, buffers: list[memoryview]) -> None:
        written.extend(range(offset, offset + sum(map(len, buffers)), SECTOR_BYTES))
        write(handle, offset, buffers)

    disk.write = noting  # type: ignore[method-assign]
    journal = journal_on(disk)
    groups = [[b"a"], [b"b" * 5000, b"c"], [b"d" * 4000], [b"e"]]
    for group in groups:
        journal.append(group)
    assert len(written) == len(set(written))
    assert payloads_in(disk, 1) == [payload for group in groups for payload in group]
    journal.check_integrity()


def test_a_full_segment_is_followed_by_another_and_frames_are_not_cut() -> None:
    disk = MemoryDisk()
    journal = journal_on(disk)
    most = payload_bytes_max(SEGMENT_BYTES)
    said = [bytes([n]) * most for n in range(9)]
    journal.append(said)
    found = [
        payload for n in range(1, len(journal.segments) + 1) for payload in payloads_in(disk, n)
    ]
    assert found == said
    assert [segment.number for segment in journal.segments] == [1, 2, 3]
    assert journal.size_bytes == 3 * SEGMENT_BYTES


def test_a_group_of_many_mebibytes_takes_a_buffer_of_four() -> None:
    disk = MemoryDisk()
    journal = journal_on(disk, size=64 * MIB)
    said = [bytes([n]) * (MIB + n) for n in range(20)]
    journal.append(said)
    assert payloads_in(disk, 1) == said
    assert len(journal._scratch) == GROUP_BYTES_MAX


def test_copies_are_durable_before_the_head_that_follows_them() -> None:
    operations: list[tuple[str, str]] = []
    disk = SimulatedDisk(1, watch=lambda operation, name: operations.append((operation, name)))
    journal = journal_on(disk, tail=(b"one", b"two"))
    assert [operation for operation, _ in operations] == [
        "create", "write", "sync", "write", "sync", "sync_folder",
    ]  # fmt: skip
    assert journal.durable == journal.end.sequence == 3
    journal.append([b"three"])
    assert payloads_in(disk, 1) == [b"one", b"two", b"three"]
    assert journal.durable == 3 < journal.end.sequence


def test_copies_larger_than_a_segment_get_a_larger_one() -> None:
    disk = MemoryDisk()
    journal = journal_on(disk, tail=tuple(bytes([n]) * 16000 for n in range(8)))
    assert journal.segments[0].size_bytes > SEGMENT_BYTES
    journal.append([b"next"])
    assert payloads_in(disk, 1)[-1] == b"next" or payloads_in(disk, 2) == [b"next"]


@pytest.mark.parametrize("kind", [FaultKind.IO_ERROR, FaultKind.SHORT])
def test_a_failed_write_is_tried_once_more_in_a_new_segment(kind: FaultKind) -> None:
    disk = SimulatedDisk(1)
    journal = journal_on(disk)
    journal.append([b"before"])
    disk.plan.add(Fault(kind, "write"))
    journal.append([b"one" * 3000, b"two"])
    assert payloads_in(disk, 2) == [b"one" * 3000, b"two"]
    assert journal.segments[0].last == 2
    assert not journal.failed


def test_a_write_that_fails_twice_leaves_the_journal_where_it_was() -> None:
    disk = SimulatedDisk(1)
    journal = journal_on(disk)
    journal.append([b"before"])
    before = journal.end
    disk.plan.add(Fault(FaultKind.IO_ERROR, "write", count=2))
    with pytest.raises(StorageError):
        journal.append([b"lost"])
    assert journal.end == before
    journal.append([b"after"])
    journal.sync()
    assert payloads_in(disk, journal.segments[-1].number) == [b"after"]
    journal.check_integrity()


def test_a_full_disk_is_told_at_once_and_the_journal_goes_on_later() -> None:
    disk = MemoryDisk(capacity_bytes=SEGMENT_BYTES)
    journal = journal_on(disk)
    payload = b"x" * payload_bytes_max(SEGMENT_BYTES)
    with pytest.raises(StorageFull):
        journal.append([payload] * 5)
    assert journal.end.sequence == journal.durable == 1  # what began a segment does not count
    journal.check_integrity()
    disk.capacity_bytes = 10 * SEGMENT_BYTES
    journal.append([payload] * 5)
    journal.check_integrity()
    assert not journal.failed


@pytest.mark.parametrize("operation", ["sync", "sync_folder"])
def test_a_failed_sync_is_final(operation: str) -> None:
    disk = SimulatedDisk(1)
    journal = journal_on(disk)
    journal.append([b"one"])
    disk.plan.add(Fault(FaultKind.IO_ERROR, operation))
    with pytest.raises(StorageError):
        journal.rotate()
    syncs = disk.operations
    for call in (journal.sync, journal.rotate, lambda: journal.append([b"two"])):
        with pytest.raises(StorageError, match="read-only"):
            call()
    assert disk.operations == syncs


def test_a_segment_that_could_not_begin_is_gone() -> None:
    disk = SimulatedDisk(1)
    journal = journal_on(disk)
    disk.plan.add(Fault(FaultKind.IO_ERROR, "write"))
    with pytest.raises(StorageError):
        journal.rotate()
    assert disk.names("journal") == ["journal/00000001"]
    journal.append([b"one"])
    assert disk.names("journal") == ["journal/00000001", "journal/00000003"]


def test_covered_segments_go_and_the_newest_stays() -> None:
    disk = MemoryDisk()
    for number in (1, 2):
        disk.create(segment_name(number), SECTOR_BYTES)
    journal = Journal(
        disk, store_uuid=UUID, epoch=4, end=Link(20, 5),
        found=[Segment(1, SECTOR_BYTES, 10), Segment(2, SECTOR_BYTES, 20)], next_number=3,
        segment_bytes=SEGMENT_BYTES,
    )  # fmt: skip
    journal.begin([])
    journal.drop_covered(19)
    assert disk.names("journal") == ["journal/00000002", "journal/00000003"]
    journal.drop_covered(10**9)
    assert disk.names("journal") == ["journal/00000003"]
    assert journal.size_bytes == SEGMENT_BYTES
