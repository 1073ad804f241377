"""The stager: copies the encoded pages that a step needs into a ring of chunks, ahead of use.

Invariants:
  released <= taken <= released + 1; taken <= issued <= released + chunks
  a chunk is filled again only after the event of its last reader
  the copy-in stream and the ring are this object's alone
  when `settle` or `abandon` has returned, no copy of the step is left
  a step whose copies may have read a slot that was given away ends in StaleGeneration

What a step needs is known before it starts, so this is no guess: while layer l is attended,
the pages of layer l + 1 are on their way. It stops at the step's end: outside an epoch
a warm slot may be given away. Cold units come through the cold reader, verified, or land in
VRAM past the ring (direct.py): their chunk of it then stays empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tierd.codec.layout import HEADER_BYTES, PageLayout
from tierd.units import SECTOR_BYTES, round_up
from tierd_engine.attention.plan import IntArray, LayerPlan
from tierd_engine.coldread import ColdReader
from tierd_engine.device.copyruns import SlotRun, slot_runs
from tierd_engine.device.direct import DirectCold, Elsewhere, Landing
from tierd_engine.device.fences import Fence
from tierd_engine.device.port import Device, Event
from tierd_engine.staging import RING_CHUNK_BYTES, RING_CHUNKS

# A step's last copies are four chunks of 8 MiB, behind kernels of under a second: at 64 MiB/s,
# the slowest link we promise for, half a second. Ten is a device that has failed.
COPY_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Piece:
    """Pages of one layer and layout that fill at most one chunk. No runs: the next cold unit."""

    layer: int
    layout: PageLayout
    count: int
    runs: tuple[SlotRun, ...]

    @property
    def is_cold(self) -> bool:
        """Whether the cold reader brings it."""
        return not self.runs


@dataclass(frozen=True, slots=True)
class Staged:
    """A piece in the ring: payload addresses int64 and valid tokens int32 [count], on the device.

    Launch only after `wait_filled`; valid until `release`.
    """

    piece: Piece
    addresses: torch.Tensor
    tokens: torch.Tensor
    filled: Event


def layer_pieces(
    layer: int,
    plan: LayerPlan,
    chunk_bytes: int,
    pieces_of: Callable[[IntArray], IntArray],
    near: Sequence[int] = (),
) -> tuple[Piece, ...]:
    """Return what of a layer's pages goes through the ring, in the plan's order.

    `near`: how many pages of each warm run, the first ones, do not. `pieces_of`: see Pins.
    """
    pieces = []
    for number, run in enumerate(plan.warm):
        skipped = near[number] if near else 0
        slots: IntArray = run.addresses[skipped:] - HEADER_BYTES
        numbers = pieces_of(slots)
        per_chunk = chunk_bytes // run.layout.slot_bytes
        for start in range(0, len(slots), per_chunk):
            part = slice(start, start + per_chunk)
            addresses = slots[part].tolist()
            runs = slot_runs(addresses, numbers[part].tolist(), run.layout.slot_bytes)
            pieces.append(Piece(layer, run.layout, len(addresses), runs))
    for unit in plan.cold:
        pieces.append(Piece(layer, unit.layout, len(unit.pages), ()))
    return tuple(pieces)


@dataclass(slots=True)
class StagerCounts:
    """Copies put on the stream, their bytes, and chunks filled."""

    copies: int = 0
    copied_bytes: int = 0
    fills: int = 0


class Stager:
    """Owner of the copy-in stream and of the ring. Used by one thread, in steps:

    `begin`, then `take` and `release` for each piece in order, then `settle`; or `abandon`.
    `require_valid` raises StaleGeneration if slots read in this step may have been given away.
    """

    def __init__(
        self,
        device: Device,
        reader: ColdReader,
        slot_bytes_max: int,
        require_valid: Callable[[], None],
        *,
        chunk_bytes: int = RING_CHUNK_BYTES,
        chunks: int = RING_CHUNKS,
        direct: DirectCold | None = None,
    ) -> None:
        self._device = device
        self._reader, self._direct = reader, direct
        self._landings: dict[int, Landing] = {}  # by chunk, which they stand in for
        self._require_valid = require_valid
        self.chunk_bytes = round_up(max(chunk_bytes, slot_bytes_max), SECTOR_BYTES)
        self.chunks = chunks
        self._ring = device.allocate(self.chunk_bytes * chunks)
        self._stream = device.new_stream("copy in", urgent=True)
        self._filled = [device.new_event(f"chunk {i} filled") for i in range(chunks)]
        self._read = [device.new_event(f"chunk {i} read") for i in range(chunks)]
        self._settled = device.new_event("the step's copies")
        self._cold_copied = device.new_event("the cold unit's copy")
        self.demand = device.new_event("copies that a step waits for")
        self._cold_in_use: Elsewhere | None = None
        # A tensor a chunk: kernels are built anew for an address that is aligned otherwise.
        self._addresses: dict[PageLayout, list[torch.Tensor]] = {}
        self._tokens: dict[PageLayout, torch.Tensor] = {}
        self._pieces: Sequence[Piece] = ()
        self._issued = self._taken = self._released = 0
        self.counts = StagerCounts()

    # -- a step -------------------------------------------------------------------
    def begin(self, pieces: Sequence[Piece]) -> None:
        """Start on a step's pieces, all layers' in order. Inside the epoch."""
        assert not self._pieces, "a step is running"
        self.prepare({piece.layout for piece in pieces})
        if self._direct is not None:
            self._direct.begin()
        self._pieces = pieces
        self._issued = self._taken = self._released = 0
        self._fill()

    def take(self) -> Staged:
        """Return the next piece, copied or on its way."""
        assert self._taken == self._released, "one piece is in use at a time"
        piece = self._pieces[self._taken]
        chunk = self._taken % self.chunks
        self._taken += 1
        if self._device.is_reached(self._filled[chunk]):
            self._require_valid()  # else `settle` does, when the copy has ended
        landing = self._landings.get(chunk)
        addresses = self._addresses[piece.layout][chunk][: piece.count]
        if landing is not None:
            addresses = landing.addresses
        return Staged(
            piece, addresses, self._tokens[piece.layout][: piece.count], self._filled[chunk]
        )

    def wait_filled(self, staged: Staged) -> None:
        """Hold the compute stream until the piece's copy has ended. Call it before the launch."""
        self._device.wait(self._device.compute, staged.filled, Fence.WAIT_FILLED)

    def has_caught_up(self) -> bool:
        """Return whether the device is done with all pieces released so far. Never waits."""
        if self._released == 0:
            return True
        return self._device.is_reached(self._read[(self._released - 1) % self.chunks])

    def release(self) -> None:
        """Say that all that reads the last piece is on the compute stream; copy the next ones."""
        self._let_go()
        self._fill()

    def _let_go(self) -> None:
        assert self._released + 1 == self._taken, "nothing is taken"
        event = self._read[self._released % self.chunks]
        self._device.record(event, self._device.compute, Fence.RECORD_READ)
        landing = self._landings.pop(self._released % self.chunks, None)
        if landing is not None and self._direct is not None:
            self._direct.release(landing)
        self._released += 1

    def settle(self) -> None:
        """Wait for every copy of the step, then check that no slot it read was given away.

        Raises StaleGeneration: the step is to be done again. DeviceFailed after COPY_SECONDS.
        """
        assert self._released == len(self._pieces), f"{self._released} of {len(self._pieces)}"
        self._finish_copies()
        self._require_valid()

    def abandon(self) -> None:
        """Wait for the copies of a step that is given up. Idempotent."""
        if self._taken > self._released:
            self._let_go()
        self._finish_copies()

    def _finish_copies(self) -> None:
        if self._issued:
            self._device.record(self._settled, self._stream, Fence.RECORD_SETTLED)
            self._device.wait_host(self._settled, COPY_SECONDS, Fence.WAIT_SETTLED)
        self._release_cold()
        for landing in self._landings.values():  # taken from the disk, and attended by nobody
            assert self._direct is not None
            self._direct.release(landing)
        self._landings.clear()
        self._pieces = ()
        self._issued = self._taken = self._released = 0

    # -- copies -------------------------------------------------------------------
    def _fill(self) -> None:
        while self._issued < min(len(self._pieces), self._released + self.chunks):
            piece, chunk = self._pieces[self._issued], self._issued % self.chunks
            self._device.wait(self._stream, self._read[chunk], Fence.WAIT_READ)
            target = self._ring.address + chunk * self.chunk_bytes
            if piece.is_cold:
                self._bring_cold(piece, target, chunk)
            else:
                self._copy_warm(piece, target)
            self._device.record(self._filled[chunk], self._stream, Fence.RECORD_FILLED)
            self._device.record(self.demand, self._stream, Fence.RECORD_DEMAND)
            self._issued += 1
            self.counts.fills += 1

    def _copy_warm(self, piece: Piece, target: int) -> None:
        slot_bytes = piece.layout.slot_bytes
        for run in piece.runs:
            rows = run.rows(target + run.first * slot_bytes, slot_bytes)
            self._device.copy_in_rows(self._stream, rows)
            self.counts.copies += 1
            self.counts.copied_bytes += rows.row_bytes * rows.count

    def _bring_cold(self, piece: Piece, target: int, chunk: int) -> None:
        taken = Elsewhere.READER if self._direct is None else self._direct.take()
        if isinstance(taken, Landing):
            self._landings[chunk] = taken
        else:
            self._copy_cold(piece, target, taken)

    def _copy_cold(self, piece: Piece, target: int, place: Elsewhere) -> None:
        self._release_cold()
        if place is Elsewhere.READER:
            source = int(self._reader.take()[0]) - HEADER_BYTES
        else:
            assert self._direct is not None
            source = self._direct.read_aside()
        self._cold_in_use = place
        size = piece.count * piece.layout.slot_bytes
        self._device.copy_in(self._stream, source, target, size)
        self._device.record(self._cold_copied, self._stream, Fence.RECORD_COLD_COPIED)
        self.counts.copies += 1
        self.counts.copied_bytes += size

    def _release_cold(self) -> None:
        """Let the disk refill host staging, once the unit there has left it."""
        place = self._cold_in_use
        if place is not None:
            self._device.wait_host(self._cold_copied, COPY_SECONDS, Fence.WAIT_COLD_COPIED)
            self._cold_in_use = None
            if place is Elsewhere.READER:
                self._reader.release()

    def prepare(self, layouts: Iterable[PageLayout]) -> None:
        """Put addresses and token counts of these layouts on the device, so that no step does."""
        layouts = set(layouts)
        if self._direct is not None:
            self._direct.prepare(layouts)
        for layout in layouts:
            if layout in self._addresses:
                continue
            per_chunk = self.chunk_bytes // layout.slot_bytes
            slots = np.arange(per_chunk, dtype=np.int64) * layout.slot_bytes + HEADER_BYTES
            device = self._device.torch_device
            self._addresses[layout] = [
                torch.from_numpy(self._ring.address + chunk * self.chunk_bytes + slots).to(device)
                for chunk in range(self.chunks)
            ]
            tokens = torch.full((per_chunk,), layout.block_tokens, dtype=torch.int32)
            self._tokens[layout] = tokens.to(device)

    @property
    def total_bytes(self) -> int:
        """Bytes of the ring."""
        return self._ring.size_bytes

    def close(self) -> None:
        """Give the ring back; a step must have been settled or abandoned, and its readers done."""
        assert not self._pieces, "a step is running"
        self._device.free(self._ring)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the ring's counts add up."""
        issued, taken, released = self._issued, self._taken, self._released
        assert released <= taken <= released + 1, f"{released=} {taken=}"
        assert taken <= issued <= min(released + self.chunks, len(self._pieces)), (
            f"{issued=} {taken=} {released=} pieces={len(self._pieces)}"
        )
