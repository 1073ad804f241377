"""Decode and prefill over encoded pages: each plan against the float64 reference."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import cast

import numpy as np
import pytest
import torch

from tests.engine.attention.pages import Pages, make_pages
from tierd.types import CodecId, DType, Geometry
from tierd_engine.arena import HotArena, hot_block_bytes
from tierd_engine.attention.executors import Executors, StepView
from tierd_engine.attention.operator import attend_reference
from tierd_engine.attention.plan import LayerPlan, PageRun, PlanMode, StepPlan
from tierd_engine.coldread import ColdPage, ColdReader, ColdUnit
from tierd_engine.staging import StagingRing

BLOCK, PAGES, KV_HEADS, SHARE, HEAD_DIM = 64, 5, 2, 3, 96
HEADS, SCALE = KV_HEADS * SHARE, 96**-0.5
LOSSY = [codec for codec in CodecId if codec not in (CodecId.NONE, CodecId.RAW)]

each_codec = pytest.mark.parametrize("codec", LOSSY, ids=lambda codec: codec.name.lower())


@contextmanager
def executors() -> Iterator[Executors]:
    """Yield executors over an arena with nothing hot, their staging full of NaN."""
    geometry = Geometry(1, KV_HEADS, HEAD_DIM, DType.BFLOAT16, BLOCK)
    arena = HotArena(geometry, hot_block_bytes(geometry), blocks_max=1)
    reader = ColdReader(StagingRing(0))
    made = Executors(geometry, HEADS, arena, reader, reader.ring, lambda: None)
    made.staging.keys.fill_(torch.nan)
    made.staging.values.fill_(torch.nan)
    try:
        yield made
    finally:
        reader.close()


def plan_over(*runs: Pages) -> StepPlan:
    """Return a plan whose only pages are warm, a run for each codec."""
    none = np.empty(0, dtype=np.int64)
    warm = tuple(
        PageRun(pages.layout, pages.addresses, np.full(len(pages.addresses), BLOCK, np.int32))
        for pages in runs
    )
    count = sum(len(pages.addresses) for pages in runs)
    layers = (LayerPlan(warm, ()),)
    return StepPlan(0, (), (), none.reshape(1, 0), none, layers, (), count, 0, count)


def tokens_of(*runs: Pages) -> tuple[np.ndarray, np.ndarray]:
    """Return keys and values [kv_heads, tokens, head_dim] of all runs' pages."""
    keys = np.concatenate([pages.keys for pages in runs]).transpose(1, 0, 2, 3)
    values = np.concatenate([pages.values for pages in runs]).transpose(1, 0, 2, 3)
    return keys.reshape(KV_HEADS, -1, HEAD_DIM), values.reshape(KV_HEADS, -1, HEAD_DIM)


def draw(rng: np.random.Generator, codec: CodecId) -> Pages:
    return make_pages(rng, PAGES, KV_HEADS, HEAD_DIM, BLOCK, codec)


def decode(executor: Executors, plan: StepPlan, q: np.ndarray, mode: PlanMode) -> np.ndarray:
    """Return o [n, heads, head_dim] of q of that shape, through the executors' own step."""
    positions = np.full(len(q), 10**6, dtype=np.int64)
    executor.begin(plan, StepView(0, positions, np.empty(0, np.int32)), mode)
    o = executor.attend_few(0, torch.from_numpy(q).transpose(0, 1), SCALE)
    executor.finish()
    return o.numpy()


@each_codec
def test_decode_near_and_streamed_gives_the_same_bits_and_the_references_numbers(
    codec: CodecId,
) -> None:
    rng = np.random.default_rng()
    pages = draw(rng, codec)
    q = rng.standard_normal((1, HEADS, HEAD_DIM)).astype(np.float32)
    with executors() as executor:
        near = decode(executor, plan_over(pages), q, PlanMode.NEAR)
        streamed = decode(executor, plan_over(pages), q, PlanMode.STREAM)
    np.testing.assert_array_equal(near, streamed)
    expected = attend_reference(q, *tokens_of(pages), SCALE)
    np.testing.assert_allclose(near, expected.o, atol=2e-5, rtol=0)


class Brought:
    """A reader whose units are there already: each at another place each time."""

    def __init__(self, *units: Pages) -> None:
        self._units, self.taken, self.released = units, 0, 0
        self._copies = [[payload_copies(unit) for unit in units] for _ in range(2)]

    def take(self) -> np.ndarray:
        turn, number = divmod(self.taken, len(self._units))
        self.taken += 1
        addresses: np.ndarray = self._copies[turn % 2][number][0]
        return addresses

    def release(self) -> None:
        self.released += 1
        assert self.released == self.taken


def payload_copies(pages: Pages) -> tuple[np.ndarray, np.ndarray]:
    size = pages.layout.payload_bytes
    held = np.empty((len(pages.addresses), size + 64), np.uint8)
    starts = held.ctypes.data + np.arange(len(held), dtype=np.int64) * (size + 64)
    starts += -starts % 64
    for source, target in zip(pages.addresses.tolist(), starts.tolist(), strict=True):
        ctypes.memmove(target, source, size)
    return starts, held


def with_cold(plan: StepPlan, *units: Pages) -> StepPlan:
    cold = tuple(
        ColdUnit(unit.layout, (cast(ColdPage, None),) * len(unit.addresses)) for unit in units
    )
    pages = sum(len(unit.addresses) for unit in units)
    layers = (LayerPlan(plan.layers[0].warm, cold),)
    return replace(plan, layers=layers, parts_max=plan.parts_max + pages)


@pytest.mark.parametrize("mode", [PlanMode.NEAR, PlanMode.STREAM])
@pytest.mark.parametrize("n", [1, 3])
def test_one_cold_unit_or_several_stand_where_the_reader_brought_them(
    mode: PlanMode, n: int
) -> None:
    rng = np.random.default_rng()
    warm, first, second = (draw(rng, codec) for codec in (CodecId.INT8, CodecId.INT4, CodecId.INT4))
    for near in ((warm,), ()):
        for units in ((first,), (first, second)):
            plan = with_cold(plan_over(*near), *units)
            with executors() as executor:
                executor.reader = cast(ColdReader, Brought(*units))
                for _ in range(3):
                    q = rng.standard_normal((n, HEADS, HEAD_DIM)).astype(np.float32)
                    o = decode(executor, plan, q, mode)
                    expected = attend_reference(q, *tokens_of(*near, *units), SCALE)
                    np.testing.assert_allclose(o, expected.o, atol=2e-5, rtol=0)
                assert executor.reader.released == 3 * len(units)  # type: ignore[attr-defined]
                executor.reader = ColdReader(executor.ring)


@each_codec
def test_prefill_decodes_pages_to_the_references_numbers(codec: CodecId) -> None:
    rng = np.random.default_rng()
    pages = draw(rng, codec)
    n = 24
    q = torch.from_numpy(rng.standard_normal((HEADS, n, HEAD_DIM)).astype(np.float32))
    own_keys, own_values = (
        torch.from_numpy(rng.standard_normal((KV_HEADS, n, HEAD_DIM)).astype(np.float32))
        for _ in range(2)
    )
    with executors() as executor:
        past = PAGES * BLOCK
        o = executor.attend_many(
            0, plan_over(pages), q, own_keys, own_values, past, PlanMode.STREAM, SCALE
        )
    past_keys, past_values = tokens_of(pages)
    keys = np.concatenate([past_keys, own_keys.numpy()], axis=1)
    values = np.concatenate([past_values, own_values.numpy()], axis=1)
    visible = np.arange(past + n)[None] <= past + np.arange(n)[:, None]
    expected = attend_reference(q.numpy().transpose(1, 0, 2), keys, values, SCALE, visible)
    np.testing.assert_allclose(o.numpy().transpose(1, 0, 2), expected.o, atol=5e-5, rtol=0)


def test_a_layer_may_hold_pages_of_several_codecs() -> None:
    rng = np.random.default_rng()
    runs = [draw(rng, codec) for codec in (CodecId.RAW, *LOSSY)]
    q = rng.standard_normal((1, HEADS, HEAD_DIM)).astype(np.float32)
    with executors() as executor:
        o = decode(executor, plan_over(*runs), q, PlanMode.NEAR)
    expected = attend_reference(q, *tokens_of(*runs), SCALE)
    np.testing.assert_allclose(o, expected.o, atol=2e-5, rtol=0)
