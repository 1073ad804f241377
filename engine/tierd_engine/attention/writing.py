"""Writes a few tokens' keys and values into a hot page: one compiled call for both.

PyTorch takes some 20 us for that in each layer, as much as it takes to attend over a page.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import types

from tierd.codec.intrinsics import as_array
from tierd_engine.attention.compiling import compile_cached, step
from tierd_engine.attention.simd import Const, ConstType

_SOURCES = Const(0)
_ARGUMENTS = 12


@step
def copy_row(source: Any, target: Any, size: Any) -> None:
    here, there = as_array(source, size, np.uint8), as_array(target, size, np.uint8)
    for i in range(size):
        there[i] = here[i]


def _write(
    sources: Any, keys: Any, keys_head: Any, keys_token: Any, values: Any, values_head: Any,
    values_token: Any, key_row: Any, value_row: Any, head_bytes: Any, row_bytes: Any, heads: Any,
    n: Any,
) -> None:  # fmt: skip
    """Addresses and distances in bytes: of keys and values, then of a page's rows."""
    for head in range(heads):
        for token in range(n):
            at = head * head_bytes + token * row_bytes
            copy_row(keys + head * keys_head + token * keys_token, key_row + at, row_bytes)
            copy_row(values + head * values_head + token * values_token, value_row + at, row_bytes)


@functools.cache
def _compiled() -> Callable[..., None]:
    signature = (ConstType(0), *(types.int64,) * _ARGUMENTS)
    return compile_cached(_write, signature, nogil=True).call


def prepare_writes() -> None:
    """Compile, or load from disk, what a write needs."""
    _compiled()


def write_rows(
    keys: torch.Tensor, values: torch.Tensor, key_row: int, value_row: int, head_bytes: int
) -> None:
    """Copy K and V, [..., kv_heads, n, head_dim] in RAM, to rows of a page.

    `key_row`, `value_row`: addresses of the first token's row in the first head;
    `head_bytes`: from a head to the next. A token's channels must lie side by side.
    """
    heads, n, head_dim = keys.shape[-3:]
    size = keys.element_size()
    *_, keys_head, keys_token, keys_channel = keys.stride()
    *_, values_head, values_token, values_channel = values.stride()
    assert keys_channel == values_channel == 1
    _compiled()(
        _SOURCES, keys.data_ptr(), size * keys_head, size * keys_token, values.data_ptr(),
        size * values_head, size * values_token, key_row, value_row, head_bytes,
        size * head_dim, heads, n,
    )  # fmt: skip
