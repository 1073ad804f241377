"""The real model: short forms of `scripts/bench exact` and `scripts/bench fidelity`."""

from __future__ import annotations

from tierd.types import CodecId
from tierd_engine.bench.exact import bench_exact
from tierd_engine.bench.fidelity import bench_fidelity
from tierd_engine.bench.texts import python_reference


def test_raw_tiers_give_smollm2s_own_tokens_under_every_budget_and_plan() -> None:
    cells = bench_exact([300], python_reference())
    assert len(cells) == 6
    assert all(cell.holds for cell in cells), [cell for cell in cells if not cell.holds]


def test_int8_meets_its_fidelity_bar_and_beats_the_q8_0_layout_on_real_text() -> None:
    ours, q8 = bench_fidelity(1024, CodecId.INT8, 96)
    assert ours.holds, ours
    assert ours.kl_mean < q8.kl_mean, (ours, q8)
