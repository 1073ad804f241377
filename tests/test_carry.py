"""Copies between warm and cold: right bytes, or a named error, and never a spread of damage."""

import pytest

from tests.rig import INT8_SLOT, LAYERS, Rig
from tierd.carry import Batch
from tierd.codec.layout import HEADER_BYTES
from tierd.disk.header import SlotHeader, with_device_digest
from tierd.disk.memory import MemoryDisk
from tierd.disk.posix import PosixDisk
from tierd.errors import PageDamaged, StorageError, StorageFull
from tierd.moves import Move
from tierd.testing import failing
from tierd.types import CodecId, PageKey, Tier


def demoted(rig: Rig):
    rig.engine(1)
    session = rig.session()
    rig.demote(session, [1])
    return session, [PageKey(session.number, layer, 1) for layer in range(LAYERS)]


def carry(rig: Rig, keys: list[PageKey], to: Tier) -> tuple[Batch, list[Move]]:
    moves = rig.store.traffic.begin_moves(keys, to)
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
    moves = rig.store.traffic.begin_moves(keys, Tier.COLD)
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


class StaleOnce(MemoryDisk):
    """Gives other bytes at the first read of `stale`'s place, as a disk's cache may."""

    stale: bytes | None = None

    def scatter(self, handle, offset, buffers) -> None:
        super().scatter(handle, offset, buffers)
        if self.stale is not None:
            buffers[0][: len(self.stale)] = self.stale
            self.stale = None


def test_a_device_digest_of_bytes_that_were_read_wrong_is_not_kept():
    rig = Rig(disk=StaleOnce())
    _, keys = demoted(rig)
    rig.move(keys, Tier.COLD)
    moves = rig.store.traffic.begin_moves(keys, Tier.WARM)
    written = bytes(next(iter(rig.disk.files.values())))
    other = written[moves[0].source.slot * INT8_SLOT :][:HEADER_BYTES]
    rig.disk.stale = with_device_digest(other, 7)[: HEADER_BYTES - 1] + b"?"
    batch = Batch(moves, Tier.WARM, rig.store.placement, rig.clock, 1e9)
    batch.carry()
    assert batch.errors == [None, None] and rig.disk.stale is None
    for move in moves:
        assert SlotHeader.unpack(move.warm).device_digest is None


class CountingDisk(MemoryDisk):
    """Remembers the slots of each I/O."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.reads: list[range] = []
        self.writes: list[range] = []

    def scatter(self, handle, offset, buffers) -> None:
        self.reads.append(slots(offset, buffers))
        super().scatter(handle, offset, buffers)

    def write(self, handle, offset, buffers) -> None:
        self.writes.append(slots(offset, buffers))
        super().write(handle, offset, buffers)


def slots(offset: int, buffers) -> range:
    first, rest = divmod(offset, INT8_SLOT)
    count, more = divmod(sum(map(len, buffers)), INT8_SLOT)
    assert (rest, more) == (0, 0)
    return range(first, first + count)


def stored(rig: Rig, blocks: int):
    rig.engine(1)
    session = rig.session()
    rig.demote(session, range(1, blocks + 1))
    return session, rig.pages(session, Tier.WARM)


def test_neighbours_are_carried_in_one_io_each_way_whatever_their_order():
    rig = Rig(disk=CountingDisk())
    session, keys = stored(rig, 4)
    rig.move(keys, Tier.COLD)
    assert rig.disk.writes == [range(0, 8)]
    rig.move(keys[1:3] + keys[:1] + keys[7:] + keys[4:6], Tier.WARM)
    assert rig.disk.reads == [range(0, 3), range(4, 6), range(7, 8)]
    for key in keys:
        assert rig.bytes_of(session, key.layer, key.block) == rig.payload(
            session, key, CodecId.INT8
        )
    rig.store.check_integrity()


def test_an_io_is_as_large_as_it_must_be_and_no_larger(monkeypatch):
    monkeypatch.setattr("tierd.carry.IO_BYTES", 2 * INT8_SLOT + 1)
    rig = Rig(disk=CountingDisk())
    _, keys = stored(rig, 4)
    rig.move(keys, Tier.COLD)
    assert rig.disk.writes == [range(0, 3), range(3, 6), range(6, 8)]


def test_a_damaged_page_parts_its_neighbours_and_is_not_written():
    rig = Rig(disk=CountingDisk())
    _, keys = stored(rig, 2)
    moves = rig.store.traffic.begin_moves(keys, Tier.COLD)
    moves[1].warm[HEADER_BYTES] ^= 1
    batch = Batch(moves, Tier.COLD, rig.store.placement, rig.clock, 1e9)
    batch.carry()
    assert [error is None for error in batch.errors] == [True, False, True, True]
    assert rig.disk.writes == [range(0, 1), range(2, 4)]


@pytest.mark.parametrize("operation", ["read", "write"])
def test_one_bad_place_does_not_cost_its_neighbours(operation):
    bad = StorageError("input/output error")

    class BadSlot(CountingDisk):
        def scatter(self, handle, offset, buffers) -> None:
            super().scatter(handle, offset, buffers)
            if operation == "read" and 2 in self.reads[-1]:
                raise bad

        def write(self, handle, offset, buffers) -> None:
            if operation == "write" and 2 in slots(offset, buffers):
                raise bad
            super().write(handle, offset, buffers)

    rig = Rig(disk=BadSlot())
    _, keys = stored(rig, 2)
    if operation == "read":
        rig.move(keys, Tier.COLD)
    batch, _ = carry(rig, keys, Tier.COLD if operation == "write" else Tier.WARM)
    assert batch.errors == [None, None, bad, None]


def test_no_space_is_not_tried_page_by_page():
    full = StorageFull("no space left")
    disk = CountingDisk(fail=failing(full, range(1, 2**63), operations=("write",)))
    rig = Rig(disk=disk)
    _, keys = stored(rig, 2)
    batch, _ = carry(rig, keys, Tier.COLD)
    assert batch.errors == [full] * 4 and len(disk.writes) == 1


def test_a_page_damaged_among_neighbours_is_read_again_alone():
    rig = Rig(disk=CountingDisk())
    session, keys = stored(rig, 2)
    rig.move(keys, Tier.COLD)
    place = session.index.get(keys[1].layer, keys[1].block).place
    rig.flip_cold_bit(place, INT8_SLOT, HEADER_BYTES + 5)
    batch, _ = carry(rig, keys, Tier.WARM)
    assert [error is None for error in batch.errors] == [True, False, True, True]
    assert rig.disk.reads == [range(0, 4), range(1, 2)]


@pytest.mark.parametrize(("fails", "ends"), [(range(1, 2), None), (range(1, 3), StorageError)])
def test_a_read_that_fails_is_tried_once_more(fails, ends):
    error = StorageError("input/output error")
    rig = Rig(disk=MemoryDisk(fail=failing(error, fails, operations=("read",))))
    _, keys = demoted(rig)
    rig.move(keys, Tier.COLD)
    batch, _ = carry(rig, keys[:1], Tier.WARM)
    assert (batch.errors == [None]) if ends is None else isinstance(batch.errors[0], ends)
