"""xxh3-128 on the GPU, interpreted: the library's 16 bytes for pages of any size."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tierd.codec import digest_pages, page_layout
from tierd.errors import InvalidArgument
from tierd.types import CodecId, DType, Geometry
from tierd_engine.gpu.xxhashing import xxh3_pages

U8 = np.uint8


def both(memory: np.ndarray, starts: list[int], size_bytes: int) -> tuple[bytes, bytes]:
    """Return the GPU's and the library's digests of payloads in `memory`."""
    first = memory.ctypes.data + (-memory.ctypes.data) % 64
    addresses = first + np.array(starts, np.int64)
    out = torch.full((len(starts), 2), -1, dtype=torch.int64)
    xxh3_pages(torch.tensor(addresses), size_bytes, out)
    return out.numpy().astype(">i8").tobytes(), digest_pages(addresses, size_bytes).tobytes()


def random_bytes(size_bytes: int) -> np.ndarray:
    seed = int(np.random.default_rng().integers(2**32))
    print(f"seed {seed}")
    return np.random.default_rng(seed).integers(0, 256, size_bytes + 64, dtype=U8)


def test_one_page_of_any_size_gives_the_librarys_digest() -> None:
    memory = random_bytes(60_000)
    edges = [256, 320, 960, 1024, 1088, 2048, 2112, 4096 - 64, 4096, 4096 + 64, 5 * 4096]
    for size_bytes in edges + (64 * np.random.default_rng().integers(4, 900, 12)).tolist():
        found, expected = both(memory, [0], size_bytes)
        assert found == expected, size_bytes


@pytest.mark.parametrize("codec", list(CodecId)[1:], ids=lambda codec: codec.name.lower())
def test_a_batch_of_pages_gives_the_librarys_digests(codec: CodecId) -> None:
    size_bytes = page_layout(Geometry(1, 3, 64, DType.BFLOAT16, 64), codec).payload_bytes
    memory = random_bytes(5 * (size_bytes + 64))
    starts = (np.random.default_rng().permutation(5) * (size_bytes + 64)).tolist()
    found, expected = both(memory, starts, size_bytes)
    assert found == expected and len({found[i : i + 16] for i in range(0, 80, 16)}) == 5


@pytest.mark.parametrize("value", [0, 255])
def test_words_with_all_bits_alike_wrap_as_the_librarys_do(value: int) -> None:
    memory = np.full(40_000 + 64, value, dtype=U8)
    found, expected = both(memory, [0], 40_000)
    assert found == expected


def test_every_page_layout_has_a_size_that_it_takes() -> None:
    for codec in list(CodecId)[1:]:
        for head_dim in (32, 64, 96, 128):
            for tokens in (16, 64, 256):
                geometry = Geometry(1, 1, head_dim, DType.FLOAT16, tokens)
                size_bytes = page_layout(geometry, codec).payload_bytes
                assert size_bytes % 64 == 0 and size_bytes >= 256, (codec, head_dim, tokens)


def test_sizes_that_are_no_stripes_are_refused_and_no_pages_give_none() -> None:
    addresses, out = torch.empty(0, dtype=torch.int64), torch.empty((0, 2), dtype=torch.int64)
    for size_bytes in (100, 192, 0, -64, 2**31):
        with pytest.raises(InvalidArgument, match=str(size_bytes)):
            xxh3_pages(addresses, size_bytes, out)
    xxh3_pages(addresses, 4096, out)
