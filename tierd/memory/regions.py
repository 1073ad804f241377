"""Regions of address space, aligned to huge pages, and huge pages for what lies in them.

Invariants:
  a region is unmapped exactly once: when the last view of it, or of a part of it, is gone
  a region of HUGE_PAGE_BYTES or more begins at a multiple of HUGE_PAGE_BYTES
  huge pages are an offer to the kernel: without them everything works, more slowly

Why they matter here: a disk's request holds a few hundred pieces of memory. Of a memfd's 4 KiB
pages that is 1 MiB, of huge ones all that is asked for; and attention that streams over pages
waits less for address translation.

Python's mmap cannot ask for an address, so these are the C library's calls.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
import weakref
from collections.abc import Callable

from tierd.errors import TierFull
from tierd.units import format_size

HUGE_PAGE_BYTES = 2 << 20  # x86-64, and aarch64 with pages of 4 KiB
# Linux 6.1, asm-generic/mman-common.h; Python 3.11 does not name it.
_MADV_COLLAPSE = 25
# Free memory takes 0.1 ms; 5 where a virtual machine's host gives it only now, as it would for
# small pages; compaction 13 and more.
_PIECE_SECONDS, _GRACE_SECONDS = 0.006, 0.03
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_PROT_NONE = 0
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
]  # fmt: skip
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def map_shared(fd: int, size_bytes: int, *, writable: bool) -> tuple[int, memoryview]:
    """Map the first bytes of a file; return the address and a view. Raises OSError.

    The mapping lasts as long as the view and what was made of it.
    """
    return _map(fd, size_bytes, mmap.MAP_SHARED, writable=writable)


def anonymous(size_bytes: int) -> tuple[int, memoryview]:
    """Return the address and a view of private zeroed memory, huge pages asked for.

    It is given back with the last view. Raises TierFull where the host has none left.
    """
    try:
        address, view = _map(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, writable=True)
    except OSError as error:
        raise TierFull(f"the host has no {format_size(size_bytes)} of memory left") from error
    _libc.madvise(address, size_bytes, mmap.MADV_HUGEPAGE)
    return address, view


def make_huge(fd: int, size_bytes: int, clock: Callable[[], float] = time.monotonic) -> bool:
    """Back a new memfd by huge pages, as far as there are any; return whether all of it is.

    Needs no right and no setting, but Linux 6.1: what `shmem_enabled` says is for the kernel's
    own initiative. Where memory is in pieces the kernel moves others' pages together first: that
    is given up soon, for who asks is the daemon's loop. Raises OSError where there is no memory.
    """
    give_up_seconds = clock() + _GRACE_SECONDS
    whole_bytes = size_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if not whole_bytes:
        return False
    for offset in range(0, whole_bytes, HUGE_PAGE_BYTES):
        os.pwrite(fd, b"\0", offset)  # the kernel does not collapse a hole
        # Mapped piece by piece: what is mapped is part of this process's resident set.
        address, view = _map(fd, HUGE_PAGE_BYTES, mmap.MAP_SHARED, writable=True, offset=offset)
        with view:
            if _libc.madvise(address, HUGE_PAGE_BYTES, _MADV_COLLAPSE):
                return False
        give_up_seconds += _PIECE_SECONDS
        if clock() > give_up_seconds:
            return False
    return True


def discard(address: int, size_bytes: int) -> bool:
    """Free the memory of a shared mapping, for all who map it; return whether it is free."""
    return not _libc.madvise(address, size_bytes, mmap.MADV_REMOVE)


def _map(
    fd: int, size_bytes: int, flags: int, *, writable: bool, offset: int = 0
) -> tuple[int, memoryview]:
    """Map at an aligned address: where the kernel's choice is none, reserve too much, give both
    ends back, and map over the rest. What can be refused is refused at the first try."""
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    address = _mmap(None, size_bytes, protection, flags, fd, offset)
    if size_bytes >= HUGE_PAGE_BYTES and address % HUGE_PAGE_BYTES:
        _libc.munmap(address, size_bytes)
        address = _reserve(size_bytes)
        _mmap(address, size_bytes, protection, flags | _MAP_FIXED, fd, offset)
    array = (ctypes.c_char * size_bytes).from_address(address)
    # Every view keeps the array; a mapping that is still looked into stays at the process's end.
    weakref.finalize(array, _libc.munmap, address, size_bytes).atexit = False
    view = memoryview(array).cast("B")
    return address, view if writable else view.toreadonly()


def _reserve(size_bytes: int) -> int:
    """Return the address of an aligned range that nobody else will be given."""
    page = mmap.PAGESIZE
    wanted_bytes = -(-size_bytes // page) * page
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    first = _mmap(None, wanted_bytes + HUGE_PAGE_BYTES, _PROT_NONE, flags, -1)
    before_bytes = -first % HUGE_PAGE_BYTES
    if before_bytes:
        _libc.munmap(first, before_bytes)
    _libc.munmap(first + before_bytes + wanted_bytes, HUGE_PAGE_BYTES - before_bytes)
    return first + before_bytes


def _mmap(
    address: int | None, size_bytes: int, protection: int, flags: int, fd: int, offset: int = 0
) -> int:
    mapped = _libc.mmap(address, size_bytes, protection, flags, fd, offset)
    if mapped in (None, _FAILED):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(mapped)
