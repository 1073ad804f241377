"""Codec int4: keys of 4 bits per channel over 32 tokens, values per token and 32 channels.

Bytes are those of `reference`, which defines each step.
"""

from __future__ import annotations

from typing import Any

from tierd.codec import nibbles
from tierd.codec.elements import inner
from tierd.codec.tiles import item_bytes


@inner
def encode_head(hot: Any, out: Any, s: Any, w: Any) -> Any:
    """Write every part of one KV head of a page at `out`; returns the flags."""
    bits = 0
    for tile in range(s.tokens // s.tile_tokens):
        bits |= nibbles.encode_keys(hot, out, tile, s, w)
    for run in range(s.tokens // nibbles.RUN_TOKENS):
        bits |= nibbles.encode_values(hot, out, run, s, w)
    return bits


@inner
def decode_head(payload: Any, keys: Any, values: Any, s: Any, kind: Any, w: Any) -> None:
    """Write all tokens' rows of one KV head of a page."""
    row_bytes = s.d * item_bytes(kind)
    for tile in range(s.tokens // s.tile_tokens):
        nibbles.decode_keys(payload, keys + tile * s.tile_tokens * row_bytes, tile, s, kind, w)
    for run in range(s.tokens // nibbles.RUN_TOKENS):
        rows = values + run * nibbles.RUN_TOKENS * row_bytes
        nibbles.decode_values(payload, rows, run, s, kind, w)
