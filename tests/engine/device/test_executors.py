"""The executors on a device against float64, in many orders, with each fence left out in turn."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from tests.engine.device.test_direct import FENCES as DIRECT_FENCES
from tests.engine.device.test_directwrite import FENCES as WRITE_FENCES
from tests.engine.device.test_encoder import FENCES as ENCODER_FENCES
from tests.engine.device.test_encoder import INTERRUPT_FENCES
from tests.engine.device.world import (
    GEOMETRY,
    HEADS,
    SCALE,
    TOKENS,
    D,
    Validity,
    World,
    random_q,
)
from tierd.errors import DeviceFailed, StaleGeneration
from tierd.types import CodecId, DType, Geometry
from tierd_engine.arena import TORCH_DTYPES, hot_block_bytes
from tierd_engine.attention.executors import StepView
from tierd_engine.attention.operator import attend_reference
from tierd_engine.attention.plan import PlanMode, StepPlan
from tierd_engine.device.arena import DeviceArena
from tierd_engine.device.executors import DeviceExecutors
from tierd_engine.device.exploring import RandomChooser, explore_all, explore_random
from tierd_engine.device.fake import Chooser, FakeDevice, FirstChooser
from tierd_engine.device.fences import Fence
from tierd_engine.device.kernels import HostKernels, PageKernels
from tierd_engine.device.near import NearLink
from tierd_engine.device.parts import Part, Parts
from tierd_engine.device.pinning import HostLimits, Pins
from tierd_engine.device.port import Event
from tierd_engine.device.split import Rates
from tierd_engine.gpu import prefill

SEEDS = range(100)
NEAR_FENCES = [
    Fence.RECORD_QUERY, Fence.WAIT_QUERY, Fence.RECORD_QUERY_DOWN, Fence.WAIT_QUERY_DOWN,
    Fence.RECORD_PARTIAL_UP, Fence.WAIT_PARTIAL_UP,
]  # fmt: skip
STREAM_FENCES = [
    Fence.RECORD_FILLED, Fence.WAIT_FILLED, Fence.RECORD_READ, Fence.WAIT_READ,
    Fence.RECORD_COLD_COPIED, Fence.WAIT_COLD_COPIED, Fence.RECORD_SETTLED, Fence.WAIT_SETTLED,
]  # fmt: skip
END_FENCES = [Fence.RECORD_NEAR_ENDED, Fence.WAIT_NEAR_ENDED]
RATES = Rates(1.0, 1.0)


class Rig:
    """Executors over a world and two hot blocks, the second of them half full."""

    def __init__(
        self, world: World, device: FakeDevice, n: int, *, validity: Validity | None = None,
        kernels: PageKernels | None = None,
    ) -> None:  # fmt: skip
        self.world, self.device, self.n = world, device, n
        geometry = world.geometry
        budget = 2 * hot_block_bytes(geometry)
        self.arena = DeviceArena(device, geometry, budget, blocks_max=2)
        self.arena.poison()
        pins = Pins(device, HostLimits(None, None))
        slot_bytes = world.layout.slot_bytes
        pins.add(world.slots.base, max(world.slots.count, 1) * slot_bytes, slot_bytes)
        self.executors = DeviceExecutors(
            device, kernels or HostKernels(), geometry, HEADS, self.arena, world.reader,  # type: ignore[arg-type]
            pins, validity or Validity(), RATES, chunk_bytes=2 * slot_bytes,
        )  # fmt: skip
        self.below = world.warm_blocks + world.cold_blocks
        self.end = (self.below + 1) * TOKENS + TOKENS // 2
        rng = np.random.default_rng(world.seed + 1)
        tokens = self.end - self.below * TOKENS
        shape = (2, geometry.layers, geometry.kv_heads, tokens, geometry.head_dim)
        hot = torch.from_numpy(rng.standard_normal(shape).astype("f4"))
        self.hot_keys, self.hot_values = hot.to(TORCH_DTYPES[geometry.dtype])
        self.slots = [self.arena.allocate(), self.arena.allocate()]

    def plan(self) -> StepPlan:
        plan, layers = self.world.plan(), self.world.geometry.layers
        pages = [[self.arena.page_address(s, layer) for s in self.slots] for layer in range(layers)]
        blocks = (self.below, self.below + 1)
        return StepPlan(
            1, blocks, tuple(self.slots), np.array(pages, np.int64),
            np.array(blocks, np.int64) * TOKENS, plan.layers, (), plan.warm_pages, plan.cold_pages,
            plan.parts_max + 2,
        )  # fmt: skip

    def step(self, mode: PlanMode, plan: StepPlan | None = None) -> list[torch.Tensor]:
        """Run one step over all layers; return each one's o, there once compute has come by."""
        outs = []
        first = self.end - self.n
        positions = np.arange(first, self.end, dtype=np.int64)
        valid = np.array([TOKENS, TOKENS // 2], np.int32)
        self.executors.begin(plan or self.plan(), StepView(first, positions, valid), mode)
        for layer in range(self.world.geometry.layers):
            self.write(layer)
            q = random_q(layer, self.n, self.hot_keys.dtype)
            q = q.transpose(0, 1)
            outs.append(self.executors.attend(layer, q, *self.own(layer), SCALE))
        self.executors.finish()
        self.executors.check_integrity()
        return outs

    def compare(self, outs: list[torch.Tensor]) -> None:
        """Compare a step's o with float64, once it is there."""
        self.device.drain()
        for layer, out in enumerate(outs):
            expected = self.expected(layer, random_q(layer, self.n, self.hot_keys.dtype))
            np.testing.assert_allclose(out.double().numpy(), expected, atol=2e-5)

    def write(self, layer: int) -> None:
        """Append what stands in the two hot blocks, as a step does before it attends."""
        for number, slot in enumerate(self.slots):
            part = slice(number * TOKENS, (number + 1) * TOKENS)
            keys, values = self.hot_keys[layer][:, part], self.hot_values[layer][:, part]
            self.arena.write(slot, layer, 0, keys, values)

    def own(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.hot_keys[layer][:, -self.n :], self.hot_values[layer][:, -self.n :]

    def expected(self, layer: int, q: torch.Tensor) -> np.ndarray:
        below = self.world.keys_values(layer)
        hot = self.hot_keys[layer].double().numpy(), self.hot_values[layer].double().numpy()
        keys, values = (np.concatenate(pair, axis=1) for pair in zip(below, hot, strict=True))
        visible = np.arange(self.end)[None] <= np.arange(self.end - self.n, self.end)[:, None]
        return attend_reference(q.double().numpy(), keys, values, SCALE, visible).o

    def close(self) -> None:
        self.device.drain()
        self.executors.close()
        self.arena.close()
        assert self.device.pending == 0
        self.device.check_integrity()


def run(
    chooser: Chooser, without: str | None = None, *, mode: PlanMode = PlanMode.AUTO, n: int = 1,
    codec: CodecId = CodecId.RAW, steps: int = 2, cold: int = 3, seed: int = 3,
) -> Rig:  # fmt: skip
    """Run steps with everything at once; after each the daemon reuses every warm slot.

    The host runs ahead of the device through a whole step, as it may on a GPU.
    """
    device = FakeDevice(chooser, without=without, follows=False)
    rig = Rig(World(seed=seed, codec=codec, cold_blocks=cold), device, n)
    plan, kept = rig.plan(), rig.world.slots.memory.copy()
    for _ in range(steps):
        outs = rig.step(mode, plan)
        rig.world.slots.poison()
        rig.compare(outs)
        rig.world.slots.memory[:] = kept
    rig.close()
    return rig


@pytest.mark.parametrize("n", [1, 3, 17, 20])
@pytest.mark.parametrize("mode", list(PlanMode))
def test_every_mode_is_right_in_random_orders(mode: PlanMode, n: int) -> None:
    case = functools.partial(run, mode=mode, n=n)
    assert explore_random(case, range(6)) is None


@pytest.mark.parametrize("codec", [CodecId.INT8, CodecId.FP8])
def test_encoded_pages_are_attended_as_they_decode(codec: CodecId) -> None:
    run(RandomChooser(5), codec=codec)


@pytest.mark.parametrize("fence", [*STREAM_FENCES, *NEAR_FENCES])
def test_the_explorer_sees_each_fence_left_out(fence: Fence) -> None:
    def both(chooser: Chooser) -> None:
        run(chooser, fence)
        run(chooser, fence, cold=0, mode=PlanMode.STREAM)

    assert explore_random(both, SEEDS) is not None


@pytest.mark.parametrize("codec", [CodecId.RAW, CodecId.INT8, CodecId.FP8])
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
@pytest.mark.parametrize("n", [17, 24])  # hot pages before the chunk: one whole or a part; a part
def test_a_prefill_chunk_is_right_over_pages_of_any_codec(
    n: int, dtype: DType, codec: CodecId
) -> None:
    geometry = Geometry(2, 1, D, dtype, TOKENS)
    device = FakeDevice(RandomChooser(n), follows=False)
    rig = Rig(World(geometry=geometry, codec=codec), device, n)
    outs = rig.step(PlanMode.AUTO)
    device.drain()
    for layer, out in enumerate(outs):
        assert out.dtype == TORCH_DTYPES[dtype]
        q = random_q(layer, n, rig.hot_keys.dtype)
        atol = 2e-5 if dtype is DType.FLOAT32 else 3e-2
        np.testing.assert_allclose(out.double().numpy(), rig.expected(layer, q), atol=atol)
    assert rig.executors._parts.filled == 0, "the paged kernel had no part in it"
    rig.close()


@pytest.mark.parametrize("pages", [1, 2, 5, 64])
def test_a_prefill_chunk_is_right_with_staging_of_any_size(
    pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = 2 * GEOMETRY.kv_heads * D * 4 * TOKENS
    sized = functools.partial(prefill.staging_bytes, budget_bytes=pages * page)
    monkeypatch.setattr(prefill, "staging_bytes", lambda g, d, b=0: sized(g, d))
    assert explore_random(functools.partial(run, n=20), range(4)) is None


PREFILL_FENCES = [*STREAM_FENCES]


@pytest.mark.parametrize("fence", PREFILL_FENCES)
def test_the_explorer_sees_each_fence_of_a_prefill_chunk_left_out(fence: Fence) -> None:
    def both(chooser: Chooser) -> None:
        run(chooser, fence, n=20)
        run(chooser, fence, n=20, cold=0)

    assert explore_random(both, SEEDS) is not None


def test_a_prefill_chunk_has_those_fences_and_no_others() -> None:
    labels = set(run(FirstChooser(), n=20).device.labels)
    assert labels - {Fence.RECORD_DEMAND, Fence.RECORD_WRITTEN, *END_FENCES} == set(PREFILL_FENCES)


def test_a_prefill_chunk_given_up_leaves_no_copy_and_the_next_is_right() -> None:
    device = FakeDevice(RandomChooser(4))
    rig = Rig(World(), device, 20)
    view = StepView(rig.end - 20, np.arange(rig.end - 20, rig.end), np.array([16, 8], np.int32))
    rig.executors.begin(rig.plan(), view, PlanMode.AUTO)
    rig.write(0)
    rig.executors.attend(0, random_q(0, 20).transpose(0, 1), *rig.own(0), SCALE)
    rig.executors.cancel()
    rig.world.reader.taken = rig.world.reader.released = 0  # a schedule made anew
    rig.compare(rig.step(PlanMode.AUTO))
    rig.close()


def test_the_fences_are_those_and_no_others() -> None:
    labels = set(run(FirstChooser()).device.labels)
    others = {Fence.RECORD_DEMAND, Fence.RECORD_WRITTEN, *END_FENCES}
    assert labels - others == {*STREAM_FENCES, *NEAR_FENCES}


def test_every_fence_is_left_out_by_some_test() -> None:
    left_out = {*STREAM_FENCES, *NEAR_FENCES, *END_FENCES, *ENCODER_FENCES, *INTERRUPT_FENCES,
                *DIRECT_FENCES, *WRITE_FENCES}  # fmt: skip
    assert left_out == set(Fence)


def ask_and_close(chooser: Chooser, without: str | None = None) -> None:
    """Close a link whose question nobody answers, as a cancelled step leaves it."""
    device = FakeDevice(chooser, without=without, follows=False)
    near = NearLink(device, GEOMETRY, HEADS)
    near.ask(random_q(1, 1))
    near.close()
    device.host_access()
    device.drain()
    end = device.new_event("end")
    device.record(end, near._stream, "end")
    device.wait_host(end, 1.0, "end")
    device.check_integrity()


@pytest.mark.parametrize("fence", [None, *END_FENCES])
def test_nothing_is_freed_under_a_question(fence: Fence | None) -> None:
    found = explore_random(lambda chooser: ask_and_close(chooser, fence), range(30))
    assert (found is None) == (fence is None)


def test_a_run_repeats_bit_for_bit_in_any_order() -> None:
    outs = []
    for seed in range(4):
        device = FakeDevice(RandomChooser(seed))
        rig = Rig(World(), device, 1)
        view = StepView(rig.end - 1, np.array([rig.end - 1]), np.array([16, 8], np.int32))
        rig.executors.begin(rig.plan(), view, PlanMode.AUTO)
        rig.write(0)
        q = random_q(0, 1).transpose(0, 1)
        outs.append(rig.executors.attend(0, q, *rig.own(0), SCALE))
        rig.executors.cancel()
        rig.close()
    assert all(torch.equal(out, outs[0]) for out in outs)


class WatchingDevice(FakeDevice):
    """Counts the kernels that wait on the compute stream while the host waits for q."""

    kernels: list[int]

    def wait_host(self, event: Event, seconds: float, label: str) -> None:
        if label == Fence.WAIT_QUERY_DOWN:
            self.kernels.append(sum(work.run is not None for work in self.compute.queue))
        super().wait_host(event, seconds, label)


def test_hot_and_streamed_pages_are_on_the_device_while_the_cpu_attends() -> None:
    device = WatchingDevice(FirstChooser(), follows=False)
    device.kernels = []
    rig = Rig(World(cold_blocks=0), device, 1)
    rig.compare(rig.step(PlanMode.AUTO))
    # q's copy, the hot pages, and two pieces for the three pages that are streamed.
    assert device.kernels[0] >= 4 and len(device.kernels) == GEOMETRY.layers
    rig.close()


def ask_twice(chooser: Chooser, without: str | None = None) -> None:
    """Two layers' questions to the CPU; the second q is made after the first answer."""
    device = FakeDevice(chooser, without=without, follows=False, torn_copies=False)
    world = World(cold_blocks=0)
    near = NearLink(device, GEOMETRY, HEADS)
    parts = [Part(torch.full((1, 1, HEADS, D), torch.nan), torch.zeros(1, 1, HEADS))] * 2
    queries = [random_q(layer, 1) for layer in range(2)]
    outs: list[np.ndarray] = []
    for layer, q in enumerate(queries):
        near.ask(q)
        near.answer(1, world.layers[layer].warm, SCALE, parts[layer])
        o = parts[layer].o
        device.launch(device.compute, lambda o=o: outs.append(o[0].numpy().copy()))  # type: ignore[misc]
    device.drain()
    for layer, q in enumerate(queries):
        expected = attend_reference(q.double().numpy(), *world.keys_values(layer), SCALE).o
        np.testing.assert_allclose(outs[layer], expected, atol=2e-5)
    near.close()


def test_two_questions_are_right_in_every_order() -> None:
    explored = explore_all(ask_twice, 2000)
    assert explored.found is None and explored.is_all
    for fence in NEAR_FENCES:
        assert explore_all(lambda c, fence=fence: ask_twice(c, fence), 2000).found, fence  # type: ignore[misc]


def test_auto_takes_the_rates_share_for_the_cpu() -> None:
    rig = run(FirstChooser(), steps=1, cold=0)
    assert rig.executors.near.counts.pages == 2 * 2  # half of 5 pages, in each layer
    rig = run(FirstChooser(), steps=1, cold=0, mode=PlanMode.NEAR)
    assert rig.executors.near.counts.pages == 10 and rig.executors.stager.counts.fills == 0


def test_a_step_given_up_leaves_no_copy_and_the_next_is_right() -> None:
    device = FakeDevice(RandomChooser(9))
    rig = Rig(World(), device, 1)
    for layers in range(3):
        view = StepView(rig.end - 1, np.array([rig.end - 1]), np.array([16, 8], np.int32))
        rig.executors.begin(rig.plan(), view, PlanMode.AUTO)
        for layer in range(layers):
            rig.write(layer)
            rig.executors.attend(layer, random_q(0, 1).transpose(0, 1), *rig.own(layer), SCALE)
        rig.executors.cancel()
        rig.executors.cancel()
        assert rig.world.reader.taken == rig.world.reader.released
        rig.world.reader.taken = rig.world.reader.released = 0  # a schedule made anew
    rig.compare(rig.step(PlanMode.AUTO))
    rig.close()


def test_a_slot_given_away_ends_the_step() -> None:
    validity = Validity()
    rig = Rig(World(cold_blocks=0), FakeDevice(), 1, validity=validity)
    validity.error = StaleGeneration("given away")
    with pytest.raises(StaleGeneration):
        rig.step(PlanMode.STREAM)
    rig.executors.cancel()
    validity.error = None
    rig.compare(rig.step(PlanMode.STREAM))
    rig.close()


def test_nothing_below_hot_and_nothing_hot_are_both_right() -> None:
    rig = Rig(World(warm_blocks=0, cold_blocks=0), FakeDevice(), 2)
    rig.compare(rig.step(PlanMode.AUTO))
    rig.close()


def test_parts_are_merged_down_where_there_is_no_room() -> None:
    device = FakeDevice()
    row_bytes = 4 * HEADS * (D + 1)
    parts = Parts(device, HostKernels(), GEOMETRY, HEADS, size_bytes=5 * row_bytes)
    rng = np.random.default_rng(1)
    o, lse = rng.standard_normal((9, 1, HEADS, D)), rng.standard_normal((9, 1, HEADS))
    parts.start(1)
    assert parts.capacity == 4 and parts.pages_each(7) == 3
    for first, count in ((0, 3), (3, 1), (4, 2), (6, 3)):
        part = parts.reserve(count)
        run = slice(first, first + count)
        device.launch(device.compute, functools.partial(fill, part.o, part.lse, o[run], lse[run]))
        parts.check_integrity()
    out = parts.merged()
    device.follow(device.compute)
    weights = np.exp(lse) / np.exp(lse).sum(axis=0)
    np.testing.assert_allclose(out.numpy(), (weights[..., None] * o).sum(axis=0), atol=1e-6)
    parts.start(1)
    empty = parts.merged()
    device.follow(device.compute)
    assert bool((empty == 0).all())
    parts.start(4000)  # grows, and keeps what is still read until it closes
    assert parts.capacity >= 3 and parts.total_bytes > 5 * row_bytes
    parts.close()


def fill(o: torch.Tensor, lse: torch.Tensor, from_o: np.ndarray, from_lse: np.ndarray) -> None:
    o.copy_(torch.from_numpy(from_o))
    lse.copy_(torch.from_numpy(from_lse))


def test_bfloat16_queries_come_down_as_they_are() -> None:
    geometry = Geometry(2, 1, D, DType.BFLOAT16, TOKENS)
    device = FakeDevice(RandomChooser(2))
    rig = Rig(World(geometry=geometry, cold_blocks=0), device, 1)
    view = StepView(rig.end - 1, np.array([rig.end - 1]), np.array([16, 8], np.int32))
    rig.executors.begin(rig.plan(), view, PlanMode.AUTO)
    rig.write(0)
    q = random_q(0, 1, torch.bfloat16)
    out = rig.executors.attend(0, q.transpose(0, 1), *rig.own(0), SCALE)
    assert out.dtype == torch.bfloat16
    np.testing.assert_allclose(out.double().numpy(), rig.expected(0, q), atol=2e-2)
    rig.executors.cancel()
    rig.close()


def test_a_device_that_hangs_is_an_error_not_a_wait() -> None:
    device = FakeDevice()
    rig = Rig(World(cold_blocks=0), device, 1)
    hung, never = device.new_stream("hung"), device.new_event("never")
    device.record(never, hung, "x")
    assert never.marker is not None
    never.marker = type(never.marker)()
    device.wait(device.compute, never, "hang")
    with pytest.raises(DeviceFailed):
        rig.step(PlanMode.NEAR)
