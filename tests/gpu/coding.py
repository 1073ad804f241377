"""Hot pages encoded by the GPU's kernels, interpreted, beside what the reference makes of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.codec.pages import FOUR_BIT, Pages, hot_pages, stored
from tierd.codec import PageLayout, page_layout
from tierd.codec.reference import encode_page
from tierd.types import CodecId, DType, Geometry
from tierd_engine.gpu.encoding import encode_pages

CODECS = tuple(CodecId)[1:]
each_codec = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name.lower())

# Of a model's KV heads a few: each head is a program of its own, and the interpreter is slow.
MODELS = {
    "Llama-3": Geometry(1, 2, 128, DType.BFLOAT16, 64),
    "Qwen2": Geometry(1, 1, 128, DType.BFLOAT16, 128),
    "SmolLM2": Geometry(1, 3, 64, DType.FLOAT16, 64),
    "one channel": Geometry(1, 1, 1, DType.FLOAT16, 16),
    "odd channels": Geometry(1, 2, 17, DType.FLOAT32, 32),
    "a tile and a half": Geometry(1, 1, 96, DType.FLOAT32, 32),
    "a short block": Geometry(1, 2, 32, DType.BFLOAT16, 16),
    "wide": Geometry(1, 1, 160, DType.FLOAT32, 16),
}


def cases() -> list[pytest.param]:
    """Return every codec of every model that it can store."""
    return [
        pytest.param(geometry, codec, id=f"{name}-{codec.name.lower()}")
        for name, geometry in MODELS.items()
        for codec in CODECS
        if codec not in FOUR_BIT or geometry.head_dim % 32 == 0
    ]


def widths(codec: CodecId) -> tuple[int, int]:
    """Return a head_dim that fills no vector and one that does; 4-bit codecs take 32s alone."""
    return (32, 96) if codec in FOUR_BIT else (33, 16)


def encoded(hot: Pages, layout: PageLayout, fill: int = 0xAB) -> tuple[Pages, list[int]]:
    """Encode every page; return (payloads, status) and check that only they were written."""
    out = Pages(hot.count, layout.payload_bytes, fill)
    status = encode_pages(torch.tensor(hot.addresses), torch.tensor(out.addresses), layout)
    assert out.guards_hold() and hot.guards_hold()
    return out, status.tolist()


def assert_same_as_reference(hot: Pages, layout: PageLayout) -> Pages:
    """Encode every page, compare each with the reference's, status and bytes; return payloads."""
    out, status = encoded(hot, layout)
    for row, page, found in zip(out.rows, hot.rows, status, strict=True):
        expected, expected_status = encode_page(page, layout)
        assert found == expected_status
        if found == 0:
            np.testing.assert_array_equal(row, expected)
    return out


def hot_of(x: np.ndarray, geometry: Geometry) -> Pages:
    """Return hot pages of numbers in the geometry's dtype."""
    return hot_pages(stored(x.astype("f4"), geometry.dtype), geometry)


def layout_of(geometry: Geometry, codec: CodecId) -> PageLayout:
    """Return a geometry's layout under a codec."""
    return page_layout(geometry, codec)
