"""Where the parts of a page lie: one table of offsets for codecs, kernels and tiers.

A page holds, per KV head, keys then values then scales, each part 64-byte
aligned, so that one head, or the keys alone, can be read without the rest.
T = block_tokens, d = head_dim, G = min(g, T) tokens share a key scale: g is 64,
for int4 32. d / C channels share a value scale: C is 1, for 4-bit values d / 32.

    part          raw             int8 and fp8          4 bit (k8v4's keys are as int8's)
    keys          [T, d] dtype    [T/G, d, G] uint8     lines of [T/U, d, U]
    values        [T, d] dtype    [T, d] uint8          lines of [T, W], a tile of W channels
                                                        after the other
    key_scale     -               [T/G, d] float16      [T/G, d] float16
    key_zero      -               [T/G, d], not fp8     [T/G, d] float16
    value_scale   -               [C, T] float16        [C, T] float16
    value_zero    -               [C, T], not fp8       [C, T] float16
    key_error     -               [T] float16   L2 norm of k - decode(encode(k)), rounded up

decode: key = key_zero + key_scale * code, value = value_zero + value_scale * code;
the code of fp8 is the number that the byte means as e4m3, and its zero is 0.

Keys of int8 are channel-major inside a group of 64 tokens: then q·k for 64
tokens is d broadcast multiply-adds over one cache line each, with no
horizontal sum; a row-major page needs one horizontal sum per token and head.

4-bit codes stand in lines: a matrix [outer, U] or [outer, W] is cut, row-major,
into runs of 16 codes, eight runs a line. A line is sixteen little-endian 32-bit
words, a word a lane: code i of run k is bits 4k to 4k + 3 of word i. So a run
becomes sixteen lanes by a shift and a mask, with no byte moved between lanes.
U = min(64, T) tokens; W is 64 channels, or 32 for the last where d is no multiple of 64.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from tierd.errors import InvalidArgument
from tierd.types import CodecId, DType, Geometry
from tierd.units import CACHE_LINE_BYTES, SECTOR_BYTES, round_up

HEADER_BYTES = SECTOR_BYTES
VALUE_GROUP_CHANNELS = 32
TILE_LANES = 64  # tokens of a tile of 4-bit keys, channels of a tile of 4-bit values
LINE_CODES = 128
_F16 = 2
_PARTS = (
    "keys", "values", "key_scale", "key_zero", "value_scale", "value_zero", "key_error",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Format:
    """What a codec makes of an element (raw: nothing); at most `group_tokens` share a key scale."""

    key_bits: int
    value_bits: int
    group_tokens: int
    has_zero: bool = True


_FORMATS = {
    CodecId.RAW: _Format(0, 0, 64),
    CodecId.INT8: _Format(8, 8, 64),
    CodecId.K8V4: _Format(8, 4, 64),
    CodecId.INT4: _Format(4, 4, 32),
    CodecId.FP8: _Format(8, 8, 64, has_zero=False),
}


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Byte offsets inside a page's payload. Offsets are from the start of a head.

    `keys`, `values`, `key_scale`, `key_zero`, `value_scale`, `value_zero`,
    `key_error`: offset in bytes; -1 where the codec has no such part.
    `head_bytes`: distance between heads. `payload_bytes` = kv_heads * head_bytes.
    `part_bytes`: what each part uses, in that order; 0 for one that is not there.
    `group_tokens` share a key scale, `value_group` channels of a token a value scale.
    """

    codec: CodecId
    dtype: DType
    kv_heads: int
    head_dim: int
    block_tokens: int
    group_tokens: int
    value_group: int
    keys: int
    values: int
    key_scale: int
    key_zero: int
    value_scale: int
    value_zero: int
    key_error: int
    head_bytes: int
    part_bytes: tuple[int, ...]

    @property
    def parts(self) -> tuple[int, ...]:
        """The offsets of all parts, in the order of `part_bytes`."""
        return tuple(getattr(self, name) for name in _PARTS)

    @property
    def payload_bytes(self) -> int:
        """Bytes of a page's payload, without the slot header."""
        return self.kv_heads * self.head_bytes

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot that holds this page: header + payload, rounded to 4 KiB."""
        return HEADER_BYTES + round_up(self.payload_bytes, SECTOR_BYTES)


def page_layout(geometry: Geometry, codec: CodecId) -> PageLayout:
    """Return the layout of `geometry`'s pages under `codec`.

    Raises InvalidArgument, naming the codec, for a geometry that it cannot store.
    """
    return _layout(
        geometry.kv_heads, geometry.head_dim, geometry.block_tokens, geometry.dtype, codec
    )


@lru_cache(maxsize=256)
def _layout(kv_heads: int, d: int, tokens: int, dtype: DType, codec: CodecId) -> PageLayout:
    part_bytes = [tokens * d * dtype.itemsize] * 2 + [0] * 5
    form = _format(codec, d)
    group, value_group = min(form.group_tokens, tokens), d
    if codec is not CodecId.RAW:
        value_group = VALUE_GROUP_CHANNELS if form.value_bits == 4 else d
        key_scales, value_scales = tokens // group * d * _F16, d // value_group * tokens * _F16
        part_bytes = [
            tokens * d * form.key_bits // 8, tokens * d * form.value_bits // 8,
            key_scales, key_scales * form.has_zero, value_scales, value_scales * form.has_zero,
            tokens * _F16,
        ]  # fmt: skip
    offsets: dict[str, int] = {}
    end = 0
    for name, size_bytes in zip(_PARTS, part_bytes, strict=True):
        offsets[name] = end if size_bytes else -1
        end += round_up(size_bytes, CACHE_LINE_BYTES)
    return PageLayout(
        codec, dtype, kv_heads, d, tokens, group, value_group, **offsets, head_bytes=end,
        part_bytes=tuple(part_bytes),
    )  # fmt: skip


def _fitting(d: int) -> str:
    """Return the codecs that store heads of d channels, as one would list them."""
    found = [
        codec.name.lower()
        for codec, form in _FORMATS.items()
        if form.value_bits != 4 or d % VALUE_GROUP_CHANNELS == 0
    ]
    return f"{', '.join(found[:-1])} or {found[-1]}"


def _format(codec: CodecId, d: int) -> _Format:
    form = _FORMATS.get(codec)
    if form is None:
        raise InvalidArgument(f"codec {codec!r} has no page layout")
    if form.value_bits == 4 and d % VALUE_GROUP_CHANNELS:
        raise InvalidArgument(
            f"codec {codec.name.lower()} stores heads of a multiple of {VALUE_GROUP_CHANNELS} "
            f"channels; head_dim is {d} here: choose {_fitting(d)}"
        )
    return form
