"""Codec int8: the reference's bytes on every input, and bounds that always hold."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.codec.pages import Pages, decoded, encoded, hot_pages, layouts, shape_of, stored
from tierd.codec import decode_pages, encode_pages
from tierd.codec.reference import decode_page, encode_page, narrowed
from tierd.types import DType, Geometry

F32 = Geometry(1, 2, 64, DType.FLOAT32, 64)


def normal(geometry: Geometry, pages: int = 1, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape_of(geometry, pages), np.float32)


def assert_same_as_reference(hot: Pages, geometry: Geometry) -> None:
    _, layout = layouts(geometry)
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


@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("head_dim", [1, 17, 64, 80, 128, 256])
@pytest.mark.parametrize("block_tokens", [16, 32, 64, 256])
def test_bytes_are_the_references(dtype: DType, head_dim: int, block_tokens: int) -> None:
    geometry = Geometry(1, 2, head_dim, dtype, block_tokens)
    assert_same_as_reference(hot_pages(stored(normal(geometry), dtype), geometry), geometry)


@pytest.mark.parametrize("dtype", DType)
def test_bytes_are_the_references_for_the_largest_block(dtype: DType) -> None:
    geometry = Geometry(1, 1, 33, dtype, 4096)
    assert_same_as_reference(hot_pages(stored(normal(geometry), dtype), geometry), geometry)


@given(
    seed=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from(DType),
    head_dim=st.sampled_from([1, 3, 16, 17, 31, 64]),
    block_tokens=st.sampled_from([16, 32, 128]),
    magnitude=st.integers(-150, 18),
    offset=st.sampled_from([0.0, 1.0, -1.0, 3e-5, 1000.0, -60000.0]),
    spread=st.sampled_from([0.0, 1.0, 40.0]),
)
@settings(max_examples=150)
def test_bytes_are_the_references_at_every_magnitude(
    seed: int, dtype: DType, head_dim: int, block_tokens: int,
    magnitude: int, offset: float, spread: float,
) -> None:  # fmt: skip
    geometry = Geometry(1, 1, head_dim, dtype, block_tokens)
    rng = np.random.default_rng(seed)
    scale = 2.0 ** (magnitude + spread * (rng.random(head_dim) - 0.5))
    x = (normal(geometry, seed=seed) * scale + offset * rng.integers(0, 2, head_dim)).astype("f4")
    x[rng.random(x.shape) < 0.1] = -0.0
    assert_same_as_reference(hot_pages(stored(x, dtype), geometry), geometry)


@given(seed=st.integers(0, 2**32 - 1), dtype=st.sampled_from(DType))
@settings(max_examples=50)
def test_any_bit_pattern_gives_the_references_status_and_bytes(seed: int, dtype: DType) -> None:
    geometry = Geometry(1, 1, 5, dtype, 16)
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 2 ** (8 * dtype.itemsize), shape_of(geometry, 3), dtype=np.uint64)
    hot = hot_pages(bits.astype(f"u{dtype.itemsize}"), geometry)
    assert_same_as_reference(hot, geometry)


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("place", [(0, 0, 0), (1, 63, 63), (0, 31, 17)])
@pytest.mark.parametrize(
    ("value", "expected"), [(np.nan, 1), (np.inf, 1), (-np.inf, 1), (65505.0, 2), (-1e30, 2)]
)
def test_a_value_that_cannot_be_encoded_marks_its_page_and_no_other(
    part: int, place: tuple[int, int, int], value: float, expected: int
) -> None:
    x = normal(F32, pages=3)
    x[(1, part, *place)] = value
    _, layout = layouts(F32)
    hot = hot_pages(x, F32)
    out, status = encoded(hot, layout)
    assert status.tolist() == [0, expected, 0]
    for page in (0, 2):
        np.testing.assert_array_equal(out.rows[page], encode_page(hot.rows[page], layout)[0])


def test_nan_is_named_before_range_when_a_page_has_both() -> None:
    x = normal(F32)
    x[0, 0, 0, 0, 0], x[0, 1, 1, 63, 63] = 1e6, np.nan
    assert encoded(hot_pages(x, F32), layouts(F32)[1])[1].tolist() == [1]


def test_the_largest_float16_is_still_in_range() -> None:
    x = normal(F32)
    x[0, :, :, 3, 5], x[0, :, :, 4, 5] = 65504.0, -65504.0
    out, status = encoded(hot_pages(x, F32), layouts(F32)[1])
    assert status.tolist() == [0]
    assert np.isfinite(decoded(out, layouts(F32)[1])).all()


def test_a_float16_page_at_both_ends_of_its_range_decodes_to_finite_values() -> None:
    geometry = Geometry(1, 1, 64, DType.FLOAT16, 16)
    x = np.where(np.random.default_rng(0).random(shape_of(geometry)) < 0.5, -65504.0, 65504.0)
    layout = layouts(geometry)[1]
    out, status = encoded(hot_pages(stored(x.astype("f4"), DType.FLOAT16), geometry), layout)
    assert status.tolist() == [0]
    assert np.isfinite(decoded(out, layout, np.uint16).view(np.float16)).all()


def test_zero_and_constant_channels_come_back_exact() -> None:
    x = np.zeros(shape_of(F32), np.float32)
    x[:, 0, :, :, 1], x[:, 0, :, :, 2] = 3.5, -0.0
    layout = layouts(F32)[1]
    out, _ = encoded(hot_pages(x, F32), layout)
    np.testing.assert_array_equal(decoded(out, layout), x)
    head = out.rows[0, : layout.head_bytes]
    assert not head[layout.key_error :].any()


def test_the_error_of_each_element_is_at_most_half_a_step_of_its_own_channel() -> None:
    x = normal(F32)
    x[:, 0, :, :, 7] *= 5000.0  # an outlier channel, as in Qwen2's keys
    x[:, 0, :, :, 9] += 1000.0  # far from 0: zero is rounded by more than a step
    layout = layouts(F32)[1]
    out, _ = encoded(hot_pages(x, F32), layout)
    error = np.abs(decoded(out, layout).astype("f8") - x)
    low, high = x[:, 0].min(2, keepdims=True), x[:, 0].max(2, keepdims=True)
    offset = np.abs(low).astype("f8") * 2.0**-10  # one float16 step of zero
    step = (high - low + offset) / 255 * (1 + 2.0**-10) + 2.0**-24
    assert (error[:, 0] <= step / 2 * (1 + 1e-5) + np.abs(x[:, 0]) * 2.0**-24).all()
    ordinary = [c for c in range(64) if c not in (7, 9)]
    assert error[:, 0][..., ordinary].max() < 0.02


@given(
    seed=st.integers(0, 2**32 - 1),
    head_dim=st.sampled_from([1, 17, 64]),
    magnitude=st.integers(-110, 14),
    offset=st.sampled_from([0.0, 1.0, -50.0]),
)
@settings(max_examples=60)
def test_key_error_bounds_the_true_norm_and_is_close_to_it(
    seed: int, head_dim: int, magnitude: int, offset: float
) -> None:
    geometry = Geometry(1, 1, head_dim, DType.FLOAT32, 64)
    x = (normal(geometry, seed=seed) * 2.0**magnitude + offset).astype("f4")
    layout = layouts(geometry)[1]
    out, status = encoded(hot_pages(x, geometry), layout)
    assert not status.any()
    stored_error = out.rows[0, layout.key_error :][: 2 * 64].view(np.float16).astype("f8")
    error = decoded(out, layout)[0, 0, 0].astype("f8") - x[0, 0, 0].astype("f8")
    norm = np.sqrt((error**2).sum(1))
    assert (stored_error >= norm).all()
    assert (stored_error <= norm * (1 + 2.0**-9) + 2.0**-23).all()


def test_what_stood_in_the_slot_before_leaves_no_trace() -> None:
    geometry = Geometry(1, 2, 3, DType.BFLOAT16, 16)  # padding after every part
    hot = hot_pages(stored(normal(geometry), DType.BFLOAT16), geometry)
    first, second = (encoded(hot, layouts(geometry)[1], fill)[0] for fill in (0x00, 0xFF))
    np.testing.assert_array_equal(first.rows, second.rows)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_bytes_do_not_depend_on_the_number_of_threads(threads: int) -> None:
    geometry = Geometry(1, 2, 64, DType.BFLOAT16, 256)
    _, layout = layouts(geometry)
    hot = hot_pages(stored(normal(geometry, pages=40), DType.BFLOAT16), geometry)
    out = Pages(hot.count, layout.payload_bytes)
    assert not encode_pages(hot.addresses, out.addresses, layout, threads=threads).any()
    for i in (0, 19, 39):
        np.testing.assert_array_equal(out.rows[i], encode_page(hot.rows[i], layout)[0])
    assert out.guards_hold()


def test_callers_on_several_threads_do_not_disturb_each_other() -> None:
    geometry = Geometry(1, 2, 64, DType.BFLOAT16, 256)
    _, layout = layouts(geometry)
    hot = hot_pages(stored(normal(geometry, pages=20), DType.BFLOAT16), geometry)
    expected = encoded(hot, layout)[0].rows
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: encoded(hot, layout)[0].rows, range(8)))
    for rows in results:
        np.testing.assert_array_equal(rows, expected)


def test_a_thread_that_flushes_subnormals_gives_the_same_bytes() -> None:
    torch = pytest.importorskip("torch")
    geometry = Geometry(1, 1, 16, DType.FLOAT32, 16)
    rng = np.random.default_rng(3)
    x = normal(geometry) * 2.0 ** rng.integers(-149, -100, shape_of(geometry))
    hot = hot_pages(x.astype("f4"), geometry)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        flushed, _ = encoded(hot, layouts(geometry)[1])
    finally:
        torch.set_flush_denormal(False)
    np.testing.assert_array_equal(flushed.rows, encoded(hot, layouts(geometry)[1])[0].rows)


def test_decoding_writes_only_its_own_tokens() -> None:
    geometry = Geometry(1, 2, 20, DType.BFLOAT16, 16)
    _, layout = layouts(geometry)
    hot = hot_pages(stored(normal(geometry, pages=2), DType.BFLOAT16), geometry)
    out, _ = encoded(hot, layout)
    keys, values = (np.full((2, 70, 20), 7.0, np.float32) for _ in range(2))
    decode_pages(out.addresses, layout, keys, values, 19)
    for page in range(2):
        tokens = slice(19 + 16 * page, 35 + 16 * page)
        expected_keys, expected_values = decode_page(out.rows[page], layout)
        np.testing.assert_array_equal(keys[:, tokens], expected_keys)
        np.testing.assert_array_equal(values[:, tokens], expected_values)
    for array in (keys, values):
        assert (array[:, :19] == 7.0).all() and (array[:, 51:] == 7.0).all()


def test_no_pages_is_no_work() -> None:
    none = np.empty(0, dtype=np.int64)
    layout = layouts(F32)[1]
    assert encode_pages(none, none, layout).shape == (0,)
    decode_pages(none, layout, *(np.empty((2, 0, 64), np.float32) for _ in range(2)))
