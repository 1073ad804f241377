"""The quality guard: what it decides, and what becomes of an outlier model."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from tests.engine.support import (
    TierRig,
    TinyModel,
    greedy,
    outlier_model,
    own_greedy,
    random_tokens,
    tiny_model,
)
from tierd.layercodecs import better_codecs
from tierd.types import CodecId, DType, Geometry, Namespace, Tier
from tierd_engine import guard as guard_module
from tierd_engine.guard import KL_LIMITS, QualityGuard, choose_codecs, kl_limit
from tierd_engine.guardreport import guard_section
from tierd_engine.outputerror import Cost, OutputProbe

LAYERS = 3
PROMPT = random_tokens(400, 3)


def chosen(
    kls: dict[CodecId, list[float]], asked: CodecId, held: list[CodecId] | None = None
) -> list[CodecId]:
    def measure(codec: CodecId) -> Cost:
        return Cost(np.array(kls.pop(codec)), np.zeros(LAYERS))

    return [reading.chosen for reading in choose_codecs([asked] * LAYERS, measure, held)]


# -- the rule ---------------------------------------------------------------------


def test_the_limit_is_the_bar_of_what_was_asked_for_and_of_several_their_mean() -> None:
    for codec, limit in KL_LIMITS.items():
        assert kl_limit([codec] * 7) == pytest.approx(limit)
    assert kl_limit([CodecId.INT4, CodecId.RAW]) == pytest.approx(KL_LIMITS[CodecId.INT4] / 2)


def test_within_the_limit_nothing_is_raised_and_only_the_asked_codec_is_measured() -> None:
    share = 0.99 * KL_LIMITS[CodecId.INT4] / LAYERS
    assert chosen({CodecId.INT4: [share] * LAYERS}, CodecId.INT4) == [CodecId.INT4] * LAYERS


def test_layers_lend_each_other_of_the_limit() -> None:
    most = 0.9 * KL_LIMITS[CodecId.INT8]
    assert chosen({CodecId.INT8: [most, 0.0, 0.0]}, CodecId.INT8) == [CodecId.INT8] * 3


def test_the_worst_layer_climbs_until_all_is_within_the_limit() -> None:
    low = 0.1 * KL_LIMITS[CodecId.INT4]
    kls = {
        CodecId.INT4: [low, 1.0, low],
        CodecId.K8V4: [low, 0.5, low],
        CodecId.INT8: [low, low, low],
    }
    assert chosen(dict(kls), CodecId.INT4) == [CodecId.INT4, CodecId.INT8, CodecId.INT4]
    kls[CodecId.INT8][1] = 0.4
    assert chosen(kls, CodecId.INT4) == [CodecId.INT4, CodecId.RAW, CodecId.INT4]


def test_layers_keep_what_they_got_at_an_earlier_moment() -> None:
    low = [0.1 * KL_LIMITS[CodecId.INT4]] * LAYERS
    held = [CodecId.INT4, CodecId.INT8, CodecId.INT4]
    assert chosen({CodecId.INT4: low, CodecId.INT8: low}, CodecId.INT4, held) == held


def test_a_layer_that_cannot_be_measured_is_left_as_asked() -> None:
    kls = {CodecId.INT8: [math.nan, 1.0, 1.0]}
    assert chosen(kls, CodecId.INT8) == [CodecId.INT8, CodecId.RAW, CodecId.RAW]


def test_a_raw_layer_is_never_measured() -> None:
    assert chosen({}, CodecId.RAW) == [CodecId.RAW] * LAYERS
    namespace = Namespace(Geometry(1, 1, 32, DType.FLOAT32, 16), "w", CodecId.RAW)
    assert not QualityGuard(namespace).is_due(1)


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
    assert worst.layer == 1 and worst in verdict.raised
    assert verdict.kl_asked is not None and verdict.kl_chosen is not None
    assert verdict.kl_chosen <= verdict.kl_limit < verdict.kl_asked
    assert guarded < plain / 2
    section = guard_section(rig.kv.guard, rig.kv.handle.namespace, followed=True)
    assert section["raised"][0]["layer"] <= 1 and "mean KL of" in section["raised"][0]["why"]
    assert section["kl_asked"] == verdict.kl_asked and len(section["kls"]) == LAYERS


@pytest.mark.parametrize("codec", [CodecId.INT8, CodecId.INT4])
def test_the_same_model_without_outliers_is_left_alone(codec: CodecId) -> None:
    _, rig = kl_to_own_cache(outlier_model(1, outlier=0.0, spread=0.05), codec, guarded=True)
    assert rig.kv.guard is not None and rig.kv.guard.verdict is not None
    assert not rig.kv.guard.verdict.raised
    section = guard_section(rig.kv.guard, rig.kv.handle.namespace, followed=True)
    assert section["kl_asked"] == section["kl_chosen"] < section["kl_limit"]
    assert section["kl_limit"] == pytest.approx(KL_LIMITS[codec])


def test_raw_with_a_guard_is_the_own_cache_token_by_token() -> None:
    tiny = tiny_model(6)
    expected, _ = own_greedy(tiny.model, PROMPT, 24)
    rig = TierRig(tiny.shape, tiny.model, len(PROMPT), 24, hot="15%", guarded=True)
    with rig:
        assert greedy(rig.generator, PROMPT, 24).tokens == expected
        assert rig.kv.guard is not None and rig.kv.guard.verdict is None


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
    moments: list[int] = []

    def cost(self: OutputProbe, codec: CodecId) -> Cost:
        if codec is CodecId.INT4:
            moments.append(self._scene.measured[0])
        harm = 1.0 if codec is CodecId.INT4 and len(moments) in (2, 3) else 0.0
        return Cost(np.array([0.0, harm, 0.0]), np.zeros(LAYERS))

    monkeypatch.setattr(OutputProbe, "cost", cost)
    monkeypatch.setattr(guard_module, "GROWTH", 1.25)
    rig = TierRig(
        tiny.shape, tiny.model, len(PROMPT), 108, hot="15%", warm="90%", codec=CodecId.INT4,
        block_tokens=16, guarded=True,
    )  # fmt: skip
    with rig:
        rig.generator.feed(PROMPT)
        before = len(moments)
        for token in range(108):
            rig.generator.feed([token])
        table = rig.handle.table.read(rig.kv.sealed_blocks)
        below = table.tier[1, 1:] != Tier.NONE
        codecs = table.codec[1, 1:][below].tolist()
        verdict = rig.kv.guard.verdict if rig.kv.guard is not None else None
        rig.kv.check_integrity()
    assert before > 4 and moments == sorted(set(moments))
    assert len(moments) > before, "while tokens come one by one, too"
    assert verdict is not None and verdict.moments == len(moments)
    turned = codecs.index(CodecId.K8V4)
    assert turned > 0 and codecs[:turned] == [CodecId.INT4] * turned
    assert set(codecs[turned:]) == {CodecId.K8V4}
    assert all(b + 1 >= 1.1 * a for a, b in itertools.pairwise(moments))


def test_a_session_that_was_all_hot_is_judged_when_it_is_suspended() -> None:
    tiny = outlier_model(1, outlier=300.0)
    rig = TierRig(
        tiny.shape, tiny.model, len(PROMPT), 8, hot="100%", codec=CodecId.INT4, block_tokens=16,
        warm=str(4 << 20), guarded=True,
    )  # fmt: skip
    with rig:
        rig.generator.feed(PROMPT)
        assert rig.kv.guard is not None and rig.kv.guard.verdict is None
        rig.generator.suspend(np.array(PROMPT, np.uint32))
        verdict = rig.kv.guard.verdict
        assert verdict is not None and verdict.raised
        assert rig.kv.agent.codecs == verdict.codecs


def test_nothing_is_asked_for_once_a_session_was_resumed_or_before_it_is_due_again() -> None:
    geometry = Geometry(1, 1, 32, DType.FLOAT32, 16)
    guard = QualityGuard(Namespace(geometry, "w", CodecId.INT4))
    assert guard.is_due(1)
    guard.verdict, guard._next_position = guard_module.Verdict("measured", []), 100
    assert [guard.is_due(position) for position in (99, 100)] == [False, True]
    guard.verdict = guard_module.Verdict("resumed", [])
    assert not guard.is_due(200)


def test_a_resumed_session_goes_on_with_the_codecs_of_its_newest_encoded_block() -> None:
    geometry = Geometry(3, 1, 32, DType.FLOAT32, 16)
    namespace = Namespace(geometry, "w", CodecId.INT4)
    guard = QualityGuard(namespace)
    raw, k8v4, int4 = CodecId.RAW, CodecId.K8V4, CodecId.INT4
    pages = np.array([
        [raw, int4, int4, raw], [raw, int4, k8v4, raw], [raw, k8v4, raw, raw],
    ])  # fmt: skip
    guard.adopt(pages.astype(np.uint8))
    assert guard.verdict is not None and guard.verdict.codecs == (int4, k8v4, raw)
    section = guard_section(guard, namespace, followed=True)
    assert section["codecs"] == "int4,layers:1=k8v4,layers:2=raw"
    assert [row["layer"] for row in section["raised"]] == [1, 2]


def test_a_resumed_session_of_one_block_is_measured_anew() -> None:
    geometry = Geometry(1, 1, 32, DType.FLOAT32, 16)
    namespace = Namespace(geometry, "w", CodecId.INT8)
    guard = QualityGuard(namespace)
    guard.adopt(np.array([[CodecId.RAW]], np.uint8))
    assert guard.verdict is None
    assert guard_section(guard, namespace, followed=True)["source"].startswith("not needed")


def test_without_a_guard_the_report_says_why_and_what_becomes_of_the_codecs() -> None:
    namespace = Namespace(
        Geometry(2, 1, 32, DType.FLOAT32, 16), "w", CodecId.INT4, codec_layers="1=k8v4"
    )
    section = guard_section(None, namespace, followed=True)
    why = "--no-guard; all layers keep to int4,layers:1=k8v4"
    assert section == {"source": "off", "why": why}
    section = guard_section(None, namespace, followed=True, resumed=True)
    assert "pages keep the codecs they have, new ones get int4" in section["why"]


@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.parametrize("resumed", [True, False])
def test_raw_has_nothing_to_guard_and_the_report_says_so(guarded: bool, resumed: bool) -> None:
    namespace = Namespace(Geometry(2, 1, 32, DType.FLOAT32, 16), "w", CodecId.RAW)
    guard = QualityGuard(namespace) if guarded else None
    section = guard_section(guard, namespace, followed=True, resumed=resumed)
    assert section == {"source": "not needed: codec raw is exact, there is nothing to guard"}
