"""A window on a segment: frames across its pieces are whole, and it may go back."""

import pytest

from tierd.disk.frames import FRAME_BYTES_MAX, FRAME_HEADER_BYTES, ORIGIN, FrameKind, pack_frame
from tierd.disk.window import PIECE_BYTES, Window
from tierd.units import SECTOR_BYTES

SEED = 5
SIZE = 4 * PIECE_BYTES


def window_on(data: bytearray) -> tuple[Window, list[int]]:
    """Return a window and the offsets that it reads at."""
    reads: list[int] = []

    def read(at: int, piece: memoryview) -> None:
        reads.append(at)
        piece[:] = memoryview(data)[at : at + len(piece)]

    return Window(read, len(data)), reads


def put(data: bytearray, offset: int, payload_bytes: int) -> None:
    frame, _ = pack_frame(
        FrameKind.RECORDS, b"p" * payload_bytes, ORIGIN, epoch=1, durable=0, seed=SEED
    )
    data[offset : offset + len(frame)] = frame


@pytest.mark.parametrize("offset", [0, PIECE_BYTES - SECTOR_BYTES, 2 * PIECE_BYTES - SECTOR_BYTES])
def test_the_largest_frame_is_found_wherever_it_begins(offset: int) -> None:
    data = bytearray(SIZE)
    put(data, offset, FRAME_BYTES_MAX - FRAME_HEADER_BYTES)
    window, reads = window_on(data)
    assert [frame.offset for frame in window.strays(SEED)] == [offset]
    window.offset = offset
    found = window.find(ORIGIN, SEED)
    assert found is not None and found.offset == offset
    window.pass_by(found)
    assert window.offset == offset + FRAME_BYTES_MAX
    assert set(reads) == set(range(0, SIZE, PIECE_BYTES))


def test_each_piece_is_read_once_on_the_way() -> None:
    window, reads = window_on(bytearray(SIZE))
    assert not list(window.strays(SEED))
    assert reads == list(range(0, SIZE, PIECE_BYTES))
    window.offset = 0
    assert window.find(ORIGIN, SEED) is None
    assert reads[-2:] == [0, PIECE_BYTES]


def test_a_frame_may_stand_at_the_next_sector_and_not_at_the_one_after() -> None:
    for offset, found in ((SECTOR_BYTES, True), (2 * SECTOR_BYTES, False)):
        data = bytearray(4 * SECTOR_BYTES)
        put(data, offset, 10)
        window, _ = window_on(data)
        window.offset = 100
        assert (window.find(ORIGIN, SEED) is not None) == found


@pytest.mark.parametrize(
    ("offset", "blank"), [(99, True), (100, False), (8191, False), (8192, True)]
)
def test_blank_is_to_the_end_of_the_next_sector(offset: int, blank: bool) -> None:
    data = bytearray(4 * SECTOR_BYTES)
    data[offset] = 1
    window, _ = window_on(data)
    window.offset = 100
    assert window.blank_here() == blank


@pytest.mark.parametrize("size", [0, SECTOR_BYTES])
def test_a_short_file_has_no_frames(size: int) -> None:
    window, _ = window_on(bytearray(size))
    assert window.find(ORIGIN, SEED) is None
    assert window.blank_here()
    assert not list(window.strays(SEED))
