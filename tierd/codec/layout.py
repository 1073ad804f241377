"""Where the parts of a page lie: one table of offsets for codecs, kernels and tiers.

A page holds, per KV head, keys then values then scales, each part 64-byte
aligned, so that one head, or the keys alone, can be read without the rest.
T = block_tokens, d = head_dim, G = min(64, T) tokens share a key scale.

    part          raw             int8
    keys          [T, d] dtype    [T/G, d, G] uint8   (channel-major inside a group)
    values        [T, d] dtype    [T, d] uint8
    key_scale     -               [T/G, d] float16
    key_zero      -               [T/G, d] float16
    value_scale   -               [T] float16
    value_zero    -               [T] float16
    key_error     -               [T] float16   L2 norm of k - decode(encode(k)), rounded up

decode: key = key_zero + key_scale * code, value = value_zero + value_scale * code.

Keys of int8 are channel-major inside a group of 64 tokens: then q·k for 64
tokens is d broadcast multiply-adds over one cache line each, with no
horizontal sum; a row-major page needs one horizontal sum per token and head.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from tierd.errors import InvalidArgument
from tierd.types import CodecId, DType, Geometry
from tierd.units import CACHE_LINE_BYTES, SECTOR_BYTES, round_up

HEADER_BYTES = SECTOR_BYTES
KEY_GROUP_TOKENS = 64
_F16 = 2
_PARTS = (
    "keys", "values", "key_scale", "key_zero", "value_scale", "value_zero", "key_error",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Byte offsets inside a page's payload. Offsets are from the start of a head.

    `keys`, `values`, `key_scale`, `key_zero`, `value_scale`, `value_zero`,
    `key_error`: offset in bytes; -1 where the codec has no such part.
    `head_bytes`: distance between heads. `payload_bytes` = kv_heads * head_bytes.
    """

    codec: CodecId
    dtype: DType
    kv_heads: int
    head_dim: int
    block_tokens: int
    group_tokens: int
    keys: int
    values: int
    key_scale: int
    key_zero: int
    value_scale: int
    value_zero: int
    key_error: int
    head_bytes: int

    @property
    def payload_bytes(self) -> int:
        """Bytes of a page's payload, without the slot header."""
        return self.kv_heads * self.head_bytes

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot that holds this page: header + payload, rounded to 4 KiB."""
        return HEADER_BYTES + round_up(self.payload_bytes, SECTOR_BYTES)


def page_layout(geometry: Geometry, codec: CodecId) -> PageLayout:
    """Return the layout of `geometry`'s pages under `codec`. Raises InvalidArgument."""
    return _layout(
        geometry.kv_heads, geometry.head_dim, geometry.block_tokens, geometry.dtype, codec
    )


@lru_cache(maxsize=256)
def _layout(kv_heads: int, d: int, tokens: int, dtype: DType, codec: CodecId) -> PageLayout:
    group = min(KEY_GROUP_TOKENS, tokens)
    elements = tokens * d
    if codec is CodecId.RAW:
        sizes = [elements * dtype.itemsize, elements * dtype.itemsize, 0, 0, 0, 0, 0]
    elif codec is CodecId.INT8:
        per_group, per_token = tokens // group * d * _F16, tokens * _F16
        sizes = [elements, elements, per_group, per_group, per_token, per_token, per_token]
    else:
        raise InvalidArgument(f"codec {codec!r} has no page layout")
    offsets: dict[str, int] = {}
    end = 0
    for name, size in zip(_PARTS, sizes, strict=True):
        offsets[name] = end if size else -1
        end += round_up(size, CACHE_LINE_BYTES)
    return PageLayout(codec, dtype, kv_heads, d, tokens, group, **offsets, head_bytes=end)
