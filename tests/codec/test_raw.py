"""Codec raw: the hot page's own elements, whatever they are."""

from __future__ import annotations

import numpy as np
import pytest

from tests.codec.pages import decoded, encoded, hot_pages, shape_of
from tierd.codec import page_layout
from tierd.codec.reference import decode_page, encode_page
from tierd.types import CodecId, DType, Geometry


def any_bits(geometry: Geometry, pages: int = 3) -> np.ndarray:
    rng = np.random.default_rng(7)
    size = geometry.dtype.itemsize
    bits = rng.integers(0, 2 ** (8 * size), shape_of(geometry, pages), dtype=np.uint64)
    return bits.astype(f"u{size}")


@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("head_dim", [1, 17, 64])
def test_every_bit_pattern_is_stored_and_padding_is_zero(dtype: DType, head_dim: int) -> None:
    geometry = Geometry(1, 2, head_dim, dtype, 16)
    raw = page_layout(geometry, CodecId.RAW)
    hot = hot_pages(any_bits(geometry), geometry)
    out, status = encoded(hot, raw)
    assert not status.any()
    for row, page in zip(out.rows, hot.rows, strict=True):
        np.testing.assert_array_equal(row, encode_page(page, raw)[0])


@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16])
def test_decoding_gives_the_same_bits(dtype: DType) -> None:
    geometry = Geometry(1, 2, 17, dtype, 32)
    raw = page_layout(geometry, CodecId.RAW)
    bits = any_bits(geometry)
    out, _ = encoded(hot_pages(bits, geometry), raw)
    np.testing.assert_array_equal(decoded(out, raw, np.uint16), bits)


@pytest.mark.parametrize("dtype", DType)
def test_decoding_to_float32_is_exact(dtype: DType) -> None:
    geometry = Geometry(1, 2, 17, dtype, 32)
    raw = page_layout(geometry, CodecId.RAW)
    out, _ = encoded(hot_pages(any_bits(geometry), geometry), raw)
    together = np.stack([np.stack(decode_page(row, raw)) for row in out.rows])
    found = decoded(out, raw)
    np.testing.assert_array_equal(found, together)
    numbers = ~np.isnan(together)
    np.testing.assert_array_equal(np.signbit(found[numbers]), np.signbit(together[numbers]))
