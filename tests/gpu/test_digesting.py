"""The device digest on the GPU, interpreted: the CPU's 64 bits for bytes of any length."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tierd.codec import page_layout
from tierd.codec.devicedigest import device_digests
from tierd.errors import InvalidArgument
from tierd.types import CodecId, DType, Geometry
from tierd_engine.gpu.digesting import digest_pages

U8 = np.uint8


def both(memory: np.ndarray, starts: list[int], size_bytes: int) -> tuple[list[int], list[int]]:
    """Return the GPU's and the CPU's digests of payloads in `memory`."""
    first = memory.ctypes.data + (-memory.ctypes.data) % 64
    addresses = first + np.array(starts, np.int64)
    found = digest_pages(torch.tensor(addresses), size_bytes)
    assert found.dtype == torch.int64 and found.shape == (len(starts),)
    return found.numpy().view(np.uint64).tolist(), device_digests(addresses, size_bytes).tolist()


def random_bytes(size_bytes: int) -> np.ndarray:
    seed = int(np.random.default_rng().integers(2**32))
    print(f"seed {seed}")
    return np.random.default_rng(seed).integers(0, 256, size_bytes + 64, dtype=U8)


def test_one_page_of_any_length_gives_the_cpus_digest() -> None:
    memory = random_bytes(50_000)
    edges = [0, 4, 2044, 2048, 2052, 8 * 2048 - 4, 8 * 2048, 8 * 2048 + 4, 3 * 8 * 2048]
    for size_bytes in edges + (4 * np.random.default_rng().integers(1, 12_000, 20)).tolist():
        found, expected = both(memory, [0], size_bytes)
        assert found == expected, size_bytes


@pytest.mark.parametrize("codec", list(CodecId)[1:], ids=lambda codec: codec.name.lower())
def test_a_batch_of_pages_gives_the_cpus_digests(codec: CodecId) -> None:
    size_bytes = page_layout(Geometry(1, 3, 64, DType.BFLOAT16, 64), codec).payload_bytes
    memory = random_bytes(5 * (size_bytes + 64))
    starts = (np.random.default_rng().permutation(5) * (size_bytes + 64)).tolist()
    found, expected = both(memory, starts, size_bytes)
    assert found == expected and len(set(found)) == 5


def test_words_with_all_bits_set_wrap_as_the_cpus_do() -> None:
    memory = np.full(40_000 + 64, 255, dtype=U8)
    found, expected = both(memory, [0], 40_000)
    assert found == expected


def test_a_flipped_bit_and_swapped_words_are_found() -> None:
    rng = np.random.default_rng()
    memory = random_bytes(20_000)
    start = -memory.ctypes.data % 64
    page = memory[start : start + 20_000]
    (whole,), _ = both(memory, [0], 20_000)
    for bit in rng.choice(8 * 20_000, 30, replace=False).tolist():
        page[bit // 8] ^= 1 << bit % 8
        assert both(memory, [0], 20_000)[0] != [whole], bit
        page[bit // 8] ^= 1 << bit % 8
    words = page.view(np.uint32)
    for i, j in [(0, 1), (3, 515), (0, 8 * 512), (4999, 17)]:
        assert words[i] != words[j]
        words[[i, j]] = words[[j, i]]
        assert both(memory, [0], 20_000)[0] != [whole], (i, j)
        words[[i, j]] = words[[j, i]]
    assert both(memory, [0], 20_000)[0] == [whole]


def test_bytes_that_are_no_words_are_refused_and_no_pages_give_none() -> None:
    none = torch.empty(0, dtype=torch.int64)
    for size_bytes in (2, -4, 2**31):
        with pytest.raises(InvalidArgument, match=str(size_bytes)):
            digest_pages(none, size_bytes)
    assert digest_pages(none, 4096).shape == (0,)
