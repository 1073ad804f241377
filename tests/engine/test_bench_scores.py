"""Scores of two runs: KL, perplexity, top-1 and the bootstrap, on logits made up for it."""

import math

import numpy as np
import pytest
import torch

from tierd_engine.bench.scores import (
    TokenScores,
    bootstrap_interval,
    join_scores,
    score_tokens,
    summarise,
)


def test_equal_logits_score_nothing_whatever_is_added_to_them() -> None:
    logits = torch.randn(70, 11, generator=torch.Generator().manual_seed(1))
    scores = score_tokens(logits, logits, [3] * 70)
    assert len(scores.divergence) == 70 and scores.divergence.max() < 1e-12
    assert scores.agreed.all() and scores.logit_difference.max() == 0
    shifted = score_tokens(logits, logits + 2.5, [3] * 70)
    assert shifted.divergence.max() < 1e-6 and abs(shifted.loss_change).max() < 1e-6


def test_scores_are_those_of_the_formulas() -> None:
    p, q = np.array([0.7, 0.2, 0.1]), np.array([0.3, 0.6, 0.1])
    exact, other = (torch.tensor(np.log([x, x])) for x in (p, q))
    scores = score_tokens(exact, other, [0, 1])
    kl = float((p * np.log(p / q)).sum())
    assert scores.divergence == pytest.approx([kl, kl])
    assert scores.loss_change == pytest.approx([math.log(0.7 / 0.3), math.log(0.2 / 0.6)])
    assert not scores.agreed.any()
    assert scores.logit_difference == pytest.approx([math.log(3), math.log(3)])
    summary = summarise(scores)
    expected = math.sqrt(0.7 / 0.3 * 0.2 / 0.6) - 1
    assert summary.perplexity_change == pytest.approx(expected)
    assert (summary.tokens, summary.top1) == (2, 0.0)
    assert summary.kl_mean == pytest.approx(kl) and summary.kl_p99 == pytest.approx(kl)


def test_texts_join_token_by_token() -> None:
    def made(count: int, value: float) -> TokenScores:
        filled = np.full(count, value)
        return TokenScores(filled, filled, filled > 1, filled)

    summary = summarise(join_scores([made(30, 1.0), made(10, 5.0)]))
    assert summary.tokens == 40 and summary.kl_mean == 2.0 and summary.top1 == 0.25
    assert summary.logit_difference_max == 5.0


def test_the_interval_repeats_with_its_seed_and_moves_with_another() -> None:
    values = np.random.default_rng(2).normal(0.0, 1.0, 500)
    assert bootstrap_interval(values, 7) == bootstrap_interval(values, 7)
    assert bootstrap_interval(values, 7) != bootstrap_interval(values, 8)


def test_the_interval_covers_the_true_mean_about_as_often_as_it_says() -> None:
    draw = np.random.default_rng(3)
    covered = 0
    for seed in range(100):
        low, high = bootstrap_interval(draw.normal(0.3, 1.0, 800), seed)
        covered += low <= 0.3 <= high
    assert 86 <= covered <= 100  # 95 expected of 100; fewer than 86 has a chance below 1e-3


def test_tokens_that_err_together_widen_the_interval() -> None:
    apart = np.random.default_rng(4).normal(0.0, 1.0, 1600)
    together = np.repeat(apart[:100], 16)
    widths = [high - low for low, high in (bootstrap_interval(v, 0) for v in (apart, together))]
    assert widths[1] > 2.5 * widths[0]


def test_one_token_and_a_short_last_piece_are_allowed() -> None:
    assert bootstrap_interval(np.array([2.0]), 0) == (2.0, 2.0)
    low, high = bootstrap_interval(np.ones(17), 0)
    assert (low, high) == (1.0, 1.0)
