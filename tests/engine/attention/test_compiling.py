"""The disk cache of kernels: keyed by all their sources, and done without where it cannot be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numba import types

from tierd.codec.intrinsics import as_array
from tierd_engine.attention import compiling
from tierd_engine.attention.simd import Const, ConstType, number


def _set_to(constant: Any, address: Any) -> None:
    as_array(address, 1, np.int64)[0] = number(constant)


def test_every_kernel_is_keyed_by_the_sources() -> None:
    assert compiling.sources_digest() in ConstType(3).name
    assert ConstType(3) == ConstType(3) != ConstType(4)


@pytest.mark.parametrize("error", [RuntimeError("no locator available"), OSError("disk full")])
def test_compiles_without_a_cache_where_none_can_be_written(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    real = compiling.njit

    def refuse_cache(*args: Any, cache: bool = False, **options: Any) -> Any:
        if cache:
            raise error
        return real(*args, **options)

    monkeypatch.setattr(compiling, "njit", refuse_cache)
    compiled = compiling.compile_cached(_set_to, (ConstType(7), types.int64))
    target = np.zeros(1, dtype=np.int64)
    compiled.call(Const(7), target.ctypes.data)
    assert target[0] == 7
    assert compiled.address != 0
