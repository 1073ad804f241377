"""Which pages one copy takes: neighbours at an equal distance, in one piece of pinned memory.

A block's pages lie side by side, layer after layer; so the pages of one layer, block after
block, stand at an equal distance. One copy of rows then takes them all: a copy a page would
be 26 KiB to 550 KiB, and copies under 1 MiB do not fill the link.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tierd.codec.layout import HEADER_BYTES
from tierd_engine.device.port import Rows


@dataclass(frozen=True, slots=True)
class SlotRun:
    """`count` slots, `stride` bytes from one to the next; `first` is the number of the first."""

    first: int
    address: int
    stride: int
    count: int

    def rows(self, target: int, slot_bytes: int) -> Rows:
        """Return the copy of the payloads to staged slots, the first slot of which is `target`.

        Slots side by side go as one row, headers too; else each payload is a row.
        """
        if self.count > 1 and self.stride == slot_bytes:
            size = self.count * slot_bytes - HEADER_BYTES
            return Rows(self.address + HEADER_BYTES, size, target + HEADER_BYTES, size, size, 1)
        return Rows(
            self.address + HEADER_BYTES, max(self.stride, slot_bytes), target + HEADER_BYTES,
            slot_bytes, slot_bytes - HEADER_BYTES, self.count,
        )  # fmt: skip


def slot_runs(
    addresses: Sequence[int], pieces: Sequence[int], slot_bytes: int
) -> tuple[SlotRun, ...]:
    """Return the fewest runs that take slots in this order. `pieces`: see Pins.pieces_of."""
    runs: list[SlotRun] = []
    start = 0
    while start < len(addresses):
        end = start + 1
        stride = slot_bytes
        if end < len(addresses) and pieces[end] == pieces[start]:
            stride = addresses[end] - addresses[start]
        if stride >= slot_bytes:
            while (
                end < len(addresses)
                and pieces[end] == pieces[start]
                and addresses[end] - addresses[end - 1] == stride
            ):
                end += 1
        else:
            stride = slot_bytes
        runs.append(SlotRun(start, addresses[start], stride, end - start))
        start = end
    return tuple(runs)
