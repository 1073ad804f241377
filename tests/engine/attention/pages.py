"""Builds encoded pages in memory, and what they decode to, for attention tests.

The encoder here is the layout's own words written in NumPy: random codes and
scales are placed directly, so that the tests need no codec.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tierd.codec.layout import PageLayout, page_layout
from tierd.types import CodecId, DType, Geometry


@dataclass(frozen=True)
class Pages:
    """addresses: [pages]; keys, values: [pages, kv_heads, tokens, head_dim] float64."""

    layout: PageLayout
    memory: npt.NDArray[np.uint8]
    addresses: npt.NDArray[np.int64]
    keys: npt.NDArray[np.float64]
    values: npt.NDArray[np.float64]


def make_pages(
    rng: np.random.Generator, pages: int, kv_heads: int, head_dim: int, block: int,
    codec: CodecId, dtype: DType = DType.BFLOAT16,
) -> Pages:  # fmt: skip
    """Return `pages` random pages at scattered 64-byte aligned addresses."""
    layout = page_layout(Geometry(1, kv_heads, head_dim, dtype, block), codec)
    stride = -(-layout.payload_bytes // 64) * 64 + 128
    memory = np.full(pages * stride + 64, 0xFF, dtype=np.uint8)  # gaps read as NaN
    base = -memory.ctypes.data % 64
    order = rng.permutation(pages)
    keys = np.empty((pages, kv_heads, block, head_dim))
    values = np.empty_like(keys)
    for page in range(pages):
        for head in range(kv_heads):
            at = base + int(order[page]) * stride + head * layout.head_bytes
            view = memory[at : at + layout.head_bytes]
            fill = _fill_int8 if codec is CodecId.INT8 else _fill_raw
            keys[page, head], values[page, head] = fill(rng, view, layout)
    addresses = memory.ctypes.data + base + order.astype(np.int64) * stride
    return Pages(layout, memory, addresses, keys, values)


def poison_beyond(pages: Pages, tokens: npt.NDArray[np.int32]) -> None:
    """Make everything of tokens that are not valid read as NaN, where the format has a NaN."""
    layout, d = pages.layout, pages.layout.head_dim
    for address, count in zip(pages.addresses, tokens, strict=True):
        for head in range(layout.kv_heads):
            at = int(address) - pages.memory.ctypes.data + head * layout.head_bytes
            if layout.codec is CodecId.INT8:
                parts = ((layout.values, d), (layout.value_scale, 2), (layout.value_zero, 2))
            else:
                row = d * layout.dtype.itemsize
                parts = ((layout.keys, row), (layout.values, row))
            for offset, row_bytes in parts:
                first, end = count * row_bytes, layout.block_tokens * row_bytes
                pages.memory[at + offset + first : at + offset + end] = 0xFF


def _put(view: npt.NDArray[np.uint8], offset: int, data: npt.NDArray[Any]) -> None:
    raw = np.ascontiguousarray(data).view(np.uint8).ravel()
    view[offset : offset + raw.size] = raw


def _fill_raw(
    rng: np.random.Generator, view: npt.NDArray[np.uint8], layout: PageLayout
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    parts = []
    for offset in (layout.keys, layout.values):
        x = rng.standard_normal((layout.block_tokens, layout.head_dim)).astype(np.float32)
        if layout.dtype is DType.BFLOAT16:
            bits = (x.view(np.uint32) >> 16).astype(np.uint16)
            _put(view, offset, bits)
            x = (bits.astype(np.uint32) << 16).view(np.float32)
        else:
            x = x.astype(np.float16 if layout.dtype is DType.FLOAT16 else np.float32)
            _put(view, offset, x)
        parts.append(x.astype(np.float64))
    return parts[0], parts[1]


def _fill_int8(
    rng: np.random.Generator, view: npt.NDArray[np.uint8], layout: PageLayout
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    tokens, d, group = layout.block_tokens, layout.head_dim, layout.group_tokens
    groups = tokens // group
    key_codes = rng.integers(0, 256, (groups, d, group), dtype=np.uint8)
    value_codes = rng.integers(0, 256, (tokens, d), dtype=np.uint8)
    key_scale = rng.uniform(0.002, 0.02, (groups, d)).astype(np.float16)
    key_zero = rng.uniform(-4.0, 1.0, (groups, d)).astype(np.float16)
    value_scale = rng.uniform(0.002, 0.02, tokens).astype(np.float16)
    value_zero = rng.uniform(-3.0, 0.0, tokens).astype(np.float16)
    for offset, data in (
        (layout.keys, key_codes), (layout.values, value_codes),
        (layout.key_scale, key_scale), (layout.key_zero, key_zero),
        (layout.value_scale, value_scale), (layout.value_zero, value_zero),
    ):  # fmt: skip
        _put(view, offset, data)
    wide = key_zero[..., None].astype(np.float64) + key_scale[..., None].astype(
        np.float64
    ) * key_codes.astype(np.float64)
    keys = wide.transpose(0, 2, 1).reshape(tokens, d)
    values = value_zero[:, None].astype(np.float64) + value_scale[:, None].astype(
        np.float64
    ) * value_codes.astype(np.float64)
    return keys, values
