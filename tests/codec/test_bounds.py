"""How far a decoded element may lie from the one that was encoded: bounds that always hold."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.codec.pages import FOUR_BIT, LOSSY, decoded, encoded, hot_pages, normal, shape_of
from tierd.codec import PageLayout, page_layout
from tierd.codec.reference import HALF_MAX
from tierd.types import CodecId, DType, Geometry

F32 = Geometry(1, 2, 64, DType.FLOAT32, 64)
TINY = 2.0**-24  # the least scale, and the least step of a float16
ROUNDING = 1 + 2.0**-10  # a scale is rounded up to float16

each_codec = pytest.mark.parametrize("codec", LOSSY, ids=lambda codec: codec.name.lower())


def bound(x: np.ndarray, layout: PageLayout, part: int) -> np.ndarray:
    """The most that elements [..., tokens, head_dim] of keys (0) or values (1) may be off."""
    wide = x.astype("f8")
    tokens, d = wide.shape[-2:]
    group, channels = (layout.group_tokens, 1) if part == 0 else (1, layout.value_group)
    blocks = wide.reshape(*wide.shape[:-2], tokens // group, group, d // channels, channels)
    low, high = (f(blocks, axis=(-3, -1), keepdims=True) for f in (np.min, np.max))
    arithmetic = np.abs(blocks) * 2.0**-23 + (high - low) * 2.0**-23
    if layout.codec is CodecId.FP8:
        scale = np.maximum(-low, high) / 448 * ROUNDING + TINY
        # A byte has 4 significant bits, and steps of 2^-9 near 0.
        result = np.maximum(np.abs(blocks) * 2.0**-4, scale * 2.0**-10) * (1 + 2.0**-20)
        return (result + arithmetic).reshape(wide.shape)
    is_four_bit = layout.codec is CodecId.INT4 or (part == 1 and layout.codec in FOUR_BIT)
    offset = np.abs(low) * 2.0**-10 + TINY  # zero is rounded down to float16
    step = (high - low + offset) / (15 if is_four_bit else 255) * ROUNDING + TINY
    return np.broadcast_to(step / 2 + arithmetic, blocks.shape).reshape(wide.shape)


def assert_within_bounds(x: np.ndarray, geometry: Geometry, codec: CodecId) -> np.ndarray:
    layout = page_layout(geometry, codec)
    out, status = encoded(hot_pages(x, geometry), layout)
    assert not status.any()
    result = decoded(out, layout)
    error = np.abs(result.astype("f8") - x)
    for part in (0, 1):
        assert (error[:, part] <= bound(x[:, part], layout, part)).all()
    return result


@each_codec
@given(
    seed=st.integers(0, 2**32 - 1),
    head_dim=st.sampled_from([32, 64, 96, 128, 160]),
    block_tokens=st.sampled_from([16, 32, 64]),
    magnitude=st.integers(-140, 14),
    offset=st.sampled_from([0.0, 1.0, -50.0, 20000.0]),
    outlier=st.sampled_from([1.0, 5000.0]),
)
@settings(max_examples=60)
def test_every_element_is_within_its_codecs_bound(
    codec: CodecId, seed: int, head_dim: int, block_tokens: int, magnitude: int, offset: float,
    outlier: float,
) -> None:  # fmt: skip
    geometry = Geometry(1, 1, head_dim, DType.FLOAT32, block_tokens)
    x = normal(geometry, seed=seed) * 2.0 ** min(magnitude, 0 if outlier > 1 else 14)
    x[..., seed % head_dim] *= outlier
    x[..., (seed + 7) % head_dim] += offset
    assert_within_bounds(np.clip(x, -HALF_MAX, HALF_MAX).astype("f4"), geometry, codec)


@pytest.mark.parametrize("codec", [CodecId.INT8, CodecId.FP8])
@pytest.mark.parametrize("head_dim", [1, 3, 17, 31, 33, 80, 127])
def test_odd_head_sizes_are_within_bounds(codec: CodecId, head_dim: int) -> None:
    geometry = Geometry(1, 2, head_dim, DType.FLOAT32, 64)
    assert_within_bounds(normal(geometry, seed=head_dim), geometry, codec)


@each_codec
def test_zeros_come_back_as_zeros(codec: CodecId) -> None:
    x = np.zeros(shape_of(F32), np.float32)
    x[:, 0, :, :, 2] = -0.0
    np.testing.assert_array_equal(assert_within_bounds(x, F32, codec), x)
    layout = page_layout(F32, codec)
    head = encoded(hot_pages(x, F32), layout)[0].rows[0, : layout.head_bytes]
    assert not head[layout.key_scale :].any()


@pytest.mark.parametrize("codec", [CodecId.INT8, CodecId.K8V4, CodecId.INT4])
def test_constant_channels_of_keys_come_back_exact(codec: CodecId) -> None:
    x = np.zeros(shape_of(F32), np.float32)
    x[:, 0, :, :, 1] = 3.5
    result = assert_within_bounds(x, F32, codec)
    np.testing.assert_array_equal(result[:, 0], x[:, 0])


@each_codec
def test_constant_values_of_a_token_come_back(codec: CodecId) -> None:
    x = np.zeros(shape_of(F32), np.float32)
    x[:, 1, :, 5, :] = -2.25
    result = assert_within_bounds(x, F32, codec)
    tolerance = 2.25 * 2.0**-9 if codec is CodecId.FP8 else 0.0
    np.testing.assert_allclose(result[:, 1], x[:, 1], atol=tolerance)


@each_codec
def test_one_huge_channel_of_keys_costs_the_others_nothing(codec: CodecId) -> None:
    x = normal(F32)
    x[:, 0, :, :, 7] *= 5000.0  # an outlier channel, as in Qwen2's keys
    calm = x.copy()
    calm[:, 0, :, :, 7] = 0.0
    others = [c for c in range(64) if c != 7]
    with_outlier = assert_within_bounds(x, F32, codec)[:, 0][..., others]
    np.testing.assert_array_equal(
        with_outlier, assert_within_bounds(calm, F32, codec)[:, 0][..., others]
    )


@pytest.mark.parametrize("codec", FOUR_BIT)
def test_a_huge_channel_of_values_costs_only_its_own_32(codec: CodecId) -> None:
    x = normal(F32)
    calm = x.copy()
    x[:, 1, :, :, 40] *= 3000.0
    with_outlier = assert_within_bounds(x, F32, codec)
    without = assert_within_bounds(calm, F32, codec)
    np.testing.assert_array_equal(with_outlier[:, 1, ..., :32], without[:, 1, ..., :32])


@each_codec
def test_subnormals_are_within_bounds(codec: CodecId) -> None:
    x = (normal(F32) * 2.0**-135).astype("f4")
    np.testing.assert_array_equal(assert_within_bounds(x, F32, codec), np.zeros_like(x))


@each_codec
@given(
    seed=st.integers(0, 2**32 - 1),
    head_dim=st.sampled_from([32, 64, 160]),
    block_tokens=st.sampled_from([16, 64]),
    magnitude=st.integers(-110, 14),
    offset=st.sampled_from([0.0, 1.0, -50.0]),
)
@settings(max_examples=40)
def test_key_error_bounds_the_true_norm_and_is_close_to_it(
    codec: CodecId, seed: int, head_dim: int, block_tokens: int, magnitude: int, offset: float
) -> None:
    geometry = Geometry(1, 1, head_dim, DType.FLOAT32, block_tokens)
    x = normal(geometry, seed=seed) * 2.0**magnitude + offset
    x = np.clip(x, -HALF_MAX, HALF_MAX).astype("f4")
    layout = page_layout(geometry, codec)
    out, status = encoded(hot_pages(x, geometry), layout)
    assert not status.any()
    stored_error = out.rows[0, layout.key_error :][: 2 * block_tokens].view(np.float16)
    error = decoded(out, layout)[0, 0, 0].astype("f8") - x[0, 0, 0].astype("f8")
    norm = np.sqrt((error**2).sum(1))
    assert (stored_error.astype("f8") >= norm).all()
    assert (stored_error.astype("f8") <= norm * (1 + 2.0**-9) + 2.0**-23).all()
