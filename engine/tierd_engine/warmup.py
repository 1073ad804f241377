"""Warm-up: compile every kernel that a session will run, before anything is timed or streamed.

Numba compiles a kernel at its first call, which takes seconds. A job does that
while the user still reads "loading", not in the middle of the first token.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from tierd.codec import decode_pages, digest_pages, encode_pages, page_layout
from tierd.types import CodecId, Geometry
from tierd_engine import coldpool
from tierd_engine.attention.cpu import merge_partials, prepare
from tierd_engine.attention.layercall import prepare_calls
from tierd_engine.attention.simd import BFLOAT16, FLOAT32
from tierd_engine.attention.stretch import stretch_address
from tierd_engine.attention.writing import prepare_writes
from tierd_engine.staging import DecodeStaging

_ALIGN_BYTES = 4096


def warm_up(
    geometry: Geometry,
    heads: int,
    staging: DecodeStaging,
    codecs: Collection[CodecId],
) -> None:
    """Run each kernel once on a page of zeros. Writes to the first block of `staging`."""
    raw = page_layout(geometry, CodecId.RAW)
    pages = np.zeros(2 * _ALIGN_BYTES + 2 * raw.slot_bytes, dtype=np.uint8)
    source = pages.ctypes.data + (-pages.ctypes.data) % _ALIGN_BYTES
    target = source + raw.slot_bytes
    sources, targets = np.array([source], np.int64), np.array([target], np.int64)
    q = np.zeros((1, heads, geometry.head_dim), np.float32)
    lse = np.zeros((1, heads), np.float32)
    for kind in sorted({CodecId.RAW, *codecs}):
        layout = page_layout(geometry, kind)
        encode_pages(sources, targets, layout)
        digest_pages(targets, layout.payload_bytes)
        decode_pages(targets, layout, staging.keys_array, staging.values_array, 0)
        prepare(layout, heads)
    prepare_writes()
    coldpool.warm_up()
    for element in (FLOAT32, BFLOAT16):
        prepare_calls(element)
        stretch_address(element)
    merge_partials(q[None], lse[None], np.empty_like(q), np.empty_like(lse))
