"""The hot arena in VRAM: one buffer of the device, written on its compute stream.

Invariants: those of HotArena, and
  `written` is recorded after each write, so that who waits for it reads whole pages
"""

from __future__ import annotations

import torch

from tierd.errors import HotBudgetExceeded, InvalidArgument
from tierd.types import Geometry
from tierd_engine.arena import HotArena
from tierd_engine.device.fences import Fence
from tierd_engine.device.port import Buffer, Device


class DeviceArena(HotArena):
    """Slots of one block each, in one allocation within `budget_bytes` of the device.

    Raises InvalidArgument if the device has not that much.
    """

    def __init__(
        self, device: Device, geometry: Geometry, budget_bytes: int, *, blocks_max: int
    ) -> None:
        self._device = device
        self._buffer: Buffer | None = None
        self.written = device.new_event("hot pages written")
        super().__init__(geometry, budget_bytes, blocks_max=blocks_max)

    def _allocate(self, size_bytes: int) -> torch.Tensor:
        try:
            self._buffer = self._device.allocate(size_bytes)
        except HotBudgetExceeded as error:  # --hot asks for more than there is, as in RAM
            raise InvalidArgument(str(error)) from error
        return self._buffer.tensor

    def write(
        self, slot: int, layer: int, start: int, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """See HotArena. Runs on the compute stream."""
        keys, values = (part.reshape(part.shape[-3:]) for part in (keys, values))
        end = start + keys.shape[1]

        def kernel() -> None:
            self.keys[slot, layer, :, start:end] = keys
            self.values[slot, layer, :, start:end] = values

        self._device.launch(self._device.compute, kernel)
        self.record_written()

    def record_written(self) -> None:
        """Say that all that writes to hot pages up to now is on the compute stream."""
        self._device.record(self.written, self._device.compute, Fence.RECORD_WRITTEN)

    def on_host(self, slots: dict[int, int]) -> tuple[HotArena, dict[int, int]]:
        """See HotArena: a copy of these blocks in RAM. Waits for the compute stream."""
        self._device.follow(self._device.compute)
        copy = HotArena(self.geometry, len(slots) * self.slot_bytes, blocks_max=len(slots))
        where = {block: copy.allocate() for block in slots}
        for block, slot in slots.items():
            copy.keys[where[block]] = self.keys[slot].cpu()
            copy.values[where[block]] = self.values[slot].cpu()
        return copy, where

    def poison(self) -> None:
        """See HotArena."""
        free = list(self._free)
        self._device.launch(self._device.compute, lambda: self._poison(free))

    def close(self) -> None:
        """Give the memory back; nothing on any stream may use it any more. Idempotent."""
        if self._buffer is not None:
            self._device.free(self._buffer)
            self._buffer = None
