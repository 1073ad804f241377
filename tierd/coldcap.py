"""The cold tier's cap: what of it is for slabs, and the smallest that holds what is there."""

from __future__ import annotations

from tierd.codec.layout import page_layout
from tierd.disk.journal import SEGMENT_BYTES
from tierd.disk.superblock import SUPERBLOCK_BYTES
from tierd.disk.volatile import LedgerPort
from tierd.types import CodecId, SlabRecord
from tierd.units import MIB, SECTOR_BYTES, format_size

_SEGMENTS_RESERVED = 5
_SEGMENT_BYTES_MIN = 64 << 10


def metadata_bytes(cap_bytes: int, segment_bytes: int) -> int:
    """Return what of a cap, which counts every byte, is for other files than slabs.

    Journal: SNAPSHOT_SEGMENTS and the one that is written. The superblock and its successor.
    Two snapshots and one under way: 44 bytes a page, and a page has 12 KiB or more.
    """
    room = _SEGMENTS_RESERVED * segment_bytes + 2 * SUPERBLOCK_BYTES + cap_bytes // 64
    return min(room // SECTOR_BYTES * SECTOR_BYTES, cap_bytes)


def journal_bytes(cap_bytes: int) -> int:
    """Return the bytes of a journal's segment: 64 MiB, and less for a small cold tier."""
    small = cap_bytes // 128 // SECTOR_BYTES * SECTOR_BYTES
    return max(_SEGMENT_BYTES_MIN, min(small, SEGMENT_BYTES))


def slab_room_bytes(cap_bytes: int) -> int:
    """Return what of a cap is for slabs."""
    return cap_bytes - metadata_bytes(cap_bytes, journal_bytes(cap_bytes))


def smallest_cap_bytes(slabs_bytes: int) -> int:
    """Return the smallest cap, in whole MiB, that leaves room for these slabs."""
    low, high = slabs_bytes // MIB, 2 * (slabs_bytes // MIB + 1)
    while high - low > 1:  # low is too small, high is enough: metadata are less than half
        middle = (low + high) // 2
        if slab_room_bytes(middle * MIB) >= slabs_bytes:
            high = middle
        else:
            low = middle
    return high * MIB


def used_slabs(ledger: LedgerPort) -> list[SlabRecord]:
    """Return the slabs of earlier runs that hold a page, or a slot that is not to be used."""
    return [
        record
        for record in ledger.slabs().values()
        if len(ledger.occupancy(record.slab)[0]) or ledger.quarantined(record.slab)
    ]


def too_small(folder: str, room_bytes: int, ledger: LedgerPort) -> str:
    """Return why a cap that leaves `room_bytes` for slabs cannot be, and how to get below."""
    slabs_bytes = sum(record.size_bytes for record in used_slabs(ledger))
    smallest = smallest_cap_bytes(slabs_bytes) // MIB
    return (
        f"cold.cap_bytes: the slabs with pages in {folder} are {slabs_bytes:,d} bytes "
        f"({format_size(slabs_bytes)}), kept sessions' pages in them "
        f"{_kept_bytes(ledger):,d}, and the cap leaves {format_size(room_bytes)} for slabs; "
        f"the smallest that works is --cold-cap {smallest}MiB. To get below, start with that, end "
        "sessions (tierd sessions lists them, tierd sessions --drop SESSION --yes ends one), then "
        "stop the daemon and start it with the smaller cap; tierd fsck frees nothing that is kept"
    )


def _kept_bytes(ledger: LedgerPort) -> int:
    total = 0
    for record in ledger.sessions().values():
        if record.kept:
            rows = ledger.pages_of(record.number)
            codecs = rows["codec"][rows["block"] < record.sealed_blocks].tolist()
            geometry = record.namespace.geometry
            total += sum(page_layout(geometry, CodecId(codec)).slot_bytes for codec in codecs)
    return total
