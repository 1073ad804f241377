"""Attention over encoded pages where they lie in RAM, on the CPU (Numba).

Pages are named by absolute addresses, so one call covers pages of many slabs.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from tierd.codec.intrinsics import as_array, float32_from_bf16_bits, float32_from_f16_bits
from tierd.codec.layout import PageLayout
from tierd.types import CodecId, DType

Float32Array = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]

_INT8, _FLOAT32, _BFLOAT16, _FLOAT16 = 0, 1, 2, 3
_RAW_KINDS = {DType.FLOAT32: _FLOAT32, DType.BFLOAT16: _BFLOAT16, DType.FLOAT16: _FLOAT16}
_NO_POSITIONS = np.empty(0, dtype=np.int64)


def attend_pages(
    q: Float32Array,
    addresses: IntArray,
    tokens: npt.NDArray[np.int32],
    layout: PageLayout,
    scale: float,
    out: Float32Array,
    lse: Float32Array,
    first_position: IntArray | None = None,
    query_positions: IntArray | None = None,
) -> None:
    """Write each page's partial attention to `out` and `lse`. Zero pages is allowed.

    q: [n, heads, head_dim]; addresses: [pages] of payloads, mapped and readable
    throughout; tokens: [pages] valid tokens of each page; out: [pages, n, heads,
    head_dim], normalised per page; lse: [pages, n, heads], natural logarithm.
    With positions, query i sees token j of page p iff first_position[p] + j <=
    query_positions[i]; without, all valid tokens. A page of which a query sees
    no token gives o = 0, lse = -inf.
    """
    kind = _INT8 if layout.codec is CodecId.INT8 else _RAW_KINDS[layout.dtype]
    offsets = (
        layout.keys, layout.values, layout.key_scale, layout.key_zero,
        layout.value_scale, layout.value_zero, layout.head_bytes,
    )  # fmt: skip
    first = _NO_POSITIONS if first_position is None else first_position
    last = _NO_POSITIONS if query_positions is None else query_positions
    _attend(
        q, addresses, tokens, kind, offsets, layout.kv_heads, layout.block_tokens,
        layout.group_tokens, np.float32(scale), out, lse, first, last,
    )  # fmt: skip


def merge_partials(
    o: Float32Array, lse: Float32Array, out_o: Float32Array, out_lse: Float32Array
) -> None:
    """Merge `parts` partials in index order into out_o and out_lse.

    o: [parts, n, heads, head_dim]; lse: [parts, n, heads]; out_o: [n, heads,
    head_dim]; out_lse: [n, heads]. An lse of -inf marks an empty partial.
    """
    _merge(o, lse, out_o, out_lse)


@njit(nogil=True)
def _element(kind: Any, base: Any, index: Any) -> Any:
    if kind == _FLOAT32:
        return as_array(base, index + 1, np.float32)[index]
    bits = as_array(base, index + 1, np.uint16)[index]
    return float32_from_bf16_bits(bits) if kind == _BFLOAT16 else float32_from_f16_bits(bits)


@njit(nogil=True)
def _half(base: Any, index: Any) -> Any:
    return float32_from_f16_bits(as_array(base, index + 1, np.uint16)[index])


@njit(nogil=True)
def _attend(
    q: Any, addresses: Any, tokens: Any, kind: Any, offsets: Any, kv_heads: Any, block: Any,
    group: Any, scale: Any, out: Any, lse: Any, first: Any, last: Any,
) -> None:  # fmt: skip
    keys, values, key_scale, key_zero, value_scale, value_zero, head_bytes = offsets
    n, heads, d = q.shape
    scores = np.empty(block, dtype=np.float32)
    for page in range(addresses.shape[0]):
        for i in range(n):
            seen = np.int64(tokens[page])
            if first.shape[0] > 0:
                seen = max(np.int64(0), min(seen, last[i] - first[page] + 1))
            for h in range(heads):
                base = addresses[page] + (h // (heads // kv_heads)) * head_bytes
                top = np.float32(-np.inf)
                for j in range(seen):
                    s = np.float32(0)
                    for c in range(d):
                        if kind == _INT8:
                            g = j // group
                            code = as_array(base + keys, block * d, np.uint8)[
                                (g * d + c) * group + j % group
                            ]
                            k = _half(base + key_zero, g * d + c) + _half(
                                base + key_scale, g * d + c
                            ) * np.float32(code)
                        else:
                            k = _element(kind, base + keys, j * d + c)
                        s += q[i, h, c] * k
                    scores[j] = s * scale
                    top = max(top, scores[j])
                total = np.float32(0)
                out[page, i, h] = np.float32(0)
                for j in range(seen):
                    w = np.float32(math.exp(scores[j] - top))
                    total += w
                    for c in range(d):
                        if kind == _INT8:
                            code = as_array(base + values, block * d, np.uint8)[j * d + c]
                            v = _half(base + value_zero, j) + _half(
                                base + value_scale, j
                            ) * np.float32(code)
                        else:
                            v = _element(kind, base + values, j * d + c)
                        out[page, i, h, c] += w * v
                if seen > 0:
                    out[page, i, h] /= total
                    lse[page, i, h] = top + np.float32(math.log(total))
                else:
                    lse[page, i, h] = np.float32(-np.inf)


@njit(nogil=True)
def _merge(o: Any, lse: Any, out_o: Any, out_lse: Any) -> None:
    parts, n, heads, d = o.shape
    for i in range(n):
        for h in range(heads):
            top = np.float32(-np.inf)
            for p in range(parts):
                top = max(top, lse[p, i, h])
            total = 0.0
            out_o[i, h] = np.float32(0)
            for p in range(parts):
                if lse[p, i, h] == -np.inf:
                    continue
                w = math.exp(np.float64(lse[p, i, h]) - top)
                total += w
                for c in range(d):
                    out_o[i, h, c] += np.float32(w) * o[p, i, h, c]
            if total > 0.0:
                out_o[i, h] *= np.float32(1.0 / total)
                out_lse[i, h] = np.float32(top + math.log(total))
            else:
                out_lse[i, h] = np.float32(-np.inf)
