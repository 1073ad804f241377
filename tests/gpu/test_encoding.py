"""Encode and decode on the GPU, interpreted: the reference's bytes on every input."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tests.codec.pages import Pages, hot_pages, normal, shape_of, stored
from tierd.codec import page_layout
from tierd.codec.reference import decode_page, encode_page, narrowed
from tierd.errors import InvalidArgument
from tierd.types import CodecId, DType, Geometry
from tierd_engine.gpu.encoding import _folded, decode_pages, encode_pages

# NumPy, which the interpreter computes with, warns of what the kernels then discard.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")

F32 = Geometry(1, 2, 20, DType.FLOAT32, 16)
MODELS = {
    "Llama-3": Geometry(1, 8, 128, DType.BFLOAT16, 64),
    "Qwen2": Geometry(1, 4, 128, DType.BFLOAT16, 128),
    "SmolLM2": Geometry(1, 3, 64, DType.FLOAT16, 128),
    "one channel": Geometry(1, 1, 1, DType.FLOAT16, 16),
    "odd channels": Geometry(1, 2, 17, DType.FLOAT32, 32),
    "wide": Geometry(1, 1, 160, DType.FLOAT32, 16),
}
each_model = pytest.mark.parametrize("geometry", MODELS.values(), ids=MODELS.keys())


def encoded(hot: Pages, geometry: Geometry, fill: int = 0xAB) -> tuple[Pages, list[int]]:
    """Encode every page; return (payloads, status) and check that only they were written."""
    layout = page_layout(geometry, CodecId.INT8)
    out = Pages(hot.count, layout.payload_bytes, fill)
    status = encode_pages(torch.tensor(hot.addresses), torch.tensor(out.addresses), layout)
    assert out.guards_hold()
    return out, status.tolist()


def assert_same_as_reference(x: np.ndarray, geometry: Geometry) -> Pages:
    layout = page_layout(geometry, CodecId.INT8)
    hot = hot_pages(stored(x.astype("f4"), geometry.dtype), geometry)
    out, status = encoded(hot, geometry)
    for row, page, found in zip(out.rows, hot.rows, status, strict=True):
        expected, expected_status = encode_page(page, layout)
        assert found == expected_status
        if found == 0:
            np.testing.assert_array_equal(row, expected)
    return out


@each_model
def test_bytes_are_the_references(geometry: Geometry) -> None:
    x = np.random.default_rng().standard_normal(shape_of(geometry, 1), np.float32)
    assert_same_as_reference(x, geometry)


@pytest.mark.parametrize("dtype", DType)
def test_bytes_are_the_references_at_every_magnitude(dtype: DType) -> None:
    seed = int(np.random.default_rng().integers(2**32))
    rng = np.random.default_rng(seed)
    geometry = Geometry(1, 1, 33, dtype, 16)
    for magnitude in (-150, -126, -40, -14, 0, 9, 14):
        for offset in (0.0, 3e-5, -60000.0):
            scale = 2.0 ** (magnitude + 4 * (rng.random(33) - 0.5))
            x = normal(geometry, seed=seed) * scale + offset * rng.integers(0, 2, 33)
            x[rng.random(x.shape) < 0.1] = -0.0
            try:
                assert_same_as_reference(x, geometry)
            except AssertionError as error:
                error.add_note(f"{seed=} {magnitude=} {offset=}")
                raise


def test_any_bit_pattern_gives_the_references_status_and_bytes() -> None:
    seed = int(np.random.default_rng().integers(2**32))
    rng = np.random.default_rng(seed)
    geometry = Geometry(1, 1, 5, DType.BFLOAT16, 16)
    layout = page_layout(geometry, CodecId.INT8)
    bits = rng.integers(0, 2**16, shape_of(geometry, 40), dtype=np.uint16) & 0xC77F  # in range
    bits[20:, 0, 0, 3, 1] |= rng.integers(0, 2**16, 20, dtype=np.uint16)
    bits[39, 1, 0, 3, 1] = 0x7FC0  # NaN
    hot = hot_pages(bits, geometry)
    out, status = encoded(hot, geometry)
    for row, page, found in zip(out.rows, hot.rows, status, strict=True):
        expected, expected_status = encode_page(page, layout)
        assert found == expected_status, f"{seed=}"
        if found == 0:
            np.testing.assert_array_equal(row, expected, err_msg=f"{seed=}")
    assert not any(status[:20]) and status[39] == 1


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize(
    ("value", "expected"), [(np.nan, 1), (np.inf, 1), (-np.inf, 1), (65505.0, 2), (65504.0, 0)]
)
def test_a_value_that_cannot_be_encoded_marks_its_page_and_no_other(
    part: int, value: float, expected: int
) -> None:
    x = normal(F32, pages=3)
    x[1, part, 1, 15, 19] = value
    layout = page_layout(F32, CodecId.INT8)
    hot = hot_pages(x, F32)
    out, status = encoded(hot, F32)
    assert status == [0, expected, 0]
    for page in (0, 2):
        np.testing.assert_array_equal(out.rows[page], encode_page(hot.rows[page], layout)[0])


@pytest.mark.parametrize("pair", [(1e6, np.nan), (np.nan, 1e6)])
def test_nan_is_named_before_range_when_a_page_has_both(pair: tuple[float, float]) -> None:
    x = normal(F32)
    x[0, 0, 0, 0, 0], x[0, 1, 1, 15, 19] = pair
    assert encoded(hot_pages(x, F32), F32)[1] == [1]


@triton.jit
def fold_kernel(lanes: tl.tensor, sums: tl.tensor) -> None:
    row, lane = tl.arange(0, 64), tl.arange(0, 16)
    tl.store(sums + row, _folded(tl.load(lanes + row[:, None] * 16 + lane[None, :]), 64))


def test_lanes_are_folded_in_the_references_order() -> None:
    # A wrong order moves a float32's last bit, which float16 nearly always hides.
    lanes = np.random.default_rng().lognormal(0.0, 3.0, (64, 16)).astype(np.float32)
    sums = torch.full((64,), torch.nan)
    fold_kernel[(1,)](torch.tensor(lanes), sums)
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    np.testing.assert_array_equal(sums.numpy(), lanes[:, 0])


def test_what_stood_in_the_slot_before_leaves_no_trace() -> None:
    geometry = Geometry(1, 2, 3, DType.BFLOAT16, 16)  # every part is padded
    hot = hot_pages(stored(normal(geometry), DType.BFLOAT16), geometry)
    first, second = (encoded(hot, geometry, fill)[0] for fill in (0x00, 0xFF))
    np.testing.assert_array_equal(first.rows, second.rows)


@each_model
def test_a_payload_decodes_into_a_hot_page_of_its_own_dtype(geometry: Geometry) -> None:
    layout, raw = (page_layout(geometry, codec) for codec in (CodecId.INT8, CodecId.RAW))
    x = np.random.default_rng().standard_normal(shape_of(geometry, 1), np.float32)
    payloads = assert_same_as_reference(x, geometry)
    hot = Pages(1, raw.payload_bytes)
    source, target = torch.tensor(payloads.addresses), torch.tensor(hot.addresses)
    decode_pages(
        source, target + raw.keys, target + raw.values, raw.head_bytes, layout, geometry.dtype
    )
    assert hot.guards_hold()
    both = decode_page(payloads.rows[0], layout)
    for part, expected in zip((raw.keys, raw.values), both, strict=True):
        bits = narrowed(expected, geometry.dtype)
        for head in range(geometry.kv_heads):
            start = head * raw.head_bytes + part
            found = hot.rows[0, start : start + raw.part_bytes[0]].view(bits.dtype)
            np.testing.assert_array_equal(found.reshape(bits[head].shape), bits[head])


def test_payloads_decode_into_float32_staging_and_only_into_their_tokens() -> None:
    geometry = Geometry(1, 2, 20, DType.BFLOAT16, 16)
    layout = page_layout(geometry, CodecId.INT8)
    payloads = assert_same_as_reference(normal(geometry, pages=2), geometry)
    staging = torch.full((2, 2, 70, 20), 7.0)
    row_bytes = 20 * 4
    starts = 19 * row_bytes + 16 * row_bytes * torch.arange(2)
    keys_to, values_to = (staging[part].data_ptr() + starts for part in (0, 1))
    decode_pages(
        torch.tensor(payloads.addresses), keys_to, values_to, 70 * row_bytes, layout, DType.FLOAT32
    )
    for page in range(2):
        tokens = slice(19 + 16 * page, 35 + 16 * page)
        expected = np.stack(decode_page(payloads.rows[page], layout))
        np.testing.assert_array_equal(staging[:, :, tokens].numpy(), expected)
    assert (staging[:, :, :19] == 7.0).all() and (staging[:, :, 51:] == 7.0).all()


def test_a_float16_page_at_both_ends_of_its_range_decodes_to_finite_values() -> None:
    geometry = Geometry(1, 1, 16, DType.FLOAT16, 16)
    layout, raw = (page_layout(geometry, codec) for codec in (CodecId.INT8, CodecId.RAW))
    x = np.where(np.random.default_rng(0).random(shape_of(geometry)) < 0.5, -65504.0, 65504.0)
    payloads = assert_same_as_reference(x, geometry)
    to = torch.zeros(2, 16, 16, dtype=torch.float16)
    at = torch.tensor([to.data_ptr()])
    source = torch.tensor(payloads.addresses)
    decode_pages(source, at, at + raw.part_bytes[0], raw.head_bytes, layout, DType.FLOAT16)
    assert to.isfinite().all() and (to.abs() > 65000).all()


def test_no_pages_is_no_work_and_another_codec_is_refused() -> None:
    none = torch.empty(0, dtype=torch.int64)
    layout = page_layout(F32, CodecId.INT8)
    assert encode_pages(none, none, layout).shape == (0,)
    decode_pages(none, none, none, 0, layout, DType.FLOAT32)
    with pytest.raises(InvalidArgument, match="fp8"):
        encode_pages(none, none, page_layout(F32, CodecId.FP8))
