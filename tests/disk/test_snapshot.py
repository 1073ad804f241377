"""Snapshots: what is written is read, each bit of the header and of the columns is guarded."""

import contextlib
import random

import msgpack
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tests.disk.ledgerrig import NAMESPACE, UUID, State, rows_of, state_of
from tierd.disk.frames import Link
from tierd.disk.image import Image
from tierd.disk.memory import MemoryDisk
from tierd.disk.records import SessionRecord, SlabRecord
from tierd.disk.snapshot import (
    SECTIONS,
    Section,
    SnapshotHeader,
    read_snapshot,
    snapshot_name,
    write_snapshot,
)
from tierd.errors import NotFound, StorageError, StorageFull
from tierd.testing import Fault, FaultKind, SimulatedDisk, crash_choices
from tierd.units import SECTOR_BYTES

END = Link(0x123, 77)
NAME = snapshot_name(END.sequence)


def image_of(pages: int = 300) -> Image:
    image = Image(slab_limit=513)
    for slab in (3, 4):
        image.slabs[slab] = SlabRecord(slab, NAMESPACE.digest(), 8192, 4096)
    for number in (2**63, 5):
        image.sessions[number] = SessionRecord(number, NAMESPACE, "parked", bytes(4096), 2)
    draw = random.Random(2)
    image.commit(
        rows_of({
            (draw.choice([2**63, 5]), n // 2, n % 2): (3 + n % 2, n, 1, draw.randbytes(16))
            for n in range(pages)
        })
    )  # fmt: skip
    image.quarantine(4, 9, "digest")
    return image


def written(disk: MemoryDisk | SimulatedDisk, image: Image, end: Link = END) -> None:
    write_snapshot(disk, image, store_uuid=UUID, epoch=9, end=end)


@pytest.mark.parametrize("pages", [0, 1, 300])
def test_what_is_written_is_read(pages: int) -> None:
    disk, image = MemoryDisk(), image_of(pages)
    written(disk, image)
    snapshot = read_snapshot(disk, END.sequence, UUID)
    assert state_of(snapshot.image) == state_of(image)
    assert (snapshot.header.end, snapshot.header.epoch, snapshot.header.slab_limit) == (END, 9, 513)
    assert disk.names("snap") == [NAME]
    assert not disk.files


def test_an_empty_image_is_a_snapshot_too() -> None:
    disk = MemoryDisk()
    written(disk, Image())
    assert state_of(read_snapshot(disk, END.sequence, UUID).image) == State()


def test_each_of_the_32768_bits_of_the_header_is_guarded() -> None:
    disk = MemoryDisk()
    written(disk, image_of())
    header = bytearray(disk.named[NAME][:SECTOR_BYTES])
    SnapshotHeader.unpack(header)
    for bit in range(SECTOR_BYTES * 8):
        header[bit // 8] ^= 1 << bit % 8
        with pytest.raises(StorageError):
            SnapshotHeader.unpack(header)
        header[bit // 8] ^= 1 << bit % 8
    for length in range(SECTOR_BYTES):
        with pytest.raises(StorageError):
            SnapshotHeader.unpack(header[:length])


def test_a_flipped_bit_anywhere_is_refused_or_in_padding() -> None:
    disk, image = MemoryDisk(), image_of()
    written(disk, image)
    data, draw, state = disk.named[NAME], random.Random(8), state_of(image)
    refused = 0
    for _ in range(1500):
        bit = draw.randrange(len(data) * 8)
        data[bit // 8] ^= 1 << bit % 8
        try:
            assert state_of(read_snapshot(disk, END.sequence, UUID).image) == state
        except StorageError:
            refused += 1
        data[bit // 8] ^= 1 << bit % 8
    assert refused > 700


def test_every_cut_of_the_file_is_refused() -> None:
    disk = MemoryDisk()
    written(disk, image_of(50))
    whole = disk.named[NAME]
    for length in range(0, len(whole), 64):
        disk.named[NAME] = whole[:length]
        with pytest.raises(StorageError):
            read_snapshot(disk, END.sequence, UUID)


@pytest.mark.parametrize(("sequence", "uuid"), [(0x124, UUID), (0x123, bytes(16))])
def test_another_snapshot_or_another_stores_is_refused(sequence: int, uuid: bytes) -> None:
    disk = MemoryDisk()
    written(disk, image_of())
    disk.named[snapshot_name(sequence)] = disk.named[NAME]
    with pytest.raises(StorageError, match="another"):
        read_snapshot(disk, sequence, uuid)


def test_rows_out_of_order_are_refused_though_their_checksum_matches() -> None:
    image = image_of()
    image.rows_of_session(5)
    image.pages[5].sorted_rows = image.pages[5].sorted_rows[::-1]
    disk = MemoryDisk()
    written(disk, image)
    with pytest.raises(StorageError, match="order"):
        read_snapshot(disk, END.sequence, UUID)


JUNK = st.recursive(
    st.none() | st.integers(-(2**63), 2**64 - 1) | st.binary(max_size=20) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=5),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(SECTIONS), st.lists(JUNK, min_size=4, max_size=4)) | JUNK)
def test_any_table_is_understood_or_a_typed_error(table: object) -> None:
    disk = MemoryDisk()
    written(disk, image_of(4))
    packed = msgpack.packb(table)
    body = bytearray(disk.named[NAME][: SECTOR_BYTES - 8])
    body[12:16] = len(packed).to_bytes(4, "little")
    body[64 : 64 + len(packed)] = packed
    disk.named[NAME][:SECTOR_BYTES] = body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")
    with pytest.raises(StorageError):
        read_snapshot(disk, END.sequence, UUID)


@given(st.sampled_from(SECTIONS[1:]), st.lists(JUNK, max_size=3) | st.binary(max_size=20))
def test_any_section_is_understood_or_a_typed_error(name: str, items: object) -> None:
    disk = MemoryDisk()
    written(disk, image_of(4))
    blob = items if isinstance(items, bytes) else b"".join(msgpack.packb(item) for item in items)
    header = SnapshotHeader.unpack(disk.named[NAME][:SECTOR_BYTES])
    end = len(disk.named[NAME])
    disk.named[NAME] += blob.ljust(SECTOR_BYTES, b"\0")
    count = len(items) if isinstance(items, list) else 1
    header.sections[name] = Section(count, end, len(blob), xxhash.xxh3_128_digest(blob))
    disk.named[NAME][:SECTOR_BYTES] = header.pack()
    with contextlib.suppress(StorageError):
        read_snapshot(disk, END.sequence, UUID)


def test_a_crash_while_writing_leaves_the_old_one_and_maybe_the_new_one_whole() -> None:
    draw, seen = random.Random(4), set()

    def look(_operation: str, _name: str) -> None:
        for keep in crash_choices(disk.pending(), 30, draw):
            after = disk.crash(keep, torn=True)
            assert state_of(read_snapshot(after, 1, UUID).image) == old
            for name in set(after.names("snap")) - {snapshot_name(1)}:
                seen.add(name)
                if name == NAME:
                    assert state_of(read_snapshot(after, END.sequence, UUID).image) == new

    disk = SimulatedDisk(4)
    old, new = state_of(image_of(3)), state_of(image_of(9))
    written(disk, image_of(3), Link(1, 1))
    disk._watch = look
    written(disk, image_of(9))
    look("", "")
    assert seen == {NAME, NAME + ".tmp"}


@pytest.mark.parametrize("operation", ["create", "write", "sync", "rename", "sync_folder"])
def test_a_failed_write_leaves_nothing(operation: str) -> None:
    disk = SimulatedDisk(1, faults=[Fault(FaultKind.IO_ERROR, operation)])
    with pytest.raises(StorageError):
        written(disk, image_of())
    assert disk.names("snap") == []
    written(disk, image_of())
    assert disk.names("snap") == [NAME]


def test_no_space_is_said_so() -> None:
    disk = MemoryDisk(capacity_bytes=SECTOR_BYTES)
    with pytest.raises(StorageFull):
        written(disk, image_of())
    assert disk.used_bytes() == 0


def test_one_that_is_not_there_is_not_found() -> None:
    with pytest.raises(NotFound):
        read_snapshot(MemoryDisk(), 1, UUID)
