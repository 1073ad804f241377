"""The hot arena on a device: what it says where the device has not that much memory."""

from __future__ import annotations

import pytest

from tests.engine.device.world import GEOMETRY
from tierd.errors import HotBudgetExceeded, InvalidArgument
from tierd_engine.arena import hot_block_bytes
from tierd_engine.device.arena import DeviceArena
from tierd_engine.device.exploring import RandomChooser
from tierd_engine.device.fake import FakeDevice
from tierd_engine.device.port import Buffer


class FullDevice(FakeDevice):
    """A device that says as CUDA's port does that it has no such memory left."""

    def allocate(self, size_bytes: int) -> Buffer:
        raise HotBudgetExceeded("the device has 1 GiB free: give a smaller --hot")


def test_a_hot_tier_that_the_device_cannot_hold_is_a_usage_error() -> None:
    with pytest.raises(InvalidArgument, match="give a smaller --hot"):
        DeviceArena(
            FullDevice(RandomChooser(1)), GEOMETRY, 2 * hot_block_bytes(GEOMETRY), blocks_max=2
        )
