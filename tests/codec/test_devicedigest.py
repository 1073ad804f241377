"""The device digest: its definition in whole numbers, and what it finds."""

from __future__ import annotations

import numpy as np
import pytest

from tierd.codec.devicedigest import device_digests
from tierd.errors import InvalidArgument

U8 = np.uint8


def key(stream: int, index: int) -> int:
    mask = 2**64 - 1
    z = (0x7469657264 + (2**32 * stream + index + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & mask
    return z ^ z >> 31


def reference(payload: bytes) -> int:
    """Return the digest by its definition; Python's numbers have no end."""
    sums = [key(2 + lane, 0) + key(2 + lane, 1) * len(payload) for lane in (0, 1)]
    for block, start in enumerate(range(0, len(payload), 2048)):
        words = np.frombuffer(payload[start : start + 2048], "<u4").tolist()
        u = []
        for lane in (0, 1):
            total = key(lane, 0) + sum(key(lane, 1 + i) * word for i, word in enumerate(words))
            u.append(total % 2**64 >> 32)
        for lane in (0, 1):
            at = 2 + 2 * block
            sums[lane] += key(2 + lane, at) * u[0] + key(2 + lane, at + 1) * u[1]
    high, low = (total % 2**64 >> 32 for total in sums)
    return high << 32 | low


def digest(payload: np.ndarray) -> int:
    return int(device_digests(np.array([payload.ctypes.data]), len(payload))[0])


@pytest.mark.parametrize("words", [0, 1, 511, 512, 513, 1024, 3 * 512 + 17])
def test_the_digest_is_its_definition(words: int) -> None:
    payload = np.random.default_rng().integers(0, 256, 4 * words, dtype=U8)
    assert digest(payload) == reference(payload.tobytes())
    payload[:] = 255
    assert digest(payload) == reference(payload.tobytes())


def test_the_digest_of_these_bytes_is_this_for_ever() -> None:
    payload = np.arange(4096, dtype=np.uint32).view(U8)
    assert digest(payload) == 0xA9DE94AB2F192118


def test_a_batch_gives_each_payloads_digest_wherever_it_lies() -> None:
    memory = np.random.default_rng().integers(0, 256, 7 * 3000, dtype=U8)
    addresses = memory.ctypes.data + np.array([4, 3000, 15000, 6001], np.int64)
    found = device_digests(addresses, 2980).tolist()
    starts = (addresses - memory.ctypes.data).tolist()
    assert found == [reference(memory[s : s + 2980].tobytes()) for s in starts]


def test_any_flipped_bit_is_found() -> None:
    payload = np.random.default_rng().integers(0, 256, 5120, dtype=U8)
    seen = {digest(payload)}
    for bit in range(8 * len(payload)):
        payload[bit // 8] ^= 1 << bit % 8
        seen.add(digest(payload))
        payload[bit // 8] ^= 1 << bit % 8
    assert len(seen) == 1 + 8 * len(payload)


def test_swapped_words_and_swapped_blocks_are_found() -> None:
    rng = np.random.default_rng()
    words = rng.permutation(6 * 512).astype(np.uint32)
    whole = digest(words.view(U8))
    for _ in range(500):
        i, j = rng.choice(len(words), 2, replace=False)
        words[[i, j]] = words[[j, i]]
        assert digest(words.view(U8)) != whole, (i, j)
        words[[i, j]] = words[[j, i]]
    blocks = words.reshape(6, 512)
    for i in range(6):
        for j in range(i):
            swapped = blocks.copy()
            swapped[[i, j]] = swapped[[j, i]]
            assert digest(swapped.reshape(-1).view(U8)) != whole, (i, j)


def test_top_bits_alone_are_found_as_well_as_any() -> None:
    """Multiples of 2^31 reach but 33 bits of a sum modulo 2^64: the top ones, which are kept."""
    words = np.zeros(512, np.uint32)
    seen = {digest(words.view(U8))}
    for i in range(100):
        for j in range(i):
            words[[i, j]] = 2**31
            seen.add(digest(words.view(U8)))
            words[[i, j]] = 0
    assert len(seen) == 1 + 100 * 99 // 2


def test_zeros_of_each_length_differ() -> None:
    zeros = np.zeros(4 * 1100, dtype=U8)
    seen = {digest(zeros[: 4 * words]) for words in range(1101)}
    assert len(seen) == 1101


def test_bytes_that_are_no_words_are_refused_and_no_pages_give_none() -> None:
    none = np.empty(0, np.int64)
    for size_bytes in (2, -4, 2**32):
        with pytest.raises(InvalidArgument, match=str(size_bytes)):
            device_digests(none, size_bytes)
    assert device_digests(none, 4096).shape == (0,)
