"""Copies between warm and cold: right bytes, or a named error, and never a spread of damage."""

import pytest

from tests.rig import INT8_SLOT, LAYERS, Rig
from tierd.carry import Batch
from tierd.codec.layout import HEADER_BYTES
from tierd.disk.memory import MemoryDisk
from tierd.disk.posix import PosixDisk
from tierd.errors import PageDamaged, StorageError
from tierd.placement import Move
from tierd.testing import failing
from tierd.types import CodecId, PageKey, Tier


def demoted(rig: Rig):
    rig.engine(1)
    session = rig.session()
    rig.demote(session, [1])
    return session, [PageKey(session.number, layer, 1) for layer in range(LAYERS)]


def carry(rig: Rig, keys: list[PageKey], to: Tier) -> tuple[Batch, list[Move]]:
    moves = [rig.store.traffic.begin_move(key, to) for key in keys]
    batch = Batch(moves, to, rig.store.placement, rig.clock, 1e9)
    batch.carry()
    return batch, moves


def test_bytes_go_through_a_real_file_and_back(tmp_path):
    with PosixDisk(str(tmp_path / "cold"), ephemeral=True) as disk:
        rig = Rig(disk=disk)
        session, keys = demoted(rig)
        for tier in (Tier.COLD, Tier.WARM):
            rig.move(keys, tier)
            for key in keys:
                expected = rig.payload(session, key, CodecId.INT8)
                assert session.index.get(key.layer, 1).place.tier is tier
                if tier is Tier.WARM:
                    assert rig.bytes_of(session, key.layer, 1) == expected
        rig.store.close()


def test_a_damaged_warm_page_is_not_written_and_the_others_are():
    rig = Rig()
    _, keys = demoted(rig)
    moves = [rig.store.traffic.begin_move(key, Tier.COLD) for key in keys]
    moves[0].warm[HEADER_BYTES + 7] ^= 1
    batch = Batch(moves, Tier.COLD, rig.store.placement, rig.clock, 1e9)
    batch.carry()
    assert isinstance(batch.errors[0], PageDamaged) and batch.errors[1] is None
    written = next(iter(rig.disk.files.values()))
    place = moves[0].destination
    assert not any(written[place.slot * INT8_SLOT : (place.slot + 1) * INT8_SLOT])


@pytest.mark.parametrize("offset", [0, 40, 4088, HEADER_BYTES, HEADER_BYTES + 4096])
def test_a_bit_flipped_on_disk_is_found(offset):
    rig = Rig()
    session, keys = demoted(rig)
    rig.move(keys, Tier.COLD)
    rig.flip_cold_bit(session.index.get(0, 1).place, INT8_SLOT, offset)
    batch, _ = carry(rig, keys, Tier.WARM)
    assert isinstance(batch.errors[0], PageDamaged) and batch.errors[1] is None


def test_a_write_that_went_to_another_slot_is_found():
    rig = Rig()
    session, keys = demoted(rig)
    rig.move(keys, Tier.COLD)
    first, second = (session.index.get(layer, 1).place for layer in range(LAYERS))
    written = next(iter(rig.disk.files.values()))
    start = second.slot * INT8_SLOT
    written[first.slot * INT8_SLOT : (first.slot + 1) * INT8_SLOT] = written[
        start : start + INT8_SLOT
    ]
    batch, _ = carry(rig, keys, Tier.WARM)
    assert isinstance(batch.errors[0], PageDamaged) and batch.errors[1] is None


def test_a_write_that_never_reached_the_disk_is_found():
    rig = Rig()
    session, keys = demoted(rig)
    rig.move(keys, Tier.COLD)
    place = session.index.get(0, 1).place
    written = next(iter(rig.disk.files.values()))
    written[place.slot * INT8_SLOT : (place.slot + 1) * INT8_SLOT] = bytes(INT8_SLOT)
    batch, _ = carry(rig, keys, Tier.WARM)
    assert isinstance(batch.errors[0], PageDamaged)


@pytest.mark.parametrize(("fails", "ends"), [(range(1, 2), None), (range(1, 3), StorageError)])
def test_a_read_that_fails_is_tried_once_more(fails, ends):
    error = StorageError("input/output error")
    rig = Rig(disk=MemoryDisk(fail=failing(error, fails, operations=("read",))))
    _, keys = demoted(rig)
    rig.move(keys, Tier.COLD)
    batch, _ = carry(rig, keys[:1], Tier.WARM)
    assert (batch.errors == [None]) if ends is None else isinstance(batch.errors[0], ends)
