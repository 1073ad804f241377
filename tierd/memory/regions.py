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
import weakref

HUGE_PAGE_BYTES = 2 << 20  # x86-64, and aarch64 with pages of 4 KiB
# Linux 6.1, asm-generic/mman-common.h; Python 3.11 does not name it.
_MADV_COLLAPSE = 25
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

    It is given back with the last view. Raises OSError.
    """
    address, view = _map(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, writable=True)
    _libc.madvise(address, size_bytes, mmap.MADV_HUGEPAGE)
    return address, view


def make_huge(fd: int, size_bytes: int) -> bool:
    """Back a new memfd by huge pages, as far as there are any; return whether all of it is.

    Needs no right and no setting, but Linux 6.1: what `shmem_enabled` says is for the kernel's
    own initiative. Raises OSError where there is no memory at all.
    """
    whole_bytes = size_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if not whole_bytes:
        return False
    for offset in range(0, whole_bytes, HUGE_PAGE_BYTES):
        os.pwrite(fd, b"\0", offset)  # the kernel does not collapse a hole
        # Mapped piece by piece: what is mapped counts as ours, though nothing is in it yet.
        address, view = _map(fd, HUGE_PAGE_BYTES, mmap.MAP_SHARED, writable=True, offset=offset)
        with view:
            if _libc.madvise(address, HUGE_PAGE_BYTES, _MADV_COLLAPSE):
                return False
    return True


def discard(address: int, size_bytes: int) -> bool:
    """Free the memory of a shared mapping, for all who map it; return whether it is free."""
    return not _libc.madvise(address, size_bytes, mmap.MADV_REMOVE)


def _map(
    fd: int, size_bytes: int, flags: int, *, writable: bool, offset: int = 0
) -> tuple[int, memoryview]:
    """Map at an aligned address: reserve too much, give both ends back, map over the rest."""
    slack_bytes = HUGE_PAGE_BYTES if size_bytes >= HUGE_PAGE_BYTES else 0
    whole_bytes = size_bytes + slack_bytes
    reserved = _mmap(
        None, whole_bytes, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1
    )
    before_bytes = -reserved % HUGE_PAGE_BYTES if slack_bytes else 0
    address = reserved + before_bytes
    page = mmap.PAGESIZE
    end = address + -(-size_bytes // page) * page
    if before_bytes:
        _libc.munmap(reserved, before_bytes)
    if end < (reserved_end := reserved + -(-whole_bytes // page) * page):
        _libc.munmap(end, reserved_end - end)
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    try:
        _mmap(address, size_bytes, protection, flags | _MAP_FIXED, fd, offset)
    except OSError:
        _libc.munmap(address, size_bytes)
        raise
    array = (ctypes.c_char * size_bytes).from_address(address)
    # Every view keeps the array; a mapping that is still looked into stays at the process's end.
    weakref.finalize(array, _libc.munmap, address, size_bytes).atexit = False
    view = memoryview(array).cast("B")
    return address, view if writable else view.toreadonly()


def _mmap(
    address: int | None, size_bytes: int, protection: int, flags: int, fd: int, offset: int = 0
) -> int:
    mapped = _libc.mmap(address, size_bytes, protection, flags, fd, offset)
    if mapped in (None, _FAILED):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(mapped)
