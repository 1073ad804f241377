"""The fake in memory: a capacity, faults on demand, and files that outlive their handles."""

import pytest

from tests.disk.support import PAGE, SIZE, aligned, read
from tierd.disk.memory import MemoryDisk
from tierd.errors import StorageError, StorageFull
from tierd.testing import failing


def test_a_memory_disk_has_a_capacity() -> None:
    disk = MemoryDisk(capacity_bytes=SIZE)
    handle = disk.create("slab/00000001", SIZE)
    with pytest.raises(StorageFull):
        disk.create("slab/00000002", PAGE)
    disk.delete(handle)
    disk.create("slab/00000002", PAGE)


def test_an_operation_can_be_made_to_fail_once_or_for_ever() -> None:
    eio = StorageError("input/output error")
    for numbers, outcomes in ((range(2, 3), "010"), (range(2, 2**63), "011")):
        disk = MemoryDisk(fail=failing(eio, numbers, operations=["read"]))
        handle = disk.create("slab/00000001", SIZE)
        for outcome in outcomes:
            try:
                read(disk, handle, 0, PAGE)
                assert outcome == "0"
            except StorageError:
                assert outcome == "1"


def test_a_flipped_bit_stays_flipped() -> None:
    disk = MemoryDisk()
    handle = disk.create("slab/00000001", SIZE)
    disk.flip_bit(handle, PAGE * 8 + 3)
    assert read(disk, handle, PAGE, PAGE) == b"\x08" + bytes(PAGE - 1)


@pytest.mark.parametrize("operation", ["open", "sync", "rename", "sync_folder"])
def test_each_operation_on_names_can_be_made_to_fail(operation) -> None:
    eio = StorageError("input/output error")
    disk = MemoryDisk(fail=failing(eio, range(1, 2), operations=[operation]))
    handle = disk.create("superblock.tmp", SIZE)
    steps = {
        "open": lambda: disk.open("superblock.tmp"),
        "sync": lambda: disk.sync(handle),
        "rename": lambda: disk.rename("superblock.tmp", "superblock"),
        "sync_folder": lambda: disk.sync_folder(""),
    }
    with pytest.raises(StorageError, match="input"):
        steps[operation]()
    assert disk.names("") == ["superblock.tmp"]
    for step in steps.values():
        step()
    disk.check_integrity()


def test_files_stay_when_a_disk_is_closed() -> None:
    disk = MemoryDisk()
    disk.write(disk.create("superblock", SIZE), 0, [aligned(PAGE, 1)])
    disk.close()
    assert disk.files == {}
    assert read(disk, disk.open("superblock"), 0, PAGE) == b"\1" * PAGE
    assert disk.named["superblock"][:PAGE] == b"\1" * PAGE
