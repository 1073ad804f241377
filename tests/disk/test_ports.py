"""Every disk: whole reads and writes or a typed error; names are ours and mean one file."""

from collections.abc import Iterator

import pytest

from tests.disk.support import PAGE, SIZE, aligned, make, read
from tierd.disk.ports import DiskPort
from tierd.errors import NotFound, StorageError

KINDS = ("ephemeral", "named", "memory", "simulated")


@pytest.fixture(params=KINDS)
def disk(request, tmp_path) -> Iterator[DiskPort]:
    disk = make(request.param, tmp_path / "cold")
    yield disk
    disk.check_integrity()
    disk.close()


@pytest.fixture(params=["named", "memory", "simulated"])
def kept(request, tmp_path) -> Iterator[DiskPort]:
    """A disk whose files have names."""
    disk = make(request.param, tmp_path / "cold")
    yield disk
    disk.check_integrity()
    disk.close()


def test_a_new_file_reads_as_zeros(disk) -> None:
    handle = disk.create("slab/00000001", SIZE)
    assert read(disk, handle, 0, SIZE) == bytes(SIZE)


def test_buffers_are_written_one_after_the_other(disk) -> None:
    handle = disk.create("slab/00000001", SIZE)
    disk.write(handle, 2 * PAGE, [aligned(PAGE, 1), aligned(2 * PAGE, 2), aligned(PAGE, 3)])
    assert read(disk, handle, 2 * PAGE, 4 * PAGE) == b"\1" * PAGE + b"\2" * 2 * PAGE + b"\3" * PAGE
    assert read(disk, handle, 0, 2 * PAGE) == bytes(2 * PAGE)
    assert read(disk, handle, 6 * PAGE, PAGE) == bytes(PAGE)


def test_buffers_are_filled_one_after_the_other(disk) -> None:
    handle = disk.create("slab/00000001", SIZE)
    disk.write(handle, PAGE, [aligned(PAGE, 1), aligned(PAGE, 2), aligned(PAGE, 3)])
    first, second = aligned(2 * PAGE, 9), aligned(PAGE, 9)
    disk.scatter(handle, PAGE, [first, second])
    assert bytes(first) == b"\1" * PAGE + b"\2" * PAGE
    assert bytes(second) == b"\3" * PAGE
    with pytest.raises(AssertionError):
        disk.scatter(handle, SIZE - PAGE, [first])


def test_files_do_not_share_bytes(disk) -> None:
    handles = [disk.create(f"slab/{number:08x}", SIZE) for number in range(3)]
    for number, handle in enumerate(handles):
        disk.write(handle, 0, [aligned(PAGE, number + 1)])
    for number, handle in enumerate(handles):
        assert read(disk, handle, 0, PAGE) == bytes([number + 1]) * PAGE


@pytest.mark.parametrize(
    ("offset", "size"), [(1, PAGE), (0, PAGE - 1), (SIZE, PAGE), (SIZE - PAGE, 2 * PAGE)]
)
def test_io_outside_the_file_or_off_the_sectors_is_a_bug(disk, offset, size) -> None:
    handle = disk.create("slab/00000001", SIZE)
    with pytest.raises(AssertionError):
        disk.read_into(handle, offset, aligned(size))
    with pytest.raises(AssertionError):
        disk.write(handle, offset, [aligned(size)])


def test_a_deleted_file_is_an_error_and_its_handle_never_comes_back(disk) -> None:
    seen = set()
    for number in range(5):
        handle = disk.create(f"slab/{number:08x}", SIZE)
        assert handle not in seen
        seen.add(handle)
        disk.delete(handle)
        with pytest.raises(StorageError):
            read(disk, handle, 0, PAGE)
        with pytest.raises(StorageError):
            disk.write(handle, 0, [aligned(PAGE)])


def test_close_is_idempotent(disk) -> None:
    disk.create("slab/00000001", SIZE)
    disk.close()
    disk.close()


def test_a_disk_says_what_it_is(disk) -> None:
    assert disk.free_bytes() > 0
    assert disk.describe().startswith(("posix, O_DIRECT", "posix, buffered", "memory", "simulated"))


def test_a_file_is_kept_until_it_is_removed(kept) -> None:
    handle = kept.create("journal/0000002a", SIZE)
    kept.write(handle, PAGE, [aligned(PAGE, 7)])
    kept.sync(handle)
    kept.sync_folder("journal")
    kept.release(handle)
    assert kept.names("journal") == ["journal/0000002a"]
    again = kept.open("journal/0000002a")
    assert again != handle
    assert kept.size_bytes(again) == SIZE
    assert read(kept, again, PAGE, PAGE) == b"\7" * PAGE
    kept.delete(again)
    assert kept.names("journal") == []
    with pytest.raises(NotFound):
        kept.open("journal/0000002a")


def test_a_name_is_made_once_and_listed_in_its_folder_in_order(kept) -> None:
    names = ["slab/0000000b", "slab/0000000a", "superblock", "snap/0000000000000123.tmp"]
    for name in names:
        kept.create(name, PAGE)
    with pytest.raises(StorageError):
        kept.create("superblock", PAGE)
    assert kept.names("slab") == ["slab/0000000a", "slab/0000000b"]
    assert kept.names("") == ["superblock"]
    assert kept.names("snap") == ["snap/0000000000000123.tmp"]
    assert kept.names("journal") == []
    assert kept.used_bytes() == 4 * PAGE


def test_a_renamed_file_replaces_the_other_and_handles_follow(kept) -> None:
    old, new = "snap/0000000000000123.tmp", "snap/0000000000000123"
    replaced, handle = kept.create(new, PAGE), kept.create(old, PAGE)
    kept.write(handle, 0, [aligned(PAGE, 3)])
    kept.rename(old, new)
    assert kept.names("snap") == [new]
    assert read(kept, handle, 0, PAGE) == b"\3" * PAGE
    assert read(kept, replaced, 0, PAGE) == bytes(PAGE)  # open still, under no name
    kept.delete(replaced)
    assert read(kept, kept.open(new), 0, PAGE) == b"\3" * PAGE
    kept.delete(handle)
    assert kept.names("snap") == []
    with pytest.raises(NotFound):
        kept.rename(old, new)


def test_removing_by_name_leaves_who_has_it_open_and_a_new_file_of_that_name(kept) -> None:
    kept.remove("slab/00000001")
    first = kept.create("slab/00000001", PAGE)
    kept.remove("slab/00000001")
    second = kept.create("slab/00000001", PAGE)
    assert read(kept, first, 0, PAGE) == bytes(PAGE)
    kept.delete(first)
    assert kept.names("slab") == ["slab/00000001"]
    kept.release(second)
    with pytest.raises(StorageError):
        kept.size_bytes(second)
    with pytest.raises(StorageError):
        kept.sync(second)


@pytest.mark.parametrize(
    "name",
    ["", "LOCK", "00000001", "slab/1", "slab/../superblock", "/etc/passwd", "slab/0000000A",
     "superblock\n", "snap/00000001", "journal/000000001", "slab/00000001/x"],
)  # fmt: skip
def test_a_name_that_is_not_ours_is_a_bug(disk, name) -> None:
    for use in (disk.open, disk.remove, lambda name: disk.create(name, PAGE)):
        with pytest.raises(AssertionError):
            use(name)
    with pytest.raises(AssertionError):
        disk.rename("superblock", name)
    with pytest.raises(AssertionError):
        disk.names("..")
