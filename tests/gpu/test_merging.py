"""The GPU's merge, interpreted, against the float64 pairwise merge."""

from __future__ import annotations

from functools import reduce

import numpy as np
import pytest
import torch

from tierd_engine.attention.operator import Partial, merge
from tierd_engine.gpu.merging import merge_partials


def merged(o: np.ndarray, lse: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    out, out_lse = torch.full(o.shape[1:], torch.nan), torch.full(lse.shape[1:], torch.nan)
    merge_partials(torch.tensor(o), torch.tensor(lse), out, out_lse)
    return out.numpy(), out_lse.numpy()


@pytest.mark.parametrize(
    ("n", "heads", "d", "parts"), [(1, 9, 64, 50), (2, 3, 20, 7), (1, 32, 128, 9), (1, 1, 16, 1)]
)
def test_matches_the_pairwise_merge(n: int, heads: int, d: int, parts: int) -> None:
    rng = np.random.default_rng()
    o = rng.standard_normal((parts, n, heads, d)).astype(np.float32)
    lse = rng.uniform(-30.0, 30.0, (parts, n, heads)).astype(np.float32)
    lse[1:][rng.random((parts - 1, n, heads)) < 0.2] = -np.inf
    is_empty = np.isneginf(lse)[..., None]
    pairs = [Partial(*pair) for pair in zip(np.where(is_empty, 0.0, o), lse, strict=True)]
    o[np.isneginf(lse)] = np.nan  # what is empty is not read
    out, out_lse = merged(o, lse)
    expected = reduce(merge, pairs)
    np.testing.assert_allclose(out, expected.o, atol=1e-5)
    np.testing.assert_allclose(out_lse, expected.lse, atol=1e-5)


@pytest.mark.parametrize("parts", [0, 1, 5])
def test_nothing_but_empty_partials_is_empty(parts: int) -> None:
    o = np.full((parts, 2, 3, 16), np.nan, dtype=np.float32)
    out, out_lse = merged(o, np.full((parts, 2, 3), -np.inf, dtype=np.float32))
    assert (out == 0.0).all() and np.isneginf(out_lse).all()


def test_one_partial_is_returned_as_it_is() -> None:
    rng = np.random.default_rng()
    o = rng.standard_normal((1, 1, 9, 64)).astype(np.float32)
    lse = rng.uniform(-1e4, 1e4, (1, 1, 9)).astype(np.float32)
    out, out_lse = merged(o, lse)
    assert out.tobytes() == o[0].tobytes() and out_lse.tobytes() == lse[0].tobytes()


def test_lse_far_apart_neither_overflows_nor_loses_the_top() -> None:
    o = np.stack([np.full((1, 1, 16), v, np.float32) for v in (1.0, 2.0, 3.0)])
    out, out_lse = merged(o, np.array([-1e5, 3e4, -3e30], np.float32).reshape(3, 1, 1))
    assert (out == 2.0).all() and out_lse[0, 0] == 3e4
