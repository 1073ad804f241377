"""Slot headers of many pages at once: the same 4 KiB as header.py packs, filled column by column.

A page of 108 KiB takes a disk 40 us; to pack and compare its headers one by one takes as
long again. So the headers of a batch are rows of one array.

Invariant: row i is `SlotHeader.pack()` of page i, bit for bit.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from tierd.disk.header import CHECKSUM_OFFSET, HEADER_BYTES, SlotHeader
from tierd.types import PageKey, Place

# Of header.py's table: what differs between the pages of one namespace and codec.
_COLUMNS = np.dtype(
    {
        "names": ["slab", "slot", "generation", "session", "layer", "block", "digest", "checksum"],
        "formats": ["<u4", "<u4", "<u4", "<u8", "<u4", "<u4", "V16", "<u8"],
        "offsets": [32, 36, 40, 48, 56, 60, 96, CHECKSUM_OFFSET],
        "itemsize": HEADER_BYTES,
    }
)
Rows = npt.NDArray[np.void]


def header_rows(count: int) -> Rows:
    """Return `count` empty rows, aligned as O_DIRECT wants them."""
    return np.frombuffer(mmap.mmap(-1, count * HEADER_BYTES), _COLUMNS)


def fill_rows(
    rows: Rows, like: SlotHeader, keys: Sequence[PageKey], digests: Sequence[bytes]
) -> None:
    """Fill rows with all but their places, which `place_rows` adds.

    `like` is the header of any page of the same namespace and codec.
    """
    rows.view(np.uint8).reshape(-1, HEADER_BYTES)[:] = np.frombuffer(like.pack(), np.uint8)
    rows["session"], rows["layer"], rows["block"] = zip(*keys, strict=True)
    rows["digest"] = np.frombuffer(b"".join(digests), "V16")


def as_bytes(rows: Rows) -> memoryview:
    """Return the rows' memory, one header after the other."""
    return rows.view(np.uint8).data


def place_rows(rows: Rows, places: Sequence[Place]) -> None:
    """Let row i be the header of its page at `places[i]`: it is whole now."""
    _, _, slabs, slots, generations = zip(*places, strict=True)
    rows["slab"], rows["slot"], rows["generation"] = slabs, slots, generations
    body = as_bytes(rows)
    starts = range(0, len(body), HEADER_BYTES)
    rows["checksum"] = [
        xxhash.xxh3_64_intdigest(body[start : start + CHECKSUM_OFFSET]) for start in starts
    ]
