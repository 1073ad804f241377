"""Codec k8v4: int8's keys; values of 4 bits, per token and 32 channels; Numba kernels.

Bytes are those of `reference`, which defines each step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from tierd.codec import int8, nibbles
from tierd.codec.elements import Target
from tierd.codec.intrinsics import as_array
from tierd.codec.layout import PageLayout
from tierd.codec.tiles import decode_batch, encode_batch, item_bytes, zero_gaps

IntArray = npt.NDArray[np.int64]


def encode_pages(
    source: IntArray, destination: IntArray, layout: PageLayout, threads: int | None = None
) -> npt.NDArray[np.uint8]:
    """Encode hot pages; see `tiles.encode_batch`."""
    return encode_batch(_encode_span, source, destination, layout, threads)


def decode_pages(
    source: IntArray, layout: PageLayout, target: Target, threads: int | None = None
) -> None:
    """Decode payloads at [pages] addresses into `target`, one after the other."""
    decode_batch(_decode_span, source, layout, target, threads)


@njit(nogil=True)
def _encode_span(
    source: Any, target: Any, flags: Any, first: Any, end: Any, s: Any, w: Any
) -> None:
    sources, targets = as_array(source, end, np.int64), as_array(target, end, np.int64)
    found = as_array(flags, end, np.uint8)
    for task in range(first, end):
        page, head = task // s.heads, task % s.heads
        hot = sources[page] + head * s.hot_head_bytes
        out = targets[page] + head * s.head_bytes
        bits = 0
        for group in range(s.tokens // s.group):
            bits |= int8.encode_keys(hot, out, group, s, w)
        for run in range(s.tokens // nibbles.RUN_TOKENS):
            bits |= nibbles.encode_values(hot, out, run, s, w)
        zero_gaps(out, s)
        found[task] = bits


@njit(nogil=True)
def _decode_span(source: Any, first: Any, end: Any, s: Any, target: Any, w: Any) -> None:
    sources = as_array(source, end, np.int64)
    row_bytes = s.d * item_bytes(target.kind)
    for task in range(first, end):
        page, head = task // s.heads, task % s.heads
        payload = sources[page] + head * s.head_bytes
        row = (target.start_token + page * s.tokens) * row_bytes
        keys = target.keys + head * target.keys_head_bytes + row
        values = target.values + head * target.values_head_bytes + row
        for group in range(s.tokens // s.group):
            at = keys + group * s.group * row_bytes
            int8.decode_keys(payload, at, group, s, target.kind, w)
        for run in range(s.tokens // nibbles.RUN_TOKENS):
            at = values + run * nibbles.RUN_TOKENS * row_bytes
            nibbles.decode_values(payload, at, run, s, target.kind, w)
