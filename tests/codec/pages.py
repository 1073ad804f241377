"""Pages in memory for codec tests: buffers with guards, and arrays to hot pages and back."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tierd.codec import PageLayout, decode_pages, encode_pages, page_layout
from tierd.types import CodecId, DType, Geometry

LOSSY = (CodecId.INT8, CodecId.K8V4, CodecId.INT4, CodecId.FP8)
FOUR_BIT = (CodecId.K8V4, CodecId.INT4)  # head_dim must be a multiple of 32
GUARD_BYTES = 256
GUARD = 0xC5
POISON = 0xAB

Array = npt.NDArray[np.generic]


@dataclass
class Pages:
    """`count` pages of one size, 64-byte aligned, with guard bytes around each."""

    count: int
    page_bytes: int
    fill: int = POISON
    rows: npt.NDArray[np.uint8] = field(init=False)
    addresses: npt.NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        stride = -(-self.page_bytes // 64) * 64 + 2 * GUARD_BYTES
        self._memory = np.full(self.count * stride + 64, GUARD, dtype=np.uint8)
        start = -self._memory.ctypes.data % 64
        self._whole = self._memory[start : start + self.count * stride].reshape(-1, stride)
        self.rows = self._whole[:, GUARD_BYTES : GUARD_BYTES + self.page_bytes]
        self.rows[:] = self.fill
        first = self._memory.ctypes.data + start + GUARD_BYTES
        self.addresses = first + np.arange(self.count, dtype=np.int64) * stride

    def guards_hold(self) -> bool:
        """Whether nothing but the pages was written."""
        around = (self._whole[:, :GUARD_BYTES], self._whole[:, GUARD_BYTES + self.page_bytes :])
        return all((part == GUARD).all() for part in around)


def stored(values: npt.NDArray[np.float32], dtype: DType) -> Array:
    """Return float32 values in a dtype's bits: truncated for bfloat16, nearest for float16."""
    if dtype is DType.FLOAT32:
        return values
    if dtype is DType.FLOAT16:
        with np.errstate(over="ignore"):
            return values.astype(np.float16).view(np.uint16)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def hot_pages(bits: Array, geometry: Geometry) -> Pages:
    """Return hot pages of `bits` [pages, 2 (K, V), kv_heads, block_tokens, head_dim]."""
    raw = page_layout(geometry, CodecId.RAW)
    pages = Pages(len(bits), raw.payload_bytes)
    for row, page in zip(pages.rows, bits, strict=True):
        for head in range(geometry.kv_heads):
            for part, offset in ((0, raw.keys), (1, raw.values)):
                flat = np.ascontiguousarray(page[part, head]).reshape(-1).view(np.uint8)
                start = head * raw.head_bytes + offset
                row[start : start + flat.size] = flat
    return pages


def shape_of(geometry: Geometry, pages: int = 1) -> tuple[int, int, int, int, int]:
    """Return the shape `hot_pages` takes."""
    return pages, 2, geometry.kv_heads, geometry.block_tokens, geometry.head_dim


def normal(geometry: Geometry, pages: int = 1, seed: int = 0) -> npt.NDArray[np.float32]:
    """Return normal numbers of that shape."""
    return np.random.default_rng(seed).standard_normal(shape_of(geometry, pages), np.float32)


def encoded(hot: Pages, layout: PageLayout, fill: int = POISON) -> tuple[Pages, Array]:
    """Encode every page; return (payloads, status) and check that only they were written."""
    out = Pages(hot.count, layout.payload_bytes, fill)
    status = encode_pages(hot.addresses, out.addresses, layout)
    assert out.guards_hold()
    return out, status


def decoded(payloads: Pages, layout: PageLayout, dtype: type = np.float32) -> Array:
    """Return [pages, 2, kv_heads, block_tokens, head_dim] of the given array dtype."""
    tokens = layout.block_tokens
    shape = (layout.kv_heads, payloads.count * tokens, layout.head_dim)
    keys, values = np.zeros(shape, dtype=dtype), np.zeros(shape, dtype=dtype)
    decode_pages(payloads.addresses, layout, keys, values)
    both = np.stack([keys, values]).reshape(2, layout.kv_heads, payloads.count, tokens, -1)
    return both.transpose(2, 0, 1, 3, 4)
