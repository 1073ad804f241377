"""The digest of a page's payload: xxh3-128 over the bytes where they lie, no copy.

Right after encoding the page is in the cache, and one core hashes 40 GB/s: threads would gain
nothing. From RAM it is 12 (xxh3.py asks for it ahead).
"""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt
import xxhash

DIGEST_BYTES = 16


def payload_digest(address: int, size_bytes: int) -> bytes:
    """Return the 16-byte digest (canonical, big-endian) of mapped memory at `address`."""
    return xxhash.xxh3_128_digest((ctypes.c_ubyte * size_bytes).from_address(address))


def digest_pages(addresses: npt.NDArray[np.int64], size_bytes: int) -> npt.NDArray[np.uint8]:
    """Return digests, uint8 [pages, 16], of payloads of `size_bytes` at [pages] addresses.

    The caller keeps the memory mapped and unchanged during the call. Zero pages is allowed.
    """
    kind = ctypes.c_ubyte * size_bytes
    joined = b"".join(
        xxhash.xxh3_128_digest(kind.from_address(address)) for address in addresses.tolist()
    )
    return np.frombuffer(joined, dtype=np.uint8).reshape(-1, DIGEST_BYTES)
