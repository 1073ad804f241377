"""The device's executors and encoder with Triton's kernels, interpreted, on the fake device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.engine.device.test_encoder import addresses, targets, write_blocks
from tests.engine.device.test_executors import Rig
from tests.engine.device.world import GEOMETRY, Slots, World
from tierd.codec import encode_pages
from tierd.codec.layout import page_layout
from tierd.types import CodecId, DType, Geometry
from tierd_engine.arena import HotArena, hot_block_bytes
from tierd_engine.attention.plan import PlanMode
from tierd_engine.device.arena import DeviceArena
from tierd_engine.device.encoder import DeviceEncoder
from tierd_engine.device.exploring import RandomChooser
from tierd_engine.device.fake import FakeDevice
from tierd_engine.device.kernels import TritonKernels


@pytest.mark.parametrize(
    ("codec", "n", "mode"),
    [
        (CodecId.INT8, 1, PlanMode.STREAM),
        (CodecId.RAW, 1, PlanMode.AUTO),
        (CodecId.FP8, 18, PlanMode.AUTO),
    ],
)
def test_a_step_with_tritons_kernels_is_right(codec: CodecId, n: int, mode: PlanMode) -> None:
    device = FakeDevice(RandomChooser(n), follows=False)
    rig = Rig(World(codec=codec, cold_blocks=2), device, n, kernels=TritonKernels())
    rig.compare(rig.step(mode))
    rig.close()


def test_bfloat16_goes_through_tritons_kernels() -> None:
    geometry = Geometry(1, 1, 16, DType.BFLOAT16, 16)
    device = FakeDevice(RandomChooser(4), follows=False)
    rig = Rig(World(geometry=geometry), device, 2, kernels=TritonKernels())
    outs = rig.step(PlanMode.STREAM)
    device.drain()
    assert outs[0].dtype == torch.bfloat16
    rig.close()


def test_demotion_with_tritons_encoder_gives_the_cpus_bytes() -> None:
    device = FakeDevice(RandomChooser(5))
    budget = 3 * hot_block_bytes(GEOMETRY)
    arena = DeviceArena(device, GEOMETRY, budget, blocks_max=3)
    own = HotArena(GEOMETRY, budget, blocks_max=3)
    encoder = DeviceEncoder(device, TritonKernels(), arena, device.new_event("no demand"))
    layout = page_layout(GEOMETRY, CodecId.INT8)
    warm, expected = Slots(layout, 6), Slots(layout, 6)
    slots, own_slots = write_blocks(arena, 1), write_blocks(own, 1)
    arena.write(slots[0], 0, 2, *torch.full((2, 1, 1, 16), float("inf")))
    encoded = encoder.encode(addresses(arena, slots), targets(warm), layout)
    assert encoded.status.tolist() == [1, 0, 0, 0, 0, 0]
    encode_pages(addresses(own, own_slots), targets(expected), layout)
    for page in range(1, 6):
        np.testing.assert_array_equal(warm.payload(page), expected.payload(page))
