"""XXH3 in compiled code is XXH3 as xxHash's Python package says it."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import xxhash
from numba import types

from tierd.codec import xxh3
from tierd.codec.compiling import compile_cached

pytestmark = pytest.mark.skipif(
    not xxh3.is_there(), reason="this build of xxhash does not show its functions"
)
# Where its ways of hashing begin, and where a piece that is hashed at a time does.
EDGES = (1, 16, 17, 128, 129, 240, 241, 1023, 1024, 1025, 2047, 2048, 2049, 65536, 65537)


@cache
def both() -> Any:
    def call(address, size, digest):  # type: ignore[no-untyped-def]
        return xxh3.xxh3_64(address, size), xxh3.xxh3_128_at(address, size, digest)

    return compile_cached(call, (types.int64,) * 3).call


def test_hashes_are_what_the_package_says() -> None:
    draw = np.random.default_rng()
    for size in (*EDGES, *draw.integers(1, 10**6, 20).tolist()):
        data = draw.integers(0, 256, size + 64, dtype=np.uint8)[draw.integers(64) :][:size]
        digest = np.frombuffer(xxhash.xxh3_128_digest(data.tobytes()), np.uint8).copy()
        short, same = both()(data.ctypes.data, size, digest.ctypes.data)
        assert int(short) % 2**64 == xxhash.xxh3_64_intdigest(data.tobytes()), size
        assert same, size
        digest[draw.integers(16)] ^= 1 << draw.integers(8)
        assert not both()(data.ctypes.data, size, digest.ctypes.data)[1], size


def test_every_bit_of_the_bytes_counts() -> None:
    draw = np.random.default_rng()
    data = draw.integers(0, 256, 3000, dtype=np.uint8)
    digest = np.frombuffer(xxhash.xxh3_128_digest(data), np.uint8).copy()
    for at in draw.integers(0, data.size, 200):
        data[at] ^= (flipped := np.uint8(1 << draw.integers(8)))
        assert not both()(data.ctypes.data, data.size, digest.ctypes.data)[1], f"{at=} {flipped=}"
        data[at] ^= flipped
    assert both()(data.ctypes.data, data.size, digest.ctypes.data)[1]


def test_of_several_functions_the_one_for_this_processor_is_taken() -> None:
    class Library:
        XXH3_64bits, XXH3_64bits_dispatch, XXH3_128bits = 1, 2, 3

    assert xxh3._function(Library(), "XXH3_64bits") == 2
    assert xxh3._function(Library(), "XXH3_128bits") == 3
    with pytest.raises(AttributeError):
        xxh3._function(Library(), "XXH3_128bits_reset")
