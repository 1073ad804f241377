"""SessionKV on fakes: budgets, demotion, losses, stale copies and suspension."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests.engine.fakes import FakeDaemon
from tests.engine.support import greedy, own_greedy, random_tokens, tiny_model
from tierd.errors import HotBudgetExceeded, InvalidArgument, StaleGeneration, StorageError, TierFull
from tierd.types import CodecId, DType, Namespace, Tier
from tierd_engine.arena import hot_block_bytes
from tierd_engine.attention.plan import PlanMode
from tierd_engine.cache import TierCache
from tierd_engine.generator import LOSSES_PER_BLOCK_MAX, Generator
from tierd_engine.session import SessionKV

CONTEXT, NEW = 150, 20


_rigs: list[Rig] = []


@pytest.fixture(autouse=True)
def close_rigs() -> Iterator[None]:
    """End the reader threads of every rig that a test made."""
    yield
    while _rigs:
        _rigs.pop().kv.close()


class Rig:
    """A tiny model over a SessionKV on the fake daemon."""

    def __init__(
        self, *, blocks: int = 3, codec: CodecId = CodecId.RAW, mode: PlanMode = PlanMode.NEAR,
        warm_slots: int = 200, seed: int = 5, dtype: DType = DType.FLOAT32,
    ) -> None:  # fmt: skip
        self.tiny = tiny_model(seed, "llama")
        geometry = self.tiny.shape.geometry(dtype, 16)
        namespace = Namespace(geometry, weights_digest="x", codec=codec)
        self.daemon = FakeDaemon(namespace, CONTEXT + NEW, warm_slots=warm_slots)
        budget = blocks * hot_block_bytes(geometry)
        daemon = self.daemon
        self.kv = SessionKV(
            daemon,
            daemon,
            self.tiny.shape.heads,
            budget,
            CONTEXT + NEW,
            mode,  # type: ignore[arg-type]
        )
        _rigs.append(self)
        self.kv.arena.poison()
        self.generator = Generator(self.tiny.model, self.kv)
        self.prompt = random_tokens(CONTEXT, seed)

    def expected(self) -> list[int]:
        return own_greedy(self.tiny.model, self.prompt, NEW)[0]


@pytest.mark.parametrize("mode", list(PlanMode))
def test_every_plan_gives_the_own_caches_tokens(mode: PlanMode) -> None:
    rig = Rig(mode=mode)
    assert greedy(rig.generator, rig.prompt, NEW).tokens == rig.expected()
    assert rig.kv.counts.step_rpcs == 0 and rig.kv.counts.room_rpcs > 0
    assert rig.daemon.aborted == 0 and not rig.daemon.epochs.inside


def test_more_tokens_at_once_than_the_budget_holds_is_a_typed_error() -> None:
    rig = Rig(blocks=2)
    ids = torch.tensor([rig.prompt])
    with pytest.raises(HotBudgetExceeded, match="at most 32"), torch.inference_mode():
        rig.tiny.model(input_ids=ids, cache=TierCache(rig.kv), use_cache=True)
    assert rig.kv.arena.peak_bytes <= rig.kv.arena.budget_bytes
    rig.kv.cancel()
    rig.kv.check_integrity()


def test_a_session_refuses_more_tokens_than_it_was_opened_for() -> None:
    rig = Rig()
    with pytest.raises(InvalidArgument, match="opened for 170"):
        rig.generator.feed(random_tokens(CONTEXT + NEW + 1, 1))


def test_a_full_warm_tier_is_a_typed_error_and_keeps_what_is_hot() -> None:
    rig = Rig(warm_slots=2)
    with pytest.raises(TierFull):
        rig.generator.feed(rig.prompt)
    rig.kv.check_integrity()
    assert not rig.daemon.epochs.inside


@pytest.mark.parametrize("lost_layer", [0, 1])
def test_a_lost_page_is_recomputed_and_the_text_is_the_same(lost_layer: int) -> None:
    rig = Rig()
    notes: list[str] = []
    rig.generator.note = notes.append
    expected = rig.expected()
    tokens = []
    logits = rig.generator.feed(rig.prompt)
    for i in range(NEW):
        tokens.append(int(logits.argmax()))
        if i == 7:
            rig.daemon.table.arrays["tier"][lost_layer, 3] = Tier.NONE
            rig.daemon.table.touch()
        if i + 1 < NEW:
            logits = rig.generator.feed([tokens[-1]])
    assert tokens == expected
    assert rig.daemon.truncations == [(3, lost_layer)]
    assert rig.generator.losses == {3: 1}
    (said,) = notes
    assert said.startswith("block 3 was lost (") and "anew" in said and "\n" not in said
    rig.kv.check_integrity()


def test_every_block_of_a_loss_is_counted() -> None:
    rig = Rig()
    rig.generator.feed(rig.prompt)
    sealed = rig.kv.sealed_blocks
    for layer, block in ((1, 5), (0, 3), (1, 3), (0, 4)):
        rig.daemon.table.arrays["tier"][layer, block] = Tier.NONE
    rig.daemon.table.touch()
    rig.generator.feed([1])
    assert rig.generator.losses == {3: 1} and rig.generator.lost_blocks == sealed - 3
    rig.daemon.table.arrays["tier"][0, 2] = Tier.NONE
    rig.daemon.table.touch()
    rig.generator.feed([1])
    assert rig.generator.lost_blocks == sealed - 3 + sealed - 2
    assert rig.generator.recomputed_tokens // 16 == rig.generator.lost_blocks
    rig.kv.check_integrity()


def test_a_block_lost_again_and_again_ends_in_a_typed_error() -> None:
    rig = Rig()
    rig.generator.feed(rig.prompt)
    commit = rig.daemon.commit

    def commit_and_lose(demotion: object, digests: object, device_digests: object) -> None:
        commit(demotion, digests)
        rig.daemon.table.arrays["tier"][0, 1] = Tier.NONE

    rig.daemon.commit = commit_and_lose  # type: ignore[method-assign]
    rig.daemon.table.arrays["tier"][0, 1] = Tier.NONE
    rig.daemon.table.touch()
    with pytest.raises(StorageError, match=f"lost {LOSSES_PER_BLOCK_MAX + 1} times"):
        rig.generator.feed([1])


@pytest.mark.parametrize("mode", [PlanMode.NEAR, PlanMode.STREAM])
def test_a_step_whose_slots_were_reused_is_done_again(mode: PlanMode) -> None:
    rig = Rig(mode=mode)
    expected = rig.expected()
    calls = {"left": 3}

    def reclaimed() -> int:
        if calls["left"] and rig.kv.position > CONTEXT:
            calls["left"] -= 1
            return rig.daemon.table.epoch() + 1
        return 0

    rig.daemon.table.reclaimed = reclaimed  # type: ignore[method-assign]
    rig.generator.feed(rig.prompt)
    rig.generator.feed([expected[0]])
    logits = rig.generator.feed([expected[1]])
    assert int(logits.argmax()) == expected[2] and calls["left"] == 0


def test_slots_reused_again_and_again_end_in_a_typed_error() -> None:
    rig = Rig(mode=PlanMode.STREAM)
    rig.generator.feed(rig.prompt)
    rig.daemon.table.reclaimed = lambda: 99  # type: ignore[method-assign]
    with pytest.raises(StaleGeneration, match="took this engine for dead"):
        rig.generator.feed([1])
    assert not rig.daemon.epochs.inside


def test_a_table_that_changes_between_steps_is_read_again() -> None:
    rig = Rig()
    expected = rig.expected()
    plain = rig.daemon.table.version

    def version() -> int:
        if not rig.daemon.epochs.inside:
            rig.daemon.table.touch()
        return plain()

    rig.daemon.table.version = version  # type: ignore[method-assign]
    assert greedy(rig.generator, rig.prompt, NEW).tokens == expected


@pytest.mark.parametrize("mode", [PlanMode.NEAR, PlanMode.STREAM])
def test_int8_tiers_stay_close_to_the_own_cache(mode: PlanMode) -> None:
    rig = Rig(codec=CodecId.INT8, mode=mode)
    _, logits = own_greedy(rig.tiny.model, rig.prompt, 1)
    close = rig.generator.feed(rig.prompt)
    assert 0.0 < float((close - logits[0]).abs().max()) < 0.1


@pytest.mark.parametrize("codec", [CodecId.INT8, CodecId.K8V4, CodecId.INT4, CodecId.FP8])
def test_a_page_that_its_codec_cannot_encode_goes_down_raw(codec: CodecId) -> None:
    rig = Rig(codec=codec, seed=9)  # head_dim 32
    rig.generator.feed(rig.prompt[:40])
    slot = rig.kv.slot_of(1)
    rig.kv.arena.values[slot, 1, 0, 3, 0] = 1e6  # finite, but out of float16's range
    rig.generator.feed(rig.prompt[40:])
    codecs = rig.daemon.table.arrays["codec"]
    assert (codecs[:, 1] == CodecId.RAW).all()
    # What is computed from such values may be out of range too, so later blocks may follow.
    assert rig.kv.agent.raw_fallback_blocks >= 1 and rig.daemon.aborted > 0


def test_truncation_forgets_tokens_and_the_same_tokens_come_back() -> None:
    rig = Rig()
    expected = rig.expected()
    first = greedy(rig.generator, rig.prompt, NEW).tokens
    rig.kv.truncate(CONTEXT - 1)
    assert rig.kv.position < CONTEXT
    rig.generator.token_ids = rig.generator.token_ids[: rig.kv.position]
    logits = rig.generator.feed(rig.prompt[rig.kv.position :])
    assert first == expected and int(logits.argmax()) == expected[0]


def test_suspension_demotes_every_sealed_block_and_frees_the_arena() -> None:
    rig = Rig()
    rig.generator.feed(rig.prompt)
    rig.kv.suspend(np.array(rig.generator.token_ids, dtype=np.uint32))
    assert rig.kv.arena.used_slots == 0
    assert rig.daemon.suspended == (rig.prompt, CONTEXT // 16)
    assert (rig.daemon.table.arrays["tier"][:, : CONTEXT // 16] == Tier.WARM).all()


def test_the_first_block_is_never_demoted_while_the_session_runs() -> None:
    rig = Rig(blocks=2, codec=CodecId.INT8)
    greedy(rig.generator, rig.prompt, NEW)
    assert (rig.daemon.table.arrays["tier"][:, 0] == Tier.NONE).all()
    assert rig.kv.slot_of(0) >= 0


def test_a_batch_of_two_is_refused() -> None:
    rig = Rig()
    ids = torch.tensor([rig.prompt[:8], rig.prompt[:8]])
    with pytest.raises(InvalidArgument, match="one sequence"), torch.inference_mode():
        rig.tiny.model(input_ids=ids, cache=TierCache(rig.kv), use_cache=True)


def test_beam_search_is_refused() -> None:
    from tierd.errors import UnsupportedModel

    rig = Rig()
    with pytest.raises(UnsupportedModel, match="beam"):
        TierCache(rig.kv).reorder_cache(torch.tensor([0]))
