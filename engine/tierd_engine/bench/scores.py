"""How far two runs over the same forced tokens lie apart, token by token, and what it amounts to.

Everything is paired: a token's score compares two models of that token, so the
text's own spread cancels. KL in nats of the whole vocabulary resolves best;
perplexity moves with the few tokens that happen to be next, so it carries an
interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

Float64Array = npt.NDArray[np.float64]

RESAMPLES = 2000
CONFIDENCE = 0.95
# Neighbouring tokens err together; pieces of this many are drawn as one.
PIECE_TOKENS = 16
# 32 rows of 49,152 float64 are 12 MiB an array.
_ROWS = 32


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Arrays [tokens]: KL(exact || other) in nats; how much less likely (in nats) the text's own
    token became; whether the argmax is the same; the largest |difference| of a logit."""

    divergence: Float64Array
    loss_change: Float64Array
    agreed: npt.NDArray[np.bool_]
    logit_difference: Float64Array


@dataclass(frozen=True, slots=True)
class Summary:
    """What scores amount to. Perplexity changes are relative, with a bootstrap interval."""

    tokens: int
    kl_mean: float
    kl_p99: float
    perplexity_change: float
    perplexity_change_low: float
    perplexity_change_high: float
    top1: float
    logit_difference_max: float


def score_tokens(exact: torch.Tensor, other: torch.Tensor, targets: Sequence[int]) -> TokenScores:
    """Compare logits [tokens, vocab] of two runs; `targets`: the token that came next at each."""
    assert exact.shape == other.shape and len(exact) == len(targets)
    columns: list[list[torch.Tensor]] = []
    for start in range(0, len(targets), _ROWS):
        rows = slice(start, start + _ROWS)
        own, tiers = exact[rows], other[rows]
        log_p = torch.log_softmax(own.double(), -1)
        log_q = torch.log_softmax(tiers.double(), -1)
        token = torch.tensor(list(targets[rows]))[:, None]
        columns.append([
            (log_p.exp() * (log_p - log_q)).sum(-1).clamp(min=0),
            (log_p - log_q).gather(1, token)[:, 0],
            own.argmax(-1) == tiers.argmax(-1),
            (own - tiers).abs().amax(-1).double(),
        ])  # fmt: skip
    return TokenScores(*(torch.cat(column).numpy() for column in zip(*columns, strict=True)))


def join_scores(parts: Sequence[TokenScores]) -> TokenScores:
    """Return the scores of several texts as one. At least one."""
    return TokenScores(
        np.concatenate([part.divergence for part in parts]),
        np.concatenate([part.loss_change for part in parts]),
        np.concatenate([part.agreed for part in parts]),
        np.concatenate([part.logit_difference for part in parts]),
    )


def summarise(scores: TokenScores, seed: int = 0) -> Summary:
    """Return what the scores amount to; `seed` is the bootstrap's. At least one token."""
    low, high = bootstrap_interval(scores.loss_change, seed)
    return Summary(
        tokens=len(scores.divergence),
        kl_mean=float(scores.divergence.mean()),
        kl_p99=float(np.percentile(scores.divergence, 99)),
        perplexity_change=math.expm1(float(scores.loss_change.mean())),
        perplexity_change_low=math.expm1(low),
        perplexity_change_high=math.expm1(high),
        top1=float(scores.agreed.mean()),
        logit_difference_max=float(scores.logit_difference.max()),
    )


def bootstrap_interval(
    values: Float64Array, seed: int, *, piece: int = PIECE_TOKENS
) -> tuple[float, float]:
    """Return the 95 % percentile interval of the mean of `values` [tokens].

    Pieces of neighbouring tokens are drawn with replacement (block bootstrap,
    Künsch 1989, pieces not overlapping; a shorter one at the end keeps its weight).
    """
    edges = np.arange(0, len(values), piece)
    sums = np.add.reduceat(values, edges)
    counts = np.diff(np.append(edges, len(values)))
    drawn = np.random.default_rng(seed).integers(0, len(edges), (RESAMPLES, len(edges)))
    means = sums[drawn].sum(1) / counts[drawn].sum(1)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(means, (tail, 1 - tail))
    return float(low), float(high)
