"""The cold pool: compiled threads find what Python finds, and what they miss Python names."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba import types

from tests.engine.device.coldfiles import LAYOUT, SIZE, ColdFile
from tierd.codec import xxh3
from tierd.codec.compiling import compile_cached
from tierd.disk.header import CHECKSUM_OFFSET, DEVICE_DIGEST_OFFSET, HEADER_BYTES
from tierd.errors import DeadlineExceeded, PageDamaged, PageMiss
from tierd_engine import coldpool, coldread
from tierd_engine.attention import reading
from tierd_engine.coldread import ColdReader, ColdUnit
from tierd_engine.staging import StagingRing

pytestmark = pytest.mark.skipif(
    not xxh3.is_there(), reason="this build of xxhash does not show its functions"
)
PAGES = 3  # of a unit


@pytest.fixture
def file(tmp_path: Path):
    made = ColdFile(tmp_path, units=7, unit_pages=PAGES, without=frozenset(range(0, 21, 2)))
    yield made
    os.close(made.fd)


@pytest.fixture
def reader():
    made = ColdReader(StagingRing(0, chunk_bytes=PAGES * LAYOUT.slot_bytes))
    yield made
    made.close()


def taken(reader: ColdReader) -> list[bytes]:
    """Take and release a unit; return its payloads."""
    found = [ctypes.string_at(int(address), SIZE) for address in reader.take()]
    reader.check_integrity()
    reader.release()
    return found


def payloads(file: ColdFile, *numbers: int) -> list[bytes]:
    return [file.payloads[number].tobytes() for number in numbers]


def shuffled(file: ColdFile) -> list[ColdUnit]:
    """Return units whose pages are no neighbours, or in another order than on disk."""
    numbers = [(2, 1, 0), (4, 3, 20), (5, 7, 9), (6, 8, 10), (11, 12, 13), (15, 14, 16)]
    return [ColdUnit(LAYOUT, tuple(file.page(number) for number in unit)) for unit in numbers]


@cache
def sound() -> Any:
    def is_sound(slot, stored_bytes, starts):  # type: ignore[no-untyped-def]
        return reading.is_sound(slot, stored_bytes, starts)

    return compile_cached(is_sound, (types.int64,) * 3, coldpool._SOURCES).call


def test_units_come_in_order_again_and_again_with_their_bytes(file, reader) -> None:
    reader.set_schedule(file.cold_units())
    assert reader._is_pooled
    for i in range(28):
        first = i % 7 * PAGES
        assert taken(reader) == payloads(file, *range(first, first + PAGES))
    assert reader.pages_read == 28 * PAGES
    assert reader._threads is None, "Python's threads were not needed"


@pytest.mark.parametrize("share_bytes", [1, 3 * LAYOUT.slot_bytes])
def test_pages_in_any_order_on_disk_come_to_their_places(
    file, reader, monkeypatch, share_bytes
) -> None:
    monkeypatch.setattr(coldread, "SHARE_BYTES", share_bytes)
    units = shuffled(file)
    reader.set_schedule(units)
    for i in range(18):
        numbers = [page.block for page in units[i % len(units)].pages]
        assert taken(reader) == payloads(file, *numbers)


def test_a_new_schedule_drops_what_the_old_one_read(file, reader) -> None:
    units = file.cold_units()
    for number in range(40):
        reader.set_schedule([units[number % 7], units[(number + 3) % 7]])
        first = number % 7 * PAGES
        assert taken(reader) == payloads(file, *range(first, first + PAGES))


def test_compiled_code_finds_every_flipped_bit_as_python_does(file) -> None:
    rng = np.random.default_rng()
    memory = np.zeros(2 * 4096 + LAYOUT.slot_bytes, np.uint8)
    at = -memory.ctypes.data % 4096
    slot = memory[at : at + LAYOUT.slot_bytes]
    used = HEADER_BYTES + SIZE
    for number in (0, 1):  # without a device digest, and with one
        check = file.page(number).verify
        starts = np.frombuffer(b"".join(check.starts), np.uint8).copy()
        slot[:] = np.frombuffer(file.slot(number), np.uint8)
        args = slot.ctypes.data, SIZE, starts.ctypes.data
        assert sound()(*args)
        header_bits = rng.permutation(8 * HEADER_BYTES)[:3000]
        fields = np.arange(8 * (DEVICE_DIGEST_OFFSET + 8))
        payload_bits = rng.integers(8 * HEADER_BYTES, 8 * used, 1000)
        for bit in np.concatenate([fields, header_bits, payload_bits]).tolist():
            slot[bit // 8] ^= 1 << bit % 8
            assert not sound()(*args), bit
            slot[bit // 8] ^= 1 << bit % 8
        slot[used:] = 1  # what is behind the payload is nobody's
        assert sound()(*args)
        check(memoryview(slot))


def test_a_header_with_a_right_checksum_of_another_page_is_not_sound(file) -> None:
    check = file.page(3).verify
    starts = np.frombuffer(b"".join(check.starts), np.uint8).copy()
    for other in (2, 4):
        slot = np.frombuffer(file.slot(other), np.uint8).copy()
        assert not sound()(slot.ctypes.data, SIZE, starts.ctypes.data)


@pytest.mark.parametrize("where", [0, 8, 50, 100, CHECKSUM_OFFSET, HEADER_BYTES, HEADER_BYTES + 77])
def test_damage_is_named_and_costs_only_its_unit(file, reader, where) -> None:
    broken = bytearray(file.slot(4))
    broken[where] ^= 16
    file.put(4, bytes(broken))
    units = file.cold_units()
    reader.set_schedule(units)
    assert taken(reader) == payloads(file, 0, 1, 2)
    with pytest.raises(PageDamaged) as damaged:
        reader.take()
    assert damaged.value.block == 4
    reader.set_schedule([units[0], units[2]])
    for first in (0, 6, 0):
        assert taken(reader) == payloads(file, first, first + 1, first + 2)


def test_what_was_wrong_once_is_cured_by_the_second_read(file, reader) -> None:
    file.put(4, bytes(LAYOUT.slot_bytes))
    reader.set_schedule(file.cold_units())
    reader._pool.wait(1, lambda: 5.0)
    file.put(4, file.slot(4))
    assert taken(reader) == payloads(file, 0, 1, 2)
    assert taken(reader) == payloads(file, 3, 4, 5)
    assert taken(reader) == payloads(file, 6, 7, 8)


@pytest.mark.parametrize("how", ["short", "closed"])
def test_a_file_that_ends_early_or_is_closed_is_a_miss(file, reader, how) -> None:
    if how == "short":
        os.ftruncate(file.fd, 4 * LAYOUT.slot_bytes + 100)
        units = file.cold_units()
    else:
        fd, file.fd = file.fd, 10**6
        units = file.cold_units()
        file.fd = fd
    reader.set_schedule(units)
    with pytest.raises(PageMiss):
        for _ in range(2):
            reader.take()
            reader.release()


def test_a_disk_that_does_not_answer_ends_at_the_deadline(file, reader, monkeypatch) -> None:
    monkeypatch.setattr(coldread, "READ_THREADS", 0)  # nobody reads
    monkeypatch.setattr(coldread, "READ_DEADLINE_SECONDS", 0.2)
    reader.set_schedule(file.cold_units())
    start = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="did not answer"):
        reader.take()
    with pytest.raises(DeadlineExceeded, match="did not end in time"):
        reader.set_schedule(file.cold_units())
    assert 0.4 <= time.monotonic() - start < 5


def test_other_checks_and_who_wants_to_be_told_are_served_by_python(file, reader) -> None:
    seen: list[int] = []
    reader.on_verified = lambda page, slot: seen.append(page.block)
    reader.set_schedule(file.cold_units()[:1])
    assert taken(reader) == payloads(file, 0, 1, 2)
    assert not reader._is_pooled and set(seen) == {0, 1, 2}


def test_without_xxhashs_functions_python_checks(file, reader, monkeypatch) -> None:
    monkeypatch.setattr(xxh3, "is_there", lambda: False)
    reader.set_schedule(file.cold_units())
    assert not reader._is_pooled
    assert taken(reader) == payloads(file, 0, 1, 2)


def test_a_closed_pool_leaves_no_thread_and_no_fd(file) -> None:
    def fds() -> int:
        return len(os.listdir("/proc/self/fd"))

    before, threads = fds(), set(threading.enumerate())
    for _ in range(5):
        reader = ColdReader(StagingRing(0, chunk_bytes=PAGES * LAYOUT.slot_bytes))
        reader.set_schedule(file.cold_units())
        assert fds() > before
        reader.close()
        reader.close()
    assert fds() == before and set(threading.enumerate()) <= threads


def test_counts_add_up_whenever_they_are_looked_at(file, reader) -> None:
    reader.set_schedule(file.cold_units())
    for _ in range(300):
        for _ in range(20):
            reader.check_integrity()
        reader.take()
        reader.release()


def test_tokens_too_many_wake_threads_for_nothing(file, reader) -> None:
    reader.set_schedule(file.cold_units())
    for i in range(14):
        reader._pool._wake(50)
        first = i % 7 * PAGES
        assert taken(reader) == payloads(file, first, first + 1, first + 2)


def test_a_pipe_full_of_tokens_blocks_nobody() -> None:
    """As where every thread hangs in a dead disk: here there is none."""
    pool = coldpool.ColdPool(0, 4, None)
    for _ in range(200):
        pool._wake(200)
    pool.close()


def test_a_forked_child_that_closes_the_reader_leaves_the_parents_threads(file, reader) -> None:
    reader.set_schedule(file.cold_units())
    reader.take()
    child = os.fork()
    if not child:
        reader._pool.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    reader.release()
    for i in range(1, 15):
        first = i % 7 * PAGES
        assert taken(reader) == payloads(file, first, first + 1, first + 2)


@pytest.mark.parametrize("what", ["pipe", "thread"])
def test_where_no_pool_can_be_made_python_reads_and_nothing_leaks(
    file, reader, monkeypatch, what
) -> None:
    made: list[int] = []

    def fails(real: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            made.append(1)
            if len(made) == 1:
                raise OSError(24, "no more") if what == "pipe" else RuntimeError("no more")
            return real(*args, **options)

        return call

    fds, threads = len(os.listdir("/proc/self/fd")), set(threading.enumerate())
    with monkeypatch.context() as patch:
        patch.setattr(coldread.ColdReader, "_fill", lambda reader: None)
        if what == "pipe":
            patch.setattr(os, "pipe2", fails(os.pipe2))
        else:
            patch.setattr(threading.Thread, "start", fails(threading.Thread.start))
        reader.set_schedule(file.cold_units())
    assert not reader._is_pooled
    assert len(os.listdir("/proc/self/fd")) == fds
    assert not [t for t in set(threading.enumerate()) - threads if t.is_alive()]
    reader._fill()
    assert taken(reader) == payloads(file, 0, 1, 2)


def test_fewer_threads_than_wanted_do(file, reader, monkeypatch) -> None:
    real, made = threading.Thread.start, []

    def third_fails(thread: threading.Thread) -> None:
        made.append(thread)
        if len(made) == 3:
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", third_fails)
    reader.set_schedule(file.cold_units())
    assert reader._is_pooled and len(reader._pool._threads) == 2
    for i in range(14):
        first = i % 7 * PAGES
        assert taken(reader) == payloads(file, first, first + 1, first + 2)


def test_a_thread_that_hangs_in_a_read_holds_the_ring_until_it_ends(
    file, reader, monkeypatch
) -> None:
    monkeypatch.setattr(coldread, "READ_DEADLINE_SECONDS", 0.2)
    monkeypatch.setattr(coldread, "READ_THREADS", 1)
    units = file.cold_units()
    reader.set_schedule(units)
    for _ in range(3):
        reader.take()
        reader.release()
    pool = reader._pool
    pool._chunks[0, 0] += 1  # a share of chunk 0 that does not come back
    for _ in range(2):
        with pytest.raises(DeadlineExceeded):
            reader.set_schedule(units)
    pool._chunks[0, 0] -= 1
    reader.set_schedule(units)
    assert taken(reader) == payloads(file, 0, 1, 2)
