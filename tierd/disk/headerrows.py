"""Slot headers of many pages at once: the same 4 KiB as header.py packs, filled column by column.

A page of 108 KiB takes a disk 40 us; to pack and compare its headers one by one takes as
long again. So the headers of a batch are rows of one array. Nor may the digests of pages be made
one by one through Python: a daemon's lanes then hold the interpreter's lock for as long as that
takes, and over a disk of 3.5 GB/s, on a machine that reads 8 GB/s a core, these pages were spilled
at 0.55 of its speed.

Invariants:
  a sealed row i is `SlotHeader.pack()` of page i, bit for bit
  the compiled kernels say of each slot what Python says
  once they are loaded, or cannot be, that stands; what may pass is tried again
"""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import xxhash

from tierd.codec.digest import payload_digest
from tierd.disk.header import (
    CHECKSUM_OFFSET,
    DEVICE_DIGEST_OFFSET,
    HEADER_BYTES,
    VERSION,
    VERSION_WITH_DEVICE_DIGEST,
    SlotHeader,
)
from tierd.types import PageKey, Place

if TYPE_CHECKING:
    from tierd.disk.slotkernels import SlotKernels

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

# A try imports Numba, half a second: a twentieth of a lane's time while there are no fds for it.
LOAD_AGAIN_SECONDS = 10.0


class _Kernels:
    """The compiled kernels, or None without Numba, without xxh3 for compiled code, or without fds.

    A lane does not end for that: Python does the same, slowly. Fds may be there again.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._loading = threading.Lock()  # of many that ask first, one loads them
        self._found: SlotKernels | None = None
        self._load_at_seconds = -math.inf  # +inf: what was found stands

    def get(self) -> SlotKernels | None:
        """Return the kernels; a try to load them takes its time."""
        if self._load_at_seconds == math.inf:
            return self._found
        with self._loading:
            now_seconds = self._monotonic()
            if now_seconds >= self._load_at_seconds:
                self._load_at_seconds = now_seconds + LOAD_AGAIN_SECONDS
                if self._load():
                    self._load_at_seconds = math.inf
            return self._found

    def _load(self) -> bool:
        """Load them; return whether that is how it ends."""
        try:
            from tierd.disk.slotkernels import compile_kernels

            self._found = compile_kernels()
        except OSError:
            return False
        except ImportError as error:  # the loader of libraries gives no number, but its text
            return os.strerror(errno.EMFILE) not in str(error)
        return True


_kernels = _Kernels()
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
    """Fill rows with all but their places, which `place_rows` adds, and their seals.

    `like` is the header of any page of the same namespace and codec.
    """
    rows.view(np.uint8).reshape(-1, HEADER_BYTES)[:] = np.frombuffer(like.pack(), np.uint8)
    rows["session"], rows["layer"], rows["block"] = zip(*keys, strict=True)
    rows["digest"] = np.frombuffer(b"".join(digests), "V16")


def as_bytes(rows: Rows) -> memoryview:
    """Return the rows' memory, one header after the other."""
    return rows.view(np.uint8).data


def place_rows(rows: Rows, places: Sequence[Place]) -> None:
    """Let row i say that its page is at `places[i]`; it is to be sealed then."""
    _, _, slabs, slots, generations = zip(*places, strict=True)
    rows["slab"], rows["slot"], rows["generation"] = slabs, slots, generations


def seal_rows(rows: Rows) -> None:
    """Let each row end in the checksum of what it says: it is a header now."""
    if (kernels := _kernels.get()) is not None:
        kernels.seal(rows.ctypes.data, len(rows))
    else:
        _seal_in_python(rows)


def check_slots(
    rows: Rows, slots: npt.NDArray[np.int64], stored_bytes: npt.NDArray[np.int64]
) -> npt.NDArray[np.bool_]:
    """Return which of the slots at [pages] addresses hold the pages of `rows`, header and payload.

    `stored_bytes`: [pages], of their payloads. Row i takes the device digest that its slot says,
    or that it has none, and is sealed: nobody knows that digest but the slot, and where the slot
    is sound the header's checksum says that it is right. The caller keeps the slots mapped and
    unchanged meanwhile. The interpreter's lock is free where Numba is installed; the first call in
    a process takes the time to load it.
    """
    if (kernels := _kernels.get()) is None:
        return _check_in_python(rows, slots, stored_bytes)
    sound = np.zeros(len(rows), np.bool_)
    kernels.check(
        slots.ctypes.data, len(rows), stored_bytes.ctypes.data, rows.ctypes.data, sound.ctypes.data
    )  # fmt: skip
    return sound


def _seal_in_python(rows: Rows) -> None:
    body = as_bytes(rows)
    starts = range(0, len(body), HEADER_BYTES)
    rows["checksum"] = [
        xxhash.xxh3_64_intdigest(body[start : start + CHECKSUM_OFFSET]) for start in starts
    ]


def _check_in_python(
    rows: Rows, slots: npt.NDArray[np.int64], stored_bytes: npt.NDArray[np.int64]
) -> npt.NDArray[np.bool_]:
    addresses: list[int] = slots.tolist()
    found = [ctypes.string_at(address, HEADER_BYTES) for address in addresses]
    _take_device_digests(rows, found)
    _seal_in_python(rows)
    pages = zip(addresses, stored_bytes.tolist(), found, rows, strict=True)
    sound = [
        header == row.tobytes()
        and payload_digest(address + HEADER_BYTES, size_bytes) == row["digest"].tobytes()
        for address, size_bytes, header, row in pages
    ]
    return np.array(sound, np.bool_)


def _take_device_digests(rows: Rows, found: Sequence[bytes]) -> None:
    starts = np.frombuffer(b"".join([header[: _START.itemsize] for header in found]), _START)
    has_one = starts["version"] == VERSION_WITH_DEVICE_DIGEST
    rows["version"] = np.where(has_one, VERSION_WITH_DEVICE_DIGEST, VERSION)
    rows["device_digest"] = np.where(has_one, starts["device_digest"], np.uint64(0))
