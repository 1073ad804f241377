"""The stager: right bytes in every order of the device's work, and each fence is needed."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import pytest

from tests.engine.device.world import GEOMETRY, Validity, World
from tierd.codec.layout import HEADER_BYTES, page_layout
from tierd.errors import StaleGeneration
from tierd.types import CodecId, DType, Geometry
from tierd.units import MIB
from tierd_engine.attention.plan import LayerPlan, PageRun
from tierd_engine.device.exploring import explore_all, explore_random
from tierd_engine.device.fake import POISON, Chooser, FakeDevice, FirstChooser, bytes_at
from tierd_engine.device.fences import Fence
from tierd_engine.device.pinning import HostLimits, Pins
from tierd_engine.device.stager import Piece, Staged, Stager, layer_pieces
from tierd_engine.staging import RING_CHUNK_BYTES

SEEDS = range(150)
FENCES = [
    Fence.RECORD_FILLED, Fence.WAIT_FILLED, Fence.RECORD_READ, Fence.WAIT_READ,
    Fence.RECORD_COLD_COPIED, Fence.WAIT_COLD_COPIED, Fence.RECORD_SETTLED, Fence.WAIT_SETTLED,
]  # fmt: skip
UNLIMITED = HostLimits(None, None)


def step(
    chooser: Chooser, without: str | None = None, *, world: World | None = None, chunks: int = 2,
    torn: bool = True, validity: Validity | None = None, steps: int = 2, is_pinned: bool = True,
) -> FakeDevice:  # fmt: skip
    """Run steps that read every page on the compute stream, as executors do; check the bytes.

    After each step the daemon reuses every warm slot, as it may once the epoch is left.
    """
    device = FakeDevice(chooser, without=without, torn_copies=torn)
    world = world or World()
    kept = world.slots.memory.copy()
    pins = Pins(device, UNLIMITED)
    if is_pinned:
        slot_bytes = world.layout.slot_bytes
        pins.add(world.slots.base, world.slots.count * slot_bytes, slot_bytes)
        pins.add(world.reader.ring.base, world.reader.ring.count * slot_bytes, slot_bytes)
    stager = Stager(
        device, world.reader, world.layout.slot_bytes, validity or Validity(),  # type: ignore[arg-type]
        chunk_bytes=2 * world.layout.slot_bytes, chunks=chunks,
    )  # fmt: skip
    pieces = [
        piece
        for layer, plan in enumerate(world.layers)
        for piece in layer_pieces(layer, plan, stager.chunk_bytes, pins.pieces_of)
    ]
    for _ in range(steps):
        read: list[list[bytes]] = []
        stager.begin(pieces)
        for _ in pieces:
            staged = stager.take()
            stager.wait_filled(staged)
            read.append([])
            kernel = functools.partial(read_pages, staged, read[-1])
            device.launch(device.compute, kernel)
            stager.release()
            stager.check_integrity()
        stager.settle()
        world.slots.poison()
        device.follow(device.compute)
        assert read == expected(world, pieces)
        world.slots.memory[:] = kept
    assert device.pending == 0, "a copy is left after the step"
    stager.close()
    pins.check_integrity()
    pins.close()
    device.check_integrity()
    return device


def read_pages(staged: Staged, into: list[bytes]) -> None:
    size = staged.piece.layout.payload_bytes
    into.extend(bytes_at(address, size).tobytes() for address in staged.addresses.tolist())


def expected(world: World, pieces: Sequence[Piece]) -> list[list[bytes]]:
    read, done = [], [0] * GEOMETRY.layers
    for piece in pieces:
        first = done[piece.layer]
        done[piece.layer] += piece.count
        read.append([world.payload(piece.layer, first + i).tobytes() for i in range(piece.count)])
    return read


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_every_page_is_read_as_it_was_in_random_orders(chunks: int) -> None:
    assert explore_random(functools.partial(step, chunks=chunks), range(60)) is None


@pytest.mark.parametrize(("warm", "cold"), [(2, 0), (0, 1)])
def test_in_all_orders_of_a_small_step(warm: int, cold: int) -> None:
    def small(chooser: Chooser) -> None:
        world = World(warm_blocks=warm, cold_blocks=cold)
        step(chooser, world=world, chunks=2, torn=False, steps=1)

    explored = explore_all(small, 20_000)
    assert explored.found is None and explored.is_all
    assert explored.orders > 30


@pytest.mark.parametrize("fence", FENCES)
def test_the_explorer_sees_each_fence_left_out(fence: Fence) -> None:
    def both(chooser: Chooser) -> None:
        step(chooser, fence)
        step(chooser, fence, world=World(cold_blocks=0))  # whose last copy is a warm one

    assert explore_random(both, SEEDS) is not None


def test_the_fences_are_those_and_no_others() -> None:
    labels = set(step(FirstChooser()).labels)
    assert labels - {Fence.RECORD_DEMAND} == set(FENCES)


def test_a_slot_given_away_during_the_step_ends_it_and_leaves_no_copy() -> None:
    device, world = FakeDevice(), World()
    validity = Validity()
    stager = Stager(device, world.reader, world.layout.slot_bytes, validity)  # type: ignore[arg-type]
    pieces = layer_pieces(0, world.layers[0], stager.chunk_bytes, np.zeros_like)
    stager.begin(pieces)
    for _ in pieces:
        stager.take()
        stager.release()
    validity.error = StaleGeneration("given away")
    with pytest.raises(StaleGeneration):
        stager.settle()
    stager.abandon()
    stager.check_integrity()
    assert device.pending == 0 and world.reader.taken == world.reader.released


@pytest.mark.parametrize("taken", [0, 1, 2])
def test_a_step_may_be_abandoned_anywhere(taken: int) -> None:
    device, world = FakeDevice(), World()
    stager = Stager(
        device, world.reader, world.layout.slot_bytes, Validity(),  # type: ignore[arg-type]
        chunk_bytes=world.layout.slot_bytes,
    )  # fmt: skip
    pieces = layer_pieces(0, world.layers[0], 2 * world.layout.slot_bytes, np.zeros_like)
    pieces = tuple(piece for piece in pieces if not piece.is_cold)
    stager = Stager(device, world.reader, 0, Validity(), chunk_bytes=stager.chunk_bytes * 2)  # type: ignore[arg-type]
    stager.begin(pieces)
    for number in range(taken):
        stager.take()
        if number + 1 < taken:
            stager.release()
    stager.abandon()
    stager.abandon()
    stager.check_integrity()
    assert device.pending == 0
    stager.begin(pieces)  # and another one runs
    stager.abandon()


def test_a_layers_pages_go_in_one_copy_where_blocks_lie_in_order() -> None:
    world = World(warm_blocks=4, cold_blocks=0, codec=CodecId.INT8)
    pieces = layer_pieces(1, world.layers[1], 1 << 20, np.ones_like)
    assert [[(run.count, run.stride) for run in piece.runs] for piece in pieces] == [
        [(4, 2 * world.layout.slot_bytes)]
    ]
    shuffled = World(warm_blocks=4, cold_blocks=0, order=[2, 0, 1, 3])
    runs = layer_pieces(0, shuffled.layers[0], 1 << 20, np.ones_like)[0].runs
    assert sum(run.count for run in runs) == 4 and len(runs) > 1
    assert explore_random(lambda c: step(c, world=shuffled), range(10)) is None


@pytest.mark.parametrize(
    ("geometry", "codec"),
    [
        (Geometry(32, 8, 128, DType.BFLOAT16), CodecId.INT8),
        (Geometry(32, 8, 128, DType.BFLOAT16), CodecId.K8V4),
        (Geometry(28, 4, 128, DType.BFLOAT16), CodecId.INT8),
        (Geometry(30, 3, 64, DType.BFLOAT16), CodecId.INT8),
    ],
    ids=["Llama int8", "Llama k8v4", "Qwen2 int8", "SmolLM2 int8"],
)
def test_a_copy_takes_a_mebibyte_and_more_of_a_long_context(
    geometry: Geometry, codec: CodecId
) -> None:
    """128k tokens, demoted in order into slabs of 64 MiB, a block's layers side by side."""
    layout = page_layout(geometry, codec)
    per_slab = 64 * MIB // layout.slot_bytes
    slots = np.arange(512) * geometry.layers + 3  # of layer 3
    slab, slot = slots // per_slab, slots % per_slab
    bases = (1 << 40) + slab.astype(np.int64) * (1 << 32)
    addresses = bases + slot * layout.slot_bytes + HEADER_BYTES
    tokens = np.full(512, geometry.block_tokens, np.int32)
    plan = LayerPlan((PageRun(layout, addresses, tokens),), ())
    pieces = layer_pieces(3, plan, RING_CHUNK_BYTES, lambda addresses: addresses >> 32)
    runs = [run for piece in pieces for run in piece.runs]
    assert sum(run.count for run in runs) == 512
    assert 512 * layout.payload_bytes / len(runs) >= MIB


def test_pageable_memory_gives_the_same() -> None:
    device = step(FirstChooser(), is_pinned=False)
    assert device.pageable_bytes == device.copied_in_bytes > 0
    assert step(FirstChooser()).pageable_bytes == 0


def test_the_ring_starts_as_poison() -> None:
    device, world = FakeDevice(), World()
    stager = Stager(device, world.reader, world.layout.slot_bytes, Validity())  # type: ignore[arg-type]
    assert bool((stager._ring.tensor == POISON).all())
    assert stager.total_bytes == 32 << 20
    assert np.all(world.slots.memory[-1:] == POISON)
