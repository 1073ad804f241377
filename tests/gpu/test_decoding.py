"""Decode on the GPU, interpreted: the reference's numbers, and only where they belong."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.codec.pages import Pages, hot_pages, normal, shape_of
from tests.gpu.coding import cases, each_codec, hot_of, layout_of
from tierd.codec.reference import decode_page, encode_page, narrowed
from tierd.types import CodecId, DType, Geometry
from tierd_engine.device.kernels import HostKernels, TritonKernels
from tierd_engine.gpu.decoding import decode_pages

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")


def payloads_of(x: np.ndarray, geometry: Geometry, codec: CodecId) -> Pages:
    """Return what the reference encodes."""
    layout = layout_of(geometry, codec)
    hot = hot_of(x, geometry)
    payloads = Pages(hot.count, layout.payload_bytes)
    for row, page in zip(payloads.rows, hot.rows, strict=True):
        row[:], status = encode_page(page, layout)
        assert status == 0
    return payloads


def decoded_hot(payloads: Pages, geometry: Geometry, codec: CodecId) -> Pages:
    """Decode every payload into a hot page; check that nothing else was written."""
    raw = layout_of(geometry, CodecId.RAW)
    hot = Pages(payloads.count, raw.payload_bytes)
    to = torch.tensor(hot.addresses)
    decode_pages(
        torch.tensor(payloads.addresses), to + raw.keys, to + raw.values, raw.head_bytes,
        layout_of(geometry, codec), geometry.dtype,
    )  # fmt: skip
    assert hot.guards_hold() and payloads.guards_hold()
    return hot


def rows_of(hot: Pages, page: int, geometry: Geometry) -> np.ndarray:
    """Return bits [2, kv_heads, tokens, head_dim] of a hot page."""
    raw = layout_of(geometry, CodecId.RAW)
    kind = np.float32 if geometry.dtype is DType.FLOAT32 else np.uint16
    shape = (geometry.block_tokens, geometry.head_dim)
    parts = []
    for part in (raw.keys, raw.values):
        for head in range(geometry.kv_heads):
            start = head * raw.head_bytes + part
            found = hot.rows[page, start : start + raw.part_bytes[0]].view(kind)
            parts.append(found.reshape(shape))
    return np.stack(parts).reshape(2, geometry.kv_heads, *shape)


@pytest.mark.parametrize(("geometry", "codec"), cases())
def test_a_payload_decodes_into_a_hot_page_of_its_own_dtype(
    geometry: Geometry, codec: CodecId
) -> None:
    x = np.random.default_rng().standard_normal(shape_of(geometry, 1), np.float32)
    payloads = payloads_of(x, geometry, codec)
    hot = decoded_hot(payloads, geometry, codec)
    both = np.stack(decode_page(payloads.rows[0], layout_of(geometry, codec)))
    expected = narrowed(both, geometry.dtype)
    np.testing.assert_array_equal(rows_of(hot, 0, geometry), expected)


@each_codec
def test_payloads_decode_into_float32_staging_and_only_into_their_tokens(codec: CodecId) -> None:
    geometry = Geometry(1, 2, 32, DType.BFLOAT16, 16)
    x = np.random.default_rng().standard_normal(shape_of(geometry, 2), np.float32)
    x[:, :, :, 3] = -0.0
    payloads = payloads_of(x, geometry, codec)
    staging = torch.full((2, 2, 70, 32), 7.0)
    row_bytes = 32 * 4
    starts = 19 * row_bytes + 16 * row_bytes * torch.arange(2)
    keys_to, values_to = (staging[part].data_ptr() + starts for part in (0, 1))
    decode_pages(
        torch.tensor(payloads.addresses), keys_to, values_to, 70 * row_bytes,
        layout_of(geometry, codec), DType.FLOAT32,
    )  # fmt: skip
    for page in range(2):
        tokens = slice(19 + 16 * page, 35 + 16 * page)
        expected = np.stack(decode_page(payloads.rows[page], layout_of(geometry, codec)))
        found = staging[:, :, tokens].numpy()
        np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))
    assert (staging[:, :, :19] == 7.0).all() and (staging[:, :, 51:] == 7.0).all()


@each_codec
def test_a_float16_page_at_both_ends_of_its_range_decodes_to_finite_values(codec: CodecId) -> None:
    geometry = Geometry(1, 1, 32, DType.FLOAT16, 16)
    x = np.where(np.random.default_rng(0).random(shape_of(geometry)) < 0.5, -65504.0, 65504.0)
    payloads = payloads_of(x, geometry, codec)
    rows = rows_of(decoded_hot(payloads, geometry, codec), 0, geometry).view(np.float16)
    assert np.isfinite(rows).all() and (np.abs(rows) > 65000).all()


@pytest.mark.parametrize("dtype", DType)
def test_raw_comes_back_bit_for_bit_whatever_the_bits(dtype: DType) -> None:
    geometry = Geometry(1, 2, 65, dtype, 32)
    kind = np.uint32 if dtype is DType.FLOAT32 else np.uint16
    rng = np.random.default_rng()
    bits = rng.integers(0, np.iinfo(kind).max, shape_of(geometry, 1), kind, endpoint=True)
    bits[0, 0, 0, 0, :4] = [0x7FC0, 0x7F81, 0xFFFF, 0x8000]
    payloads = hot_pages(bits, geometry)  # raw is the hot page's own bytes, less the gaps
    rows = rows_of(decoded_hot(payloads, geometry, CodecId.RAW), 0, geometry)
    np.testing.assert_array_equal(rows.view(kind), bits[0])


@each_codec
def test_every_byte_pattern_of_codes_decodes_as_the_reference_decodes_it(codec: CodecId) -> None:
    geometry = Geometry(1, 1, 64, DType.FLOAT32, 64)
    layout = layout_of(geometry, codec)
    rng = np.random.default_rng()
    payloads = payloads_of(normal(geometry), geometry, codec)
    if codec is not CodecId.RAW:
        for part, size in zip(layout.parts[:2], layout.part_bytes[:2], strict=True):
            codes = rng.integers(0, 256, size, dtype=np.uint8)
            if codec is CodecId.FP8:
                codes[codes & 0x7F == 0x7F] = 0  # NaN, which no encoder writes
            payloads.rows[0, part : part + size] = codes
    rows = rows_of(decoded_hot(payloads, geometry, codec), 0, geometry)
    np.testing.assert_array_equal(rows, np.stack(decode_page(payloads.rows[0], layout)))


@each_codec
def test_no_pages_is_no_work(codec: CodecId) -> None:
    none = torch.empty(0, dtype=torch.int64)
    layout = layout_of(Geometry(1, 2, 32, DType.FLOAT32, 16), codec)
    decode_pages(none, none, none, 0, layout, DType.FLOAT32)


@each_codec
def test_the_kernels_of_a_device_promote_to_the_same_bytes(codec: CodecId) -> None:
    geometry = Geometry(1, 2, 32, DType.BFLOAT16, 64)
    x = np.random.default_rng().standard_normal(shape_of(geometry, 2), np.float32)
    payloads = payloads_of(x, geometry, codec)
    made = []
    for kernels in (TritonKernels(), HostKernels()):
        hot = Pages(payloads.count, layout_of(geometry, CodecId.RAW).payload_bytes)
        source, target = torch.tensor(payloads.addresses), torch.tensor(hot.addresses)
        kernels.decode_hot(source, target, layout_of(geometry, codec))
        assert hot.guards_hold() and payloads.guards_hold()
        made.append([rows_of(hot, page, geometry) for page in range(2)])
    np.testing.assert_array_equal(made[0], made[1])
