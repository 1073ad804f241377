"""`scripts/bench decode`: what is computed from its figures."""

from __future__ import annotations

import json

import pytest

from tierd_engine.bench import decode, peers
from tierd_engine.bench.decode import DecodeRow, fit_costs, missed_bars, with_peer_ratios


def row(name: str, context: int, rate: float, **more: object) -> DecodeRow:
    return DecodeRow(name, context, rate, **more)  # type: ignore[arg-type]


def test_a_tiered_row_has_ratios_to_llama_cpp_at_its_own_context():
    rows = [
        row(decode.MAIN.name, 4096, 30.0),
        row("llama.cpp f16", 4096, 15.0),
        row("llama.cpp f16", 16384, 1.0),
    ]
    done = with_peer_ratios(rows[0], rows)
    assert done.ratio_to_llama_cpp_f16 == 2.0
    assert done.ratio_to_llama_cpp_q8_0 is None
    assert with_peer_ratios(rows[1], rows) == rows[1]


def test_the_fit_finds_a_step_and_a_cost_per_token():
    rows = [row("x", n, 1 / (0.02 + n * 1e-6)) for n in (4096, 16384, 131072)]
    (fit,) = fit_costs(rows)
    assert fit.empty_seconds == pytest.approx(0.02)
    assert fit.seconds_per_context_token == pytest.approx(1e-6)
    assert fit.worst < 1e-6
    assert -1 < fit.exponent < -0.5
    assert fit_costs(rows[:1]) == []


def test_a_bar_is_missed_only_where_it_was_measured():
    name = decode.MAIN.name
    assert missed_bars([row(name, 16384, 1.0, ratio_to_transformers=6.0)]) == []
    low = row(name, 16384, 1.0, ratio_to_transformers=5.9, ratio_to_llama_cpp_f16=0.9)
    assert len(missed_bars([low])) == 2
    cold = row("tierd int8 cold", 4096, 1.0, limit="disk", achieved_of_limit=0.84)
    assert len(missed_bars([cold])) == 1


def test_json_rows_carry_the_three_ratios():
    from tierd_engine.weightonly import Weights

    text = json.dumps(decode.decode_to_dict([row(decode.MAIN.name, 4096, 30.0)], Weights.AUTO))
    found = json.loads(text)["rows"][0]
    assert {"ratio_to_transformers", "ratio_to_llama_cpp_f16", "ratio_to_llama_cpp_q8_0"} <= set(
        found
    )


def test_kept_figures_say_when_and_where():
    for figure in peers.kept_figures():
        assert figure.kv in peers.KINDS
        assert figure.origin.startswith("kept: 20") and "load" in figure.origin
