"""The device digest of a payload: 64 bits that a GPU and a CPU compute alike, block by block.

GPUDirect Storage puts a page's bytes into VRAM, where xxh3 takes two passes, one of them a chain
(an engine's GPU makes it of what it writes, tierd_engine/gpu/xxhashing.py). This is
MULTILINEAR of Lemire and Kaser, "Strongly universal string hashing is fast" (The Computer Journal
57(11), 2014, section 3), twice: over the 32-bit little-endian words of each block of 512, then
over what the blocks gave. All arithmetic is modulo 2^64; r = 0, 1 are two lanes with keys of
their own; words past the payload's end are 0:

    u_r(b) = (k_r(0) + sum_i k_r(1 + i) * word(512 b + i)) >> 32                      i < 512
    h_r    = (k_2+r(0) + k_2+r(1) * size_bytes
              + sum_b k_2+r(2 + 2b) * u_0(b) + k_2+r(3 + 2b) * u_1(b)) >> 32
    digest = h_0 << 32 | h_1

    k_s(j) = mix64(SEED + (2^32 s + j + 1) * GAMMA)     splitmix64: Steele, Lea, Flood,
             "Fast splittable pseudorandom number generators" (OOPSLA 2014)

Sums are of integers, so blocks may be added in any order, by any number of threads.

Bound: for keys drawn at random, of a sum of K = 64 bits over words of L = 32 the upper K - L + 1
bits are strongly universal, as is proven there; so two lists of words meet in the upper 32 of a
lane with probability 2^-32. Two different blocks meet in both lanes with 2^-64; if they do not, two
different lists of u, or two sizes, do with 2^-64: together 2^-63. The keys are fixed, and known:
this finds what a disk, a link or a bug did, nobody's forgery. Beside it xxh3-128 stays the name of
the bytes.

It is made where a page is encoded, by an engine whose GPU checks what it reads: there it is one
pass over bytes that are in VRAM anyway. An engine without a GPU makes none: it would cost 13 % more
than a core's time for int8 (27 GB/s from its cache and 14 from RAM, where xxh3 does 53 and 26), for
a reader it does not have. A page without a device digest
is read through RAM, where xxh3 checks it.

Importing this imports Numba.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types

from tierd.codec.compiling import compile_cached
from tierd.codec.elements import inner
from tierd.codec.intrinsics import as_array
from tierd.errors import InvalidArgument

BLOCK_WORDS = 512  # both lanes' keys of a block, 8 KiB, stay in the first cache
SEED = 0x7469657264  # "tierd"; another seed is another format of the slot header
GAMMA = 0x9E3779B97F4A7C15
MIX_1, MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
SIZE_BYTES_MAX = 2**32 - 1  # the size is a 32-bit word of the second sum

U64Array = npt.NDArray[np.uint64]

_SEED, _GAMMA, _MIX_1, _MIX_2 = (np.uint64(n) for n in (SEED, GAMMA, MIX_1, MIX_2))
_30, _27, _31, _32 = (np.uint64(n) for n in (30, 27, 31, 32))
_ONE, _TWO, _THREE = np.uint64(1), np.uint64(2), np.uint64(3)


@inner
def _key(stream: Any, index: Any) -> Any:
    z = _SEED + ((stream << _32) + index + _ONE) * _GAMMA
    z = (z ^ (z >> _30)) * _MIX_1
    z = (z ^ (z >> _27)) * _MIX_2
    return z ^ (z >> _31)


@inner
def _block_keys() -> Any:
    keys = np.empty((2, 1 + BLOCK_WORDS), np.uint64)
    for lane in range(2):
        for index in range(1 + BLOCK_WORDS):
            keys[lane, index] = _key(np.uint64(lane), np.uint64(index))
    return keys


@inner
def _digest(payload: Any, words: Any, keys_0: Any, keys_1: Any) -> Any:
    size = np.uint64(4) * np.uint64(words)
    h_0 = _key(_TWO, np.uint64(0)) + _key(_TWO, _ONE) * size
    h_1 = _key(_THREE, np.uint64(0)) + _key(_THREE, _ONE) * size
    for block in range(-(-words // BLOCK_WORDS)):
        count = min(BLOCK_WORDS, words - block * BLOCK_WORDS)
        block_words = as_array(payload + 4 * BLOCK_WORDS * block, count, np.uint32)
        u_0, u_1 = keys_0[0], keys_1[0]
        for i in range(count):
            word = np.uint64(block_words[i])
            u_0 += keys_0[1 + i] * word
            u_1 += keys_1[1 + i] * word
        u_0 >>= _32
        u_1 >>= _32
        at = _TWO + _TWO * np.uint64(block)
        h_0 += _key(_TWO, at) * u_0 + _key(_TWO, at + _ONE) * u_1
        h_1 += _key(_THREE, at) * u_0 + _key(_THREE, at + _ONE) * u_1
    return ((h_0 >> _32) << _32) | (h_1 >> _32)


def _digests(addresses: Any, pages: Any, words: Any, out: Any) -> None:
    sources, digests = as_array(addresses, pages, np.int64), as_array(out, pages, np.uint64)
    keys = _block_keys()
    for page in range(pages):
        digests[page] = _digest(sources[page], words, keys[0], keys[1])


@functools.cache
def _compiled() -> Callable[..., None]:
    return compile_cached(_digests, (types.int64,) * 4, nogil=True).call


def device_digests(addresses: npt.NDArray[np.int64], size_bytes: int) -> U64Array:
    """Return device digests, uint64 [pages], of payloads of `size_bytes` at [pages] addresses.

    The caller keeps the memory mapped and unchanged during the call. Zero pages is allowed.
    Raises InvalidArgument for a size that is no multiple of 4 or is over 4 GiB.
    """
    if size_bytes % 4 or not 0 <= size_bytes <= SIZE_BYTES_MAX:
        raise InvalidArgument(f"device digest: {size_bytes} bytes are not 32-bit words up to 4 GiB")
    out = np.empty(len(addresses), dtype=np.uint64)
    sources = np.ascontiguousarray(addresses, dtype=np.int64)
    _compiled()(sources.ctypes.data, len(sources), size_bytes // 4, out.ctypes.data)
    return out
