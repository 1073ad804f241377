"""The cold reader: right bytes or a typed miss, within a deadline, in the schedule's order."""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from tierd.codec.layout import HEADER_BYTES, page_layout
from tierd.errors import DeadlineExceeded, PageDamaged, PageMiss
from tierd.types import CodecId, DType, Geometry
from tierd_engine import coldread
from tierd_engine.coldread import ColdPage, ColdReader, ColdUnit
from tierd_engine.staging import RING_CHUNKS, StagingRing

GEOMETRY = Geometry(layers=1, kv_heads=1, head_dim=16, dtype=DType.FLOAT32, block_tokens=16)
LAYOUT = page_layout(GEOMETRY, CodecId.RAW)


@pytest.fixture
def slab(tmp_path: Path) -> int:
    """A file of 40 slots, each filled with its own number."""
    path = tmp_path / "slab"
    path.write_bytes(b"".join(bytes([i]) * LAYOUT.slot_bytes for i in range(40)))
    return os.open(path, os.O_RDONLY)


def _page(fd: int, slot: int, verify: object = None) -> ColdPage:
    def accept(_: memoryview) -> None:
        return None

    return ColdPage(0, slot, fd, slot * LAYOUT.slot_bytes, verify or accept)  # type: ignore[arg-type]


def _unit(fd: int, *slots: int) -> ColdUnit:
    return ColdUnit(LAYOUT, tuple(_page(fd, slot) for slot in slots))


def _first_bytes(addresses: np.ndarray) -> list[int]:
    return [ctypes.string_at(int(address), 1)[0] for address in addresses]


def _reader(*, cuts_ring: bool = False, chunk_slots: int = 4) -> ColdReader:
    ring = StagingRing(0, chunk_bytes=chunk_slots * LAYOUT.slot_bytes)
    return ColdReader(ring, cuts_ring=cuts_ring)


def test_units_come_in_order_again_and_again(slab: int) -> None:
    reader = _reader()
    reader.set_schedule([_unit(slab, 3 * i, 3 * i + 1, 3 * i + 2) for i in range(7)])
    for i in range(21):
        unit = i % 7
        assert _first_bytes(reader.take()) == [3 * unit, 3 * unit + 1, 3 * unit + 2]
        reader.check_integrity()
        reader.release()
    assert reader.pages_read == 63
    reader.close()


@pytest.mark.parametrize("pages", [1, 2, 3, 4])
def test_small_units_are_read_further_ahead(slab: int, pages: int) -> None:
    reader = _reader(cuts_ring=True)
    units = [_unit(slab, *range(pages * i, pages * (i + 1))) for i in range(10)]
    for schedule in (units, units[::-1]):
        reader.set_schedule(schedule)
        for i in range(25):
            ahead, most = reader._issued_count - reader._taken_count, RING_CHUNKS * 4 // pages
            # Chunks are filled again a quarter of them together.
            assert 0.75 * min(10, most) < ahead <= min(10, most)
            slots = [page.block for page in schedule[i % 10].pages]
            assert _first_bytes(reader.take()) == slots
            reader.check_integrity()
            reader.release()
    reader.close()


def test_a_taken_chunk_keeps_its_bytes_until_release(slab: int) -> None:
    reader = _reader()
    reader.set_schedule([_unit(slab, i) for i in range(2 * RING_CHUNKS)])
    addresses = reader.take()
    while reader._issued_count < RING_CHUNKS:
        reader._fill()
    for futures in reader._issued:
        for future in futures:
            future.result(5)
    assert _first_bytes(addresses) == [0]
    reader.close()


def test_a_new_schedule_drops_what_the_old_one_read(slab: int) -> None:
    reader = _reader()
    reader.set_schedule([_unit(slab, 1), _unit(slab, 2)])
    reader.take()
    reader.set_schedule([_unit(slab, 9)])
    assert _first_bytes(reader.take()) == [9]
    reader.close()


def test_a_damaged_page_is_read_twice_and_then_a_typed_error(slab: int) -> None:
    calls = []

    def verify(view: memoryview) -> None:
        calls.append(len(view))
        raise PageDamaged("digest", layer=0, block=4)

    reader = _reader()
    reader.set_schedule([ColdUnit(LAYOUT, (_page(slab, 4, verify),))])
    with pytest.raises(PageDamaged):
        reader.take()
    assert calls == [LAYOUT.slot_bytes] * 2
    reader.close()


def test_a_bit_flipped_on_the_way_is_cured_by_the_second_read(slab: int) -> None:
    calls = []

    def verify(_: memoryview) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise PageDamaged("digest", layer=0, block=4)

    reader = _reader()
    reader.set_schedule([ColdUnit(LAYOUT, (_page(slab, 4, verify),))])
    assert _first_bytes(reader.take()) == [4]
    reader.close()


def _reads(monkeypatch: pytest.MonkeyPatch, *fds: int) -> list[tuple[int, int]]:
    """Return where (slot, slots) of the reads of `fds` to come are noted."""
    reads, preadv = [], os.preadv

    def noted(fd: int, buffers: list[memoryview], offset: int) -> int:
        size = LAYOUT.slot_bytes
        if fd in fds:  # threads of an earlier reader may be at their last read
            reads.append((offset // size, sum(map(len, buffers)) // size))
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", noted)
    return reads


def test_neighbours_on_disk_are_one_read_in_any_order(
    slab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, reader = _reads(monkeypatch, slab), _reader()
    reader.set_schedule([_unit(slab, 7, 5, 6, 9)])
    assert _first_bytes(reader.take()) == [7, 5, 6, 9]
    assert sorted(reads) == [(5, 3), (9, 1)]
    reader.close()


def test_neighbours_in_number_alone_or_in_another_file_are_not_read_together(
    slab: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = os.open(tmp_path / "slab", os.O_RDONLY)
    reads, reader = _reads(monkeypatch, slab, other), _reader()
    reader.set_schedule([ColdUnit(LAYOUT, (_page(slab, 1), _page(other, 2), _page(other, 3)))])
    assert _first_bytes(reader.take()) == [1, 2, 3]
    assert sorted(reads) == [(1, 1), (2, 2)]
    reader.close()
    os.close(other)


def test_a_read_is_as_large_as_it_must_be_and_no_larger(
    slab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coldread, "RUN_BYTES", LAYOUT.slot_bytes + 1)
    reads, reader = _reads(monkeypatch, slab), _reader()
    reader.set_schedule([_unit(slab, 0, 1, 2, 3), _unit(slab, 4)])
    assert _first_bytes(reader.take()) == [0, 1, 2, 3]
    reader.release()
    assert _first_bytes(reader.take()) == [4]
    assert {(0, 2), (2, 2), (4, 1)} == set(reads)
    reader.close()


def test_one_thread_reads_several_pages_that_lie_apart(
    slab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coldread, "SHARE_BYTES", 2 * LAYOUT.slot_bytes)
    reads, reader = _reads(monkeypatch, slab), _reader(chunk_slots=5)
    unit = _unit(slab, 8, 0, 2, 5, 6)
    assert unit.shares() == [[[1], [2]], [[3, 4]], [[0]]]
    reader.set_schedule([unit])
    assert [len(futures) for futures in reader._issued] == [3]
    assert _first_bytes(reader.take()) == [8, 0, 2, 5, 6]
    assert sorted(reads) == [(0, 1), (2, 1), (5, 2), (8, 1)]
    reader.close()


def test_a_page_damaged_among_neighbours_is_read_again_alone_and_named(
    slab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(_: memoryview) -> None:
        raise PageDamaged("digest", layer=0, block=3)

    reads, reader = _reads(monkeypatch, slab), _reader()
    pages = (_page(slab, 2), _page(slab, 3, damaged), _page(slab, 4))
    reader.set_schedule([ColdUnit(LAYOUT, pages)])
    with pytest.raises(PageDamaged):
        reader.take()
    assert reads == [(2, 3), (3, 1)]
    reader.close()


def test_neighbours_that_cannot_be_read_together_are_read_alone_and_the_culprit_named(
    slab: int,
) -> None:
    reader = _reader()
    reader.set_schedule([_unit(slab, 38, 39, 40)])
    with pytest.raises(PageMiss, match="ends early") as raised:
        reader.take()
    assert raised.value.block == 40
    reader.close()


def test_a_short_file_and_a_closed_file_are_misses(slab: int, tmp_path: Path) -> None:
    reader = _reader()
    for fd, slot in ((slab, 40), (9999, 0)):
        reader.set_schedule([_unit(fd, slot)])
        with pytest.raises(PageMiss) as raised:
            reader.take()
        assert raised.value.block == slot
    reader.close()


def test_a_stuck_disk_ends_at_the_deadline(slab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    monkeypatch.setattr(coldread, "READ_DEADLINE_SECONDS", 0.05)
    reader = _reader()
    reader.set_schedule([ColdUnit(LAYOUT, (_page(slab, 0, lambda _: gate.wait(5)),))])
    with pytest.raises(DeadlineExceeded, match="did not answer"):
        reader.take()
    gate.set()
    reader.close()


def test_payload_addresses_skip_the_header(slab: int) -> None:
    reader = _reader()
    reader.set_schedule([_unit(slab, 5, 6)])
    addresses = reader.take()
    assert (addresses - reader.ring.address(0)).tolist() == [
        HEADER_BYTES,
        LAYOUT.slot_bytes + HEADER_BYTES,
    ]
    reader.close()


def test_a_late_read_of_a_unit_that_failed_writes_into_no_later_one(
    slab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ring is used again only when all that was begun has ended."""
    late, preadv, armed = threading.Event(), os.preadv, [True]

    def slow(fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset == 2 * LAYOUT.slot_bytes and armed:
            armed.clear()
            late.wait(5)
        return preadv(fd, buffers, offset)

    def refuse(_: memoryview) -> None:
        late_soon = threading.Timer(0.3, late.set)
        late_soon.start()
        raise PageDamaged("digest", layer=0, block=0)

    monkeypatch.setattr(coldread, "SHARE_BYTES", 1)
    monkeypatch.setattr(os, "preadv", slow)
    reader = _reader()
    reader.set_schedule([ColdUnit(LAYOUT, (_page(slab, 0, refuse), _page(slab, 2)))])
    with pytest.raises(PageDamaged):
        reader.take()
    reader.set_schedule([_unit(slab, 8, 9)])
    addresses = reader.take()
    assert late.is_set()
    assert _first_bytes(addresses) == [8, 9]
    assert not reader._unsettled
    reader.close()


def test_a_stuck_read_holds_every_later_schedule_up(
    slab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, stuck, preadv = threading.Event(), threading.Event(), os.preadv

    def hang(fd: int, buffers: list[memoryview], offset: int) -> int:
        started.set()
        stuck.wait(30)
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", hang)
    monkeypatch.setattr(coldread, "READ_DEADLINE_SECONDS", 0.1)
    reader = _reader()
    reader.set_schedule([_unit(slab, 0, 1)])
    assert started.wait(5)
    for _ in range(3):
        with pytest.raises(DeadlineExceeded):
            reader.set_schedule([_unit(slab, 8, 9)])
    stuck.set()
    monkeypatch.setattr(coldread, "READ_DEADLINE_SECONDS", 10.0)
    reader.set_schedule([_unit(slab, 8, 9)])
    assert _first_bytes(reader.take()) == [8, 9]
    reader.close()
