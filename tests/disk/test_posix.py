"""A folder as a disk: its owner's alone, nothing left behind even by KILL, faults are typed."""

import errno
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.disk.support import PAGE, SIZE, aligned, make, read
from tierd.disk.ports import FOLDERS
from tierd.disk.posix import PosixDisk
from tierd.errors import NotFound, StorageError, StorageFull

ROOT = Path(__file__).parents[2]


@pytest.fixture(params=["ephemeral", "named"])
def posix(request, tmp_path) -> Iterator[PosixDisk]:
    with PosixDisk(str(tmp_path / "cold"), ephemeral=request.param == "ephemeral") as disk:
        yield disk
        disk.check_integrity()


@pytest.fixture
def named(tmp_path) -> Iterator[PosixDisk]:
    with PosixDisk(str(tmp_path / "cold"), ephemeral=False) as disk:
        yield disk
        disk.check_integrity()


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def raising(number: int):
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


# -- the folder -------------------------------------------------------------------


def test_folder_and_files_are_their_owners_alone(named) -> None:
    named.create("slab/00000001", SIZE)
    folder = Path(named.folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    modes = {
        str(entry.relative_to(folder)): stat.S_IMODE(entry.stat().st_mode)
        for entry in folder.rglob("*")
    }
    folders = dict.fromkeys(FOLDERS, 0o700)
    assert modes == {"LOCK": 0o600, "slab/00000001": 0o600, **folders}


def test_ephemeral_files_have_no_name(tmp_path) -> None:
    with PosixDisk(str(tmp_path), ephemeral=True) as disk:
        disk.create("slab/00000001", SIZE)
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
        handle = disk.create("slab/00000001", SIZE)
        disk.write(handle, 0, [aligned(PAGE, 9)])
        assert read(disk, handle, 0, PAGE) == b"\x09" * PAGE
        assert os.listdir(tmp_path) == []


def test_ephemeral_disks_share_a_folder(tmp_path) -> None:
    with (
        PosixDisk(str(tmp_path), ephemeral=True) as one,
        PosixDisk(str(tmp_path), ephemeral=True) as other,
    ):
        mine, theirs = one.create("slab/00000001", SIZE), other.create("slab/00000001", SIZE)
        one.write(mine, 0, [aligned(PAGE, 1)])
        assert read(other, theirs, 0, PAGE) == bytes(PAGE)


def test_a_second_owner_is_refused_with_the_holders_pid(named) -> None:
    before = open_fds()
    with pytest.raises(StorageError, match=rf"in use by process {os.getpid()}\b"):
        PosixDisk(named.folder, ephemeral=False)
    assert open_fds() == before


def test_files_of_an_earlier_run_are_found_and_nothing_else(tmp_path) -> None:
    slabs = tmp_path / "slab"
    slabs.mkdir()
    (slabs / "00000001").write_bytes(bytes(SIZE))
    (slabs / "notes.txt").write_text("mine")
    (slabs / "00000002").mkdir()
    (slabs / "00000003").symlink_to(slabs / "notes.txt")
    (tmp_path / "superblock").write_bytes(bytes(SIZE))
    with PosixDisk(str(tmp_path), ephemeral=False) as disk:
        assert disk.names("slab") == ["slab/00000001"]
        assert disk.names("") == ["superblock"]
        assert disk.used_bytes() == 2 * SIZE
        for name in ("slab/00000001", "slab/00000002", "slab/00000003"):
            disk.remove(name)
        assert sorted(os.listdir(slabs)) == ["00000002", "notes.txt"]


@pytest.mark.parametrize("ephemeral", [True, False])
def test_what_is_not_a_folder_is_refused_by_name(tmp_path, ephemeral) -> None:
    (tmp_path / "file").write_text("")
    before = open_fds()
    with pytest.raises(StorageError, match="file"):
        PosixDisk(str(tmp_path / "file"), ephemeral=ephemeral)
    assert open_fds() == before


HOLDER = """
import sys, time
from tierd.disk.posix import PosixDisk
disk = PosixDisk(sys.argv[1], ephemeral=sys.argv[2] == "ephemeral")
disk.create("slab/00000001", 1 << 20)
print("holding", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("kind", ["ephemeral", "named"])
def test_a_killed_owner_leaves_no_lock_and_only_bytes_that_have_a_name(tmp_path, kind) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path), kind], stdout=subprocess.PIPE, cwd=ROOT
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"holding\n"
    holder.send_signal(signal.SIGKILL)
    holder.wait(timeout=10)
    holder.stdout.close()
    with PosixDisk(str(tmp_path), ephemeral=kind == "ephemeral") as disk:
        named = {"ephemeral": [], "named": ["slab/00000001"]}[kind]
        assert disk.names("slab") == named
        assert disk.used_bytes() == len(named) << 20


# -- faults -----------------------------------------------------------------------


def test_short_reads_and_writes_are_continued(posix, monkeypatch) -> None:
    preadv, pwritev = os.preadv, os.pwritev

    def read_one_page(fd, buffers, offset) -> int:
        return preadv(fd, [buffers[0][:PAGE]], offset)

    def write_one_page(fd, buffers, offset) -> int:
        return pwritev(fd, [buffers[0][:PAGE]], offset)

    handle = posix.create("slab/00000001", SIZE)
    monkeypatch.setattr(os, "preadv", read_one_page)
    monkeypatch.setattr(os, "pwritev", write_one_page)
    posix.write(handle, PAGE, [aligned(3 * PAGE, 1), aligned(PAGE, 2), aligned(2 * PAGE, 3)])
    expected = bytes(PAGE) + b"\1" * 3 * PAGE + b"\2" * PAGE + b"\3" * 2 * PAGE
    assert read(posix, handle, 0, 7 * PAGE) == expected
    buffers = [aligned(2 * PAGE, 9), aligned(PAGE, 9), aligned(4 * PAGE, 9)]
    posix.scatter(handle, 0, buffers)
    assert b"".join(buffers) == expected


def test_a_file_that_was_cut_is_an_error_and_never_a_short_page(posix) -> None:
    handle = posix.create("slab/00000001", SIZE)
    os.ftruncate(posix._files[handle].fd, 5 * PAGE)
    with pytest.raises(StorageError, match="ends"):
        read(posix, handle, 4 * PAGE, 2 * PAGE)


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.EIO, StorageError), (errno.ENOSPC, StorageFull), (errno.EDQUOT, StorageFull)],
)
def test_faults_of_the_device_are_typed(posix, monkeypatch, number, kind) -> None:
    handle = posix.create("slab/00000001", SIZE)
    monkeypatch.setattr(os, "preadv", raising(number))
    monkeypatch.setattr(os, "pwritev", raising(number))
    with pytest.raises(kind) as caught:
        posix.write(handle, 0, [aligned(PAGE)])
    assert type(caught.value) is kind
    assert posix.folder in str(caught.value)
    with pytest.raises(kind):
        read(posix, handle, 0, PAGE)


def test_a_disk_that_takes_no_bytes_is_an_error_and_no_endless_loop(posix, monkeypatch) -> None:
    handle = posix.create("slab/00000001", SIZE)
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    with pytest.raises(StorageError):
        posix.write(handle, 0, [aligned(PAGE)])


def test_a_file_for_which_there_is_no_space_leaves_nothing(posix, monkeypatch) -> None:
    before, names = open_fds(), os.listdir(posix.folder)
    monkeypatch.setattr(os, "posix_fallocate", raising(errno.ENOSPC))
    with pytest.raises(StorageFull):
        posix.create("slab/00000001", SIZE)
    assert (open_fds(), os.listdir(posix.folder)) == (before, names)
    monkeypatch.undo()
    posix.create("slab/00000001", SIZE)


def test_a_file_that_cannot_be_unlinked_gives_its_blocks_back(named, monkeypatch) -> None:
    handle = named.create("slab/00000001", SIZE)
    monkeypatch.setattr(os, "unlink", raising(errno.EPERM))
    named.delete(handle)
    assert (Path(named.folder) / "slab/00000001").stat().st_blocks == 0


def test_a_deleted_file_frees_its_blocks_while_an_engine_has_it_open(posix) -> None:
    handle = posix.create("slab/00000001", SIZE)
    engines = os.dup(posix.reader_fd(handle))
    assert os.fstat(engines).st_blocks * 512 >= SIZE
    posix.delete(handle)
    assert os.fstat(engines).st_blocks == 0
    os.close(engines)


def test_a_file_deleted_under_a_read_is_closed_after_it(posix, monkeypatch) -> None:
    handle = posix.create("slab/00000001", SIZE)
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
        handle = disk.create("slab/00000001", SIZE)
        disk.write(handle, 0, [aligned(PAGE, 4)])
        assert read(disk, handle, 0, PAGE) == b"\4" * PAGE


def test_an_engine_reads_what_was_written_and_cannot_write(posix) -> None:
    handle = posix.create("slab/00000001", SIZE)
    posix.write(handle, PAGE, [aligned(PAGE, 5)])
    fd, buffer = posix.reader_fd(handle), aligned(PAGE)
    assert os.preadv(fd, [buffer], PAGE) == PAGE
    assert bytes(buffer) == b"\5" * PAGE
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwritev(fd, [aligned(PAGE)], 0)
    assert not os.get_inheritable(fd)


def test_a_closed_disk_leaves_no_fd_and_the_files_that_have_a_name(tmp_path) -> None:
    before = open_fds()
    for kind in ("ephemeral", "named"):
        disk = make(kind, tmp_path)
        for number in range(5):
            disk.create(f"slab/{number:08x}", SIZE)
        assert disk.used_bytes() == 5 * SIZE
        disk.close()
    assert open_fds() == before
    assert len(os.listdir(tmp_path / "slab")) == 5


def test_a_closed_disk_says_so_to_who_looks_at_its_space(named) -> None:
    named.close()
    for look in (named.free_bytes, named.used_bytes):
        with pytest.raises(StorageError, match="it is closed"):
            look()


def test_a_file_that_somebody_removed_is_not_said_to_be_durable(named) -> None:
    handle, other = named.create("slab/00000001", SIZE), named.create("slab/00000002", SIZE)
    named.sync(handle)
    (Path(named.folder) / "slab/00000001").unlink()
    with pytest.raises(StorageError, match="somebody removed slab/00000001"):
        named.sync(handle)
    named.sync(other)
    named.remove("slab/00000002")  # we, and knowingly
    named.sync(other)


def test_a_file_that_somebody_removed_is_seen_without_a_sync(posix) -> None:
    handle, other = posix.create("slab/00000001", SIZE), posix.create("slab/00000002", SIZE)
    assert posix.is_there(handle) and posix.is_there(other)
    if not posix.ephemeral:
        (Path(posix.folder) / "slab/00000001").unlink()
        assert not posix.is_there(handle) and posix.is_there(other)
    posix.release(handle)
    assert posix.is_there(handle), "a closed one tells nothing"


# -- names --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["link", "folder", "fifo"])
def test_what_stands_in_a_files_place_is_refused_and_not_followed(named, tmp_path, kind) -> None:
    place, outside = Path(named.folder) / "slab/00000001", tmp_path / "outside"
    outside.write_bytes(bytes(PAGE))
    if kind == "link":
        place.symlink_to(outside)
    elif kind == "folder":
        place.mkdir()
    else:
        os.mkfifo(place)
    before = open_fds()
    for use in (named.open, lambda name: named.create(name, PAGE)):
        with pytest.raises(StorageError):
            use("slab/00000001")
    assert named.names("slab") == []
    assert open_fds() == before
    assert outside.read_bytes() == bytes(PAGE)


def test_a_folder_that_is_a_link_is_refused(tmp_path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "cold").mkdir()
    (tmp_path / "cold/slab").symlink_to(tmp_path / "elsewhere")
    before = open_fds()
    with pytest.raises(StorageError, match="slab"):
        PosixDisk(str(tmp_path / "cold"), ephemeral=False)
    assert open_fds() == before


def test_an_ephemeral_disk_has_nothing_to_find_and_counts_what_it_holds(tmp_path) -> None:
    with PosixDisk(str(tmp_path), ephemeral=True) as disk:
        handle = disk.create("slab/00000001", SIZE)
        disk.sync(handle)
        disk.sync_folder("slab")
        disk.remove("slab/00000001")
        assert disk.names("slab") == []
        assert disk.used_bytes() == SIZE
        with pytest.raises(NotFound):
            disk.open("slab/00000001")
        with pytest.raises(NotFound):
            disk.rename("slab/00000001", "slab/00000002")
        disk.release(handle)
        assert disk.used_bytes() == 0


def test_a_sync_that_fails_is_told_and_not_tried_again(posix, monkeypatch) -> None:
    handle = posix.create("slab/00000001", SIZE)
    calls = []

    def fail(fd: int) -> None:
        calls.append(fd)
        raising(errno.EIO)()

    monkeypatch.setattr(os, "fdatasync", fail)
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StorageError, match="sync"):
        posix.sync(handle)
    assert len(calls) == 1
    if not posix.ephemeral:
        with pytest.raises(StorageError, match="slab"):
            posix.sync_folder("slab")
        assert len(calls) == 2


def test_a_file_cut_behind_our_back_says_its_size(named) -> None:
    named.release(named.create("journal/00000001", SIZE))
    os.truncate(Path(named.folder) / "journal/00000001", 5 * PAGE + 17)
    handle = named.open("journal/00000001")
    assert named.size_bytes(handle) == 5 * PAGE + 17
    with pytest.raises(AssertionError):
        read(named, handle, 5 * PAGE, PAGE)
    assert read(named, handle, 4 * PAGE, PAGE) == bytes(PAGE)


def test_a_file_that_cannot_be_removed_is_no_error_and_is_found_again(named, monkeypatch) -> None:
    named.release(named.create("slab/00000001", SIZE))
    monkeypatch.setattr(os, "unlink", raising(errno.EROFS))
    named.remove("slab/00000001")
    assert named.names("slab") == ["slab/00000001"]


def test_a_folder_that_was_removed_is_noticed_at_the_next_sync(tmp_path: Path) -> None:
    disk = PosixDisk(str(tmp_path / "cold"), ephemeral=False)
    handle = disk.create("slab/00000001", SIZE)
    disk.sync(handle)
    shutil.rmtree(tmp_path / "cold")
    with pytest.raises(StorageError, match="was removed"):
        disk.sync(handle)
    with pytest.raises(StorageError, match="was removed"):
        disk.require_there()
    disk.close()


@pytest.mark.parametrize("name", ["", "journal", "slab"])
@pytest.mark.parametrize("replaced", [False, True])
def test_a_folder_that_was_moved_is_noticed_and_moved_back_is_well(
    tmp_path: Path, name: str, replaced: bool
) -> None:
    disk = PosixDisk(str(tmp_path / "cold"), ephemeral=False)
    handle = disk.create("slab/00000001", SIZE)
    disk.sync(handle)
    there, away = tmp_path / "cold" / name, tmp_path / "away"
    there.rename(away)
    if replaced:
        there.mkdir()
    for look in (disk.require_there, lambda: disk.sync(handle)):
        with pytest.raises(StorageError, match=f"somebody moved {name or 'it'}: .* move it back"):
            look()
    if replaced:
        there.rmdir()
    away.rename(there)
    disk.sync(handle)
    disk.close()


@pytest.mark.parametrize(
    ("names", "means"),
    [
        ("kept", "the next daemon finds what was kept, written down once instead of twice"),
        ("snap", "the next daemon looks for what is kept in journal/ and kept/ alone"),
        ("journal", "the next daemon looks for what is kept in kept/ and snap/ alone"),
        ("journal kept", "the next daemon looks for what is kept in snap/ alone"),
        ("journal kept snap", "the next daemon knows of no session that was kept"),
        ("slab", "the pages of kept sessions are gone, and computed anew as one is resumed"),
    ],
)
def test_folders_of_ours_that_were_removed_are_named_and_what_that_means(
    tmp_path: Path, names: str, means: str
) -> None:
    disk = PosixDisk(str(tmp_path / "cold"), ephemeral=False)
    for name in names.split():
        shutil.rmtree(tmp_path / "cold" / name)
    said = f"somebody removed {', '.join(names.split())} in it: {means}; nothing more is kept until"
    with pytest.raises(StorageError, match=said):
        disk.require_there()
    disk.close()


def test_nothing_is_durable_where_the_lock_was_removed(tmp_path: Path) -> None:
    disk = PosixDisk(str(tmp_path / "cold"), ephemeral=False)
    handle = disk.create("slab/00000001", PAGE)
    (tmp_path / "cold" / "LOCK").unlink()
    for look in (disk.require_there, lambda: disk.sync(handle)):
        with pytest.raises(StorageError, match="removed LOCK in it: another daemon could write"):
            look()
    disk.close()


def test_others_files_beside_a_store_are_let_be(tmp_path: Path) -> None:
    """Also where the superblock is lost: then fsck must get in."""
    with PosixDisk(str(tmp_path), ephemeral=False) as disk:
        disk.delete(disk.create("quarantine.log", PAGE))
        disk.release(disk.create("superblock", PAGE))
        disk.release(disk.create("journal/00000001", PAGE))
    (tmp_path / "notes.txt").write_text("theirs")
    (tmp_path / "journal" / "notes.txt").write_text("theirs")
    PosixDisk(str(tmp_path), ephemeral=False).close()
    (tmp_path / "superblock").unlink()
    with PosixDisk(str(tmp_path), ephemeral=False) as disk:
        assert disk.names("journal") == ["journal/00000001"]
    (tmp_path / "journal" / "00000001").unlink()
    with pytest.raises(StorageError, match=r"notes\.txt"):
        PosixDisk(str(tmp_path), ephemeral=False)
    assert (tmp_path / "notes.txt").read_text() == "theirs"


def test_a_new_disks_own_folder_is_no_strangers(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    PosixDisk(str(tmp_path), ephemeral=False).close()
