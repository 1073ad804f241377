"""Strays: what slot headers say by themselves, where records are lost. Reads only.

A header names its store, slab, slot, generation and page. It does not say that
its page is still a session's, so nothing is taken up on its word alone; but it
tells which store a folder is, which generations were given out, and of which
sessions there were pages.
"""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Container, Iterator

from tierd.disk.header import HEADER_BYTES, SlotHeader
from tierd.disk.ports import DiskPort
from tierd.errors import NotFound, PageDamaged, StorageError
from tierd.units import SECTOR_BYTES, round_up


def headers_in(disk: DiskPort, name: str) -> Iterator[SlotHeader]:
    """Yield the sound headers of a slab's file that stand where they say."""
    slab = int(name.rpartition("/")[2], 16)
    sector = memoryview(mmap.mmap(-1, SECTOR_BYTES))
    handle = disk.open(name)
    try:
        end = disk.size_bytes(handle) // SECTOR_BYTES * SECTOR_BYTES
        offset, step = 0, SECTOR_BYTES  # every sector, until one says how long a slot is
        while offset < end:
            header = _header_at(disk, handle, offset, sector)
            if header is not None and header.slab == slab:
                slot_bytes = HEADER_BYTES + round_up(header.stored_bytes, SECTOR_BYTES)
                if header.slot * slot_bytes == offset:
                    step = slot_bytes
                    yield header
            offset += step
    finally:
        disk.release(handle)


def _header_at(disk: DiskPort, handle: int, offset: int, sector: memoryview) -> SlotHeader | None:
    try:
        disk.read_into(handle, offset, sector)
        return SlotHeader.unpack(sector)
    except (PageDamaged, StorageError):
        return None  # never written, or nobody's


def count_strays(
    disk: DiskPort, names: list[str], store_uuid: bytes, known: Container[int]
) -> Counter[int]:
    """Return how many slots of these slab files hold pages of sessions that are not `known`."""
    strays: Counter[int] = Counter()
    for name in names:
        try:
            for header in headers_in(disk, name):
                if header.store_uuid == store_uuid and header.session not in known:
                    strays[header.session] += 1
        except (NotFound, StorageError):
            continue  # told elsewhere, if anything needs it
    return strays
