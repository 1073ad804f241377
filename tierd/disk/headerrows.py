"""Slot headers of many pages at once: the same 4 KiB as header.py packs, filled column by column.

A page of 108 KiB takes a disk 40 us; to pack and compare its headers one by one takes as
long again. So the headers of a batch are rows of one array.

Invariant: row i is `SlotHeader.pack()` of page i, bit for bit.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from tierd.disk.header import (
    CHECKSUM_OFFSET,
    DEVICE_DIGEST_OFFSET,
    HEADER_BYTES,
    VERSION,
    VERSION_WITH_DEVICE_DIGEST,
    SlotHeader,
)
from tierd.types import PageKey, Place

# Of header.py's table: what differs between the pages of one namespace and codec.
_COLUMNS = np.dtype(
    {
        "names": [
            "version", "slab", "slot", "generation", "session", "layer", "block", "digest",
            "device_digest", "checksum",
        ],
        "formats": [
            "<u4", "<u4", "<u4", "<u4", "<u8", "<u4", "<u4", "V16", "<u8", "<u8",
        ],
        "offsets": [8, 32, 36, 40, 48, 56, 60, 96, DEVICE_DIGEST_OFFSET, CHECKSUM_OFFSET],
        "itemsize": HEADER_BYTES,
    }
)  # fmt: skip
# The same, as far as what the slot alone knows.
_START = np.dtype(
    {
        "names": ["version", "device_digest"],
        "formats": ["<u4", "<u8"],
        "offsets": [8, DEVICE_DIGEST_OFFSET],
        "itemsize": DEVICE_DIGEST_OFFSET + 8,
    }
)
Rows = npt.NDArray[np.void]


_memory = threading.local()  # new memory costs 3 us a row before it can be written


def header_rows(count: int) -> Rows:
    """Return `count` rows, aligned as O_DIRECT wants them, of what this thread used last.

    They stay the caller's until this thread asks again.
    """
    rows: Rows | None = getattr(_memory, "rows", None)
    if rows is None or len(rows) < count:
        rows = _memory.rows = np.frombuffer(mmap.mmap(-1, count * HEADER_BYTES), _COLUMNS)
    return rows[:count]


def fill_rows(
    rows: Rows, like: SlotHeader, keys: Sequence[PageKey], digests: Sequence[bytes]
) -> None:
    """Fill rows with all but their places, which `place_rows` adds.

    `like` is the header of any page of the same namespace and codec.
    """
    rows.view(np.uint8).reshape(-1, HEADER_BYTES)[:] = np.frombuffer(like.pack(), np.uint8)
    rows["session"], rows["layer"], rows["block"] = zip(*keys, strict=True)
    rows["digest"] = np.frombuffer(b"".join(digests), "V16")


def take_device_digests(rows: Rows, found: Sequence[bytes]) -> None:
    """Let row i say the device digest that the slot header `found[i]` says, or that it has none.

    Nobody knows it but the slot. It is unchecked: a row that is then `found` has been checked.
    """
    starts = np.frombuffer(b"".join([header[: _START.itemsize] for header in found]), _START)
    has_one = starts["version"] == VERSION_WITH_DEVICE_DIGEST
    rows["version"] = np.where(has_one, VERSION_WITH_DEVICE_DIGEST, VERSION)
    rows["device_digest"] = np.where(has_one, starts["device_digest"], np.uint64(0))


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
