"""Locks on slots: seen by others, gone with their holder, not shared with who holds the file."""

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tierd.disk.slotlocks import lock_range, locked_ranges, unlock_range

SIZE = 1 << 20


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "slab"
    path.write_bytes(bytes(SIZE))
    return path


def test_every_locked_range_is_named_in_order_and_clipped(file: Path) -> None:
    mine, theirs = os.open(file, os.O_RDWR), os.open(file, os.O_RDWR)
    assert locked_ranges(mine, 0, SIZE) == []
    wanted = [(8192, 4096), (40960, 12288), (SIZE - 4096, 4096)]
    for start, size in reversed(wanted):
        lock_range(theirs, start, size)
    assert locked_ranges(mine, 0, SIZE) == wanted
    assert locked_ranges(mine, 45056, SIZE - 45056) == [(45056, 8192), wanted[2]]
    assert locked_ranges(theirs, 0, SIZE) == []  # one's own are in nobody's way
    unlock_range(theirs, 8192, 4096)
    assert locked_ranges(mine, 0, SIZE) == wanted[1:]
    with pytest.raises(BlockingIOError):
        lock_range(mine, 40960, 4096)
    os.close(theirs)
    assert locked_ranges(mine, 0, SIZE) == []
    os.close(mine)


def test_a_lock_is_the_open_files_and_outlives_one_of_its_fds(file: Path) -> None:
    mine, theirs = os.open(file, os.O_RDWR), os.open(file, os.O_RDWR)
    copy = os.dup(theirs)
    lock_range(theirs, 0, 4096)
    os.close(theirs)
    assert locked_ranges(mine, 0, SIZE) == [(0, 4096)]
    os.close(copy)
    assert locked_ranges(mine, 0, SIZE) == []
    os.close(mine)


def test_one_to_the_end_of_the_file_counts_to_the_end_that_was_asked_for(file: Path) -> None:
    mine, theirs = os.open(file, os.O_RDWR), os.open(file, os.O_RDWR)
    lock_range(theirs, 4096, 0)
    assert locked_ranges(mine, 0, SIZE) == [(4096, SIZE - 4096)]
    os.close(theirs)
    os.close(mine)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_that_dies_or_is_stopped(file: Path, end: signal.Signals) -> None:
    script = (
        "import os, sys; from tierd.disk.slotlocks import lock_range\n"
        f"fd = os.open({str(file)!r}, os.O_RDWR)\n"
        "lock_range(fd, 4096, 8192); print('ready', flush=True); sys.stdin.read()"
    )
    mine = os.open(file, os.O_RDWR)
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == b"ready\n"
        other.send_signal(signal.SIGSTOP)
        assert locked_ranges(mine, 0, SIZE) == [(4096, 8192)]
        other.send_signal(signal.SIGCONT)
        other.send_signal(end)
        other.wait(timeout=10.0)
    assert locked_ranges(mine, 0, SIZE) == []
    os.close(mine)


def test_an_error_that_is_none_of_the_file_systems_is_raised(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(number: int) -> None:
        def fail(*arguments: object) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(fcntl, "fcntl", fail)

    fd = os.open(file, os.O_RDWR)
    refuse(95)  # EOPNOTSUPP: no such locks there
    assert locked_ranges(fd, 0, SIZE) == []
    refuse(5)
    with pytest.raises(OSError):
        locked_ranges(fd, 0, SIZE)
    monkeypatch.undo()
    os.close(fd)
