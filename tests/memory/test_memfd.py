"""Memfds: really there, of one size for ever, and gone with their last user."""

import ctypes
import errno
import os

import pytest

from tierd.errors import StorageError, TierFull
from tierd.memory.memfd import Mapping, create_memfd, seal_future_write

SIZE = 64 * 1024


@pytest.fixture
def fd():
    fd = create_memfd("test", SIZE)
    yield fd
    os.close(fd)


def allocated_bytes(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_the_memory_is_allocated_before_it_is_handed_out(fd: int) -> None:
    assert os.fstat(fd).st_size == SIZE
    assert allocated_bytes(fd) == SIZE


def test_a_child_process_does_not_inherit_it(fd: int) -> None:
    assert not os.get_inheritable(fd)


@pytest.mark.parametrize("size", [0, SIZE - 4096, SIZE + 4096])
def test_its_size_cannot_be_changed(fd: int, size: int) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(fd, size)


def test_its_seals_are_final(fd: int) -> None:
    with pytest.raises(PermissionError):
        seal_future_write(fd)


def test_who_gets_a_read_only_memfd_cannot_write_to_it() -> None:
    fd = create_memfd("test", SIZE, others_read_only=True)
    with Mapping(fd, SIZE, writable=True) as mine:
        seal_future_write(fd)
        with Mapping(fd, SIZE, writable=False) as theirs:
            mine.buffer[5] = 7
            assert theirs.buffer[5] == 7
            assert theirs.buffer.readonly
        with pytest.raises(StorageError):
            Mapping(fd, SIZE, writable=True)
        with pytest.raises(PermissionError):
            os.pwrite(fd, b"x", 0)
    os.close(fd)


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.ENOSPC, TierFull), (errno.ENOMEM, TierFull), (errno.EMFILE, StorageError)],
)
@pytest.mark.parametrize("call", ["memfd_create", "ftruncate", "posix_fallocate"])
def test_a_failed_allocation_is_typed_and_leaves_no_fd(monkeypatch, call, number, kind) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, fail)
    before = open_fds()
    with pytest.raises(kind):
        create_memfd("test", SIZE)
    assert open_fds() == before


def test_mappings_of_one_memfd_share_their_bytes(fd: int) -> None:
    with Mapping(fd, SIZE, writable=True) as one, Mapping(fd, SIZE, writable=True) as other:
        one.buffer[4096:4101] = b"tierd"
        assert ctypes.string_at(other.address + 4096, 5) == b"tierd"
        assert one.address != other.address


def test_a_read_only_mapping_has_an_address_too(fd: int) -> None:
    with Mapping(fd, SIZE, writable=True) as mine, Mapping(fd, SIZE, writable=False) as theirs:
        mine.buffer[:5] = b"tierd"
        assert ctypes.string_at(theirs.address, 5) == b"tierd"


def test_a_mapping_outlives_its_fd() -> None:
    fd = create_memfd("test", SIZE)
    with Mapping(fd, SIZE, writable=True) as mapping:
        os.close(fd)
        mapping.buffer[0] = 1


def test_more_than_there_is_cannot_be_mapped(fd: int) -> None:
    with pytest.raises(StorageError):
        Mapping(fd, SIZE + 4096, writable=True)


def test_close_is_idempotent_and_final(fd: int) -> None:
    mapping = Mapping(fd, SIZE, writable=True)
    mapping.close()
    mapping.close()
    with pytest.raises(AssertionError):
        _ = mapping.buffer
    with pytest.raises(AssertionError):
        _ = mapping.address


def test_a_slice_that_is_still_held_stays_readable_after_close(fd: int) -> None:
    mapping = Mapping(fd, SIZE, writable=True)
    held = mapping.buffer[:4]
    held[:] = b"page"
    mapping.close()
    assert bytes(held) == b"page"


def test_discard_frees_the_memory_under_other_mappings_which_then_read_zeros(fd: int) -> None:
    with Mapping(fd, SIZE, writable=True) as mine, Mapping(fd, SIZE, writable=True) as theirs:
        theirs.buffer[:5] = b"tierd"
        mine.discard()
        assert allocated_bytes(fd) == 0
        assert bytes(theirs.buffer[:5]) == bytes(5)


def test_nothing_is_left_of_closed_memfds() -> None:
    before = open_fds()
    for _ in range(100):
        fd = create_memfd("test", SIZE)
        Mapping(fd, SIZE, writable=True).close()
        os.close(fd)
    assert open_fds() == before
