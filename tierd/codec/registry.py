"""Codecs by name and number, and the batch calls that reach their kernels.

Kernels compile with Numba, once on a machine, and are loaded at the first call, not at import:
the client and the daemon name codecs without ever running one.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np
import numpy.typing as npt

from tierd.codec.layout import PageLayout
from tierd.errors import InvalidArgument
from tierd.layercodecs import CODEC_NAMES, parse_codec
from tierd.types import CodecId

if TYPE_CHECKING:
    from tierd.codec.elements import ModelArray, Target

__all__ = ["CODEC_NAMES", "Codec", "codec_for", "decode_pages", "encode_pages", "parse_codec"]

IntArray = npt.NDArray[np.int64]


class Codec(Protocol):
    """What a module of kernels offers; `layout` is always of a codec that it has."""

    def encode_pages(
        self,
        source: IntArray,
        destination: IntArray,
        layout: PageLayout,
        threads: int | None = None,
    ) -> npt.NDArray[np.uint8]:
        """Encode a batch of hot pages; see `encode_pages` below."""

    def decode_pages(
        self, source: IntArray, layout: PageLayout, target: Target, threads: int | None = None
    ) -> None:
        """Decode a batch of payloads; see `decode_pages` below."""


def codec_for(codec: CodecId) -> Codec:
    """Return a codec's kernels, loading Numba. Raises InvalidArgument for one not built in."""
    if codec is CodecId.NONE:
        raise InvalidArgument(f"codec {codec!r} is not one of {', '.join(CODEC_NAMES)}")
    module = "raw" if codec is CodecId.RAW else "spans"
    return cast(Codec, import_module(f"tierd.codec.{module}"))


def encode_pages(
    source: IntArray, destination: IntArray, layout: PageLayout, *, threads: int | None = None
) -> npt.NDArray[np.uint8]:
    """Encode hot pages into payloads of `layout`; returns a status each, uint8 [pages].

    source: [pages] absolute addresses of hot pages, the raw layout of the same
    geometry; destination: [pages] addresses of payload_bytes each, writable,
    overlapping nothing. Both stay mapped during the call.
    Status 0: encoded. 1: NaN or infinity. 2: beyond float16's range. With 1 or
    2 that payload's bytes are unspecified: never publish it. Codec raw always
    gives 0. Every byte of an encoded payload is set, and is the same for the
    same input on any machine with any `threads` (default: all CPUs).
    Raises InvalidArgument when the arrays' lengths differ. Zero pages is allowed.
    """
    source, destination = _addresses(source), _addresses(destination)
    if len(source) != len(destination):
        raise InvalidArgument(f"{len(source)} source pages, {len(destination)} destinations")
    return codec_for(layout.codec).encode_pages(source, destination, layout, threads)


def decode_pages(
    source: IntArray,
    layout: PageLayout,
    keys: ModelArray,
    values: ModelArray,
    start_token: int = 0,
    *,
    threads: int | None = None,
) -> None:
    """Decode payloads into keys and values: page i fills tokens start_token + i * T and on.

    source: [pages] absolute addresses of payloads, mapped during the call;
    keys, values: [kv_heads, capacity_tokens, head_dim], each head's tokens
    contiguous; float32 for any layout (exact, or as decoded), or uint16 for
    the bits of a bfloat16 or float16 layout (to nearest even).
    Only those tokens are written. Raises InvalidArgument. Zero pages is allowed.
    """
    from tierd.codec.elements import decode_target

    source = _addresses(source)
    tokens = len(source) * layout.block_tokens
    target = decode_target(keys, values, layout, tokens, start_token)
    codec_for(layout.codec).decode_pages(source, layout, target, threads)


def _addresses(array: IntArray) -> IntArray:
    if array.ndim != 1 or array.dtype != np.int64:
        raise InvalidArgument(f"addresses must be int64 [pages], not {array.dtype} {array.shape}")
    return np.ascontiguousarray(array)
