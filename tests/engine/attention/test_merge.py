"""merge_partials against the float64 pairwise merge, and the reference's own laws."""

from __future__ import annotations

from functools import reduce
from typing import Any

import numpy as np
import pytest

from tierd_engine.attention.cpu import merge_partials
from tierd_engine.attention.operator import Partial, attend_reference, merge


def merged(o: Any, lse: Any) -> tuple[Any, Any]:
    out = np.full(o.shape[1:], np.nan, dtype=np.float32)
    out_lse = np.full(lse.shape[1:], np.nan, dtype=np.float32)
    merge_partials(o, lse, out, out_lse)
    return out, out_lse


@pytest.mark.parametrize("n", [1, 2, 16])
def test_matches_the_pairwise_merge(n: int) -> None:
    rng = np.random.default_rng()
    for heads, d, parts in ((9, 64, 50), (1, 16, 1), (3, 20, 7), (32, 128, 9), (6, 33, 400)):
        o = rng.standard_normal((parts, n, heads, d)).astype(np.float32)
        lse = rng.uniform(-30.0, 30.0, (parts, n, heads)).astype(np.float32)
        lse[rng.random(lse.shape) < 0.2] = -np.inf
        o[np.isneginf(lse)] = 0.0
        out, out_lse = merged(o, lse)
        pairs = [Partial(o[i].astype(float), lse[i].astype(float)) for i in range(parts)]
        expected = reduce(merge, pairs)
        np.testing.assert_allclose(out, expected.o, atol=1e-5)
        np.testing.assert_allclose(out_lse, expected.lse, atol=1e-5)


def test_an_empty_partial_changes_nothing_whatever_its_o_holds() -> None:
    rng = np.random.default_rng()
    o = rng.standard_normal((3, 1, 4, 20)).astype(np.float32)
    lse = rng.standard_normal((3, 1, 4)).astype(np.float32)
    without = merged(o[::2].copy(), lse[::2].copy())
    lse[1], o[1] = -np.inf, np.nan
    with_empty = merged(o, lse)
    assert with_empty[0].tobytes() == without[0].tobytes()
    assert with_empty[1].tobytes() == without[1].tobytes()


@pytest.mark.parametrize("parts", [0, 1, 5])
def test_nothing_but_empty_partials_is_empty(parts: int) -> None:
    o = np.full((parts, 2, 3, 16), np.nan, dtype=np.float32)
    lse = np.full((parts, 2, 3), -np.inf, dtype=np.float32)
    out, out_lse = merged(o, lse)
    assert (out == 0.0).all()
    assert np.isneginf(out_lse).all()


def test_one_partial_is_returned_as_it_is() -> None:
    rng = np.random.default_rng()
    o = rng.standard_normal((1, 1, 9, 64)).astype(np.float32)
    lse = rng.uniform(-1e4, 1e4, (1, 1, 9)).astype(np.float32)
    out, out_lse = merged(o, lse)
    assert out.tobytes() == o[0].tobytes()
    assert out_lse.tobytes() == lse[0].tobytes()


def test_lse_far_apart_neither_overflows_nor_loses_the_top() -> None:
    o = np.stack([np.full((1, 1, 16), v, np.float32) for v in (1.0, 2.0, 3.0)])
    lse = np.array([-1e5, 3e4, -3e30], np.float32).reshape(3, 1, 1)
    out, out_lse = merged(o, lse)
    assert (out == 2.0).all()
    assert out_lse[0, 0] == 3e4


def test_reference_parts_merge_to_the_whole_in_any_order() -> None:
    rng = np.random.default_rng()
    q = rng.standard_normal((3, 6, 20))
    keys, values = rng.standard_normal((2, 2, 50, 20))
    whole = attend_reference(q, keys, values, 0.2)
    cuts = ((0, 10), (10, 10), (10, 37), (37, 50))
    parts = [attend_reference(q, keys[:, a:b], values[:, a:b], 0.2) for a, b in cuts]
    for order in (parts, parts[::-1], [parts[2], parts[0], parts[3], parts[1]]):
        left = reduce(merge, order)
        right = merge(merge(order[0], order[1]), merge(order[2], order[3]))
        for result in (left, right):
            np.testing.assert_allclose(result.o, whole.o, atol=1e-12)
            np.testing.assert_allclose(result.lse, whole.lse, atol=1e-12)
