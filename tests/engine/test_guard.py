"""The quality guard: what it measures, what it decides, and what becomes of an outlier model."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from tests.engine.support import (
    TierRig,
    TinyModel,
    greedy,
    outlier_model,
    own_greedy,
    random_tokens,
    tiny_model,
)
from tierd.codec.layout import page_layout
from tierd.codec.reference import decode_page, encode_page
from tierd.layercodecs import better_codecs
from tierd.types import CodecId, DType, Geometry, Namespace, Tier
from tierd_engine.arena import HotArena, hot_block_bytes
from tierd_engine.guard import (
    KL_LIMITS,
    KL_PER_ERROR,
    QualityGuard,
    Verdict,
    caution,
    choose_codecs,
    layer_budget,
)
from tierd_engine.guardreport import guard_section
from tierd_engine.outputerror import VALUE_SHARE, OutputProbe, Queries

LAYERS = 3
PROMPT = random_tokens(400, 3)


def chosen(errors: dict[CodecId, list[float]], asked: CodecId) -> list[CodecId]:
    readings = choose_codecs([asked] * LAYERS, lambda codec: np.array(errors[codec]))
    return [reading.chosen for reading in readings]


# -- the rule ---------------------------------------------------------------------


def test_a_budget_is_its_layers_share_of_the_codecs_kl_limit() -> None:
    for codec, limit in KL_LIMITS.items():
        assert KL_PER_ERROR * 30 * layer_budget(codec, 30) ** 2 == pytest.approx(limit)


def test_the_fewer_the_moments_the_smaller_the_budget() -> None:
    margins = [caution(moments) for moments in (1, 4, 400)]
    assert margins == sorted(margins, reverse=True) and 1.0 < margins[-1] < 1.05
    asked, errors = [CodecId.INT4] * LAYERS, np.full(LAYERS, layer_budget(CodecId.INT4, LAYERS))
    for margin, raised in ((1.01, True), (0.99, False)):
        readings = choose_codecs(
            asked, lambda codec: errors * (codec is CodecId.INT4), None, margin
        )
        assert (readings[0].chosen is CodecId.K8V4) is raised
        assert readings[0].budget == pytest.approx(errors[0] / math.sqrt(margin))


def test_within_the_budget_nothing_is_raised_and_only_the_asked_codec_is_measured() -> None:
    budget = layer_budget(CodecId.INT4, LAYERS)
    assert chosen({CodecId.INT4: [0.99 * budget] * LAYERS}, CodecId.INT4) == [CodecId.INT4] * LAYERS


def test_layers_lend_each_other_of_the_budget() -> None:
    budget = layer_budget(CodecId.INT8, LAYERS)
    assert chosen({CodecId.INT8: [1.5 * budget, 0.0, 0.0]}, CodecId.INT8) == [CodecId.INT8] * 3


def test_the_worst_layer_climbs_until_all_is_within_the_budget() -> None:
    low = 0.1 * layer_budget(CodecId.INT4, LAYERS)
    errors = {
        CodecId.INT4: [low, 1.0, low],
        CodecId.K8V4: [low, 0.5, low],
        CodecId.INT8: [low, low, low],
    }
    assert chosen(errors, CodecId.INT4) == [CodecId.INT4, CodecId.INT8, CodecId.INT4]
    errors[CodecId.INT8][1] = 0.4
    assert chosen(errors, CodecId.INT4) == [CodecId.INT4, CodecId.RAW, CodecId.INT4]


def test_layers_keep_what_they_got_at_an_earlier_moment() -> None:
    low = 0.1 * layer_budget(CodecId.INT4, LAYERS)
    errors = {codec: np.full(LAYERS, low) for codec in (CodecId.INT4, CodecId.K8V4, CodecId.INT8)}
    held = [CodecId.INT4, CodecId.INT8, CodecId.INT4]
    readings = choose_codecs([CodecId.INT4] * LAYERS, errors.__getitem__, held)
    assert [reading.chosen for reading in readings] == held


def test_a_layer_that_cannot_be_measured_is_left_as_asked() -> None:
    errors = {CodecId.INT8: [math.nan, 1.0, 1.0]}
    assert chosen(errors, CodecId.INT8) == [CodecId.INT8, CodecId.RAW, CodecId.RAW]


def test_a_raw_layer_is_never_measured() -> None:
    assert chosen({}, CodecId.RAW) == [CodecId.RAW] * LAYERS


# -- the measurement ---------------------------------------------------------------


@pytest.fixture
def arena() -> HotArena:
    geometry = Geometry(LAYERS, 2, 32, DType.FLOAT32, 32)
    arena = HotArena(geometry, 4 * hot_block_bytes(geometry), blocks_max=4)
    torch.manual_seed(0)
    arena.keys.normal_()
    arena.values.normal_()
    return arena


def probe_of(arena: HotArena, positions: list[int], recent: int = 16) -> OutputProbe:
    slots = {block: arena.allocate() for block in range(4)}
    q = torch.randn(LAYERS, 4, len(positions), 32)
    queries = Queries(q, torch.tensor(positions), 32**-0.5)
    return OutputProbe(arena, slots, [1, 2], queries, 120, recent)


def reference_error(arena: HotArena, probe: OutputProbe, layer: int, codec: CodecId) -> float:
    """The same in float64, a token and a query at a time."""
    queries, slots = probe._queries, probe._slots
    layout = page_layout(arena.geometry, codec)
    exact, coded = {}, {}
    for block in range(4):
        k = arena.keys[slots[block], layer].numpy()
        v = arena.values[slots[block], layer].numpy()
        exact[block] = (k, v)
        if block in (1, 2):
            start = arena.page_address(slots[block], layer) - arena.base_address
            hot = arena._storage[start : start + arena.layout.payload_bytes].numpy()
            coded[block] = decode_page(encode_page(hot, layout)[0], layout)
    plain, by_keys, by_values = [], [], []
    for head in range(4):
        for n, position in enumerate(queries.positions.tolist()):
            q = queries.q[layer, head, n].double().numpy()
            sides = []
            for key_side, value_side in ((exact, exact), (coded, exact), (coded, coded)):
                scores, values = [], []
                for block, first, last in probe._spans:
                    for i in range(first, last):
                        at = block * 32 + i
                        if at > position:
                            continue
                        far = block in coded and at <= position - 16
                        k = (key_side if far else exact)[block][0]
                        v = (value_side if far else exact)[block][1]
                        scores.append(float(q @ k[head // 2, i]) * queries.scale)
                        values.append(v[head // 2, i])
                weights = np.exp(np.array(scores) - max(scores))
                sides.append(weights @ np.array(values, np.float64) / weights.sum())
            plain.append(sides[0])
            by_keys.append(sides[1] - sides[0])
            by_values.append(sides[2] - sides[1])
    squared = np.square(by_keys).sum() + VALUE_SHARE * np.square(by_values).sum()
    return math.sqrt(squared / np.square(plain).sum())


@pytest.mark.parametrize("codec", [CodecId.INT8, CodecId.INT4])
@pytest.mark.parametrize("positions", [[119], [100, 110, 119], [70, 80]])
def test_the_error_is_that_of_attention_with_and_without(
    arena: HotArena, codec: CodecId, positions: list[int]
) -> None:
    probe = probe_of(arena, positions)
    errors = probe.errors(codec)
    for layer in range(LAYERS):
        assert errors[layer] == pytest.approx(reference_error(arena, probe, layer, codec), rel=1e-3)


def test_passes_over_fewer_layers_give_the_same(arena: HotArena) -> None:
    probe = probe_of(arena, [110, 119])
    whole = probe.errors(CodecId.K8V4)
    probe._layers_per_pass = 2
    np.testing.assert_allclose(probe.errors(CodecId.K8V4), whole, rtol=1e-6)


def test_a_layer_with_a_page_that_cannot_be_encoded_is_not_measured(arena: HotArena) -> None:
    probe = probe_of(arena, [119])
    arena.keys[probe._slots[2], 1, 0, 3, 0] = torch.inf
    assert np.isnan(probe.errors(CodecId.INT8)).tolist() == [False, True, False]


def test_queries_that_see_no_measured_token_tell_nothing(arena: HotArena) -> None:
    assert not probe_of(arena, [40]).is_telling


# -- a session -----------------------------------------------------------------------


def kl_to_own_cache(tiny: TinyModel, codec: CodecId, *, guarded: bool) -> tuple[float, TierRig]:
    """Return the mean KL of 8 tokens against the model's own cache, and the rig, closed."""
    tokens, exact = own_greedy(tiny.model, PROMPT, 8)
    rig = TierRig(
        tiny.shape, tiny.model, len(PROMPT), 8, hot="15%", warm="60%", codec=codec,
        block_tokens=16, guarded=guarded,
    )  # fmt: skip
    divergences = []
    with rig:
        logits = rig.generator.feed(PROMPT)
        for i, expected in enumerate(exact):
            p, q = expected.double().log_softmax(-1), logits.double().log_softmax(-1)
            divergences.append(float((p.exp() * (p - q)).sum()))
            if i + 1 < len(exact):
                logits = rig.generator.feed([tokens[i]])
        blocks = rig.kv.sealed_blocks
        table = rig.handle.table.read(blocks)
        below = table.tier[:, 1:] != Tier.NONE
        for layer, codecs in enumerate(table.codec[:, 1:]):
            found = codecs[below[layer]].tolist()
            # A layer may rise as the session grows; the newest page is as decided last.
            assert found[-1] == int((rig.kv.agent.codecs or [codec] * LAYERS)[layer])
            ladder = [int(rung) for rung in (codec, *better_codecs(codec))]
            assert found == sorted(found, key=ladder.index)
        rig.kv.check_integrity()
    return float(np.mean(divergences)), rig


@pytest.mark.parametrize(
    ("codec", "outlier"), [(CodecId.INT4, 300.0), (CodecId.K8V4, 300.0), (CodecId.INT8, 1500.0)]
)
def test_an_outlier_model_gets_better_codecs_at_its_outliers_and_its_kl_falls_with_them(
    codec: CodecId, outlier: float
) -> None:
    tiny = outlier_model(1, outlier=outlier)
    plain, _ = kl_to_own_cache(tiny, codec, guarded=False)
    guarded, rig = kl_to_own_cache(tiny, codec, guarded=True)
    assert rig.kv.guard is not None and rig.kv.guard.verdict is not None
    verdict = rig.kv.guard.verdict
    worst = max(verdict.readings, key=lambda reading: reading.error)
    assert worst.layer == 1 and worst in verdict.raised and worst.error > worst.budget
    assert len(verdict.raised) < LAYERS
    # k8v4's loss there is not layer 1's own: it is the rounded values of layer 0, which the
    # outliers of layer 1 amplify, and no error of one layer's output tells it. Its KL fell for
    # two of six seeds when values weighed as much as keys, by the luck of layer 0's budget.
    assert codec is CodecId.K8V4 or guarded < plain / 2
    section = guard_section(rig.kv.guard, followed=True)
    assert section["raised"][0]["layer"] <= 1 and "mean KL of" in section["raised"][0]["why"]


@pytest.mark.parametrize("codec", [CodecId.INT8, CodecId.INT4])
def test_the_same_model_without_outliers_is_left_alone(codec: CodecId) -> None:
    _, rig = kl_to_own_cache(outlier_model(1, outlier=0.0), codec, guarded=True)
    assert rig.kv.guard is not None and rig.kv.guard.verdict is not None
    assert not rig.kv.guard.verdict.raised
    assert guard_section(rig.kv.guard, followed=True)["error"] < layer_budget(codec, LAYERS)


def test_raw_with_a_guard_is_the_own_cache_token_by_token() -> None:
    tiny = tiny_model(6)
    expected, _ = own_greedy(tiny.model, PROMPT, 24)
    rig = TierRig(tiny.shape, tiny.model, len(PROMPT), 24, hot="15%", guarded=True)
    with rig:
        assert greedy(rig.generator, PROMPT, 24).tokens == expected
        assert rig.kv.guard is not None and rig.kv.guard.verdict is not None
        assert not rig.kv.guard.verdict.raised


def test_a_warm_tier_too_small_for_better_codecs_keeps_to_the_asked_ones() -> None:
    tiny = outlier_model(1, outlier=300.0)
    rig = TierRig(
        tiny.shape, tiny.model, len(PROMPT), 8, hot="15%", codec=CodecId.INT4, block_tokens=16,
        warm=str(LAYERS * 8192), guarded=True,
    )  # fmt: skip
    with rig:
        rig.generator.feed(PROMPT)
        agent = rig.kv.agent
        assert agent.codecs_refused or agent.codecs == rig.kv.guard.verdict.codecs  # type: ignore[union-attr]
        rig.kv.check_integrity()


def test_a_guard_measures_again_as_the_session_grows_and_layers_only_rise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A text that turns: its first pages are harmless, its later ones are not, its last are."""
    tiny = outlier_model(1, outlier=0.0)
    over = 3 * layer_budget(CodecId.INT4, LAYERS)
    moments: list[int] = []

    def errors(self: OutputProbe, codec: CodecId) -> np.ndarray:
        if codec is CodecId.INT4:
            moments.append(self._measured[0])
        harm = over if codec is CodecId.INT4 and len(moments) in (2, 3) else 0.0
        return np.array([0.0, harm, 0.0])

    monkeypatch.setattr(OutputProbe, "errors", errors)
    rig = TierRig(
        tiny.shape, tiny.model, len(PROMPT), 8, hot="15%", warm="90%", codec=CodecId.INT4,
        block_tokens=16, guarded=True,
    )  # fmt: skip
    with rig:
        rig.generator.feed(PROMPT)
        for token in range(8):
            rig.generator.feed([token])
        table = rig.handle.table.read(rig.kv.sealed_blocks)
        below = table.tier[1, 1:] != Tier.NONE
        codecs = table.codec[1, 1:][below].tolist()
        verdict = rig.kv.guard.verdict if rig.kv.guard is not None else None
        rig.kv.check_integrity()
    assert len(moments) > 4 and moments == sorted(set(moments))
    assert verdict is not None and verdict.moments == len(moments)
    turned = codecs.index(CodecId.K8V4)
    assert turned > 0 and codecs[:turned] == [CodecId.INT4] * turned
    assert set(codecs[turned:]) == {CodecId.K8V4}
    # A quarter longer each time: so the moments of a long session are few.
    assert all(b + 1 >= 1.1 * a for a, b in itertools.pairwise(moments))


def test_after_a_verdict_only_prefill_steps_that_end_where_it_is_due_again_are_observed() -> None:
    geometry = Geometry(1, 1, 32, DType.FLOAT32, 16)
    guard = QualityGuard(Namespace(geometry, "w", CodecId.INT4), 2)
    assert guard.wants(1, 1) and guard.is_due(1)
    guard.verdict, guard._next_position = Verdict("measured", []), 100
    assert [guard.wants(64, end) for end in (99, 100)] == [False, True]
    assert not guard.wants(1, 200)
    guard.verdict = Verdict("resumed", [])
    assert not guard.wants(64, 200) and not guard.is_due(200)


def test_a_cancelled_steps_queries_are_not_used() -> None:
    geometry = Geometry(2, 1, 32, DType.FLOAT32, 16)
    guard = QualityGuard(Namespace(geometry, "w", CodecId.INT8), 2)
    guard.observe(0, torch.ones(2, 9, 32), 0, 1.0)
    guard.forget_step()
    arena = HotArena(geometry, 3 * hot_block_bytes(geometry), blocks_max=3)
    slots = {block: arena.allocate() for block in range(3)}
    guard.decide(arena, slots, [1, 2], 48)
    assert guard.verdict is None


def test_a_resumed_session_goes_on_with_the_codecs_of_its_newest_encoded_block() -> None:
    geometry = Geometry(3, 1, 32, DType.FLOAT32, 16)
    guard = QualityGuard(Namespace(geometry, "w", CodecId.INT4), 2)
    raw, k8v4, int4 = CodecId.RAW, CodecId.K8V4, CodecId.INT4
    pages = np.array([
        [raw, int4, int4, raw], [raw, int4, k8v4, raw], [raw, k8v4, raw, raw],
    ])  # fmt: skip
    guard.adopt(pages.astype(np.uint8))
    assert guard.verdict is not None and guard.verdict.codecs == (int4, k8v4, raw)
    section = guard_section(guard, followed=True)
    assert section["codecs"] == "int4,layers:1=k8v4,layers:2=raw"
    assert [row["layer"] for row in section["raised"]] == [1, 2]


def test_a_resumed_session_of_one_block_is_measured_anew() -> None:
    geometry = Geometry(1, 1, 32, DType.FLOAT32, 16)
    guard = QualityGuard(Namespace(geometry, "w", CodecId.INT8), 2)
    guard.adopt(np.array([[CodecId.RAW]], np.uint8))
    assert guard.verdict is None
    assert guard_section(guard, followed=True)["source"].startswith("not needed")
    assert guard_section(None, followed=True) == {"source": "off"}
