"""Fidelity's runs on a tiny model, its judgement and its report on made-up scores."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.engine.support import outlier_model, random_tokens, tiny_model
from tierd.codec.layout import page_layout
from tierd.errors import DeadlineExceeded, InvalidArgument
from tierd.types import CodecId, DType
from tierd_engine.bench import fidelity_report
from tierd_engine.bench.fidelity import (
    BARS,
    FidelityPlan,
    FidelityResult,
    MissingRun,
    Verdict,
    _Key,
    _Scored,
    fidelity_to_dict,
    find_misses,
    judge,
    make_rows,
    run_text,
)
from tierd_engine.bench.forced import ForcedRuns, OwnRun, Protocol, Setting, TiersRun
from tierd_engine.bench.layouts import Layout, PagesHeld, round_q8_0
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
        exact = runs.over_tiers(Layout.parse("raw"), setting, protocol, own).logits
        for context in contexts:
            assert exact[context].shape == (tokens, 251)
            assert (exact[context] - own.logits[context]).abs().max() < 1e-4
        coarse = Layout("coarse", Layout.parse("raw").codec, lambda x: x.round())
        rounded = runs.over_tiers(coarse, setting, protocol, own).logits
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
        protocol: runs.over_tiers(lost, Setting.parse("near"), protocol, own).logits[1030]
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


HELD = PagesHeld("int4,layers:1=k8v4", 900.0, 6.5, 800.0, 1100.0, 2e-3, 1e-3)


def made_key(layout: str, bar_name: str = "") -> _Key:
    return _Key(layout, "near:smallest", Protocol.TIERS, 2048, bar_name or layout)


def made_result(ours: float, q8: float) -> FidelityResult:
    scores = {
        made_key("int8"): {
            "prose": _Scored(constant_scores(ours)), "code": _Scored(constant_scores(3 * ours)),
        },
        made_key("q8_0"): {text: _Scored(constant_scores(q8)) for text in ("prose", "code")},
    }  # fmt: skip
    return FidelityResult(make_rows(scores, seed=0, texts=("prose", "code")))


def test_rows_are_judged_on_all_texts_and_against_q8_0_on_the_same() -> None:
    result = made_result(ours=1e-5, q8=2.5e-5)
    rows = result.rows
    assert [(row.layout, row.text) for row in rows] == [
        ("int8", "all"), ("int8", "prose"), ("int8", "code"),
        ("q8_0", "all"), ("q8_0", "prose"), ("q8_0", "code"),
    ]  # fmt: skip
    together, prose, code = rows[:3]
    assert together.summary.kl_mean == pytest.approx(2e-5)
    assert together.verdict is Verdict.HOLDS and prose.verdict is Verdict.HOLDS
    assert code.misses == ("q8_0",)
    assert fidelity_to_dict(FidelityPlan(), result)["holds"] is True


def test_the_report_names_what_fails_and_does_without_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, result = FidelityPlan(contexts=(2048,)), made_result(ours=1e-4, q8=1e-3)
    monkeypatch.setattr(fidelity_report, "find_spec", lambda name: None)
    (table,) = fidelity_report.write_report(tmp_path / "made" / "here", plan, result)
    assert "no plot: matplotlib is not installed" in capsys.readouterr().err
    text = table.read_text(encoding="utf-8")
    assert "- int8, near:smallest, protocol tiers: 2,048: fails (KL)" in text
    assert text.count("| int8 |") == 3 and text.count("| q8_0 |") == 3
    fidelity_report.print_fidelity(plan, result)
    assert "fails (KL)" in capsys.readouterr().out
    printed = fidelity_to_dict(plan, result)
    assert printed["holds"] is False
    assert json.loads(json.dumps(printed))["rows"][0]["kl_mean"] == pytest.approx(2e-4)


def test_a_row_is_judged_by_the_codec_asked_for_and_says_who_got_what(tmp_path: Path) -> None:
    key = made_key("int4+guard", "int4")
    texts = {text: _Scored(constant_scores(1e-3), HELD) for text in ("prose", "code")}
    result = FidelityResult(make_rows({key: texts}, seed=0, texts=("prose", "code")))
    together = result.rows[0]
    assert together.kl_limit == BARS["int4"].kl_mean and together.verdict is Verdict.HOLDS
    assert together.element_bits == pytest.approx(6.5)
    text = fidelity_report.markdown(FidelityPlan(protocols=(Protocol.TIERS,)), result)
    assert "| 100.00% | 6.50 | holds |" in text
    assert "int4+guard, near:smallest, protocol tiers: 2,048: holds" in text
    assert (
        "prose, 2,048: int4,layers:1=k8v4; 900 bytes a token, 6.50 bits an element (as asked 800 "
        "bytes, int8 1,100); the guard took KL for 2.0e-03 and chose 1.0e-03; it is 1.0e-03"
    ) in text


def test_a_failed_run_is_named_and_its_layout_has_no_row_of_all_texts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(1))
    tiny = tiny_model(9, "llama")
    runs = ForcedRuns(tiny.model, tiny.shape, [1, 2, 3, 4, 5, 6], [2], 4)
    monkeypatch.setattr(ForcedRuns, "own", lambda self: OwnRun({2: logits}, None))

    def over_tiers(self: ForcedRuns, layout: Layout, *_: object) -> TiersRun:
        if layout.name == "int8" and len(failures) < 1:
            failures.append(layout.name)
            raise DeadlineExceeded("the embedded daemon did not stop in 10 s")
        return TiersRun({2: logits}, {2: None})

    failures: list[str] = []
    monkeypatch.setattr(ForcedRuns, "over_tiers", over_tiers)
    plan = FidelityPlan(["int8", "int4"], [2], ["a", "b"], protocols=[Protocol.TIERS], tokens=4)
    scores: dict[_Key, dict[str, _Scored]] = {}
    said: list[str] = []
    missing = [
        run for text in plan.texts for run in run_text(runs, text, plan, scores, said.append)
    ]
    result = FidelityResult(make_rows(scores, 0, plan.texts), missing)
    assert {(row.layout, row.text) for row in result.rows} == {
        ("int8", "b"), ("int4", "all"), ("int4", "a"), ("int4", "b"),
    }  # fmt: skip
    assert [(run.layout, run.text) for run in missing] == [("int8", "a")]
    assert sum("failed" in line for line in said) == 1
    printed = fidelity_to_dict(plan, result)
    assert printed["holds"] is False and len(printed["missing"]) == 1
    fidelity_report.print_fidelity(plan, result)
    named = "missing: int8, near:smallest, protocol tiers, a: the embedded daemon did not stop"
    assert named in capsys.readouterr().out
    assert isinstance(missing[0], MissingRun)


def test_a_mixed_layouts_pages_are_weighed_as_they_lie() -> None:
    tiny = tiny_model(9, "llama")
    runs = ForcedRuns(tiny.model, tiny.shape, random_tokens(620, 9), [600], 20)
    layout = Layout.parse("k8v4,layers:0=int8")
    run = runs.over_tiers(layout, Setting.parse("near:smallest:64"), Protocol.TIERS, runs.own())
    geometry = tiny.shape.geometry(DType.FLOAT32, 64)
    codecs = [CodecId.INT8, *[CodecId.K8V4] * (geometry.layers - 1)]
    pages = [page_layout(geometry, codec).payload_bytes for codec in codecs]
    held = run.held[600]
    assert held is not None and held.codecs == "k8v4,layers:0=int8"
    assert held.token_bytes == pytest.approx(sum(pages) / 64)
    elements = 2 * geometry.layers * geometry.kv_heads * geometry.head_dim
    assert held.element_bits == pytest.approx(8 * held.token_bytes / elements)
    assert held.asked_token_bytes == pytest.approx(held.token_bytes) and held.kl_asked is None
    assert held.int8_token_bytes > held.token_bytes
    rounded = Layout.parse("q8_0")
    run = runs.over_tiers(rounded, Setting.parse("near:smallest:64"), Protocol.TIERS, runs.own())
    assert run.held[600] is None


def test_a_guarded_layout_gets_what_a_job_gets_and_loses_less() -> None:
    outliers = outlier_model(1, outlier=300.0)
    runs = ForcedRuns(outliers.model, outliers.shape, random_tokens(420, 3), [400], 16)
    own, setting = runs.own(), Setting.parse("near:15%:16")
    losses, held = {}, {}
    for name in ("int4", "int4+guard"):
        run = runs.over_tiers(Layout.parse(name), setting, Protocol.TIERS, own)
        scores = score_tokens(own.logits[400], run.logits[400], runs.targets(400))
        losses[name], held[name] = scores.divergence.mean(), run.held[400]
    plain, guarded = held["int4"], held["int4+guard"]
    assert plain is not None and plain.codecs == "int4" and plain.kl_asked is None
    assert guarded is not None and guarded.codecs.startswith("int4,layers:")
    assert guarded.kl_asked is not None and guarded.kl_chosen is not None
    assert guarded.kl_asked > 1.5e-3 > guarded.kl_chosen
    assert guarded.asked_token_bytes == plain.token_bytes < guarded.token_bytes
    assert losses["int4+guard"] < losses["int4"] / 2


def test_a_guarded_layout_is_refused_under_the_prefix_protocol() -> None:
    with pytest.raises(InvalidArgument, match="give --protocol tiers"):
        FidelityPlan(layouts=["int4+guard"])
    FidelityPlan(layouts=["int4+guard"], protocols=[Protocol.TIERS])


def test_a_plan_whose_windows_overlap_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="rise by the 448 forced tokens"):
        FidelityPlan(contexts=(2048, 2100))
    with pytest.raises(InvalidArgument, match="at least 1"):
        FidelityPlan(contexts=())


def test_layouts_and_settings_are_read_and_refused_by_name() -> None:
    assert Setting.parse("stream:25%").name == "stream:25%"
    assert Setting.parse("near").name == "near:smallest"
    assert Setting.parse("near:22.5MiB:128").name == "near:22.5MiB:128"
    with pytest.raises(InvalidArgument, match="choose one of raw, int8, k8v4, int4, fp8, q8_0"):
        Layout.parse("int9")
    assert Layout.parse(" K8V4, layers:0-1=int8 +guard").name == "k8v4,layers:0-1=int8+guard"
    assert Layout.parse("k8v4,layers:0-1=int8").bar_name == "k8v4"
    assert Layout.parse("q8_0").bar_name == "q8_0"
    for text, said in (
        ("int4+guards", "after \\+ stands guard"),
        ("q8_0+guard", "has no guard"),
        ("int4,layers:x", "not understood"),
    ):
        with pytest.raises(InvalidArgument, match=said):
            Layout.parse(text)
    with pytest.raises(InvalidArgument):
        Setting.parse("near:lots")
    with pytest.raises(InvalidArgument, match="block tokens 'x'"):
        Setting.parse("near:smallest:x")
