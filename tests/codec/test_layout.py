"""Parts of a page stand apart, aligned, in the order the table gives."""

from __future__ import annotations

import itertools

import pytest

from tests.codec.pages import FOUR_BIT, LOSSY
from tierd.codec import page_layout
from tierd.errors import InvalidArgument
from tierd.types import CodecId, DType, Geometry

NAMES = ("keys", "values", "key_scale", "key_zero", "value_scale", "value_zero", "key_error")
# Bits of a key and of a value, tokens of a key group, whether codes start from a zero.
FORMS = {
    CodecId.INT8: (8, 8, 64, True),
    CodecId.K8V4: (8, 4, 64, True),
    CodecId.INT4: (4, 4, 32, True),
    CodecId.FP8: (8, 8, 64, False),
}


def sizes_of(codec: CodecId, dtype: DType, d: int, tokens: int) -> tuple[int, ...]:
    elements = tokens * d
    if codec is CodecId.RAW:
        return (elements * dtype.itemsize,) * 2 + (0,) * 5
    key_bits, value_bits, group, has_zero = FORMS[codec]
    keys = 2 * d * max(1, tokens // group)
    values = 2 * tokens * (d // 32 if value_bits == 4 else 1)
    return (
        elements * key_bits // 8, elements * value_bits // 8, keys, keys * has_zero,
        values, values * has_zero, 2 * tokens,
    )  # fmt: skip


@pytest.mark.parametrize("codec", [CodecId.RAW, *LOSSY])
@pytest.mark.parametrize("dtype", DType)
def test_parts_are_aligned_and_do_not_overlap(codec: CodecId, dtype: DType) -> None:
    head_dims = (32, 64, 96, 160) if codec in FOUR_BIT else (1, 3, 64, 80, 127)
    for d, tokens in itertools.product(head_dims, (16, 64, 256, 4096)):
        layout = page_layout(Geometry(4, 3, d, dtype, tokens), codec)
        sizes = sizes_of(codec, dtype, d, tokens)
        assert layout.part_bytes == sizes
        assert layout.parts == tuple(getattr(layout, name) for name in NAMES)
        present = [(part, size) for part, size in zip(layout.parts, sizes, strict=True) if size]
        assert all(part == -1 for part, size in zip(layout.parts, sizes, strict=True) if not size)
        assert present[0][0] == 0 and all(part % 64 == 0 for part, _ in present)
        ends = [part + size for part, size in present]
        assert all(end <= start for end, (start, _) in zip(ends, present[1:], strict=False))
        assert ends[-1] <= layout.head_bytes and layout.head_bytes % 64 == 0
        assert layout.payload_bytes == 3 * layout.head_bytes
        assert layout.slot_bytes % 4096 == 0 and layout.slot_bytes >= 4096 + layout.payload_bytes


@pytest.mark.parametrize(
    "codec, bytes_per_element",
    [(CodecId.INT8, 1.047), (CodecId.K8V4, 0.844), (CodecId.INT4, 0.625), (CodecId.FP8, 1.024)],
)
def test_an_element_takes_the_bytes_of_the_design(codec: CodecId, bytes_per_element: float) -> None:
    geometry = Geometry(1, 8, 128, DType.BFLOAT16, 256)
    payload = page_layout(geometry, codec).payload_bytes
    key_error = 2 / 256  # bytes per element: one float16 for a key and a value of 128 each
    assert payload / (geometry.page_bytes / 2) <= bytes_per_element + key_error


@pytest.mark.parametrize("codec", FOUR_BIT)
@pytest.mark.parametrize("head_dim", [1, 16, 33, 80, 112])
def test_a_head_size_that_4_bits_cannot_hold_is_refused_by_name(
    codec: CodecId, head_dim: int
) -> None:
    with pytest.raises(InvalidArgument, match=rf"{codec.name.lower()}.*head_dim is {head_dim}"):
        page_layout(Geometry(1, 1, head_dim, DType.FLOAT32), codec)


def test_a_codec_without_a_layout_is_refused() -> None:
    with pytest.raises(InvalidArgument):
        page_layout(Geometry(1, 1, 64, DType.FLOAT32), CodecId.NONE)
