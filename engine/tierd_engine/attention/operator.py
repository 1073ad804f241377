"""The operator at the spine, defined in float64: partial attention and its merge.

For a set A of tokens and one query head: s_j = scale * q·k_j, m = max s_j,
Z = sum exp(s_j - m), lse = m + ln Z, o = (1/Z) sum exp(s_j - m) v_j. Partials of
disjoint sets merge by log-sum-exp; the merge is exact in real arithmetic,
associative and commutative. The empty set is o = 0, lse = -inf.

This is what the kernels are tested against; it is written to be read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Partial:
    """o: [n, heads, head_dim]; lse: [n, heads], natural logarithm; float64."""

    o: Float64Array
    lse: Float64Array


def attend_reference(
    q: npt.NDArray[Any],
    keys: npt.NDArray[Any],
    values: npt.NDArray[Any],
    scale: float,
    visible: npt.NDArray[np.bool_] | None = None,
) -> Partial:
    """Return the partial of q over the tokens of one set.

    q: [n, heads, head_dim]; keys, values: [kv_heads, tokens, head_dim]; visible:
    [n, tokens], None where every query sees every token. Query head h reads KV
    head h // (heads / kv_heads). Zero tokens, or none visible, is the empty set.
    """
    n, heads, head_dim = q.shape
    kv_heads = keys.shape[0]
    folded = q.astype(np.float64).reshape(n, kv_heads, heads // kv_heads, head_dim)
    scores = scale * np.einsum("nkrd,ktd->nkrt", folded, keys.astype(np.float64))
    if visible is not None:
        scores = np.where(visible[:, None, None, :], scores, -np.inf)
    top = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    weights = np.exp(scores - np.where(np.isneginf(top), 0.0, top))
    total = weights.sum(axis=-1, keepdims=True)
    is_empty = total == 0.0
    safe = np.where(is_empty, 1.0, total)
    o = np.einsum("nkrt,ktd->nkrd", weights / safe, values.astype(np.float64))
    lse = np.where(is_empty, -np.inf, top + np.log(safe))
    return Partial(o.reshape(n, heads, head_dim), lse.reshape(n, heads))


def merge(a: Partial, b: Partial) -> Partial:
    """Return the partial of the union of two disjoint sets. Either may be empty, or both."""
    top = np.maximum(a.lse, b.lse)
    safe_top = np.where(np.isneginf(top), 0.0, top)
    a_weight, b_weight = np.exp(a.lse - safe_top), np.exp(b.lse - safe_top)
    total = a_weight + b_weight
    is_empty = total == 0.0
    safe = np.where(is_empty, 1.0, total)
    o = (a_weight / safe)[..., None] * a.o + (b_weight / safe)[..., None] * b.o
    return Partial(o, np.where(is_empty, -np.inf, safe_top + np.log(safe)))
