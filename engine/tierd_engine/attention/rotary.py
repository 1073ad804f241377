"""Rotary positions of one token's queries and keys in one call (Su et al. 2021, section 3.4.2).

    y = x * cos + rotate_half(x) * sin,   rotate_half(x) = (-x2, x1) for the halves x1, x2 of x

In a decode step PyTorch makes this of twelve operators, 60 us a layer, for some hundred numbers.
Each product and the sum are rounded to the dtype, as PyTorch's operators round them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from numba import types

from tierd_engine.attention.compiling import compile_cached, step
from tierd_engine.attention.simd import (
    Const,
    ConstType,
    element_bytes,
    load_element,
    rounded,
    store_rounded,
)

_ARGUMENTS = 8


@step
def _rotate(kind: Any, x: Any, out: Any, heads: Any, cos: Any, sin: Any, head_dim: Any) -> None:
    size, half = element_bytes(kind), head_dim // 2
    for head in range(heads):
        here, there = x + head * head_dim * size, out + head * head_dim * size
        for c in range(head_dim):
            other = load_element(kind, here + (c + half if c < half else c - half) * size)
            turned = rounded(
                kind, (-other if c < half else other) * load_element(kind, sin + c * size)
            )
            kept = rounded(
                kind, load_element(kind, here + c * size) * load_element(kind, cos + c * size)
            )
            store_rounded(kind, kept + turned, there + c * size)


@step
def rotate_both(
    kind: Any, queries: Any, keys: Any, cos: Any, sin: Any, out: Any, heads: Any, kv_heads: Any,
    head_dim: Any,
) -> None:  # fmt: skip
    """Queries [heads, head_dim] and keys [kv_heads, head_dim] to `out`, keys behind queries."""
    _rotate(kind, queries, out, heads, cos, sin, head_dim)
    behind = out + heads * head_dim * element_bytes(kind)
    _rotate(kind, keys, behind, kv_heads, cos, sin, head_dim)


def _rotate_both(
    kind: Any, queries: Any, keys: Any, cos: Any, sin: Any, out: Any, heads: Any, kv_heads: Any,
    head_dim: Any,
) -> None:  # fmt: skip
    rotate_both(kind, queries, keys, cos, sin, out, heads, kv_heads, head_dim)


@functools.cache
def compiled_rotary(kind: int) -> Callable[[int, int, int, int, int, int, int, int], None]:
    """Return the kernel for elements of `kind`, compiled or loaded.

    Called with the addresses of queries, keys, cos, sin and out, heads, kv_heads and head_dim.
    """
    signature = (ConstType(kind), *(types.int64,) * _ARGUMENTS)
    return functools.partial(compile_cached(_rotate_both, signature, nogil=True).call, Const(kind))
