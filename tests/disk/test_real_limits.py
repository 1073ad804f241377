"""PosixDisk against a kernel that says no: a full, a read-only and a limited file system."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.processes import ROOT, open_fds
from tierd.disk.posix import PosixDisk
from tierd.errors import StorageError

PAGE = 4096

PREAMBLE = """
import mmap, os, resource, sys
import pytest
from tierd.disk.posix import PosixDisk
from tierd.errors import StorageError, StorageFull
PAGE, MIB = 4096, 1 << 20
folder, ephemeral = sys.argv[1], sys.argv[2] == "ephemeral"
fds = lambda: sorted(os.listdir("/proc/self/fd"))
def page(byte):
    buffer = memoryview(mmap.mmap(-1, PAGE))
    buffer[:] = bytes([byte]) * PAGE
    return buffer
"""

FULL = """
with PosixDisk(folder, ephemeral=ephemeral) as disk:
    kept = disk.create("slab/0000feed", MIB)
    before, names = fds(), os.listdir(folder)
    with pytest.raises(StorageFull, match=folder):
        disk.create("slab/0000beef", 64 * MIB)
    assert (fds(), os.listdir(folder)) == (before, names)
    more = [disk.create(f"slab/{number:08x}", MIB) for number in range(disk.free_bytes() // MIB)]
    for handle in more:
        disk.delete(handle)
    assert disk.free_bytes() >= len(more) * MIB > 0
    # A neighbour takes what is left: what was allocated can still be written, all of it.
    neighbour = os.open(folder, os.O_RDWR | os.O_TMPFILE)
    os.posix_fallocate(neighbour, 0, disk.free_bytes())
    assert disk.free_bytes() == 0
    for offset in range(0, MIB, PAGE):
        disk.write(kept, offset, [page(7)])
    buffer = page(0)
    disk.read_into(kept, MIB - PAGE, buffer)
    assert buffer == page(7)
    with pytest.raises(StorageFull):
        disk.create("slab/0000dead", PAGE)
    os.close(neighbour)
    disk.delete(disk.create("slab/0000cafe", MIB))
"""

READ_ONLY = """
before = fds()
with pytest.raises(StorageError, match=f"{folder}.*[Rr]ead-only"):
    PosixDisk(folder, ephemeral=ephemeral)
assert fds() == before
"""

LIMITED = """
with PosixDisk(folder, ephemeral=ephemeral) as disk:
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, MIB))
    before, names = fds(), os.listdir(folder)
    with pytest.raises(StorageError, match="too large"):
        disk.create("slab/0000beef", 2 * MIB)
    assert (fds(), os.listdir(folder)) == (before, names)
    disk.write(disk.create("slab/0000feed", MIB), MIB - PAGE, [page(1)])
"""


def run(folder: Path, kind: str, code: str, before: list[str] | None = None) -> None:
    command = [*(before or []), sys.executable, "-c", PREAMBLE + code, str(folder), kind]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def mounted(tmp_path: Path) -> list[str]:
    """Return a command that runs another with a tmpfs of its own, of 4 MiB, on `tmp_path`.

    The mount is in a namespace of that process alone: whatever happens, nothing stays mounted.
    """
    script = f'mount -t tmpfs -o size=4m,"$1" tmpfs {tmp_path} && shift && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", script, "sh"]
    if os.geteuid() != 0:
        command[1:1] = ["--user", "--map-root-user"]
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare here")
    if subprocess.run([*command, "rw", "true"], capture_output=True, timeout=30).returncode:
        pytest.skip("this user may not mount a tmpfs")
    return command


@pytest.mark.parametrize("kind", ["ephemeral", "named"])
def test_a_full_device_is_told_leaves_nothing_and_keeps_what_it_allocated(
    tmp_path: Path, mounted: list[str], kind: str
) -> None:
    run(tmp_path, kind, FULL, [*mounted, "rw"])


@pytest.mark.parametrize("kind", ["ephemeral", "named"])
def test_a_read_only_folder_is_refused_at_once(
    tmp_path: Path, mounted: list[str], kind: str
) -> None:
    run(tmp_path, kind, READ_ONLY, [*mounted, "ro"])


@pytest.mark.parametrize("kind", ["ephemeral", "named"])
def test_a_limit_on_file_sizes_is_a_typed_error_and_leaves_nothing(
    tmp_path: Path, kind: str
) -> None:
    run(tmp_path, kind, LIMITED)


@pytest.mark.parametrize("ephemeral", [True, False])
@pytest.mark.parametrize("folder", ["/proc", "/proc/tierd", "/sys", "/dev/null", ""])
def test_where_nobody_can_write_nothing_opens(folder: str, ephemeral: bool) -> None:
    before = open_fds()
    with pytest.raises(StorageError, match=f"cold folder {folder}"):
        PosixDisk(folder, ephemeral=ephemeral)
    assert open_fds() == before


def test_files_that_come_and_go_under_io_of_many_threads_stay_apart(tmp_path: Path) -> None:
    import mmap

    errors: list[BaseException] = []

    def work(disk: PosixDisk, number: int) -> None:
        buffer = memoryview(mmap.mmap(-1, PAGE))
        try:
            for turn in range(40):
                handle = disk.create(f"slab/{number * 256 + turn:08x}", 2 * PAGE)
                disk.write(handle, PAGE, [memoryview(mmap.mmap(-1, PAGE))])
                for value in (number, turn):
                    buffer[:] = bytes([value]) * PAGE
                    disk.write(handle, 0, [buffer])
                    buffer[:] = bytes(PAGE)
                    disk.read_into(handle, 0, buffer)
                    assert buffer == bytes([value]) * PAGE
                disk.delete(handle)
        except BaseException as error:
            errors.append(error)
            raise

    before = open_fds()
    with PosixDisk(str(tmp_path), ephemeral=False) as disk:
        threads = [threading.Thread(target=work, args=(disk, number)) for number in range(1, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=30.0)
        disk.check_integrity()
        assert disk.names("slab") == []
    assert not errors
    assert open_fds() == before
