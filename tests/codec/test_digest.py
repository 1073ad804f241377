"""Digests name a payload's bytes, where they lie."""

from __future__ import annotations

import numpy as np
import xxhash

from tierd.codec import digest_pages, payload_digest


def test_a_batch_gives_each_payloads_digest() -> None:
    memory = np.random.default_rng(1).integers(0, 256, 5 * 1000, dtype=np.uint8)
    addresses = memory.ctypes.data + np.arange(5, dtype=np.int64) * 1000
    digests = digest_pages(addresses, 1000)
    for i, digest in enumerate(digests):
        expected = xxhash.xxh3_128(memory[1000 * i : 1000 * (i + 1)].tobytes()).digest()
        assert digest.tobytes() == expected == payload_digest(int(addresses[i]), 1000)


def test_any_flipped_bit_changes_the_digest() -> None:
    memory = np.zeros(300, dtype=np.uint8)
    seen = {payload_digest(memory.ctypes.data, 300)}
    for bit in range(0, 8 * 300, 7):
        memory[bit // 8] ^= 1 << bit % 8
        seen.add(payload_digest(memory.ctypes.data, 300))
        memory[bit // 8] ^= 1 << bit % 8
    assert len(seen) == 1 + len(range(0, 8 * 300, 7))


def test_no_pages_give_no_digests() -> None:
    assert digest_pages(np.empty(0, dtype=np.int64), 100).shape == (0, 16)
