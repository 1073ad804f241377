"""RMS normalisation of a few rows in one call (Zhang and Sennrich 2019, section 4), without bias.

    y = round(x / sqrt(mean(x^2) + epsilon)) * weight, rounded again

In a decode step PyTorch makes this of six operators, 50 us a layer twice, for some hundred numbers.
The sum of squares is a float64; `round` is to the rows' dtype, as transformers' modules do it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit, types

from tierd_engine.attention.compiling import STEP, compile_cached
from tierd_engine.attention.simd import Const, ConstType, element_bytes, load_element, store_rounded

_ARGUMENTS = 5


# The sum may be made in any order: in vectors. It is the same in each call.
@njit(**STEP, fastmath={"reassoc"})
def normalise(
    kind: Any, x: Any, weight: Any, out: Any, rows: Any, width: Any, epsilon: Any
) -> None:
    """Rows of `width` elements of `kind`, one after the other at `x` and at `out`."""
    size = element_bytes(kind)
    for row in range(rows):
        here, there = x + row * width * size, out + row * width * size
        squares = np.float64(0)
        for c in range(width):
            element = np.float64(load_element(kind, here + c * size))
            squares += element * element
        scale = np.float32(1 / np.sqrt(squares / width + epsilon))
        for c in range(width):
            store_rounded(kind, load_element(kind, here + c * size) * scale, there + c * size)
        for c in range(width):
            product = load_element(kind, there + c * size) * load_element(kind, weight + c * size)
            store_rounded(kind, product, there + c * size)


def _normalise(
    kind: Any, x: Any, weight: Any, out: Any, rows: Any, width: Any, epsilon: Any
) -> None:
    normalise(kind, x, weight, out, rows, width, epsilon)


@functools.cache
def compiled_norm(kind: int) -> Callable[[int, int, int, int, int, float], None]:
    """Return the kernel for rows of `kind`, compiled or loaded.

    Called with the addresses of x, weight and out, rows, width and epsilon. `out` is not x.
    """
    signature = (ConstType(kind), *(types.int64,) * _ARGUMENTS, types.float64)
    return functools.partial(compile_cached(_normalise, signature, nogil=True).call, Const(kind))
