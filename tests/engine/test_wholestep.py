"""Whole steps as one job: the bits of layer by layer, over warm pages and over cold ones."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as tf

from tests.engine.support import TierRig, random_tokens, tiny_model
from tierd.codec import xxh3
from tierd.codec.layout import HEADER_BYTES
from tierd.errors import DeadlineExceeded, StaleGeneration
from tierd.types import CodecId, DType, Tier
from tierd_engine import coldread, hf, staging, wholestep
from tierd_engine.attention.executors import Executors
from tierd_engine.attention.plan import PlanMode
from tierd_engine.cache import ATTENTION_NAME
from tierd_engine.session import SessionKV
from tierd_engine.stretches import Stretch
from tierd_engine.weightonly import Weights, apply_weights
from tierd_engine.wholestep import Attended, WholeStep, fits

VOCABULARY = 251
needs_pool = pytest.mark.skipif(
    not xxh3.is_there(), reason="this build of xxhash does not show its functions"
)


class Runs:
    """Counts the steps that ran as one job, and can keep them from it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, allowed: bool = True) -> None:
        self.count = 0
        run, lone_calls = WholeStep.run, Executors.lone_calls

        def counted(step: WholeStep, *values: torch.Tensor) -> None:
            self.count += 1
            run(step, *values)

        monkeypatch.setattr(WholeStep, "run", counted)
        monkeypatch.setattr(
            Executors, "lone_calls", lambda *args: lone_calls(*args) if allowed else None
        )


def steps_of(
    seed: int, *, plan: PlanMode = PlanMode.NEAR, warm: str = "100%", tokens: int = 60
) -> torch.Tensor:
    """Return logits [tokens, vocab] of steps past block ends and demotions."""
    one = tiny_model(seed, "llama")
    apply_weights(one.model, Weights.AUTO)
    sizes: dict[str, Any] = {"hot": "40%", "warm": warm, "block_tokens": 16, "plan": plan}
    with TierRig(one.shape, one.model, 100, tokens, **sizes) as rig:
        rig.generator.feed(random_tokens(100, seed))
        rows = [rig.generator.feed([token]) for token in random_tokens(tokens, seed + 1)]
        rig.kv.check_integrity()
        assert rig.kv.counts.steps >= tokens and rig.kv.counts.step_rpcs == 0
        return torch.stack(rows)


@pytest.mark.parametrize("seed", [1, 2, 5, 9])
def test_a_step_as_one_job_gives_the_bits_of_one_layer_by_layer(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        runs = Runs(patch)
        found = steps_of(seed)
        assert runs.count == 60 - 2  # all but those that were recorded
    with monkeypatch.context() as patch:
        runs = Runs(patch, allowed=False)
        assert torch.equal(found, steps_of(seed))
        assert runs.count == 0


def test_a_step_whose_pages_are_copied_first_goes_layer_by_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        runs = Runs(patch)
        found = steps_of(3, plan=PlanMode.STREAM)
        assert runs.count == 0
    torch.testing.assert_close(found, steps_of(3), rtol=0, atol=1e-4)


def test_steps_of_both_ways_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where another session takes warm room, and gives it back."""
    expected = steps_of(4)
    lone_calls, asked = Executors.lone_calls, [0]

    def by_turns(*args: Any) -> Any:
        asked[0] += 1
        return lone_calls(*args) if asked[0] // 3 % 2 else None

    monkeypatch.setattr(Executors, "lone_calls", by_turns)
    runs = Runs(monkeypatch)
    assert torch.equal(steps_of(4), expected)
    assert 20 < runs.count < 40


def test_a_step_that_is_stale_is_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = steps_of(6)
    finish, calls = SessionKV.finish, [0]

    def stale_at_times(kv: SessionKV) -> None:
        calls[0] += 1
        if calls[0] % 7 == 0:
            raise StaleGeneration("a page was given away")
        finish(kv)

    monkeypatch.setattr(SessionKV, "finish", stale_at_times)
    runs = Runs(monkeypatch)
    assert torch.equal(steps_of(6), expected)
    assert runs.count > 60


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_smollm2s_layers_are_one_job(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The packaged model's kind, in both dtypes, over int8 pages."""
    config = tf.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=96, intermediate_size=200, num_hidden_layers=3,
        num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=512,
        initializer_range=0.1, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(1)
    model = tf.LlamaForCausalLM(config).eval().to(dtype)
    model.config._attn_implementation = ATTENTION_NAME
    apply_weights(model, Weights.AUTO)
    kind = DType.FLOAT32 if dtype is torch.float32 else DType.BFLOAT16
    rows = []
    for allowed in (True, False):
        with monkeypatch.context() as patch:
            runs = Runs(patch, allowed=allowed)
            shape = hf.model_shape(config)
            sizes: dict[str, Any] = {"hot": "40%", "warm": "100%", "block_tokens": 16}
            with TierRig(shape, model, 100, 40, codec=CodecId.INT8, dtype=kind, **sizes) as rig:
                rig.generator.feed(random_tokens(100, 7))
                rows.append(torch.stack([rig.generator.feed([t]) for t in random_tokens(40, 8)]))
            assert (runs.count > 30) == allowed
    assert torch.equal(*rows)


def test_only_a_step_in_hots_dtype_and_every_layer_is_one_job() -> None:
    one = tiny_model(5, "llama")
    stretch, part = Stretch(torch.float32), torch.zeros(1)
    layers = [Attended(i, part, part, part, part, 1.0) for i in range(one.shape.layers)]
    with TierRig(one.shape, one.model, 60, 60, hot="60%", block_tokens=16) as rig:
        assert fits(rig.kv, [stretch], layers)
        assert not fits(rig.kv, [stretch], layers[:-1])
        assert not fits(rig.kv, [stretch], layers[::-1])
        assert not fits(rig.kv, [stretch, Stretch(torch.bfloat16)], layers)
        for name in ("query", "keys", "values", "o"):
            other = replace(layers[0], **{name: part.bfloat16()})
            assert not fits(rig.kv, [stretch], [other, *layers[1:]])
        assert not fits(rig.kv, [], [])


# -- over cold pages --------------------------------------------------------------------


def cold_rig(one: Any, **sizes: Any) -> TierRig:
    """Return a rig of 160 tokens at most, most of whose pages are cold."""
    apply_weights(one.model, Weights.AUTO)
    named = {"hot": "40%", "warm": "10%", "block_tokens": 16, "plan": PlanMode.NEAR} | sizes
    return TierRig(one.shape, one.model, 100, 60, **named)


def damage(rig: TierRig, layer: int, which: int) -> None:
    """Overwrite bytes of one of a layer's cold pages, in its file."""
    table = rig.handle.table.read(rig.kv.sealed_blocks)
    block = (table.tier[layer] == Tier.COLD).nonzero()[0][which]
    slab = rig.client.slab(int(table.slab[layer, block]))
    fd = os.open(f"/proc/self/fd/{slab.fd}", os.O_WRONLY)
    place = int(table.slot[layer, block]) * slab.slot_bytes + HEADER_BYTES + 100
    assert os.pwrite(fd, bytes(range(1, 200)), place) == 199
    os.close(fd)


@pytest.fixture(params=[1, 2])
def workers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """As few or as many workers as a step of a larger model has."""
    monkeypatch.setattr(wholestep, "workers_for", lambda size_bytes: request.param)
    monkeypatch.setattr(Stretch, "workers", 2, raising=False)
    return int(request.param)


@needs_pool
@pytest.mark.parametrize("seed", [1, 2, 3, 9])
def test_a_step_that_waits_for_cold_pages_gives_the_bits_of_one_layer_by_layer(
    seed: int, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        runs = Runs(patch)
        found = steps_of(seed, warm="10%")
        assert runs.count == 60 - 2
    with monkeypatch.context() as patch:
        Runs(patch, allowed=False)
        assert torch.equal(found, steps_of(seed, warm="10%"))


@needs_pool
def test_with_fewer_chunks_than_layers_they_are_given_back_in_the_job(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = steps_of(3, warm="10%")
    monkeypatch.setattr(coldread, "CHUNKS_MAX", 2)
    runs = Runs(monkeypatch)
    assert torch.equal(steps_of(3, warm="10%"), expected)
    assert runs.count == 60 - 2


def test_a_layer_of_several_units_goes_layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = steps_of(3, warm="10%")
    monkeypatch.setattr(staging, "RING_CHUNK_BYTES", 1)  # a slot
    defaults = staging.StagingRing.__init__.__defaults__
    assert defaults is not None
    monkeypatch.setattr(staging.StagingRing.__init__, "__defaults__", (1,))
    runs = Runs(monkeypatch)
    torch.testing.assert_close(steps_of(3, warm="10%"), expected, rtol=0, atol=1e-4)
    assert runs.count == 0


@needs_pool
@pytest.mark.parametrize("layer", [0, 1])
def test_a_page_damaged_under_whole_steps_is_found_and_recomputed(
    layer: int, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = Runs(monkeypatch)
    rows = []
    for hits in ((), (7, 18, 30)):
        with cold_rig(tiny_model(5, "qwen3")) as rig:
            rig.generator.feed(random_tokens(100, 3))
            found = []
            for i, token in enumerate(random_tokens(40, 4)):
                if i in hits:
                    damage(rig, layer, -(i % 2))
                found.append(rig.generator.feed([token]))
            rig.kv.check_integrity()
            assert sum(rig.generator.losses.values()) == len(hits)
            assert (rig.generator.recomputed_tokens > 0) == bool(hits)
        rows.append(torch.stack(found))
    assert runs.count > 60
    torch.testing.assert_close(rows[0], rows[1], rtol=0, atol=5e-4)


@contextmanager
def stuck_share(rig: TierRig, seconds: float = 1e9) -> Iterator[None]:
    """Hold back a share of the second unit that the next step takes: until the end, or so long."""
    pool, number = rig.kv.reader.pool_for_job(), rig.kv.reader.next_number
    assert pool is not None and pool.wait(number + 1, lambda: 5.0)
    chunk, comes = (number + 1) % pool._chunk_count, threading.Event()

    def come() -> None:
        comes.wait(seconds)
        pool._chunks[chunk, 0] -= 1

    pool._chunks[chunk, 0] += 1
    thread = threading.Thread(target=come)
    thread.start()
    try:
        yield
    finally:
        comes.set()
        thread.join(10.0)


@needs_pool
def test_a_unit_that_comes_late_costs_a_step_its_job_and_nothing_else(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile Ctrl-C is heard, as it is not by a job."""
    heard: list[float] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(time.monotonic()))
    monkeypatch.setattr(coldread, "JOB_WAIT_SECONDS", 0.2)
    tokens = random_tokens(12, 4)
    rows = []
    try:
        for is_late in (False, True):
            with cold_rig(tiny_model(5, "qwen3")) as rig:
                rig.generator.feed(random_tokens(100, 3))
                found = [rig.generator.feed([token]) for token in tokens[:8]]
                if is_late:
                    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1))
                    with stuck_share(rig, 4.0):
                        timer.start()
                        found.append(rig.generator.feed([tokens[8]]))
                        comes_at = time.monotonic()
                    timer.join(10.0)
                    assert len(heard) == 1 and heard[0] < comes_at - 1.0
                found += [rig.generator.feed([token]) for token in tokens[len(found) :]]
                assert rig.generator.losses.total() == 0
                rig.kv.check_integrity()
            rows.append(torch.stack(found))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert torch.equal(*rows)


@needs_pool
def test_a_disk_that_does_not_answer_ends_a_whole_step_in_time(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And when it answers again, the session goes on where it was."""
    tokens = random_tokens(12, 4)
    rows = []
    for hangs in (False, True):
        with cold_rig(tiny_model(5, "qwen3")) as rig:
            monkeypatch.setattr(coldread, "READ_DEADLINE_SECONDS", 0.5 if hangs else 10.0)
            monkeypatch.setattr(coldread, "JOB_WAIT_SECONDS", 0.1 if hangs else 1.0)
            rig.generator.feed(random_tokens(100, 3))
            found = [rig.generator.feed([token]) for token in tokens[:8]]
            if hangs:
                start = time.monotonic()
                with stuck_share(rig), pytest.raises(DeadlineExceeded):
                    rig.generator.feed([tokens[8]])
                assert 0.5 < time.monotonic() - start < 5
                rig.generator.token_ids.pop()  # fed again below
            found += [rig.generator.feed([token]) for token in tokens[8:]]
            assert rig.generator.decode_step.whole_steps >= 9
            rig.kv.check_integrity()
        rows.append(torch.stack(found))
    assert torch.equal(*rows)
