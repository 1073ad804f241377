"""Exactness: with codec raw every plan and budget gives the own cache's tokens."""

from __future__ import annotations

from collections.abc import Iterator

import numba
import pytest
import torch

from tests.engine.support import TierRig, greedy, own_greedy, random_tokens, tiny_model
from tierd_engine.attention.plan import PlanMode
from tierd_engine.sizing import HOT_BLOCKS_MIN


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny models gain nothing from a second thread, and on a busy machine wait for it."""
    before = torch.get_num_threads(), numba.get_num_threads()
    numba.set_num_threads(1)
    torch.set_num_threads(1)
    yield
    numba.set_num_threads(before[1])
    torch.set_num_threads(before[0])


LOGIT_DIFFERENCE_MAX = 3e-4  # attention.md; sdpa and eager differ by 6e-5 on SmolLM2
NEW_TOKENS = 128
PLANS = PlanMode.NEAR, PlanMode.STREAM
CONTEXTS = [255, 256, 257, 300, 511, 513]


def _smallest_hot(shape: object, context: int) -> str:
    from tierd.types import BLOCK_TOKENS_MIN, DType
    from tierd_engine.arena import hot_block_bytes

    geometry = shape.geometry(DType.FLOAT32, BLOCK_TOKENS_MIN)  # type: ignore[attr-defined]
    return str(HOT_BLOCKS_MIN * hot_block_bytes(geometry))


@pytest.mark.parametrize("seed", range(20))
def test_a_tiny_random_model_over_raw_tiers_gives_its_own_tokens(seed: int) -> None:
    tiny = tiny_model(seed)
    context = CONTEXTS[seed % len(CONTEXTS)]
    prompt = random_tokens(context, seed)
    tokens, logits = own_greedy(tiny.model, prompt, NEW_TOKENS)
    budgets = "25%", "10%", _smallest_hot(tiny.shape, context)
    for i, hot in enumerate(budgets):
        plan = PLANS[(seed + i) % 2]  # the other one with the next seed, which is another model
        with TierRig(tiny.shape, tiny.model, context, NEW_TOKENS, hot=hot, plan=plan) as rig:
            run = greedy(rig.generator, prompt, NEW_TOKENS)
            assert rig.kv.arena.peak_bytes <= rig.sizes.hot_budget_bytes
            assert rig.kv.counts.step_rpcs == 0
        assert run.tokens == tokens, f"{tiny.name} {hot=} {plan=}"
        difference = max(
            float((a - b).abs().max()) for a, b in zip(logits, run.logits, strict=True)
        )
        assert difference < LOGIT_DIFFERENCE_MAX, f"{tiny.name} {hot=} {plan=} {difference=}"


def test_logits_are_finite_though_every_free_hot_slot_is_poisoned() -> None:
    tiny = tiny_model(3, "llama")
    with TierRig(tiny.shape, tiny.model, 300, 8, hot="20%") as rig:
        run = greedy(rig.generator, random_tokens(300, 3), 8)
    assert all(torch.isfinite(logits).all() for logits in run.logits)
