"""Parts of a page stand apart, aligned, in the order the table gives."""

from __future__ import annotations

import itertools

import pytest

from tierd.codec import page_layout
from tierd.errors import InvalidArgument
from tierd.types import CodecId, DType, Geometry


@pytest.mark.parametrize("codec", [CodecId.RAW, CodecId.INT8])
@pytest.mark.parametrize("dtype", DType)
def test_parts_are_aligned_and_do_not_overlap(codec: CodecId, dtype: DType) -> None:
    for d, tokens in itertools.product((1, 3, 64, 80, 127), (16, 64, 256, 4096)):
        layout = page_layout(Geometry(4, 3, d, dtype, tokens), codec)
        item = dtype.itemsize if codec is CodecId.RAW else 1
        scales = 2 * d * tokens // layout.group_tokens
        sizes = [tokens * d * item, tokens * d * item]
        parts = [layout.keys, layout.values]
        if codec is CodecId.INT8:
            sizes += [scales, scales, 2 * tokens, 2 * tokens, 2 * tokens]
            parts += [layout.key_scale, layout.key_zero, layout.value_scale]
            parts += [layout.value_zero, layout.key_error]
        ends = [part + size for part, size in zip(parts, sizes, strict=True)]
        assert all(part % 64 == 0 for part in parts)
        assert all(end <= start for end, start in zip(ends, parts[1:], strict=False))
        assert ends[-1] <= layout.head_bytes and layout.head_bytes % 64 == 0
        assert layout.payload_bytes == 3 * layout.head_bytes
        assert layout.slot_bytes % 4096 == 0 and layout.slot_bytes >= 4096 + layout.payload_bytes


def test_int8_takes_about_one_byte_an_element() -> None:
    geometry = Geometry(1, 8, 128, DType.BFLOAT16, 256)
    payload = page_layout(geometry, CodecId.INT8).payload_bytes
    assert payload / (geometry.page_bytes / 2) < 1.06  # attention.md: 1.047, and key_error


def test_a_codec_without_a_layout_is_refused() -> None:
    with pytest.raises(InvalidArgument):
        page_layout(Geometry(1, 1, 64, DType.FLOAT32), CodecId.NONE)
