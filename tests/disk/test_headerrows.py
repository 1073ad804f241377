"""Rows of headers are what header.py packs one by one, and tell a sound slot from any other."""

import builtins

import numpy as np
import pytest
import xxhash

from tierd.disk import headerrows
from tierd.disk.header import HEADER_BYTES, SlotHeader, with_device_digest
from tierd.disk.headerrows import check_slots, fill_rows, header_rows, place_rows, seal_rows
from tierd.testing import FakeClock
from tierd.types import CodecId, DType, PageKey, Place, Tier


def test_each_row_is_the_header_packed_alone() -> None:
    draw = np.random.default_rng()
    uuid, namespace = draw.bytes(16), draw.bytes(16)

    def header(place: Place, key: PageKey, digest: bytes) -> SlotHeader:
        return SlotHeader(
            uuid, place.slab, place.slot, place.generation, place.codec, DType.BFLOAT16,
            *key, namespace, 2**40 + 1, 12345, digest,
        )  # fmt: skip

    def place(tier: Tier) -> Place:
        slab, slot, generation = draw.integers(0, 2**32, 3, dtype=np.uint64).tolist()
        return Place(tier, CodecId.K8V4, slab, slot, generation)

    count = 23
    keys = [
        PageKey(int(draw.integers(0, 2**64, dtype=np.uint64)), *draw.integers(0, 2**32, 2).tolist())
        for _ in range(count)
    ]
    digests = [draw.bytes(15) + b"\0" for _ in range(count)]
    rows = header_rows(count)
    fill_rows(rows, header(place(Tier.WARM), keys[0], bytes(16)), keys, digests)
    for tier in (Tier.WARM, Tier.COLD):
        places = [place(tier) for _ in range(count)]
        place_rows(rows, places)
        seal_rows(rows)
        packed = rows.tobytes()
        for i in range(count):
            own = header(places[i], keys[i], digests[i]).pack()
            assert packed[i * HEADER_BYTES :][:HEADER_BYTES] == own, i
            assert SlotHeader.unpack(own) == header(places[i], keys[i], digests[i])


STORED_BYTES = (64, 5000, 300)  # a page's, in turn
SLOT_BYTES = 3 * HEADER_BYTES


def slots_and_rows(seed: int):
    """Sound slots, every second with a device digest, and the unsealed rows of their pages."""
    draw = np.random.default_rng(seed)
    count = 9
    stored = np.array([STORED_BYTES[i % 3] for i in range(count)], np.int64)
    slots = draw.integers(0, 256, (count, SLOT_BYTES), np.uint8)
    rows = np.zeros(count, header_rows(1).dtype)
    for i, slot in enumerate(slots):
        size = int(stored[i])
        digest = xxhash.xxh3_128_digest(slot[HEADER_BYTES : HEADER_BYTES + size].tobytes())
        place = Place(Tier.COLD, CodecId.INT8, 7, i, 40 + i)
        key = PageKey(2**63 + 5, i, 300 + i)
        header = SlotHeader(
            bytes(16), *place[2:], place.codec, DType.BFLOAT16, *key, bytes(16), size, size, digest
        )
        fill_rows(rows[i : i + 1], header, [key], [digest])
        place_rows(rows[i : i + 1], [place])
        packed = header.pack()
        packed = with_device_digest(packed, int(draw.integers(2**63))) if i % 2 else packed
        slot[:HEADER_BYTES] = np.frombuffer(packed, np.uint8)
    return slots, rows, stored


def addresses(slots):
    return slots.ctypes.data + SLOT_BYTES * np.arange(len(slots), dtype=np.int64)


@pytest.fixture(params=["compiled", "python"])
def check(request, monkeypatch):
    """Each way of checking; where there is no Numba both are Python's."""
    if request.param == "python":
        monkeypatch.setattr(headerrows._Kernels, "get", lambda kernels: None)
    return check_slots


def test_sound_slots_are_sound_and_their_rows_are_their_headers(check) -> None:
    slots, rows, stored = slots_and_rows(seed=1)
    assert check(rows, addresses(slots), stored).all()
    assert rows.tobytes() == slots[:, :HEADER_BYTES].tobytes()


def test_any_flipped_bit_of_a_slot_is_found_and_of_that_slot_alone(check) -> None:
    slots, rows, stored = slots_and_rows(seed=2)
    draw = np.random.default_rng()
    for _ in range(600):
        page = int(draw.integers(len(slots)))
        byte = int(draw.integers(HEADER_BYTES + stored[page])) if draw.random() < 0.7 else int(
            draw.integers(128)
        )  # fmt: skip
        bit = np.uint8(1 << int(draw.integers(8)))
        slots[page, byte] ^= bit
        sound = check(rows, addresses(slots), stored)
        slots[page, byte] ^= bit
        assert np.flatnonzero(~sound).tolist() == [page], (page, byte, bit)


def test_another_pages_slot_an_older_write_and_the_wrong_place_are_found(check) -> None:
    slots, rows, stored = slots_and_rows(seed=3)
    at = addresses(slots)
    at[0], at[3] = at[3], at[0]  # of one size
    place_rows(rows[4:5], [Place(Tier.COLD, CodecId.INT8, 7, 4, 45)])  # a generation later
    rows["digest"][5] = np.frombuffer(bytes(16), "V16")
    assert np.flatnonzero(~check(rows, at, stored)).tolist() == [0, 3, 4, 5]


def test_bytes_behind_the_payload_are_nobodys(check) -> None:
    slots, rows, stored = slots_and_rows(seed=4)
    for page, size in enumerate(stored):
        slots[page, HEADER_BYTES + size :] ^= 0xFF
    assert check(rows, addresses(slots), stored).all()


def test_compiled_code_is_what_checks_where_numba_is() -> None:
    pytest.importorskip("numba")
    assert headerrows._kernels.get() is not None


def test_no_slots_are_no_work(check) -> None:
    _, rows, stored = slots_and_rows(seed=5)
    assert check(rows[:0], np.empty(0, np.int64), stored[:0]).shape == (0,)
    seal_rows(rows[:0])


def refusing(error: Exception, tries: list[str]):
    """Return an __import__ that raises `error` for the kernels, and notes that in `tries`."""
    real = builtins.__import__

    def without_kernels(name: str, *rest: object) -> object:
        if name == "tierd.disk.slotkernels":
            tries.append(name)
            raise error
        return real(name, *rest)

    return without_kernels


NO_FDS = "Too many open files"


@pytest.mark.parametrize("error", [OSError(24, NO_FDS), ImportError(f"dlopen: x.so: {NO_FDS}")])
def test_kernels_that_found_no_fds_are_loaded_later(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    clock, tries = FakeClock(), []
    kernels = headerrows._Kernels(clock.monotonic)
    with monkeypatch.context() as patch:
        patch.setattr(builtins, "__import__", refusing(error, tries))
        for _ in range(3):
            assert kernels.get() is None, "no error of a lane"
        assert len(tries) == 1, "no try at each batch"
        clock.advance(headerrows.LOAD_AGAIN_SECONDS)
        assert kernels.get() is None and len(tries) == 2
    assert kernels.get() is None
    clock.advance(headerrows.LOAD_AGAIN_SECONDS)
    assert kernels.get() is not None
    clock.advance(headerrows.LOAD_AGAIN_SECONDS)
    monkeypatch.setattr(builtins, "__import__", refusing(error, tries))
    assert kernels.get() is not None and len(tries) == 2, "what is loaded stays"


def test_where_there_are_no_kernels_that_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, tries = FakeClock(), []
    kernels = headerrows._Kernels(clock.monotonic)
    monkeypatch.setattr(builtins, "__import__", refusing(ImportError("no numba"), tries))
    for _ in range(3):
        assert kernels.get() is None
        clock.advance(headerrows.LOAD_AGAIN_SECONDS)
    assert len(tries) == 1


def test_a_library_that_finds_no_fd_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    from tierd.codec import xxh3

    there = xxh3.is_there()

    def full(name: str) -> object:
        raise OSError(f"{name}: cannot open shared object file: {NO_FDS}")

    xxh3.find.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(xxh3.ctypes, "CDLL", full)
        assert not xxh3.is_there()
    assert xxh3.is_there() == there
