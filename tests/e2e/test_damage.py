"""Cold pages damaged on disk: counted, recomputed, and the text is the same."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.e2e.support import (
    CONTEXT,
    MODEL,
    NEW_TOKENS,
    Engine,
    embedded,
    expected,
    model,
    prompt,
    slab_for_writing,
)
from tierd.codec.layout import HEADER_BYTES
from tierd.types import Tier
from tierd_engine.attention.plan import PlanMode

GARBAGE = bytes(range(1, 256))
HEADER, PAYLOAD = 40, HEADER_BYTES + 1000  # offsets in a slot


def damage(engine: Engine, layer: int, block: int, offset: int) -> None:
    """Overwrite bytes of a cold page in its slab file."""
    with slab_for_writing(engine, layer, block) as (fd, start):
        assert os.pwrite(fd, GARBAGE, start + offset) == len(GARBAGE)


@pytest.mark.parametrize("plan", [PlanMode.NEAR, PlanMode.STREAM])
def test_pages_damaged_while_decoding_are_counted_and_recomputed(
    tmp_path: Path, plan: PlanMode
) -> None:
    tiny = model(MODEL)
    # (step, which of the cold blocks, layer, where): first, last and between, in both layers.
    hits = {5: (0, 0, PAYLOAD), 17: (-1, 1, HEADER), 29: (4, 1, PAYLOAD), 41: (2, 0, HEADER)}
    with (
        embedded(tiny, tmp_path, warm_blocks=4) as daemon,
        Engine(daemon.socket, tiny, plan=plan) as job,
    ):
        job.prefill(prompt(CONTEXT))
        for step in range(NEW_TOKENS):
            if step in hits:
                which, layer, offset = hits[step]
                blocks = [block for on, block in job.pages(Tier.COLD) if on == layer]
                damage(job, layer, blocks[which], offset)
            job.step()
        stats = job.client.stats()
        assert job.tokens == list(expected(MODEL, CONTEXT))
        assert stats["corrupt"] == sum(job.generator.losses.values()) == len(hits)
        assert job.generator.recomputed_tokens > CONTEXT
        assert job.kv.counts.step_rpcs == 0, "recovery's calls are made between steps"
        assert job.generator.decode_step.whole_steps > 0 or plan is PlanMode.STREAM
        job.kv.check_integrity()


def test_pages_damaged_between_prefill_chunks_are_counted_and_recomputed(tmp_path: Path) -> None:
    tiny = model(MODEL)
    hit: list[tuple[int, int]] = []

    with (
        embedded(tiny, tmp_path, warm_blocks=4) as daemon,
        Engine(daemon.socket, tiny) as job,
    ):

        def advanced(tokens: int) -> None:
            cold = job.pages(Tier.COLD)
            if tokens >= 200 and not hit:
                hit.extend([cold[1], cold[-2], cold[len(cold) // 2]])
                for i, (layer, block) in enumerate(hit):
                    damage(job, layer, block, (HEADER, PAYLOAD)[i % 2])

        job.prefill(prompt(CONTEXT), advanced)
        assert len(set(hit)) == 3
        assert job.generator.recomputed_tokens > 0
        assert job.client.stats()["corrupt"] == sum(job.generator.losses.values()) >= 1
        job.steps(NEW_TOKENS)
        assert job.tokens == list(expected(MODEL, CONTEXT))


def test_a_whole_slab_of_garbage_is_recomputed(tmp_path: Path) -> None:
    tiny = model(MODEL)
    with (
        embedded(tiny, tmp_path, warm_blocks=4) as daemon,
        Engine(daemon.socket, tiny) as job,
    ):
        job.prefill(prompt(CONTEXT))
        job.steps(3)
        for layer, block in job.pages(Tier.COLD):
            damage(job, layer, block, PAYLOAD)
        job.steps(NEW_TOKENS - 3)
        assert job.tokens == list(expected(MODEL, CONTEXT))
        assert job.client.stats()["corrupt"] >= 1


@pytest.mark.parametrize("kept_slots", [0, 5])
def test_a_slab_file_cut_short_is_recomputed(tmp_path: Path, kept_slots: int) -> None:
    tiny = model(MODEL)
    with (
        embedded(tiny, tmp_path, warm_blocks=4) as daemon,
        Engine(daemon.socket, tiny) as job,
    ):
        job.prefill(prompt(CONTEXT))
        job.steps(3)
        layer, block = job.pages(Tier.COLD)[0]
        slot_bytes = job.client.slab(int(job.handle.table.read(block + 1).slab[layer, block]))
        with slab_for_writing(job, layer, block) as (fd, _):
            os.ftruncate(fd, kept_slots * slot_bytes.slot_bytes + kept_slots)
        job.steps(NEW_TOKENS - 3)
        assert job.tokens == list(expected(MODEL, CONTEXT))
        assert job.client.stats()["corrupt"] >= 1 and job.generator.recomputed_tokens > 0
        job.kv.check_integrity()
