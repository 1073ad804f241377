"""Fidelity's runs on a tiny model, its judgement and its report on made-up scores."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.engine.support import random_tokens, tiny_model
from tierd.errors import InvalidArgument
from tierd_engine.bench import fidelity_report
from tierd_engine.bench.fidelity import (
    BARS,
    FidelityPlan,
    FidelityRow,
    Verdict,
    _Key,
    fidelity_to_dict,
    find_misses,
    judge,
    make_rows,
)
from tierd_engine.bench.forced import ForcedRuns, Layout, Protocol, Setting, round_q8_0
from tierd_engine.bench.scores import Summary, TokenScores, score_tokens

GOOD = Summary(256, 1e-5, 1e-4, 1e-4, -2e-4, 3e-4, 1.0, 0.1)


def constant_scores(kl: float, loss_change: float = 0.0, agreed: bool = True) -> TokenScores:
    filled = np.full(64, kl)
    return TokenScores(filled, np.full(64, loss_change), np.full(64, agreed), filled)


def test_raw_tiers_give_the_own_caches_logits_under_both_protocols_and_coarse_ones_do_not() -> None:
    tiny = tiny_model(9, "llama")
    contexts, tokens = [300, 600], 20
    runs = ForcedRuns(tiny.model, tiny.shape, random_tokens(620, 9), contexts, tokens)
    own = runs.own()
    setting = Setting.parse("near")
    for protocol in Protocol:
        exact = runs.over_tiers(Layout.parse("raw"), setting, protocol, own)
        for context in contexts:
            assert exact[context].shape == (tokens, 251)
            assert (exact[context] - own.logits[context]).abs().max() < 1e-4
        coarse = Layout("coarse", Layout.parse("raw").codec, lambda x: x.round())
        rounded = runs.over_tiers(coarse, setting, protocol, own)
        # Two blocks stay hot: of 300 tokens none is below, of 600 one block is.
        assert (rounded[300] - own.logits[300]).abs().max() < 1e-4
        scores = score_tokens(own.logits[600], rounded[600], runs.targets(600))
        assert scores.divergence.mean() > 1e-6


def test_the_prefix_protocol_spares_the_prefix_what_the_tiers_protocol_does_to_it() -> None:
    tiny = tiny_model(9, "llama")
    runs = ForcedRuns(tiny.model, tiny.shape, random_tokens(1050, 9), [1030], 20)
    own = runs.own()
    lost = Layout("lost", Layout.parse("raw").codec, lambda x: x * 0.7)
    losses = {
        protocol: runs.over_tiers(lost, Setting.parse("near:smallest"), protocol, own)[1030]
        for protocol in Protocol
    }
    assert (losses[Protocol.TIERS] - losses[Protocol.PREFIX]).abs().max() > 1e-3


def test_q8_0_rounds_each_group_of_32_channels_to_255_steps() -> None:
    x = torch.randn(2, 3, 5, 64, generator=torch.Generator().manual_seed(4))
    rounded = round_q8_0(x)
    top = x.reshape(2, 3, 5, 2, 32).abs().amax(-1, keepdim=True)
    error = (rounded - x).reshape(2, 3, 5, 2, 32).abs()
    assert bool((error <= top / 127 * 0.51 + 1e-6).all())
    assert torch.equal(round_q8_0(rounded), rounded)
    assert torch.equal(round_q8_0(torch.zeros(1, 32)), torch.zeros(1, 32))


@pytest.mark.parametrize(
    ("change", "misses", "verdict"),
    [
        ({}, (), Verdict.HOLDS),
        ({"kl_mean": 2e-4}, ("KL", "q8_0"), Verdict.FAILS),
        ({"kl_mean": 5e-5}, ("q8_0",), Verdict.FAILS),
        ({"top1": 0.99}, ("top-1",), Verdict.FAILS),
        ({"perplexity_change": -2e-3, "perplexity_change_low": -3e-3}, ("dppl",), Verdict.UNSURE),
        (
            {
                "perplexity_change": 2e-3,
                "perplexity_change_low": 1.5e-3,
                "perplexity_change_high": 3e-3,
            },
            ("dppl",),
            Verdict.FAILS,
        ),
    ],
)
def test_each_bar_of_int8_is_missed_by_name(
    change: dict[str, float], misses: tuple[str, ...], verdict: Verdict
) -> None:
    summary = replace(GOOD, **change)
    assert find_misses(summary, BARS["int8"], 4e-5) == misses
    assert judge(summary, BARS["int8"], misses) is verdict


def test_raws_bar_is_on_logits_and_a_layout_without_a_bar_has_no_verdict() -> None:
    exact = replace(GOOD, kl_mean=0.0, perplexity_change=0.0)
    assert find_misses(exact, BARS["raw"], 1.0) == ("dlogit",)
    assert judge(GOOD, None, ()) is Verdict.NO_BAR


def made_rows(ours: float, q8: float) -> list[FidelityRow]:
    def key(layout: str) -> _Key:
        return _Key(layout, "near:smallest", Protocol.TIERS, 2048)

    scores = {
        key("int8"): {"prose": constant_scores(ours), "code": constant_scores(3 * ours)},
        key("q8_0"): {"prose": constant_scores(q8), "code": constant_scores(q8)},
    }
    return make_rows(scores, seed=0)


def test_rows_are_judged_on_all_texts_and_against_q8_0_on_the_same() -> None:
    rows = made_rows(ours=1e-5, q8=2.5e-5)
    assert [(row.layout, row.text) for row in rows] == [
        ("int8", "all"), ("int8", "prose"), ("int8", "code"),
        ("q8_0", "all"), ("q8_0", "prose"), ("q8_0", "code"),
    ]  # fmt: skip
    together, prose, code = rows[:3]
    assert together.summary.kl_mean == pytest.approx(2e-5)
    assert together.verdict is Verdict.HOLDS and prose.verdict is Verdict.HOLDS
    assert code.misses == ("q8_0",)
    assert fidelity_to_dict(FidelityPlan(), rows)["holds"] is True


def test_the_report_names_what_fails_and_does_without_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, rows = FidelityPlan(contexts=(2048,)), made_rows(ours=1e-4, q8=1e-3)
    monkeypatch.setattr(fidelity_report, "find_spec", lambda name: None)
    (table,) = fidelity_report.write_report(tmp_path / "made" / "here", plan, rows)
    assert "no plot: matplotlib is not installed" in capsys.readouterr().err
    text = table.read_text(encoding="utf-8")
    assert "- int8, near:smallest, protocol tiers: 2,048: fails (KL)" in text
    assert text.count("| int8 |") == 3 and text.count("| q8_0 |") == 3
    fidelity_report.print_fidelity(plan, rows)
    assert "fails (KL)" in capsys.readouterr().out
    printed = fidelity_to_dict(plan, rows)
    assert printed["holds"] is False
    assert json.loads(json.dumps(printed))["rows"][0]["kl_mean"] == pytest.approx(2e-4)


def test_a_plan_whose_windows_overlap_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="rise by the 256 forced tokens"):
        FidelityPlan(contexts=(2048, 2100))
    with pytest.raises(InvalidArgument, match="at least 1"):
        FidelityPlan(contexts=())


def test_layouts_and_settings_are_read_and_refused_by_name() -> None:
    assert Setting.parse("stream:25%").name == "stream:25%"
    assert Setting.parse("near").name == "near:smallest"
    assert Setting.parse("near:22.5MiB:128").name == "near:22.5MiB:128"
    with pytest.raises(InvalidArgument, match="choose one of raw, int8, k8v4, int4, fp8, q8_0"):
        Layout.parse("int9")
    with pytest.raises(InvalidArgument):
        Setting.parse("near:lots")
    with pytest.raises(InvalidArgument, match="block tokens 'x'"):
        Setting.parse("near:smallest:x")
