"""Frames: each bit and each cut is noticed, another store's are no frames, strays are found."""

import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tierd.disk.frames import (
    FRAME_HEADER_BYTES,
    ORIGIN,
    FrameKind,
    Link,
    pack_frame,
    seed_of,
    stray_frames,
    unpack_frame,
)
from tierd.errors import StorageError
from tierd.units import SECTOR_BYTES

SEED = seed_of(bytes(range(16)))
U64 = st.integers(0, 2**64 - 2)
FOLLOWS = Link(41, 99)
PAYLOAD = random.Random(1).randbytes(300)


def frame(payload: bytes = PAYLOAD, follows: Link = FOLLOWS, seed: int = SEED) -> bytes:
    packed, _ = pack_frame(FrameKind.RECORDS, payload, follows, epoch=3, durable=40, seed=seed)
    return packed


@given(st.binary(max_size=300), U64, U64, st.sampled_from(list(FrameKind)))
def test_what_is_packed_is_unpacked(
    payload: bytes, number: int, other: int, kind: FrameKind
) -> None:
    follows = Link(number, other)
    packed, link = pack_frame(kind, payload, follows, epoch=5, durable=other, seed=SEED)
    found = unpack_frame(memoryview(b"x" * 3 + packed + b"y"), 3, SEED)
    assert (found.payload, found.follows, found.link) == (payload, follows, link)
    assert (found.kind, found.epoch, found.durable, found.offset) == (kind, 5, other, 3)
    assert found.length == len(packed) == FRAME_HEADER_BYTES + len(payload)


def test_the_bytes_on_disk_are_these_for_ever() -> None:
    packed, link = pack_frame(FrameKind.HEAD, b"abc", ORIGIN, epoch=1, durable=0, seed=7)
    assert packed[:40].hex() == (
        "33000000" "01000000" "0100000000000000" "0000000000000000" "0000000000000000"
        "01" "00000000000000"
    )  # fmt: skip
    assert packed[48:] == b"abc"
    assert link == Link(1, int.from_bytes(packed[40:48], "little"))


def test_each_bit_of_a_frame_is_guarded() -> None:
    packed = bytearray(frame())
    for bit in range(len(packed) * 8):
        packed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(StorageError):
            unpack_frame(memoryview(packed), 0, SEED)
        packed[bit // 8] ^= 1 << bit % 8
    unpack_frame(memoryview(packed), 0, SEED)


def test_each_cut_of_a_frame_is_noticed() -> None:
    packed = memoryview(frame())
    for length in range(len(packed)):
        with pytest.raises(StorageError):
            unpack_frame(packed[:length], 0, SEED)


def test_another_stores_frame_is_none_here() -> None:
    with pytest.raises(StorageError):
        unpack_frame(memoryview(frame(seed=seed_of(bytes(16)))), 0, SEED)


@given(st.binary(max_size=200))
@example(b"")
@example(bytes(200))
@example(b"\xff" * 200)
def test_any_other_bytes_are_no_frame(data: bytes) -> None:
    with pytest.raises(StorageError):
        unpack_frame(memoryview(data), 0, SEED)


@given(st.binary(max_size=SECTOR_BYTES), st.integers(0, 3))
def test_strays_are_found_at_sectors_whatever_stands_before(noise: bytes, sector: int) -> None:
    buffer = bytearray(4 * SECTOR_BYTES)
    buffer[: len(noise)] = noise
    packed = frame()
    start = sector * SECTOR_BYTES
    buffer[start : start + len(packed)] = packed
    found = list(stray_frames(memoryview(buffer), len(buffer), SEED))
    assert [stray.offset for stray in found] == [start]


def test_a_stray_may_reach_beyond_what_is_searched() -> None:
    packed = frame(bytes(3 * SECTOR_BYTES))
    buffer = bytearray(5 * SECTOR_BYTES)
    buffer[SECTOR_BYTES : SECTOR_BYTES + len(packed)] = packed
    assert len(list(stray_frames(memoryview(buffer), 2 * SECTOR_BYTES, SEED))) == 1
    assert not list(stray_frames(memoryview(buffer), SECTOR_BYTES, SEED))
