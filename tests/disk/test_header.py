"""Slot header: what is written is read, and no flipped bit, cut or foreign page passes."""

import dataclasses
import struct

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tierd.disk.header import (
    HEADER_BYTES,
    SlotCheck,
    SlotHeader,
    device_digest_in,
    verify_header,
    verify_slot,
    with_device_digest,
)
from tierd.errors import PageDamaged
from tierd.types import CodecId, DType

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
SIXTEEN = st.binary(min_size=16, max_size=16)

headers = st.builds(
    SlotHeader,
    store_uuid=SIXTEEN, slab=U32, slot=U32, generation=U32,
    codec=st.sampled_from(list(CodecId)[1:]), dtype=st.sampled_from(list(DType)),
    session=U64, layer=U32, block=U32,
    namespace_digest=SIXTEEN, logical_bytes=U64, stored_bytes=U64, payload_digest=SIXTEEN,
    device_digest=st.none() | U64,
)  # fmt: skip

PAYLOAD = np.random.default_rng(7).bytes(5000)
HEADER = SlotHeader(
    store_uuid=bytes(range(16)), slab=3, slot=5, generation=7, codec=CodecId.INT8,
    dtype=DType.BFLOAT16, session=2**63 + 1, layer=29, block=11,
    namespace_digest=bytes(range(16, 32)), logical_bytes=8192, stored_bytes=len(PAYLOAD),
    payload_digest=xxhash.xxh3_128_digest(PAYLOAD),
)  # fmt: skip
DEVICE_HEADER = dataclasses.replace(HEADER, device_digest=0x0123456789ABCDEF)
both_versions = pytest.mark.parametrize("header", [HEADER, DEVICE_HEADER], ids=["1", "2"])
# One other value for each field: a header that differs in it is another page's.
OTHER = {
    "store_uuid": bytes(16), "slab": 4, "slot": 6, "generation": 8, "codec": CodecId.RAW,
    "dtype": DType.FLOAT16, "session": 1, "layer": 28, "block": 12,
    "namespace_digest": bytes(16), "stored_bytes": len(PAYLOAD) - 1,
}  # fmt: skip


def slot_of(header: SlotHeader, payload: bytes = PAYLOAD) -> memoryview:
    slot = bytearray(HEADER_BYTES + 8192)
    header.pack_into(memoryview(slot))
    slot[HEADER_BYTES : HEADER_BYTES + len(payload)] = payload
    return memoryview(slot)


def resealed(packed: bytes, offset: int, value: bytes) -> bytes:
    """Return a header with bytes changed and a checksum that matches them."""
    body = packed[:offset] + value + packed[offset + len(value) : HEADER_BYTES - 8]
    return body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")


@given(headers)
def test_what_is_packed_is_unpacked(header) -> None:
    packed = header.pack()
    assert len(packed) == HEADER_BYTES
    assert SlotHeader.unpack(packed) == header


def test_the_bytes_on_disk_are_these_for_ever() -> None:
    packed = HEADER.pack()
    assert packed[:8] == b"TIERDSLT"
    assert struct.unpack_from("<II", packed, 8) == (1, 0)
    assert packed[16:32] == HEADER.store_uuid
    assert struct.unpack_from("<IIIBBH", packed, 32) == (3, 5, 7, 2, 2, 0)
    assert struct.unpack_from("<QII", packed, 48) == (2**63 + 1, 29, 11)
    assert packed[64:80] == HEADER.namespace_digest
    assert struct.unpack_from("<QQ", packed, 80) == (8192, 5000)
    assert packed[96:112] == HEADER.payload_digest
    assert not any(packed[112:4088])
    assert struct.unpack_from("<Q", packed, 4088) == (xxhash.xxh3_64_intdigest(packed[:4088]),)


def test_a_device_digest_stands_behind_what_version_1_has_and_makes_it_version_2() -> None:
    packed = DEVICE_HEADER.pack()
    assert struct.unpack_from("<II", packed, 8) == (2, 0)
    assert packed[16:112] == HEADER.pack()[16:112]
    assert struct.unpack_from("<Q", packed, 112) == (0x0123456789ABCDEF,)
    assert not any(packed[120:4088])
    assert SlotHeader.unpack(dataclasses.replace(HEADER, device_digest=0).pack()).device_digest == 0


@given(headers, U64)
def test_a_packed_header_is_given_a_device_digest(header, digest) -> None:
    packed = with_device_digest(header.pack(), digest)
    assert packed == dataclasses.replace(header, device_digest=digest).pack()
    assert device_digest_in(packed) == digest
    assert device_digest_in(header.pack()) == header.device_digest


def test_packing_leaves_the_payload_alone() -> None:
    slot = slot_of(HEADER)
    HEADER.pack_into(slot)
    assert bytes(slot[HEADER_BYTES : HEADER_BYTES + len(PAYLOAD)]) == PAYLOAD


@both_versions
def test_each_of_the_32768_bits_of_a_header_is_guarded(header) -> None:
    packed = bytearray(header.pack())
    for bit in range(HEADER_BYTES * 8):
        packed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(PageDamaged):
            SlotHeader.unpack(packed)
        packed[bit // 8] ^= 1 << bit % 8
    assert SlotHeader.unpack(packed) == header


def test_each_cut_of_a_header_is_noticed() -> None:
    packed = memoryview(HEADER.pack())
    for length in range(HEADER_BYTES):
        with pytest.raises(PageDamaged):
            SlotHeader.unpack(packed[:length])


@given(st.binary(max_size=64))
def test_any_other_bytes_are_no_header(data) -> None:
    with pytest.raises(PageDamaged):
        SlotHeader.unpack(data.ljust(HEADER_BYTES, b"\0"))


@pytest.mark.parametrize(
    ("offset", "value"),
    [(0, b"X"), (8, b"\0"), (8, b"\3"), (12, b"\1"), (44, b"\0"), (44, b"\6"), (45, b"\0"),
     (45, b"\4"), (46, b"\1"), (112, b"\1"), (119, b"\1"), (120, b"\1"), (4087, b"\1")],
    ids=["magic", "version 0", "version 3", "reserved word", "no codec", "codec to come",
         "dtype 0", "dtype 4", "reserved half", "digest of version 2", "its last byte",
         "first of padding", "last of padding"],
)  # fmt: skip
def test_what_this_version_does_not_know_is_refused_though_its_checksum_matches(
    offset, value
) -> None:
    with pytest.raises(PageDamaged):
        SlotHeader.unpack(resealed(HEADER.pack(), offset, value))


# -- whole slots ------------------------------------------------------------------


@both_versions
def test_a_whole_slot_is_verified_with_its_digest_known_or_not(header) -> None:
    """Its device digest is never known: it comes from the slot."""
    for digest in (HEADER.payload_digest, b""):
        expected = dataclasses.replace(HEADER, payload_digest=digest)
        assert verify_slot(slot_of(header), expected) == header
        assert verify_header(slot_of(header)[:HEADER_BYTES], expected) == header


@both_versions
def test_each_bit_of_a_slots_header_is_guarded(header) -> None:
    slot = slot_of(header)
    checks = [
        lambda buffer: verify_slot(buffer, HEADER),
        lambda buffer: verify_header(buffer, HEADER),
        SlotCheck(dataclasses.replace(HEADER, payload_digest=b"")),
    ]
    for check in checks:
        check(slot)
    for bit in range(0, HEADER_BYTES * 8):
        if 130 * 8 < bit < 4080 * 8 and bit % 97:
            continue
        slot[bit // 8] ^= 1 << bit % 8
        for check in checks:
            with pytest.raises(PageDamaged):
                check(slot)
        slot[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize("name", OTHER)
def test_a_slot_that_differs_in_one_field_is_another_page(name) -> None:
    other = dataclasses.replace(HEADER, **{name: OTHER[name]})
    with pytest.raises(PageDamaged, match=rf"layer 29 block 11.*{name}") as caught:
        verify_slot(slot_of(other), HEADER)
    assert (caught.value.layer, caught.value.block) == (29, 11)


def test_every_field_that_names_a_page_is_compared() -> None:
    # The first follows from the geometry, the second is compared by itself, the last is the slot's.
    free = {"logical_bytes", "payload_digest", "device_digest"}
    assert set(OTHER) == {field.name for field in dataclasses.fields(SlotHeader)} - free


def test_each_bit_of_the_payload_is_guarded() -> None:
    slot = slot_of(HEADER)
    for bit in range(0, len(PAYLOAD) * 8, 7):
        slot[HEADER_BYTES + bit // 8] ^= 1 << bit % 8
        with pytest.raises(PageDamaged, match="digest"):
            verify_slot(slot, HEADER)
        slot[HEADER_BYTES + bit // 8] ^= 1 << bit % 8
    verify_slot(slot, HEADER)


def test_a_lost_write_leaves_an_older_page_that_is_whole_and_still_refused() -> None:
    older = dataclasses.replace(HEADER, payload_digest=xxhash.xxh3_128_digest(PAYLOAD[::-1]))
    for check in (verify_slot, verify_header):
        with pytest.raises(PageDamaged, match="older"):
            check(slot_of(older, PAYLOAD[::-1]), HEADER)


def test_a_header_alone_says_nothing_of_the_payload() -> None:
    assert verify_header(slot_of(HEADER, PAYLOAD[::-1]), HEADER) == HEADER


def test_a_slot_cut_short_is_refused() -> None:
    slot = slot_of(HEADER)
    for length in (0, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + len(PAYLOAD) - 1):
        with pytest.raises(PageDamaged):
            verify_slot(slot[:length], HEADER)


def test_a_slot_never_written_is_refused() -> None:
    with pytest.raises(PageDamaged):
        verify_slot(memoryview(bytes(HEADER_BYTES + 8192)), HEADER)
