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
            fill = _fill_raw if codec is CodecId.RAW else _fill_coded
            keys[page, head], values[page, head] = fill(rng, view, layout)
    addresses = memory.ctypes.data + base + order.astype(np.int64) * stride
    return Pages(layout, memory, addresses, keys, values)


def poison_beyond(pages: Pages, tokens: npt.NDArray[np.int32]) -> None:
    """Make everything of tokens that are not valid read as NaN, where the format has a NaN."""
    layout, d = pages.layout, pages.layout.head_dim
    for address, count in zip(pages.addresses, tokens, strict=True):
        for head in range(layout.kv_heads):
            at = int(address) - pages.memory.ctypes.data + head * layout.head_bytes
            if layout.codec is CodecId.RAW:
                row = d * layout.dtype.itemsize
                parts = [(layout.keys, row), (layout.values, row)]
            else:
                parts = [(layout.values, d)] if layout.codec in (CodecId.INT8, CodecId.FP8) else []
                scales = (layout.value_scale, layout.value_zero)
                parts += [
                    (part + 2 * group * layout.block_tokens, 2)
                    for part in scales if part >= 0
                    for group in range(d // layout.value_group)
                ]  # fmt: skip
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


def _fill_coded(
    rng: np.random.Generator, view: npt.NDArray[np.uint8], layout: PageLayout
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    tokens, d, size = layout.block_tokens, layout.head_dim, layout.group_tokens
    key_scale = _halves(rng, tokens // size, 1, d)
    key_zero = _zeros(rng, layout, tokens // size, 1, d)
    value_scale = _halves(rng, d // layout.value_group, tokens)
    value_zero = _zeros(rng, layout, d // layout.value_group, tokens)
    key_codes = _codes(rng, layout, layout.codec is CodecId.INT4, tokens, d)
    value_codes = _codes(rng, layout, layout.codec in (CodecId.K8V4, CodecId.INT4), tokens, d)
    if layout.codec is CodecId.INT4:
        _put(view, layout.keys, _lines(key_codes.reshape(-1, min(64, tokens), d).swapaxes(1, 2)))
    else:
        _put(view, layout.keys, key_codes.reshape(-1, size, d).swapaxes(1, 2))
    if layout.codec in (CodecId.K8V4, CodecId.INT4):
        tiles = [_lines(value_codes[:, c : c + 64]) for c in range(0, d, 64)]
        _put(view, layout.values, np.concatenate(tiles))
    else:
        _put(view, layout.values, value_codes)
    _put(view, layout.key_scale, key_scale)
    _put(view, layout.value_scale, value_scale)
    if layout.key_zero >= 0:
        _put(view, layout.key_zero, key_zero)
        _put(view, layout.value_zero, value_zero)
    numbers = [_numbers(codes, layout) for codes in (key_codes, value_codes)]
    keys = key_zero.astype("f8") + key_scale.astype("f8") * numbers[0].reshape(-1, size, d)
    by_group = numbers[1].reshape(tokens, -1, layout.value_group)
    values = value_zero.astype("f8").T[..., None] + value_scale.astype("f8").T[..., None] * by_group
    return keys.reshape(tokens, d), values.reshape(tokens, d)


def _codes(
    rng: np.random.Generator, layout: PageLayout, is_four_bit: bool, tokens: int, d: int
) -> npt.NDArray[np.uint8]:
    codes = rng.integers(0, 16 if is_four_bit else 256, (tokens, d), dtype=np.uint8)
    if layout.codec is CodecId.FP8:
        codes[codes & 0x7F == 0x7F] = 0  # NaN, which no encoder writes
    return codes


def _halves(rng: np.random.Generator, *shape: int) -> npt.NDArray[np.float16]:
    return rng.uniform(0.002, 0.02, shape).astype(np.float16)


def _zeros(rng: np.random.Generator, layout: PageLayout, *shape: int) -> npt.NDArray[np.float16]:
    if layout.codec is CodecId.FP8:
        return np.zeros(shape, np.float16)
    return rng.uniform(-3.0, 0.5, shape).astype(np.float16)


def _numbers(codes: npt.NDArray[np.uint8], layout: PageLayout) -> npt.NDArray[np.float64]:
    """What codes mean before scale and zero."""
    if layout.codec is not CodecId.FP8:
        return codes.astype(np.float64)
    exponent, mantissa = (codes >> 3 & 15).astype(np.float64), (codes & 7) / 8
    size = np.where(exponent > 0, (1 + mantissa) * 2 ** (exponent - 7), mantissa * 2.0**-6)
    return np.where(codes & 0x80, -size, size)


def _lines(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Eight runs of 16 codes to a line: the layout's words, taken byte by byte."""
    runs = np.ascontiguousarray(codes).reshape(-1, 4, 2, 16)
    return (runs[:, :, 0] | runs[:, :, 1] << 4).swapaxes(1, 2)
