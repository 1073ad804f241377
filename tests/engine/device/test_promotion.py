"""Promotion on a device: hot pages are what warm ones decode to, in every order; fences; ends."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from tests.engine.device.world import GEOMETRY, HEADS, Validity, World
from tierd.errors import StaleGeneration
from tierd.types import CodecId, DType, Geometry
from tierd_engine.arena import hot_block_bytes
from tierd_engine.device.arena import DeviceArena
from tierd_engine.device.executors import DeviceExecutors
from tierd_engine.device.exploring import explore_all, explore_random
from tierd_engine.device.fake import Chooser, FakeDevice, FirstChooser
from tierd_engine.device.fences import Fence
from tierd_engine.device.kernels import HostKernels
from tierd_engine.device.pinning import HostLimits, Pins
from tierd_engine.device.port import Rows, Stream
from tierd_engine.device.split import Rates
from tierd_engine.promotion import Ascent

FENCES = [
    Fence.RECORD_FILLED, Fence.WAIT_FILLED, Fence.RECORD_READ, Fence.WAIT_READ,
    Fence.RECORD_SETTLED, Fence.WAIT_SETTLED,
]  # fmt: skip
# Those of demotions, which never read a promoted page, and of near's own end.
OTHERS = {
    Fence.RECORD_DEMAND, Fence.RECORD_WRITTEN, Fence.RECORD_NEAR_ENDED, Fence.WAIT_NEAR_ENDED,
}  # fmt: skip
ROUNDOFF = {DType.FLOAT32: 0.0, DType.BFLOAT16: 2.0**-8, DType.FLOAT16: 2.0**-11}
# Wide enough for every codec.
WIDE = [Geometry(2, 2, 32, dtype, 32) for dtype in DType]


class Rig:
    """Executors over a world of warm blocks, and an arena with room for all of them."""

    def __init__(self, device: FakeDevice, world: World, validity: Validity | None = None) -> None:
        self.device, self.world = device, world
        blocks = world.warm_blocks
        budget = blocks * hot_block_bytes(world.geometry)
        self.arena = DeviceArena(device, world.geometry, budget, blocks_max=blocks)
        self.arena.poison()
        slot_bytes = world.layout.slot_bytes
        self.pins = Pins(device, HostLimits(None, None))
        self.pins.add(world.slots.base, world.slots.count * slot_bytes, slot_bytes)
        self.executors = DeviceExecutors(
            device, HostKernels(), world.geometry, HEADS, self.arena, world.reader,  # type: ignore[arg-type]
            self.pins, validity or Validity(), Rates(1.0, 1.0), chunk_bytes=2 * slot_bytes,
        )  # fmt: skip
        self.slots = [self.arena.allocate() for _ in range(blocks)]

    def ascents(self) -> list[Ascent]:
        found = []
        for layer, plan in enumerate(self.world.layers):
            targets = [self.arena.page_address(slot, layer) for slot in self.slots]
            found.append(Ascent(layer, plan.warm[0], np.array(targets, np.int64)))
        return found

    def compare(self) -> None:
        """Hold what is hot against the float64 values of the encoded pages.

        Raw: they are equal. Else decoding is a product and a sum in float32, and to a
        16-bit dtype one rounding more, of half a unit in the last place.
        """
        world, is_raw = self.world, self.world.codec is CodecId.RAW
        narrow = ROUNDOFF[world.geometry.dtype]
        for layer, pages in enumerate(world.pages):
            for part, exact in ((self.arena.keys, pages.keys), (self.arena.values, pages.values)):
                hot = part[self.slots, layer].double().numpy()
                bound = 2.0**-22 * np.abs(exact).max() + 1.001 * narrow * np.abs(exact)
                assert (np.abs(hot - exact) <= (0.0 if is_raw else bound)).all()

    def close(self) -> None:
        self.executors.check_integrity()
        self.executors.close()
        self.arena.close()
        self.pins.close()
        assert self.device.pending == 0
        self.device.check_integrity()


def promote(
    chooser: Chooser, without: str | None = None, *, codec: CodecId = CodecId.RAW,
    geometry: Geometry = GEOMETRY, warm_blocks: int = 5, torn: bool = True,
) -> FakeDevice:  # fmt: skip
    """Promote blocks; then the daemon reuses every slot, as it may once the epoch is left."""
    device = FakeDevice(chooser, without=without, torn_copies=torn)
    world = World(codec=codec, geometry=geometry, warm_blocks=warm_blocks, cold_blocks=0)
    rig = Rig(device, world)
    rig.executors.promote(rig.ascents())
    world.slots.poison()
    device.follow(device.compute)
    rig.compare()
    rig.close()
    return device


@pytest.mark.parametrize("codec", [c for c in CodecId if c is not CodecId.NONE])
@pytest.mark.parametrize("geometry", WIDE, ids=list(DType))
def test_hot_pages_are_what_warm_ones_decode_to(codec: CodecId, geometry: Geometry) -> None:
    case = functools.partial(promote, codec=codec, geometry=geometry)
    found = explore_random(case, range(8))
    assert found is None, found


def test_in_all_orders_of_a_small_promotion() -> None:
    explored = explore_all(lambda c: promote(c, warm_blocks=1, torn=False), 20_000)
    assert explored.found is None and explored.is_all and explored.orders > 3


@pytest.mark.parametrize("fence", FENCES)
def test_the_explorer_sees_each_fence_left_out(fence: Fence) -> None:
    assert explore_random(lambda chooser: promote(chooser, fence), range(150)) is not None


def test_the_fences_are_those_and_no_others() -> None:
    assert set(promote(FirstChooser()).labels) - OTHERS == set(FENCES)


def test_nothing_to_promote_is_allowed() -> None:
    rig = Rig(FakeDevice(), World(cold_blocks=0))
    rig.executors.promote([])
    rig.close()


def test_slots_given_away_meanwhile_end_it_with_no_copy_left() -> None:
    validity = Validity(StaleGeneration("given away"))
    rig = Rig(FakeDevice(), World(cold_blocks=0), validity)
    with pytest.raises(StaleGeneration):
        rig.executors.promote(rig.ascents())
    rig.device.follow(rig.device.compute)
    rig.close()


class InterruptedDevice(FakeDevice):
    """Raises once, as a user's interrupt would, after a number of copies."""

    copies_left = 3

    def copy_in_rows(self, stream: Stream, rows: Rows) -> None:
        super().copy_in_rows(stream, rows)
        self.copies_left -= 1
        if self.copies_left == 0:
            raise KeyboardInterrupt


def interrupt(chooser: Chooser, without: str | None = None) -> None:
    """Interrupt a promotion: slots are others' from then on, and so are the hot pages."""
    world = World(cold_blocks=0)
    rig = Rig(InterruptedDevice(chooser, without=without), world)
    with pytest.raises(KeyboardInterrupt):
        rig.executors.promote(rig.ascents())
    left = rig.executors.stager._stream.queue  # type: ignore[attr-defined]
    assert not left, "a copy still reads a slot that may be given away"
    rig.device.follow(rig.device.compute)
    rig.close()


def test_an_interrupted_promotion_leaves_no_copy() -> None:
    found = explore_random(interrupt, range(30))
    assert found is None, found


@pytest.mark.parametrize("fence", [Fence.RECORD_SETTLED, Fence.WAIT_SETTLED])
def test_the_explorer_sees_an_interruption_that_does_not_wait(fence: Fence) -> None:
    assert explore_random(lambda chooser: interrupt(chooser, fence), range(100)) is not None
