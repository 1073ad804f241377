"""Rehearsal: a pass that the session knows nothing of, and what its gradients are worth."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.engine.support import TierRig, TinyModel, outlier_model, random_tokens, tiny_model
from tierd.types import CodecId, DType
from tierd_engine import rehearsal
from tierd_engine.cache import TierCache
from tierd_engine.fidelity import OwnCacheRun
from tierd_engine.outputerror import Scene
from tierd_engine.rehearsal import RehearsalKV, passage, rehearse
from tierd_engine.weightonly import Weights, apply_weights

PROMPT = random_tokens(150, 3)


@pytest.fixture(params=range(3))
def tiny(request: pytest.FixtureRequest) -> TinyModel:
    return tiny_model(request.param)


@pytest.fixture
def rig(tiny: TinyModel) -> Iterator[TierRig]:
    rig = TierRig(
        tiny.shape, tiny.model, len(PROMPT), 8, hot="100%", codec=CodecId.INT4, block_tokens=16,
        guarded=True,
    )  # fmt: skip
    with rig:
        rig.generator.feed(PROMPT)
        yield rig


def scene_of(rig: TierRig) -> Scene:
    scene = rig.kv.scene()
    assert scene is not None
    return scene


def test_what_is_read_again_stands_in_the_middle_of_what_is_measured(rig: TierRig) -> None:
    scene = scene_of(rig)
    assert scene.at == 144  # nine blocks are sealed
    again = passage(scene, PROMPT)
    assert len(again) == rehearsal.QUERIES_MAX and again[0] == PROMPT[5 * 16]


def test_the_model_reads_as_over_its_own_cache(tiny: TinyModel, rig: TierRig) -> None:
    scene = scene_of(rig)
    again = list(passage(scene, PROMPT))
    own = OwnCacheRun(tiny.model)
    own.prefill(PROMPT[: scene.at])
    expected = [own.decode(token) for token in again]
    with torch.no_grad():
        output = tiny.model(
            input_ids=torch.tensor([again]), cache=TierCache(RehearsalKV(scene)), use_cache=True
        )
    for got, want in zip(output.logits[0], expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


def test_the_session_is_left_as_it_was(tiny: TinyModel, rig: TierRig) -> None:
    before = rig.kv.position, rig.kv.arena.keys.clone(), rig.kv.counts.steps
    rehearsal.judge_codecs(tiny.model, rig.kv, PROMPT)
    verdict = rig.kv.guard.verdict if rig.kv.guard is not None else None
    assert verdict is not None and verdict.moments == 1 and verdict.seconds > 0.0
    assert rig.kv.agent.codecs == verdict.codecs
    assert (rig.kv.position, rig.kv.counts.steps) == (before[0], before[2])
    assert torch.equal(rig.kv.arena.keys.nan_to_num(), before[1].nan_to_num())
    rig.kv.check_integrity()


def test_what_is_heard_is_the_same_each_time_and_finite(tiny: TinyModel, rig: TierRig) -> None:
    scene = scene_of(rig)
    runs = [rehearse(tiny.model, scene, passage(scene, PROMPT)) for _ in range(2)]
    for part in ("q", "keys", "values", "gradients"):
        first, second = (getattr(run, part) for run in runs)
        assert torch.isfinite(first).all() and torch.equal(first, second)


@pytest.mark.parametrize("weights", list(Weights))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replaced_linear_layers_and_bfloat16_tell_as_much(
    weights: Weights, dtype: torch.dtype
) -> None:
    tiny = tiny_model(1)
    heard = {}
    for changed in (False, True):
        kind = DType(str(dtype if changed else torch.float32).removeprefix("torch."))
        rig = TierRig(
            tiny.shape, tiny.model, len(PROMPT), 8, hot="100%", codec=CodecId.INT4,
            block_tokens=16, dtype=kind,
        )  # fmt: skip
        if changed:
            tiny.model.to(dtype)
            assert apply_weights(tiny.model, weights) > 0
        with rig:
            rig.generator.feed(PROMPT)
            scene = scene_of(rig)
            heard[changed] = rehearse(tiny.model, scene, passage(scene, PROMPT)).gradients
    exact, near = heard[False], heard[True]
    assert float((near - exact).norm() / exact.norm()) < 0.5


class Moved(RehearsalKV):
    """Adds `change` to one layer's output at the newest query."""

    def __init__(self, scene: Scene, layer: int, change: torch.Tensor) -> None:
        super().__init__(scene)
        self._at, self._change = layer, change

    def attend(self, layer: int, *rest: object) -> torch.Tensor:
        o: torch.Tensor = super().attend(layer, *rest)  # type: ignore[arg-type]
        if layer == self._at:
            o = o.clone()
            o[-1] += self._change
        return o


def test_half_the_mean_square_of_a_gradient_along_a_change_is_its_kl(
    tiny: TinyModel, rig: TierRig
) -> None:
    scene = scene_of(rig)
    again = list(passage(scene, PROMPT))[:12]
    runs = [rehearse(tiny.model, scene, again, seed).gradients[:, -1] for seed in range(300)]
    gradients = torch.stack(runs)
    exact = logits_of(tiny, RehearsalKV(scene), again)
    for layer in range(tiny.shape.layers):
        torch.manual_seed(layer)
        change = torch.randn(tiny.shape.heads, tiny.shape.head_dim)
        change *= 1e-2
        moved = logits_of(tiny, Moved(scene, layer, change), again)
        kl = float((exact.exp() * (exact - moved)).sum())
        reach = (gradients[:, layer] * change).sum((1, 2)).double()
        # 300 draws of a chi-square: a standard deviation of 0.08.
        assert float(reach.square().mean()) / 2 == pytest.approx(kl, rel=0.35)


def logits_of(tiny: TinyModel, kv: RehearsalKV, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        output = tiny.model(
            input_ids=torch.tensor([ids]), cache=TierCache(kv), use_cache=True, logits_to_keep=1
        )
    logits: torch.Tensor = output.logits[0, -1].double().log_softmax(-1)
    return logits


def test_a_block_smaller_than_a_passage_and_a_session_of_two_blocks_are_read_too() -> None:
    tiny = outlier_model(2)
    for tokens in (32, 33, 47):
        rig = TierRig(
            tiny.shape, tiny.model, tokens, 8, hot="100%", codec=CodecId.INT4, block_tokens=16,
            guarded=True,
        )  # fmt: skip
        with rig:
            rig.generator.feed(PROMPT[:tokens])
            scene = scene_of(rig)
            assert list(passage(scene, PROMPT)) == PROMPT[16:32] and scene.at == 32
            rehearsal.judge_codecs(tiny.model, rig.kv, PROMPT)
            assert rig.kv.guard is not None and rig.kv.guard.verdict is not None
