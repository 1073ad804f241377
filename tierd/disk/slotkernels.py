"""Slots checked against their rows, and rows sealed, of many pages in one call.

Importing this imports Numba.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numba import types

from tierd.codec import xxh3
from tierd.codec.compiling import SHARED_SOURCES, compile_cached
from tierd.codec.elements import inner
from tierd.codec.intrinsics import as_array
from tierd.codec.xxh3 import xxh3_64, xxh3_128_at
from tierd.disk import header
from tierd.disk.header import (
    CHECKSUM_OFFSET,
    DEVICE_DIGEST_OFFSET,
    DIGEST_OFFSET,
    HEADER_BYTES,
    VERSION,
    VERSION_OFFSET,
    VERSION_WITH_DEVICE_DIGEST,
)


@dataclass(frozen=True, slots=True)
class SlotKernels:
    """`check(slots, pages, stored_bytes, rows, sound)`, `seal(rows, pages)`: of addresses.

    `slots`: int64 addresses; `stored_bytes`: int64; `rows`: 4 KiB each; `sound`: a byte each,
    written.
    """

    check: Callable[[int, int, int, int, int], None]
    seal: Callable[[int, int], None]


@inner
def _seal(row: Any) -> Any:
    as_array(row + CHECKSUM_OFFSET, 1, np.uint64)[0] = xxh3_64(row, CHECKSUM_OFFSET)


@inner
def _is_sound(slot: Any, stored_bytes: Any, row: Any) -> Any:
    version = as_array(slot + VERSION_OFFSET, 1, np.uint32)[0]
    has_device_digest = version == VERSION_WITH_DEVICE_DIGEST
    as_array(row + VERSION_OFFSET, 1, np.uint32)[0] = np.uint32(
        VERSION_WITH_DEVICE_DIGEST if has_device_digest else VERSION
    )
    device_digest = as_array(slot + DEVICE_DIGEST_OFFSET, 1, np.uint64)[0]
    as_array(row + DEVICE_DIGEST_OFFSET, 1, np.uint64)[0] = (
        device_digest if has_device_digest else np.uint64(0)
    )
    _seal(row)
    found = as_array(slot, HEADER_BYTES // 8, np.int64)
    expected = as_array(row, HEADER_BYTES // 8, np.int64)
    differing = np.int64(0)
    for word in range(HEADER_BYTES // 8):
        differing |= found[word] ^ expected[word]
    if differing:
        return False
    return xxh3_128_at(slot + HEADER_BYTES, stored_bytes, row + DIGEST_OFFSET)


def _check(slots: Any, pages: Any, stored_bytes: Any, rows: Any, sound: Any) -> None:
    addresses, sizes = as_array(slots, pages, np.int64), as_array(stored_bytes, pages, np.int64)
    flags = as_array(sound, pages, np.uint8)
    for page in range(pages):
        flags[page] = _is_sound(addresses[page], sizes[page], rows + page * HEADER_BYTES)


def _seal_rows(rows: Any, pages: Any) -> None:
    for page in range(pages):
        _seal(rows + page * HEADER_BYTES)


def compile_kernels() -> SlotKernels | None:
    """Return the kernels, compiled or loaded; None where compiled code cannot have xxh3.

    Raises OSError where they cannot be loaded just now.
    """
    if not xxh3.find():
        return None
    sources = (*SHARED_SOURCES, Path(header.__file__))
    # To give the interpreter's lock up for a seal, which takes a microsecond a page, is to wait
    # for it behind the other lanes: a millisecond a batch.
    check, seal = (
        compile_cached(function, (types.int64,) * words, sources, nogil=nogil).call
        for function, words, nogil in ((_check, 5, True), (_seal_rows, 2, False))
    )
    return SlotKernels(check, seal)
