"""Codecs: how a page is encoded below the hot tier, and where its parts lie.

`layout` is the one table of offsets, `reference` defines every byte, `raw` and
`int8` are the kernels, `digest` names the bytes. Batches are arrays of absolute
addresses, so that one call covers pages of many slabs. Importing this loads
neither Numba nor any kernel; the first encode or decode does.
"""

from tierd.codec.digest import digest_pages, payload_digest
from tierd.codec.layout import HEADER_BYTES, PageLayout, page_layout
from tierd.codec.registry import (
    CODEC_NAMES,
    Codec,
    codec_for,
    decode_pages,
    encode_pages,
    parse_codec,
)

__all__ = [
    "CODEC_NAMES",
    "HEADER_BYTES",
    "Codec",
    "PageLayout",
    "codec_for",
    "decode_pages",
    "digest_pages",
    "encode_pages",
    "page_layout",
    "parse_codec",
    "payload_digest",
]
