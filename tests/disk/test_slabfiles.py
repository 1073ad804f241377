"""Slab files: slots lie where they should, and a disk that fails leaves the pool in order."""

import mmap
from collections.abc import Sequence

import pytest

from tierd.disk.slabfiles import SlabFiles
from tierd.disk.volatile import VolatileLedger
from tierd.errors import NotFound, StorageError, StorageFull
from tierd.memory.budget import ByteBudget
from tierd.memory.slabs import SlabIds, SlabPool
from tierd.testing import MemoryDisk, failing
from tierd.types import SlabRecord, Tier

SLOT = 8192
SLAB = 4 * SLOT
EIO = StorageError("input/output error")


def record(slab: int) -> SlabRecord:
    return SlabRecord(slab, bytes(16), SLOT, SLAB // SLOT)


def page(fill: int, size: int = SLOT) -> memoryview:
    buffer = memoryview(mmap.mmap(-1, size))
    buffer[:] = bytes([fill]) * size
    return buffer


def test_a_slot_lies_at_its_index_times_its_size() -> None:
    disk = MemoryDisk()
    files = SlabFiles(disk, VolatileLedger(bytes(16)))
    files.create(record(7))
    files.write_slots(7, 2, SLOT, [page(1, 4096), page(2, 4096)])
    (file,) = disk.files.values()
    assert file == bytes(2 * SLOT) + b"\1" * 4096 + b"\2" * 4096 + bytes(SLOT)
    into = page(0)
    files.read_slot(7, 2, SLOT, into)
    assert bytes(into) == b"\1" * 4096 + b"\2" * 4096


def test_a_slots_header_can_be_read_alone() -> None:
    files = SlabFiles(MemoryDisk(), VolatileLedger(bytes(16)))
    files.create(record(7))
    files.write_slots(7, 3, SLOT, [page(5)])
    header = page(0, 4096)
    files.read_slot(7, 3, SLOT, header)
    assert bytes(header) == b"\5" * 4096


def test_an_unknown_slab_is_not_found() -> None:
    files = SlabFiles(MemoryDisk(), VolatileLedger(bytes(16)))
    with pytest.raises(NotFound):
        files.read_slot(1, 0, SLOT, page(0))
    with pytest.raises(NotFound):
        files.fd(1)


def test_closing_removes_every_file() -> None:
    disk = MemoryDisk()
    files = SlabFiles(disk, VolatileLedger(bytes(16)))
    for slab in (1, 2, 3):
        files.create(record(slab))
    files.destroy(2)
    files.check_integrity()
    files.close()
    files.close()
    assert disk.files == {}


def pool_on(disk: MemoryDisk) -> tuple[SlabPool, ByteBudget]:
    budget = ByteBudget(3 * SLAB)
    pool = SlabPool(
        Tier.COLD,
        SLOT,
        bytes(16),
        budget,
        SLAB,
        SlabFiles(disk, VolatileLedger(bytes(16))),
        SlabIds(),
    )
    return pool, budget


def live(pool: SlabPool) -> None:
    """Reserve, commit, retire, reclaim and release, and again."""
    for _ in range(2):
        slots = pool.reserve(10)
        for slot in slots:
            pool.commit([slot])
        for slot in slots:
            pool.retire([slot], 1)
        pool.reclaim(2)
        pool.release_empty_slabs()


@pytest.mark.parametrize("last", [1, 2**63], ids=["once", "for ever"])
def test_each_slab_that_cannot_be_made_leaves_the_pool_in_order(last) -> None:
    for number in range(1, 7):
        numbers = range(number, max(number + 1, last))
        disk = MemoryDisk(fail=failing(EIO, numbers, operations=["create"]))
        pool, budget = pool_on(disk)
        with pytest.raises(StorageError):
            live(pool)
        pool.check_integrity()
        assert pool.capacity_bytes() == budget.used_bytes
        assert pool.counts().reserved == 0


def test_after_no_space_the_pool_goes_on_when_space_returns() -> None:
    disk = MemoryDisk(capacity_bytes=SLAB)
    pool, budget = pool_on(disk)
    with pytest.raises(StorageFull):
        pool.reserve(6)
    assert len(pool.reserve(4)) == 4
    with pytest.raises(StorageFull):
        pool.reserve(1)
    disk.capacity_bytes = 2 * SLAB
    assert len(pool.reserve(4)) == 4
    pool.check_integrity()
    assert budget.used_bytes == 2 * SLAB


def test_a_write_that_ends_after_a_sync_began_is_for_the_next_one() -> None:
    class Slow(MemoryDisk):
        """Syncs, as another lane may, while a write is under way."""

        synced = 0

        def write(self, handle: int, offset: int, buffers: Sequence[memoryview]) -> None:
            files.sync()
            super().write(handle, offset, buffers)

        def sync(self, handle: int) -> None:
            self.synced += 1
            super().sync(handle)

    disk = Slow()
    files = SlabFiles(disk, VolatileLedger(bytes(16)))
    files.create(record(7))
    files.write_slots(7, 0, SLOT, [page(1)])
    before = disk.synced
    files.sync()
    assert disk.synced == before + 1
