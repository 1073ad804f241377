"""Disk ports: whole reads and writes or a typed error; nothing is left behind, even by KILL."""

import errno
import mmap
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tierd.disk.ports import DiskPort, MemoryDisk, PosixDisk
from tierd.errors import StorageError, StorageFull
from tierd.testing import failing

ROOT = Path(__file__).parents[2]
PAGE = 4096
SIZE = 16 * PAGE
KINDS = ("ephemeral", "named", "memory")


def make(kind: str, folder: Path) -> DiskPort:
    if kind == "memory":
        return MemoryDisk()
    return PosixDisk(str(folder), ephemeral=kind == "ephemeral")


@pytest.fixture(params=KINDS)
def disk(request, tmp_path) -> Iterator[DiskPort]:
    disk = make(request.param, tmp_path / "cold")
    yield disk
    disk.close()


@pytest.fixture(params=["ephemeral", "named"])
def posix(request, tmp_path) -> Iterator[PosixDisk]:
    with PosixDisk(str(tmp_path / "cold"), ephemeral=request.param == "ephemeral") as disk:
        yield disk
        disk.check_integrity()


@pytest.fixture
def named(tmp_path) -> Iterator[PosixDisk]:
    with PosixDisk(str(tmp_path / "cold"), ephemeral=False) as disk:
        yield disk


def aligned(size: int, fill: int = 0) -> memoryview:
    buffer = memoryview(mmap.mmap(-1, size))
    buffer[:] = bytes([fill]) * size
    return buffer


def read(disk: DiskPort, handle: int, offset: int, size: int) -> bytes:
    buffer = aligned(size, 0xEE)
    disk.read_into(handle, offset, buffer)
    return bytes(buffer)


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def raising(number: int):
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


# -- every disk -------------------------------------------------------------------


def test_a_new_file_reads_as_zeros(disk) -> None:
    handle = disk.create("00000001", SIZE)
    assert read(disk, handle, 0, SIZE) == bytes(SIZE)


def test_buffers_are_written_one_after_the_other(disk) -> None:
    handle = disk.create("00000001", SIZE)
    disk.write(handle, 2 * PAGE, [aligned(PAGE, 1), aligned(2 * PAGE, 2), aligned(PAGE, 3)])
    assert read(disk, handle, 2 * PAGE, 4 * PAGE) == b"\1" * PAGE + b"\2" * 2 * PAGE + b"\3" * PAGE
    assert read(disk, handle, 0, 2 * PAGE) == bytes(2 * PAGE)
    assert read(disk, handle, 6 * PAGE, PAGE) == bytes(PAGE)


def test_files_do_not_share_bytes(disk) -> None:
    handles = [disk.create(f"{number:08x}", SIZE) for number in range(3)]
    for number, handle in enumerate(handles):
        disk.write(handle, 0, [aligned(PAGE, number + 1)])
    for number, handle in enumerate(handles):
        assert read(disk, handle, 0, PAGE) == bytes([number + 1]) * PAGE


@pytest.mark.parametrize(
    ("offset", "size"), [(1, PAGE), (0, PAGE - 1), (SIZE, PAGE), (SIZE - PAGE, 2 * PAGE)]
)
def test_io_outside_the_file_or_off_the_sectors_is_a_bug(disk, offset, size) -> None:
    handle = disk.create("00000001", SIZE)
    with pytest.raises(AssertionError):
        disk.read_into(handle, offset, aligned(size))
    with pytest.raises(AssertionError):
        disk.write(handle, offset, [aligned(size)])


def test_a_deleted_file_is_an_error_and_its_handle_never_comes_back(disk) -> None:
    seen = set()
    for number in range(5):
        handle = disk.create(f"{number:08x}", SIZE)
        assert handle not in seen
        seen.add(handle)
        disk.delete(handle)
        with pytest.raises(StorageError):
            read(disk, handle, 0, PAGE)
        with pytest.raises(StorageError):
            disk.write(handle, 0, [aligned(PAGE)])


def test_close_is_idempotent(disk) -> None:
    disk.create("00000001", SIZE)
    disk.close()
    disk.close()


def test_a_disk_says_what_it_is(disk) -> None:
    assert disk.free_bytes() > 0
    assert disk.describe().startswith(("posix, O_DIRECT", "posix, buffered", "memory"))


# -- the folder -------------------------------------------------------------------


def test_folder_and_files_are_their_owners_alone(named) -> None:
    named.create("00000001", SIZE)
    folder = Path(named.folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    modes = {entry.name: stat.S_IMODE(entry.stat().st_mode) for entry in folder.iterdir()}
    assert modes == {"LOCK": 0o600, "00000001.slab": 0o600}


def test_ephemeral_files_have_no_name(tmp_path) -> None:
    with PosixDisk(str(tmp_path), ephemeral=True) as disk:
        disk.create("00000001", SIZE)
        assert os.listdir(tmp_path) == []


def test_ephemeral_files_have_no_name_where_the_file_system_knows_no_tmpfile(
    tmp_path, monkeypatch
) -> None:
    opened = os.open

    def old_kernel(path, flags, *rest, **options) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raising(errno.EOPNOTSUPP)()
        return opened(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", old_kernel)
    with PosixDisk(str(tmp_path), ephemeral=True) as disk:
        handle = disk.create("00000001", SIZE)
        disk.write(handle, 0, [aligned(PAGE, 9)])
        assert read(disk, handle, 0, PAGE) == b"\x09" * PAGE
        assert os.listdir(tmp_path) == []


def test_ephemeral_disks_share_a_folder(tmp_path) -> None:
    with (
        PosixDisk(str(tmp_path), ephemeral=True) as one,
        PosixDisk(str(tmp_path), ephemeral=True) as other,
    ):
        mine, theirs = one.create("00000001", SIZE), other.create("00000001", SIZE)
        one.write(mine, 0, [aligned(PAGE, 1)])
        assert read(other, theirs, 0, PAGE) == bytes(PAGE)


def test_a_second_owner_is_refused_with_the_holders_pid(named) -> None:
    before = open_fds()
    with pytest.raises(StorageError, match=rf"in use by process {os.getpid()}\b"):
        PosixDisk(named.folder, ephemeral=False)
    assert open_fds() == before


def test_files_of_an_earlier_run_are_removed_and_nothing_else(tmp_path) -> None:
    (tmp_path / "00000001.slab").write_bytes(bytes(SIZE))
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "folder.slab").mkdir()
    (tmp_path / "link.slab").symlink_to(tmp_path / "notes.txt")
    PosixDisk(str(tmp_path), ephemeral=False).close()
    assert sorted(os.listdir(tmp_path)) == ["LOCK", "folder.slab", "link.slab", "notes.txt"]


@pytest.mark.parametrize("ephemeral", [True, False])
def test_what_is_not_a_folder_is_refused_by_name(tmp_path, ephemeral) -> None:
    (tmp_path / "file").write_text("")
    before = open_fds()
    with pytest.raises(StorageError, match="file"):
        PosixDisk(str(tmp_path / "file"), ephemeral=ephemeral)
    assert open_fds() == before


HOLDER = """
import sys, time
from tierd.disk.ports import PosixDisk
disk = PosixDisk(sys.argv[1], ephemeral=sys.argv[2] == "ephemeral")
disk.create("00000001", 1 << 20)
print("holding", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("kind", ["ephemeral", "named"])
def test_a_killed_owner_leaves_neither_its_lock_nor_its_bytes(tmp_path, kind) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path), kind], stdout=subprocess.PIPE, cwd=ROOT
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"holding\n"
    holder.send_signal(signal.SIGKILL)
    holder.wait(timeout=10)
    holder.stdout.close()
    with PosixDisk(str(tmp_path), ephemeral=kind == "ephemeral"):
        assert set(os.listdir(tmp_path)) <= {"LOCK"}


# -- faults -----------------------------------------------------------------------


def test_short_reads_and_writes_are_continued(posix, monkeypatch) -> None:
    preadv, pwritev = os.preadv, os.pwritev

    def read_one_page(fd, buffers, offset) -> int:
        return preadv(fd, [buffers[0][:PAGE]], offset)

    def write_one_page(fd, buffers, offset) -> int:
        return pwritev(fd, [buffers[0][:PAGE]], offset)

    handle = posix.create("00000001", SIZE)
    monkeypatch.setattr(os, "preadv", read_one_page)
    monkeypatch.setattr(os, "pwritev", write_one_page)
    posix.write(handle, PAGE, [aligned(3 * PAGE, 1), aligned(PAGE, 2), aligned(2 * PAGE, 3)])
    expected = bytes(PAGE) + b"\1" * 3 * PAGE + b"\2" * PAGE + b"\3" * 2 * PAGE
    assert read(posix, handle, 0, 7 * PAGE) == expected


def test_a_file_that_was_cut_is_an_error_and_never_a_short_page(posix) -> None:
    handle = posix.create("00000001", SIZE)
    os.ftruncate(posix._files[handle].fd, 5 * PAGE)
    with pytest.raises(StorageError, match="ends"):
        read(posix, handle, 4 * PAGE, 2 * PAGE)


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.EIO, StorageError), (errno.ENOSPC, StorageFull), (errno.EDQUOT, StorageFull)],
)
def test_faults_of_the_device_are_typed(posix, monkeypatch, number, kind) -> None:
    handle = posix.create("00000001", SIZE)
    monkeypatch.setattr(os, "preadv", raising(number))
    monkeypatch.setattr(os, "pwritev", raising(number))
    with pytest.raises(kind) as caught:
        posix.write(handle, 0, [aligned(PAGE)])
    assert type(caught.value) is kind
    assert posix.folder in str(caught.value)
    with pytest.raises(kind):
        read(posix, handle, 0, PAGE)


def test_a_disk_that_takes_no_bytes_is_an_error_and_no_endless_loop(posix, monkeypatch) -> None:
    handle = posix.create("00000001", SIZE)
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    with pytest.raises(StorageError):
        posix.write(handle, 0, [aligned(PAGE)])


def test_a_file_for_which_there_is_no_space_leaves_nothing(posix, monkeypatch) -> None:
    before, names = open_fds(), os.listdir(posix.folder)
    monkeypatch.setattr(os, "posix_fallocate", raising(errno.ENOSPC))
    with pytest.raises(StorageFull):
        posix.create("00000001", SIZE)
    assert (open_fds(), os.listdir(posix.folder)) == (before, names)
    monkeypatch.undo()
    posix.create("00000001", SIZE)


def test_a_file_that_cannot_be_unlinked_gives_its_blocks_back(named, monkeypatch) -> None:
    handle = named.create("00000001", SIZE)
    monkeypatch.setattr(os, "unlink", raising(errno.EPERM))
    named.delete(handle)
    assert (Path(named.folder) / "00000001.slab").stat().st_blocks == 0


def test_a_deleted_file_frees_its_blocks_while_an_engine_has_it_open(posix) -> None:
    handle = posix.create("00000001", SIZE)
    engines = os.dup(posix.reader_fd(handle))
    assert os.fstat(engines).st_blocks * 512 >= SIZE
    posix.delete(handle)
    assert os.fstat(engines).st_blocks == 0
    os.close(engines)


def test_a_file_deleted_under_a_read_is_closed_after_it(posix, monkeypatch) -> None:
    handle = posix.create("00000001", SIZE)
    before, preadv = open_fds(), os.preadv

    def deleted_meanwhile(fd, buffers, offset) -> int:
        posix.delete(handle)
        assert open_fds() == before, "closed under its reader: another file may take its number"
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", deleted_meanwhile)
    buffer = aligned(PAGE)
    with pytest.raises(StorageError, match="ends"):
        posix.read_into(handle, 0, buffer)
    assert open_fds() == before - 2


def test_without_o_direct_io_is_buffered_and_that_is_said(tmp_path, monkeypatch) -> None:
    opened = os.open

    def no_direct(path, flags, *rest, **options) -> int:
        if flags & os.O_DIRECT:
            raising(errno.EINVAL)()
        return opened(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", no_direct)
    with PosixDisk(str(tmp_path), ephemeral=True) as disk:
        assert not disk.direct
        assert "buffered" in disk.describe()
        handle = disk.create("00000001", SIZE)
        disk.write(handle, 0, [aligned(PAGE, 4)])
        assert read(disk, handle, 0, PAGE) == b"\4" * PAGE


def test_an_engine_reads_what_was_written_and_cannot_write(posix) -> None:
    handle = posix.create("00000001", SIZE)
    posix.write(handle, PAGE, [aligned(PAGE, 5)])
    fd, buffer = posix.reader_fd(handle), aligned(PAGE)
    assert os.preadv(fd, [buffer], PAGE) == PAGE
    assert bytes(buffer) == b"\5" * PAGE
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwritev(fd, [aligned(PAGE)], 0)
    assert not os.get_inheritable(fd)


def test_a_closed_disk_leaves_no_fd_and_no_file(tmp_path) -> None:
    before = open_fds()
    for kind in ("ephemeral", "named"):
        disk = make(kind, tmp_path)
        for number in range(5):
            disk.create(f"{number:08x}", SIZE)
        disk.close()
    assert open_fds() == before
    assert os.listdir(tmp_path) == ["LOCK"]


# -- the fake ---------------------------------------------------------------------


def test_a_memory_disk_has_a_capacity() -> None:
    disk = MemoryDisk(capacity_bytes=SIZE)
    handle = disk.create("00000001", SIZE)
    with pytest.raises(StorageFull):
        disk.create("00000002", PAGE)
    disk.delete(handle)
    disk.create("00000002", PAGE)


def test_an_operation_can_be_made_to_fail_once_or_for_ever() -> None:
    eio = StorageError("input/output error")
    for numbers, outcomes in ((range(2, 3), "010"), (range(2, 2**63), "011")):
        disk = MemoryDisk(fail=failing(eio, numbers, operations=["read"]))
        handle = disk.create("00000001", SIZE)
        for outcome in outcomes:
            try:
                read(disk, handle, 0, PAGE)
                assert outcome == "0"
            except StorageError:
                assert outcome == "1"


def test_a_flipped_bit_stays_flipped() -> None:
    disk = MemoryDisk()
    handle = disk.create("00000001", SIZE)
    disk.flip_bit(handle, PAGE * 8 + 3)
    assert read(disk, handle, PAGE, PAGE) == b"\x08" + bytes(PAGE - 1)
