"""Superblock: four copies, a quorum of two, and a torn update that leaves one of two epochs."""

import random
import struct
from dataclasses import replace

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tierd.disk.memory import MemoryDisk
from tierd.disk.superblock import (
    COPY_STRIDE_BYTES,
    DROPPED_MAX,
    NAME,
    SUPERBLOCK_BYTES,
    Superblock,
    choose,
    read_copies,
    write_superblock,
)
from tierd.errors import NotFound, StorageError
from tierd.testing import Fault, FaultKind, SimulatedDisk, crash_choices, failing
from tierd.units import SECTOR_BYTES

U64 = st.integers(0, 2**64 - 1)
lists = st.lists(U64, max_size=DROPPED_MAX, unique=True).map(sorted).map(tuple)
superblocks = st.builds(Superblock, st.binary(min_size=16, max_size=16), U64, U64, U64, lists)
ONE = Superblock(bytes(range(16)), 7, 257, 99)
TWO = Superblock(bytes(range(16)), 8, 513, 120)
DROPPED = replace(ONE, dropped=(3, 2**63, 2**64 - 1))
FULL = replace(ONE, dropped=tuple(range(7, 7 + DROPPED_MAX)))


@given(superblocks)
def test_what_is_packed_is_unpacked(superblock: Superblock) -> None:
    assert Superblock.unpack(superblock.pack()) == superblock


def test_the_bytes_on_disk_are_these_for_ever() -> None:
    packed = ONE.pack()
    assert packed[:8] == b"TIERDSUP"
    assert struct.unpack_from("<II16sQQQ", packed, 8) == (1, 0, bytes(range(16)), 7, 257, 99)
    assert not any(packed[56:4088])
    assert struct.unpack_from("<Q", packed, 4088) == (xxhash.xxh3_64_intdigest(packed[:4088]),)


def test_a_list_makes_it_version_2_and_fills_the_sector_at_most() -> None:
    packed = DROPPED.pack()
    assert struct.unpack_from("<II", packed, 8) == (2, 0)
    assert packed[16:56] == ONE.pack()[16:56]
    assert struct.unpack_from("<4Q", packed, 56) == (3, 3, 2**63, 2**64 - 1)
    assert not any(packed[88:4088])
    assert len(FULL.pack()) == SECTOR_BYTES and Superblock.unpack(FULL.pack()) == FULL
    assert DROPPED_MAX == 503


@pytest.mark.parametrize(
    ("version", "words"),
    [(1, [1, 5]), (2, []), (2, [DROPPED_MAX + 1]), (2, [2, 5, 5]), (2, [2, 6, 5]), (2, [1, 5, 6])],
)
def test_a_list_that_is_none_is_no_superblock(version: int, words: list[int]) -> None:
    body = bytearray(ONE.pack()[:-8])
    body[8] = version
    struct.pack_into(f"<{len(words)}Q", body, 56, *words)
    with pytest.raises(StorageError, match="no known form"):
        Superblock.unpack(bytes(body) + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little"))


@pytest.mark.parametrize("one", [ONE, DROPPED, FULL])
def test_each_of_the_32768_bits_of_a_copy_is_guarded(one: Superblock) -> None:
    packed = bytearray(one.pack())
    for bit in range(SECTOR_BYTES * 8):
        packed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(StorageError):
            Superblock.unpack(packed)
        packed[bit // 8] ^= 1 << bit % 8
    assert Superblock.unpack(packed) == one


def test_each_cut_of_a_copy_is_noticed() -> None:
    packed = memoryview(ONE.pack())
    for length in range(SECTOR_BYTES):
        with pytest.raises(StorageError):
            Superblock.unpack(packed[:length])


@given(st.binary(max_size=80), st.booleans())
def test_any_other_bytes_are_no_superblock(data: bytes, sealed: bool) -> None:
    body = data.ljust(SECTOR_BYTES - 8, b"\0")
    checksum = xxhash.xxh3_64_intdigest(body) if sealed else 1
    with pytest.raises(StorageError):
        Superblock.unpack(body + checksum.to_bytes(8, "little"))


def test_a_version_to_come_is_refused_and_named() -> None:
    body = bytearray(ONE.pack()[:-8])
    body[8] = 3
    with pytest.raises(StorageError, match="format 3"):
        Superblock.unpack(bytes(body) + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little"))


@pytest.mark.parametrize(
    ("copies", "chosen"),
    [
        ([ONE, ONE, ONE, ONE], ONE), ([TWO, None, ONE, ONE], ONE), ([TWO, TWO, ONE, ONE], TWO),
        ([TWO, TWO, None, None], TWO), ([TWO, ONE, None, None], None), ([None] * 4, None),
        ([ONE, None, None, None], None), ([], None), ([ONE, DROPPED, DROPPED, ONE], DROPPED),
    ],
)  # fmt: skip
def test_the_newest_that_two_agree_on_is_chosen(copies: list, chosen: object) -> None:
    assert choose(copies) == chosen


@pytest.mark.parametrize("two", [TWO, DROPPED])
def test_an_update_cut_anywhere_leaves_the_old_or_the_new(two: Superblock) -> None:
    seen = set()

    def look(_operation: str, _name: str) -> None:
        for keep in crash_choices(disk.pending(), 64, draw):
            after = disk.crash(keep, torn=True)
            seen.add(choose(read_copies(after)))

    draw = random.Random(3)
    disk = SimulatedDisk(3)
    write_superblock(disk, ONE)
    disk._watch = look
    write_superblock(disk, two)
    look("", "")
    assert seen == {ONE, two}


def test_the_first_one_is_there_whole_or_not_at_all() -> None:
    seen = set()

    def look(_operation: str, _name: str) -> None:
        for keep in crash_choices(disk.pending(), 64, random.Random(4)):
            try:
                seen.add(choose(read_copies(disk.crash(keep))))
            except NotFound:
                seen.add(None)

    disk = SimulatedDisk(4, watch=look)
    write_superblock(disk, ONE)
    disk._watch = lambda *_: None
    assert seen == {None, ONE}
    assert choose(read_copies(disk.crash([]))) == ONE


@pytest.mark.parametrize(
    ("length", "copies"),
    [(0, 0), (4095, 0), (4096, 1), (2 * COPY_STRIDE_BYTES, 2), (SUPERBLOCK_BYTES - 1, 4)],
)
def test_a_file_that_was_cut_is_read_as_far_as_it_goes_and_replaced_whole(
    length: int, copies: int
) -> None:
    disk = MemoryDisk()
    write_superblock(disk, ONE)
    disk.named[NAME] = disk.named[NAME][:length]
    assert read_copies(disk) == [ONE] * copies + [None] * (4 - copies)
    write_superblock(disk, TWO)
    assert read_copies(disk) == [TWO] * 4
    assert len(disk.named[NAME]) == SUPERBLOCK_BYTES


def test_a_copy_that_cannot_be_read_is_tried_again_and_then_missing() -> None:
    disk = MemoryDisk(fail=failing(StorageError("I/O"), {1, 3, 4}, operations=("read",)))
    write_superblock(disk, ONE)
    assert read_copies(disk) == [ONE, None, ONE, ONE]


@pytest.mark.parametrize("kind", [FaultKind.IO_ERROR, FaultKind.SYNC_DROPS])
def test_an_update_whose_sync_fails_leaves_the_old_one_however_often(kind: FaultKind) -> None:
    disk = SimulatedDisk(1)
    write_superblock(disk, ONE)
    for _ in range(3):
        disk.plan.add(Fault(kind, "sync"))
        with pytest.raises(StorageError):
            write_superblock(disk, TWO)
        for after in (disk, *(disk.crash(torn=True) for _ in range(20))):
            assert read_copies(after) == [ONE] * 4
    write_superblock(disk, TWO)
    assert read_copies(disk.crash([])) == [TWO] * 4
