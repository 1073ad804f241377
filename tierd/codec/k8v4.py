"""Codec k8v4: int8's keys; values of 4 bits, per token and 32 channels; Numba kernels.

Bytes are those of `reference`, which defines each step.
"""

from __future__ import annotations

from typing import Any

from tierd.codec import int8, nibbles
from tierd.codec.elements import inner
from tierd.codec.tiles import item_bytes


@inner
def encode_head(hot: Any, out: Any, s: Any, w: Any) -> Any:
    """Write every part of one KV head of a page at `out`; returns the flags."""
    bits = 0
    for group in range(s.tokens // s.group):
        bits |= int8.encode_keys(hot, out, group, s, w)
    for run in range(s.tokens // nibbles.RUN_TOKENS):
        bits |= nibbles.encode_values(hot, out, run, s, w)
    return bits


@inner
def decode_head(payload: Any, keys: Any, values: Any, s: Any, kind: Any, w: Any) -> None:
    """Write all tokens' rows of one KV head of a page."""
    row_bytes = s.d * item_bytes(kind)
    for group in range(s.tokens // s.group):
        int8.decode_keys(payload, keys + group * s.group * row_bytes, group, s, kind, w)
    for run in range(s.tokens // nibbles.RUN_TOKENS):
        rows = values + run * nibbles.RUN_TOKENS * row_bytes
        nibbles.decode_values(payload, rows, run, s, kind, w)
