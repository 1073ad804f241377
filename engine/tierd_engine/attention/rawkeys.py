"""Steps of the kernel over raw keys: a token is a row, and a score the sum of all its products.

To add up the lanes of one vector takes as long as the products of 64 channels. Where registers are
many (AVX-512), four tokens are taken together: the sums of their lanes are joined in fewer steps,
and a query's elements are loaded once for four of them.

Invariants:
  scores of whole fours of tokens are written, up to three beyond `seen`: a page lies there
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.core.registry import cpu_target
from numba.extending import overload

from tierd_engine.attention.compiling import STEP, step
from tierd_engine.attention.simd import (
    NARROW,
    element_bytes,
    fetch_ahead,
    load,
    load_first,
)
from tierd_engine.attention.tile import (
    add_fours,
    add_products,
    store_fours,
    store_sums,
    zero_fours,
    zero_rows,
)

_TOKENS = 4


def takes_fours() -> bool:
    """Whether kernels are compiled for a processor that has registers for it."""
    _, _, features = cpu_target.target_context.codegen().magic_tuple()
    return "+avx512f" in features


@step
def _one_by_one(kind: Any, rows: Any, job: Any, base: Any, seen: Any, scratch: Any) -> None:
    d, size = job.head_dim, element_bytes(kind)
    whole = d - d % NARROW
    for j in range(seen):
        key = base + job.keys + size * d * j
        fetch_ahead(key, job.ahead, base + job.values, base + job.values, size * d)
        tile = zero_rows(rows, NARROW)
        for c in range(0, whole, NARROW):
            k = load(kind, NARROW, key + size * c)
            tile = add_products(tile, scratch + 4 * c, job.q_stride, k)
        if whole < d:
            last = load_first(kind, NARROW, key + size * whole, d - whole)
            tile = add_products(tile, scratch + 4 * whole, job.q_stride, last)
        store_sums(tile, scratch + job.weights + 4 * j, job.weight_stride)


@step
def _by_fours(kind: Any, rows: Any, job: Any, base: Any, seen: Any, scratch: Any) -> None:
    d, size = job.head_dim, element_bytes(kind)
    whole, row = d - d % NARROW, size * d
    for j in range(0, seen, _TOKENS):
        key = base + job.keys + row * j
        fetch_ahead(key, job.ahead, base + job.values, base + job.values, _TOKENS * row)
        tile = zero_fours(rows, NARROW)
        for c in range(0, whole, NARROW):
            at = key + size * c
            tile = add_fours(
                tile, scratch + 4 * c, job.q_stride, load(kind, NARROW, at),
                load(kind, NARROW, at + row), load(kind, NARROW, at + 2 * row),
                load(kind, NARROW, at + 3 * row),
            )  # fmt: skip
        if whole < d:
            at, left = key + size * whole, d - whole
            tile = add_fours(
                tile, scratch + 4 * whole, job.q_stride, load_first(kind, NARROW, at, left),
                load_first(kind, NARROW, at + row, left),
                load_first(kind, NARROW, at + 2 * row, left),
                load_first(kind, NARROW, at + 3 * row, left),
            )  # fmt: skip
        store_fours(tile, scratch + job.weights + 4 * j, job.weight_stride)


def scores(kind: Any, rows: Any, job: Any, base: Any, seen: Any, scratch: Any) -> None:
    """Scores of the first `seen` tokens, at least."""
    raise NotImplementedError("which steps are taken is chosen when a kernel is compiled")


# Not strict: an implementation without annotations would count as another signature.
@overload(scores, jit_options=STEP, strict=False)
def _choose_scores(
    kind: Any, rows: Any, job: Any, base: Any, seen: Any, scratch: Any
) -> Callable[..., None]:
    return _by_fours.py_func if takes_fours() else _one_by_one.py_func  # type: ignore[no-any-return]
