"""The lossy codecs: the reference's bytes on every input, and what they refuse."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.codec.pages import (
    FOUR_BIT,
    LOSSY,
    Pages,
    decoded,
    encoded,
    hot_pages,
    normal,
    shape_of,
    stored,
)
from tierd.codec import decode_pages, encode_pages, page_layout
from tierd.codec.reference import decode_page, encode_page, narrowed
from tierd.types import CodecId, DType, Geometry

F32 = Geometry(1, 2, 64, DType.FLOAT32, 64)

each_codec = pytest.mark.parametrize("codec", LOSSY, ids=lambda codec: codec.name.lower())


def head_dims(codec: CodecId) -> tuple[int, ...]:
    return (32, 64, 96, 128, 160, 256) if codec in FOUR_BIT else (1, 17, 64, 80, 128, 256)


def assert_same_as_reference(hot: Pages, geometry: Geometry, codec: CodecId) -> None:
    layout = page_layout(geometry, codec)
    out, status = encoded(hot, layout)
    for row, page, found in zip(out.rows, hot.rows, status, strict=True):
        expected, expected_status = encode_page(page, layout)
        assert found == expected_status
        if found == 0:
            np.testing.assert_array_equal(row, expected)
    if not status.any():
        together = np.stack([np.stack(decode_page(row, layout)) for row in out.rows])
        np.testing.assert_array_equal(decoded(out, layout), together)
        if geometry.dtype is not DType.FLOAT32:
            bits = narrowed(together, geometry.dtype)
            np.testing.assert_array_equal(decoded(out, layout, np.uint16), bits)


@each_codec
@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("block_tokens", [16, 32, 64, 256])
def test_bytes_are_the_references(codec: CodecId, dtype: DType, block_tokens: int) -> None:
    for head_dim in head_dims(codec):
        geometry = Geometry(1, 2, head_dim, dtype, block_tokens)
        hot = hot_pages(stored(normal(geometry), dtype), geometry)
        assert_same_as_reference(hot, geometry, codec)


@each_codec
def test_bytes_are_the_references_for_the_largest_block(codec: CodecId) -> None:
    geometry = Geometry(1, 1, 32 if codec in FOUR_BIT else 33, DType.BFLOAT16, 4096)
    hot = hot_pages(stored(normal(geometry), DType.BFLOAT16), geometry)
    assert_same_as_reference(hot, geometry, codec)


@each_codec
@given(
    seed=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from(DType),
    pick=st.integers(0, 3),
    block_tokens=st.sampled_from([16, 32, 128]),
    magnitude=st.integers(-150, 18),
    offset=st.sampled_from([0.0, 1.0, -1.0, 3e-5, 1000.0, -60000.0]),
    spread=st.sampled_from([0.0, 1.0, 40.0]),
)
@settings(max_examples=100)
def test_bytes_are_the_references_at_every_magnitude(
    codec: CodecId, seed: int, dtype: DType, pick: int, block_tokens: int,
    magnitude: int, offset: float, spread: float,
) -> None:  # fmt: skip
    head_dim = head_dims(codec)[pick]
    geometry = Geometry(1, 1, head_dim, dtype, block_tokens)
    rng = np.random.default_rng(seed)
    scale = 2.0 ** (magnitude + spread * (rng.random(head_dim) - 0.5))
    x = (normal(geometry, seed=seed) * scale + offset * rng.integers(0, 2, head_dim)).astype("f4")
    x[rng.random(x.shape) < 0.1] = -0.0
    assert_same_as_reference(hot_pages(stored(x, dtype), geometry), geometry, codec)


@each_codec
@given(seed=st.integers(0, 2**32 - 1), dtype=st.sampled_from(DType))
@settings(max_examples=40)
def test_any_bit_pattern_gives_the_references_status_and_bytes(
    codec: CodecId, seed: int, dtype: DType
) -> None:
    geometry = Geometry(1, 1, 32 if codec in FOUR_BIT else 5, dtype, 16)
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 2 ** (8 * dtype.itemsize), shape_of(geometry, 3), dtype=np.uint64)
    if dtype is not DType.FLOAT16:  # most patterns are out of range: keep the exponents low
        bits &= 0xC7FFFFFF if dtype is DType.FLOAT32 else 0xC7FF
    hot = hot_pages(bits.astype(f"u{dtype.itemsize}"), geometry)
    assert_same_as_reference(hot, geometry, codec)


@each_codec
@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("place", [(0, 0, 0), (1, 63, 63), (0, 31, 17)])
@pytest.mark.parametrize(
    ("value", "expected"), [(np.nan, 1), (np.inf, 1), (-np.inf, 1), (65505.0, 2), (-1e30, 2)]
)
def test_a_value_that_cannot_be_encoded_marks_its_page_and_no_other(
    codec: CodecId, part: int, place: tuple[int, int, int], value: float, expected: int
) -> None:
    x = normal(F32, pages=3)
    x[(1, part, *place)] = value
    layout = page_layout(F32, codec)
    hot = hot_pages(x, F32)
    out, status = encoded(hot, layout)
    assert status.tolist() == [0, expected, 0]
    for page in (0, 2):
        np.testing.assert_array_equal(out.rows[page], encode_page(hot.rows[page], layout)[0])


@each_codec
def test_nan_is_named_before_range_when_a_page_has_both(codec: CodecId) -> None:
    x = normal(F32)
    x[0, 0, 0, 0, 0], x[0, 1, 1, 63, 63] = 1e6, np.nan
    assert encoded(hot_pages(x, F32), page_layout(F32, codec))[1].tolist() == [1]


@each_codec
def test_the_largest_float16_is_still_in_range(codec: CodecId) -> None:
    x = normal(F32)
    x[0, :, :, 3, 5], x[0, :, :, 4, 5] = 65504.0, -65504.0
    out, status = encoded(hot_pages(x, F32), page_layout(F32, codec))
    assert status.tolist() == [0]
    assert np.isfinite(decoded(out, page_layout(F32, codec))).all()


@each_codec
def test_a_float16_page_at_both_ends_of_its_range_decodes_to_finite_values(codec: CodecId) -> None:
    geometry = Geometry(1, 1, 64, DType.FLOAT16, 16)
    x = np.where(np.random.default_rng(0).random(shape_of(geometry)) < 0.5, -65504.0, 65504.0)
    layout = page_layout(geometry, codec)
    out, status = encoded(hot_pages(stored(x.astype("f4"), DType.FLOAT16), geometry), layout)
    assert status.tolist() == [0]
    assert np.isfinite(decoded(out, layout, np.uint16).view(np.float16)).all()


@each_codec
def test_what_stood_in_the_slot_before_leaves_no_trace(codec: CodecId) -> None:
    geometry = Geometry(1, 2, 32 if codec in FOUR_BIT else 3, DType.BFLOAT16, 16)  # padded parts
    hot = hot_pages(stored(normal(geometry), DType.BFLOAT16), geometry)
    first, second = (encoded(hot, page_layout(geometry, codec), fill)[0] for fill in (0x00, 0xFF))
    np.testing.assert_array_equal(first.rows, second.rows)


@each_codec
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_bytes_do_not_depend_on_the_number_of_threads(codec: CodecId, threads: int) -> None:
    geometry = Geometry(1, 2, 64, DType.BFLOAT16, 256)
    layout = page_layout(geometry, codec)
    hot = hot_pages(stored(normal(geometry, pages=40), DType.BFLOAT16), geometry)
    out = Pages(hot.count, layout.payload_bytes)
    assert not encode_pages(hot.addresses, out.addresses, layout, threads=threads).any()
    for i in (0, 19, 39):
        np.testing.assert_array_equal(out.rows[i], encode_page(hot.rows[i], layout)[0])
    assert out.guards_hold()


@each_codec
def test_callers_on_several_threads_do_not_disturb_each_other(codec: CodecId) -> None:
    geometry = Geometry(1, 2, 64, DType.BFLOAT16, 256)
    layout = page_layout(geometry, codec)
    hot = hot_pages(stored(normal(geometry, pages=20), DType.BFLOAT16), geometry)
    expected = encoded(hot, layout)[0].rows
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: encoded(hot, layout)[0].rows, range(8)))
    for rows in results:
        np.testing.assert_array_equal(rows, expected)


@each_codec
def test_a_thread_that_flushes_subnormals_gives_the_same_bytes(codec: CodecId) -> None:
    torch = pytest.importorskip("torch")
    geometry = Geometry(1, 1, 32, DType.FLOAT32, 16)
    rng = np.random.default_rng(3)
    x = normal(geometry) * 2.0 ** rng.integers(-149, -100, shape_of(geometry))
    hot = hot_pages(x.astype("f4"), geometry)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        flushed, _ = encoded(hot, page_layout(geometry, codec))
    finally:
        torch.set_flush_denormal(False)
    np.testing.assert_array_equal(flushed.rows, encoded(hot, page_layout(geometry, codec))[0].rows)


@each_codec
def test_decoding_writes_only_its_own_tokens(codec: CodecId) -> None:
    d = 32 if codec in FOUR_BIT else 20
    geometry = Geometry(1, 2, d, DType.BFLOAT16, 16)
    layout = page_layout(geometry, codec)
    hot = hot_pages(stored(normal(geometry, pages=2), DType.BFLOAT16), geometry)
    out, _ = encoded(hot, layout)
    keys, values = (np.full((2, 70, d), 7.0, np.float32) for _ in range(2))
    decode_pages(out.addresses, layout, keys, values, 19)
    for page in range(2):
        tokens = slice(19 + 16 * page, 35 + 16 * page)
        expected_keys, expected_values = decode_page(out.rows[page], layout)
        np.testing.assert_array_equal(keys[:, tokens], expected_keys)
        np.testing.assert_array_equal(values[:, tokens], expected_values)
    for array in (keys, values):
        assert (array[:, :19] == 7.0).all() and (array[:, 51:] == 7.0).all()


@each_codec
def test_no_pages_is_no_work(codec: CodecId) -> None:
    none = np.empty(0, dtype=np.int64)
    layout = page_layout(F32, codec)
    assert encode_pages(none, none, layout).shape == (0,)
    decode_pages(none, layout, *(np.empty((2, 0, 64), np.float32) for _ in range(2)))
