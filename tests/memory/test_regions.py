"""Regions: aligned, huge where the kernel can, and there for as long as anybody looks."""

import ctypes
import errno
import gc
import os
from pathlib import Path

import pytest

from tierd.errors import TierFull
from tierd.memory import regions
from tierd.memory.memfd import Mapping, create_memfd
from tierd.memory.regions import HUGE_PAGE_BYTES, anonymous, make_huge, map_shared

SIZES = [1, 4096, 4097, HUGE_PAGE_BYTES - 1, HUGE_PAGE_BYTES, 3 * HUGE_PAGE_BYTES + 4097]


def mapped_ranges() -> list[range]:
    """Return the address ranges of this process's mappings."""
    ranges = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        ranges.append(range(start, end))
    return ranges


def is_mapped(address: int) -> bool:
    return any(address in found for found in mapped_ranges())


def huge_bytes(address: int) -> int:
    """Return how much of the mapping at an address is mapped by huge pages of a memfd."""
    at_it = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            at_it = start <= address < end
        elif at_it and line.startswith("ShmemPmdMapped:"):
            return int(line.split()[1]) * 1024
    return 0


@pytest.mark.parametrize("size", SIZES)
def test_anonymous_memory_is_zeroed_writable_and_aligned(size: int) -> None:
    address, view = anonymous(size)
    assert address % (HUGE_PAGE_BYTES if size >= HUGE_PAGE_BYTES else 4096) == 0
    assert len(view) == size and bytes(view) == bytes(size)
    view[-1:] = b"x"
    assert ctypes.string_at(address + size - 1, 1) == b"x"


@pytest.mark.parametrize("size", SIZES)
def test_of_what_was_reserved_for_alignment_nothing_stays(size: int) -> None:
    def reserved() -> set[str]:
        lines = Path("/proc/self/maps").read_text().splitlines()
        return {line.split()[0] for line in lines if line.split()[1] == "---p"}

    before = reserved()
    address, view = anonymous(size)
    assert reserved() == before and is_mapped(address) and is_mapped(address + size - 1)
    del view
    gc.collect()
    assert reserved() == before


def test_a_region_is_unmapped_with_its_last_view() -> None:
    address, view = anonymous(2 * HUGE_PAGE_BYTES)
    part = view[HUGE_PAGE_BYTES:][5:7]
    view.release()
    assert is_mapped(address)
    part[:] = b"ok"
    part.release()
    del part, view
    gc.collect()
    assert not is_mapped(address)


def test_two_mappings_of_a_file_share_its_bytes_and_a_read_only_one_refuses_writes() -> None:
    size = 2 * HUGE_PAGE_BYTES + 4096
    fd = create_memfd("test", size)
    one, view = map_shared(fd, size, writable=True)
    other, read_only = map_shared(fd, size, writable=False)
    os.close(fd)
    view[size - 5 :] = b"tierd"
    assert one % HUGE_PAGE_BYTES == other % HUGE_PAGE_BYTES == 0
    assert bytes(read_only[size - 5 :]) == b"tierd" and read_only.readonly


def test_a_failed_mapping_leaves_no_reservation() -> None:
    before = len(mapped_ranges())
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        map_shared(-1, 2 * HUGE_PAGE_BYTES, writable=True)
    assert len(mapped_ranges()) <= before + 1


def test_a_memfd_lies_in_huge_pages_in_every_mapping_of_it() -> None:
    size = 4 * HUGE_PAGE_BYTES + 8192
    fd = os.memfd_create("test")
    os.ftruncate(fd, size)
    if not make_huge(fd, size):
        pytest.skip("this kernel makes no huge pages on request (Linux 6.1), or has none left")
    os.close(fd)
    fd = create_memfd("test", size)
    with Mapping(fd, size, writable=True) as mine, Mapping(fd, size, writable=True) as theirs:
        assert os.fstat(fd).st_blocks * 512 == size
        mine.buffer[:] = bytes(range(256)) * (size // 256)
        assert bytes(theirs.buffer) == bytes(mine.buffer)
        assert huge_bytes(mine.address) == huge_bytes(theirs.address) == 4 * HUGE_PAGE_BYTES
        mine.discard()
        assert os.fstat(fd).st_blocks == 0
        assert bytes(theirs.buffer[:8192]) == bytes(8192)
    os.close(fd)


def test_without_huge_pages_a_memfd_is_what_it_was(monkeypatch) -> None:
    class NoHugePages:
        munmap, mmap = regions._libc.munmap, regions._libc.mmap

        @staticmethod
        def madvise(*_: object) -> int:
            return -1

    monkeypatch.setattr(regions, "_libc", NoHugePages)
    size = 2 * HUGE_PAGE_BYTES
    fd = create_memfd("test", size)
    with Mapping(fd, size, writable=True) as mapping:
        assert os.fstat(fd).st_blocks * 512 == size
        assert bytes(mapping.buffer) == bytes(size)
        assert huge_bytes(mapping.address) == 0
        mapping.discard()  # refused as well: no error
    os.close(fd)
    assert len(anonymous(size)[1]) == size


def test_a_host_without_memory_for_the_first_bytes_is_a_full_tier(monkeypatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TierFull):
        create_memfd("test", HUGE_PAGE_BYTES)
    assert len(os.listdir("/proc/self/fd")) == before


def test_huge_pages_that_are_slow_to_come_are_given_up_soon() -> None:
    now = [0.0]

    def slow() -> float:
        now[0] += 0.015
        return now[0]

    size = 64 * HUGE_PAGE_BYTES
    fd = os.memfd_create("test")
    os.ftruncate(fd, size)
    assert not make_huge(fd, size, slow)
    assert now[0] < 0.1
    os.close(fd)


def test_memory_that_the_host_does_not_have_is_a_full_tier() -> None:
    with pytest.raises(TierFull, match="of memory left"):
        anonymous(1 << 60)
