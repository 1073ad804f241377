"""Open files: asked for before gRPC starts; a limit that is met is named with its process."""

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.processes import open_fds
from tests.test_adoption import config
from tierd.client import Client
from tierd.daemon import EmbeddedDaemon
from tierd.disk.ports import storage_errors
from tierd.errors import PageMiss, StorageError, TierFull
from tierd.openfiles import (
    CLIENT_FILES,
    DAEMON_FILES,
    require_files,
    said_by_daemon,
    why_not_opened,
)

FULL = OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def _highest_fd() -> int:
    return max(map(int, open_fds()))


@contextmanager
def room_for(count: int) -> Iterator[int]:
    """Let this process open `count` more files, in a row; yield its limit."""
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = [os.open(os.devnull, os.O_RDONLY)]
    while len(held) < 2 or held[-1] != held[-2] + 1 or held[-1] < _highest_fd():
        held.append(os.dup(held[0]))
    limit = held[-1] + 1 + count
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, usual[1]))
        yield limit
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, usual)
        for fd in held:
            os.close(fd)


def test_files_that_may_be_opened_are_enough_and_none_stays_open() -> None:
    before = open_fds()
    with room_for(5):
        require_files(5, "this")
    assert open_fds() == before


def test_too_few_are_one_line_that_names_the_limit_and_what_is_needed() -> None:
    before = open_fds()
    with room_for(5) as limit:
        with pytest.raises(StorageError) as refused:
            require_files(6, "this")
        require_files(5, "that")  # none of the others stayed open
    assert str(refused.value) == (
        f"this needs 6 more files open: Too many open files: process {os.getpid()} may open "
        f"{limit}; raise its ulimit -n"
    )
    assert refused.value.__context__ is None, "the limit would be named twice"
    assert open_fds() == before


def test_a_client_asks_before_it_starts_grpc(tmp_path: Path) -> None:
    missing = tmp_path / "no.sock"
    with room_for(CLIENT_FILES - 1), pytest.raises(StorageError, match="raise its ulimit -n"):
        Client.connect(str(missing))


def test_a_daemon_asks_before_it_starts_grpc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierd.daemon.raise_file_limit", lambda: None)
    settings = config(tmp_path)
    with room_for(DAEMON_FILES - 1), pytest.raises(StorageError, match="a daemon needs 40 more"):
        EmbeddedDaemon(settings).__enter__()
    assert not (tmp_path / "cold").exists(), "nothing is made"


def test_an_error_for_want_of_files_names_the_process() -> None:
    with room_for(0) as limit, pytest.raises(StorageError) as caught, storage_errors("cold"):
        os.open(os.devnull, os.O_RDONLY)
    said = f"cold: Too many open files: process {os.getpid()} may open {limit}; raise its ulimit -n"
    assert str(caught.value) == said
    with pytest.raises(StorageError) as caught, storage_errors("cold"):
        raise OSError(errno.ENFILE, os.strerror(errno.ENFILE))
    assert "this machine's limit; raise fs.file-max" in str(caught.value)


def test_what_leaves_a_daemon_says_that_the_limit_is_the_daemons() -> None:
    said = why_not_opened(FULL)
    theirs = f"the daemon, process {os.getpid()}, may open"
    for error in (
        StorageError(f"cold: {said}"),
        TierFull(f"no room in warm: the cold disk fails: {said}", retry_after_seconds=2.0),
        PageMiss(said, layer=1, block=2),
    ):
        with pytest.raises(type(error), match=theirs) as caught, said_by_daemon():
            raise error
        assert caught.value is error and "raise its ulimit -n" in str(error)
    with pytest.raises(StorageError, match=theirs), said_by_daemon():
        raise FULL
    with pytest.raises(OSError, match="Bad file"), said_by_daemon():
        raise OSError(errno.EBADF, "Bad file descriptor")
