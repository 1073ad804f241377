"""Demotion on a device: the CPU's bytes in every order, after the writer, behind demand."""

from __future__ import annotations

import functools
from operator import setitem

import numpy as np
import pytest
import torch

from tests.engine.device.world import GEOMETRY, Slots, Validity, World
from tierd.codec import encode_pages
from tierd.codec.devicedigest import device_digests
from tierd.codec.layout import HEADER_BYTES, page_layout
from tierd.errors import DeviceFailed
from tierd.types import CodecId
from tierd_engine.arena import HotArena, hot_block_bytes
from tierd_engine.device.arena import DeviceArena
from tierd_engine.device.encoder import DeviceEncoder
from tierd_engine.device.exploring import explore_random
from tierd_engine.device.fake import Chooser, FakeDevice, FirstChooser
from tierd_engine.device.fences import Fence
from tierd_engine.device.kernels import HostKernels, TritonKernels
from tierd_engine.device.port import Event, Stream
from tierd_engine.device.stager import Stager, layer_pieces

SEEDS = range(100)
BLOCKS = 3
FENCES = [
    Fence.RECORD_WRITTEN, Fence.WAIT_WRITTEN, Fence.RECORD_DEMAND, Fence.WAIT_DEMAND,
    Fence.RECORD_COPIED_OUT, Fence.WAIT_COPIED_OUT,
]  # fmt: skip
INTERRUPT_FENCES = [Fence.RECORD_OUT_ENDED, Fence.WAIT_OUT_ENDED]


def write_blocks(arena: HotArena, seed: int) -> list[int]:
    """Fill BLOCKS slots, layer by layer; equal arenas get equal bytes."""
    rng = np.random.default_rng(seed)
    slots = [arena.allocate() for _ in range(BLOCKS)]
    shape = (2, GEOMETRY.kv_heads, GEOMETRY.block_tokens, GEOMETRY.head_dim)
    for slot in slots:
        for layer in range(GEOMETRY.layers):
            keys, values = torch.from_numpy(rng.standard_normal(shape).astype("f4"))
            arena.write(slot, layer, 0, keys, values)
    return slots


def addresses(arena: HotArena, slots: list[int]) -> np.ndarray:
    pages = [arena.page_address(slot, layer) for slot in slots for layer in range(GEOMETRY.layers)]
    return np.array(pages, dtype=np.int64)


def targets(slots: Slots) -> np.ndarray:
    return np.array([slots.address(i) + HEADER_BYTES for i in range(slots.count)], np.int64)


def demote(
    chooser: Chooser, without: str | None = None, *, codec: CodecId = CodecId.INT8,
    can_encode: frozenset[CodecId] = frozenset(CodecId), staging_pages: int = 2,
    digests: bool = False,
) -> FakeDevice:  # fmt: skip
    """Demote blocks while a step's copies are under way; compare with the CPU's encoding."""
    device = FakeDevice(chooser, without=without)
    budget = BLOCKS * hot_block_bytes(GEOMETRY)
    arena = DeviceArena(device, GEOMETRY, budget, blocks_max=BLOCKS)
    arena.poison()
    world = World(cold_blocks=0)
    stager = Stager(
        device, world.reader, world.layout.slot_bytes, Validity(),  # type: ignore[arg-type]
        chunk_bytes=world.layout.slot_bytes,
    )  # fmt: skip
    encoder = DeviceEncoder(
        device, HostKernels(can_encode), arena, stager.demand,
        staging_bytes=staging_pages * arena.layout.payload_bytes, digests=digests,
    )  # fmt: skip
    slots = write_blocks(arena, seed=1)
    pieces = layer_pieces(0, world.layers[0], stager.chunk_bytes, np.zeros_like)
    stager.begin(pieces)
    in_flight = stager.counts.copies
    layout = page_layout(GEOMETRY, codec)
    warm = Slots(layout, BLOCKS * GEOMETRY.layers)
    encoded = encoder.encode(addresses(arena, slots), targets(warm), layout)
    for slot in slots:  # free from here on: the next block goes there
        arena.release(slot)
    write_blocks(arena, seed=2)
    device.host_access()
    own = HotArena(GEOMETRY, budget, blocks_max=BLOCKS)
    expected = Slots(layout, warm.count)
    own_slots = write_blocks(own, seed=1)
    assert encoded.status.tolist() == [0] * warm.count
    encode_pages(addresses(own, own_slots), targets(expected), layout)
    for i in range(warm.count):
        np.testing.assert_array_equal(warm.payload(i), expected.payload(i))
    if digests:
        expected_digests = device_digests(targets(expected), layout.payload_bytes)
        assert encoded.device_digests is not None
        assert encoded.device_digests.tolist() == expected_digests.tolist()
    else:
        assert encoded.device_digests is None
    order = [line.split(":")[0] for line in device.trace]
    first_out = order.index("copy out")
    assert order[:first_out].count("copy in") >= in_flight, "demotion went before demand"
    stager.abandon()
    device.follow(device.compute)
    for part in (stager, encoder, arena):
        part.check_integrity()
        part.close()
    device.check_integrity()
    return device


@pytest.mark.parametrize("codec", [CodecId.RAW, CodecId.INT8, CodecId.FP8])
def test_slots_hold_the_cpus_bytes_in_random_orders(codec: CodecId) -> None:
    assert explore_random(functools.partial(demote, codec=codec), range(15)) is None


def test_a_codec_without_a_kernel_is_encoded_by_the_cpu() -> None:
    assert explore_random(lambda c: demote(c, can_encode=frozenset()), range(10)) is None


@pytest.mark.parametrize("codec", [CodecId.RAW, CodecId.INT8, CodecId.FP8])
@pytest.mark.parametrize("can_encode", [frozenset(CodecId), frozenset()], ids=["device", "host"])
def test_device_digests_are_the_cpus_in_random_orders(
    codec: CodecId, can_encode: frozenset[CodecId]
) -> None:
    case = functools.partial(demote, codec=codec, can_encode=can_encode, digests=True)
    assert explore_random(case, range(8)) is None


def test_the_gpu_has_a_kernel_for_every_codec_below_the_hot_tier() -> None:
    encoded = {codec for codec in CodecId if TritonKernels().can_encode(codec)}
    assert encoded == set(CodecId) - {CodecId.NONE, CodecId.RAW}


@pytest.mark.parametrize("fence", FENCES)
def test_the_explorer_sees_each_fence_left_out(fence: Fence) -> None:
    assert explore_random(lambda chooser: demote(chooser, fence), SEEDS) is not None


def test_the_fences_are_those_and_the_stagers() -> None:
    labels = set(demote(FirstChooser()).labels)
    stagers = {Fence.RECORD_FILLED, Fence.WAIT_READ, Fence.RECORD_SETTLED, Fence.WAIT_SETTLED}
    assert labels - stagers == set(FENCES)


class InterruptedDevice(FakeDevice):
    """Raises once, as a user's interrupt would: after a copy, or where the host waits."""

    at_copy = at_wait = False

    def wait_host(self, event: Event, seconds: float, label: str) -> None:
        if label == Fence.WAIT_COPIED_OUT and self.at_wait:
            self.at_wait = False
            raise KeyboardInterrupt
        super().wait_host(event, seconds, label)

    def copy_out(self, stream: Stream, source: int, target: int, size_bytes: int) -> None:
        super().copy_out(stream, source, target, size_bytes)
        if self.at_copy:
            self.at_copy = False
            raise KeyboardInterrupt


def interrupt(chooser: Chooser, without: str | None = None) -> None:
    """Interrupt a round; the slots are given back, and are another page's from then on."""
    for where in ("at_copy", "at_wait"):
        device = InterruptedDevice(chooser, without=without)
        setattr(device, where, True)
        interrupt_at(device)


def interrupt_at(device: FakeDevice) -> None:
    arena = DeviceArena(device, GEOMETRY, BLOCKS * hot_block_bytes(GEOMETRY), blocks_max=BLOCKS)
    encoder = DeviceEncoder(device, HostKernels(), arena, device.new_event("no demand"))
    slots = write_blocks(arena, seed=1)
    layout = page_layout(GEOMETRY, CodecId.INT8)
    warm = Slots(layout, BLOCKS * GEOMETRY.layers)
    with pytest.raises(KeyboardInterrupt):
        encoder.encode(addresses(arena, slots), targets(warm), layout)
    warm.memory[:] = 7
    device.host_access()
    device.drain()
    end = device.new_event("end")
    device.record(end, encoder.stream, "end")
    device.wait_host(end, 1.0, "end")
    assert (warm.memory == 7).all(), "a copy landed in a slot that was given back"


def test_an_interrupted_round_leaves_nothing_that_writes_to_slots() -> None:
    assert explore_random(interrupt, range(30)) is None


@pytest.mark.parametrize("fence", INTERRUPT_FENCES)
def test_the_explorer_sees_each_fence_of_an_interruption_left_out(fence: Fence) -> None:
    assert explore_random(lambda chooser: interrupt(chooser, fence), SEEDS) is not None


def test_rounds_of_any_size_give_the_same() -> None:
    for pages in (1, 4, 64):
        demote(FirstChooser(), staging_pages=pages)


@pytest.mark.parametrize(("value", "status"), [(float("nan"), 1), (1e6, 2)])
def test_what_cannot_be_encoded_is_said_page_by_page(value: float, status: int) -> None:
    device = FakeDevice()
    arena = DeviceArena(device, GEOMETRY, BLOCKS * hot_block_bytes(GEOMETRY), blocks_max=BLOCKS)
    encoder = DeviceEncoder(device, HostKernels(), arena, device.new_event("no demand"))
    slots = write_blocks(arena, seed=1)
    device.launch(device.compute, lambda: setitem(arena.values, (slots[1], 1, 0, 3), value))
    arena.write(slots[2], 1, 0, torch.ones(1, 1, 16), torch.ones(1, 1, 16))
    layout = page_layout(GEOMETRY, CodecId.INT8)
    warm = Slots(layout, BLOCKS * GEOMETRY.layers)
    got = encoder.encode(addresses(arena, slots), targets(warm), layout)
    assert got.status.tolist() == [0, 0, 0, status, 0, 0]


def test_a_copy_that_never_ends_is_an_error_that_says_what_was_late() -> None:
    device = FakeDevice()
    arena = DeviceArena(device, GEOMETRY, BLOCKS * hot_block_bytes(GEOMETRY), blocks_max=BLOCKS)
    other, never, demand = device.new_stream("hung"), device.new_event("x"), device.new_event("y")
    device.record(never, device.new_stream("first"), "first")
    assert never.marker is not None
    never.marker = type(never.marker)()
    device.wait(other, never, "hang")
    device.record(demand, other, "demand")
    encoder = DeviceEncoder(device, HostKernels(), arena, demand)
    slots = write_blocks(arena, seed=1)
    layout = page_layout(GEOMETRY, CodecId.INT8)
    warm = Slots(layout, BLOCKS * GEOMETRY.layers)
    with pytest.raises(DeviceFailed, match="wait: pages copied out"):
        encoder.encode(addresses(arena, slots), targets(warm), layout)


def test_an_arena_shows_its_blocks_on_the_host() -> None:
    device = FakeDevice()
    arena = DeviceArena(device, GEOMETRY, BLOCKS * hot_block_bytes(GEOMETRY), blocks_max=BLOCKS)
    slots = write_blocks(arena, seed=1)
    copy, where = arena.on_host({7: slots[2]})
    assert torch.equal(copy.keys[where[7]], arena.keys[slots[2]])
    assert copy.base_address != arena.base_address
