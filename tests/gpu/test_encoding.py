"""Encode on the GPU, interpreted: the reference's bytes on every input, of every codec."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tests.codec.pages import LOSSY, hot_pages, normal, shape_of
from tests.gpu.coding import (
    assert_same_as_reference,
    cases,
    each_codec,
    encoded,
    hot_of,
    layout_of,
    widths,
)
from tierd.codec.reference import e4m3_codes as reference_e4m3
from tierd.codec.reference import e4m3_numbers, encode_page
from tierd.types import CodecId, DType, Geometry
from tierd_engine.gpu.coding import e4m3_codes, folded
from tierd_engine.gpu.encoding import encode_pages

# NumPy, which the interpreter computes with, warns of what the kernels then discard.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")

each_lossy = pytest.mark.parametrize("codec", LOSSY, ids=lambda codec: codec.name.lower())


@pytest.mark.parametrize(("geometry", "codec"), cases())
def test_bytes_are_the_references(geometry: Geometry, codec: CodecId) -> None:
    x = np.random.default_rng().standard_normal(shape_of(geometry, 1), np.float32)
    assert_same_as_reference(hot_of(x, geometry), layout_of(geometry, codec))


@each_lossy
@pytest.mark.parametrize("dtype", DType)
def test_bytes_are_the_references_at_every_magnitude(codec: CodecId, dtype: DType) -> None:
    """Subnormals and large numbers, constant offsets, and zeros of both signs: a page each."""
    seed = int(np.random.default_rng().integers(2**32))
    rng = np.random.default_rng(seed)
    width, _ = widths(codec)
    geometry = Geometry(1, 1, width, dtype, 16)
    pages = []
    for magnitude in (-150, -126, -40, -14, 0, 9, 14):
        for offset in (0.0, 3e-5, -60000.0):
            scale = 2.0 ** (magnitude + 4 * (rng.random(width) - 0.5))
            x = normal(geometry, seed=seed) * scale + offset * rng.integers(0, 2, width)
            x[rng.random(x.shape) < 0.1] = -0.0
            pages.append(x)
    print(f"{seed=}")
    assert_same_as_reference(hot_of(np.concatenate(pages), geometry), layout_of(geometry, codec))


@each_lossy
def test_flat_groups_zeros_and_an_outlier_are_coded_as_the_reference_codes_them(
    codec: CodecId,
) -> None:
    _, width = widths(codec)
    geometry = Geometry(1, 2, width, DType.FLOAT32, 32)
    x = normal(geometry, pages=5, seed=int(np.random.default_rng().integers(2**32)))
    x[0] = 0.0
    x[1, ..., 3] = -7.25  # a channel of one value
    x[1, :, :, 5] = 1e-3  # a token of one value
    x[2, ..., 7] *= 3e4
    x[3] = 2.0**-149
    x[4] = np.where(x[4] < 0, -65504.0, 65504.0)
    assert_same_as_reference(hot_of(x, geometry), layout_of(geometry, codec))


@each_lossy
def test_any_bit_pattern_gives_the_references_status_and_bytes(codec: CodecId) -> None:
    seed = int(np.random.default_rng().integers(2**32))
    rng = np.random.default_rng(seed)
    print(f"{seed=}")
    geometry = Geometry(
        1, 1, 32 if codec in (CodecId.K8V4, CodecId.INT4) else 5, DType.BFLOAT16, 16
    )
    bits = rng.integers(0, 2**16, shape_of(geometry, 12), dtype=np.uint16) & 0xC77F  # in range
    bits[6:, 0, 0, 3, 1] |= rng.integers(0, 2**16, 6, dtype=np.uint16)
    bits[11, 1, 0, 3, 1] = 0x7FC0  # NaN
    hot = hot_pages(bits, geometry)
    layout = layout_of(geometry, codec)
    assert_same_as_reference(hot, layout)
    status = encoded(hot, layout)[1]
    assert not any(status[:6]) and status[11] == 1


@each_lossy
@pytest.mark.parametrize("part", [0, 1])
def test_a_value_that_cannot_be_encoded_marks_its_page_and_no_other(
    codec: CodecId, part: int
) -> None:
    width, _ = widths(codec)
    geometry = Geometry(1, 2, width, DType.FLOAT32, 16)
    values = [np.nan, np.inf, -np.inf, 65505.0, -65505.0, 65504.0]
    x = normal(geometry, pages=8)
    x[1:7, part, 1, 15, width - 1] = values
    layout = layout_of(geometry, codec)
    hot = hot_of(x, geometry)
    out, status = encoded(hot, layout)
    assert status == [0, 1, 1, 1, 2, 2, 0, 0]
    for page in (0, 6, 7):
        np.testing.assert_array_equal(out.rows[page], encode_page(hot.rows[page], layout)[0])


@pytest.mark.parametrize("pair", [(1e6, np.nan), (np.nan, 1e6)])
def test_nan_is_named_before_range_when_a_page_has_both(pair: tuple[float, float]) -> None:
    geometry = Geometry(1, 2, 20, DType.FLOAT32, 16)
    x = normal(geometry)
    x[0, 0, 0, 0, 0], x[0, 1, 1, 15, 19] = pair
    assert encoded(hot_of(x, geometry), layout_of(geometry, CodecId.INT8))[1] == [1]


@pytest.mark.parametrize("dtype", DType)
def test_raw_stores_any_bits_as_they_are(dtype: DType) -> None:
    geometry = Geometry(1, 2, 65, dtype, 32)  # more than a run of elements, not whole runs
    kind = np.uint32 if dtype is DType.FLOAT32 else np.uint16
    rng = np.random.default_rng()
    bits = rng.integers(0, np.iinfo(kind).max, shape_of(geometry, 2), kind, endpoint=True)
    bits[0, 0, 0, 0, :4] = [0x7FC0, 0x7F81, 0xFFFF, 0x8000]
    hot = hot_pages(bits, geometry)
    layout = layout_of(geometry, CodecId.RAW)
    assert_same_as_reference(hot, layout)
    assert encoded(hot, layout)[1] == [0, 0]


@triton.jit
def fold_kernel(lanes: tl.tensor, sums: tl.tensor) -> None:
    row, lane = tl.arange(0, 64), tl.arange(0, 16)
    tl.store(sums + row, folded(tl.load(lanes + row[:, None] * 16 + lane[None, :]), 64))


def test_lanes_are_folded_in_the_references_order() -> None:
    # A wrong order moves a float32's last bit, which float16 nearly always hides.
    lanes = np.random.default_rng().lognormal(0.0, 3.0, (64, 16)).astype(np.float32)
    sums = torch.full((64,), torch.nan)
    fold_kernel[(1,)](torch.tensor(lanes), sums)
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    np.testing.assert_array_equal(sums.numpy(), lanes[:, 0])


@triton.jit
def e4m3_kernel(x: tl.tensor, codes: tl.tensor, N: tl.constexpr) -> None:
    at = tl.arange(0, N)
    tl.store(codes + at, e4m3_codes(tl.load(x + at), tl.full([N], 1.0, tl.float32)))


def test_e4m3_rounds_to_nearest_even_at_every_boundary() -> None:
    numbers = e4m3_numbers(np.arange(0x7F, dtype=np.uint8))
    middles = (numbers[1:] + numbers[:-1]) / 2
    x = np.concatenate([numbers, middles, np.nextafter(middles, np.float32(0))])
    x = np.concatenate([x, np.nextafter(middles, np.float32(500)), [0.0, 464.0, 2.0**-149]])
    x = np.resize(np.concatenate([x, -x]).astype(np.float32), 1024)
    codes = torch.zeros(1024, dtype=torch.uint8)
    e4m3_kernel[(1,)](torch.tensor(x), codes, 1024)
    np.testing.assert_array_equal(codes.numpy(), reference_e4m3(x))


@each_codec
def test_what_stood_in_the_slot_before_leaves_no_trace(codec: CodecId) -> None:
    width = 32 if codec in (CodecId.K8V4, CodecId.INT4) else 3  # every part is padded
    geometry = Geometry(1, 2, width, DType.BFLOAT16, 16)
    hot = hot_of(normal(geometry), geometry)
    layout = layout_of(geometry, codec)
    first, second = (encoded(hot, layout, fill)[0] for fill in (0x00, 0xFF))
    np.testing.assert_array_equal(first.rows, second.rows)


@each_codec
def test_no_pages_is_no_work(codec: CodecId) -> None:
    none = torch.empty(0, dtype=torch.int64)
    layout = layout_of(Geometry(1, 2, 32, DType.FLOAT32, 16), codec)
    assert encode_pages(none, none, layout).shape == (0,)
