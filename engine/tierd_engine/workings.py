"""Workings of a session: what holds, moves and attends over its pages, on the host or a device.

Invariants:
  on a device each warm slab is added to the pins before any of its bytes is copied
  `close` and `forget_slabs` unpin what was pinned here, before anything is unmapped
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tierd.client import Client, MappedSlab, SessionHandle
from tierd.codec.layout import PageLayout, page_layout
from tierd.disk.header import SlotCheck, SlotHeader
from tierd.memory.pagetable import PageTableView
from tierd.types import CodecId, Geometry
from tierd_engine.agent import TransferAgent
from tierd_engine.arena import HotArena
from tierd_engine.attention.executors import Executors
from tierd_engine.coldread import ColdPage, ColdReader, ColdUnit
from tierd_engine.coldwrite import ColdWriter
from tierd_engine.promotion import Ascent, decode_to_hot
from tierd_engine.staging import StagingRing

if TYPE_CHECKING:
    from tierd_engine.device.direct import DirectCounts
    from tierd_engine.device.encoder import DeviceEncoder
    from tierd_engine.device.executors import DeviceExecutors
    from tierd_engine.device.opening import DeviceRig


class Workings:
    """Arena, reader, executors and agent of one session. `rig` None: all of it on the host.

    `require_valid` raises StaleGeneration if pages read in the running step may have been
    given away. Raises BudgetTooSmall, HotBudgetExceeded, DeviceFailed.
    """

    def __init__(
        self,
        client: Client,
        handle: SessionHandle,
        heads: int,
        hot_budget_bytes: int,
        max_tokens: int,
        require_valid: Callable[[], None],
        rig: DeviceRig | None = None,
    ) -> None:
        geometry = handle.namespace.geometry
        self._client, self._handle, self._rig = client, handle, rig
        self._namespace_digest = handle.namespace.digest()
        self._pinned: set[int] = set()
        self._encoder: DeviceEncoder | None = None
        blocks = geometry.blocks_for(max_tokens)
        self.arena: HotArena
        self.executors: Executors | DeviceExecutors
        if rig is None:
            self.arena = HotArena(geometry, hot_budget_bytes, blocks_max=blocks)
            self.reader = _reader(geometry, cuts_ring=True)
            self.executors = Executors(
                geometry, heads, self.arena, self.reader, self.reader.ring, require_valid
            )
            self.cold_writer = ColdWriter(client, handle)
            self.agent = TransferAgent(client, handle, self.arena, cold=self.cold_writer)
            return
        from tierd_engine.device.arena import DeviceArena
        from tierd_engine.device.coldstaging import PinnedStaging
        from tierd_engine.device.directwrite import DirectWrites
        from tierd_engine.device.encoder import DeviceEncoder
        from tierd_engine.device.executors import DeviceExecutors

        device, kernels = rig.device, rig.kernels
        arena = DeviceArena(device, geometry, hot_budget_bytes, blocks_max=blocks)
        self.arena, self.reader = arena, _reader(geometry, cuts_ring=False)
        try:
            executors = DeviceExecutors(
                device, kernels, geometry, heads, arena, self.reader, rig.pins, require_valid,
                rig.rates, path_for=None if rig.paths is None else rig.paths.path_for,
            )  # fmt: skip
            self._encoder = DeviceEncoder(
                device, kernels, arena, executors.stager.demand, digests=rig.paths is not None
            )
            ring = self.reader.ring
            self._pin(ring.base_address, ring.total_bytes, ring.chunk_bytes)
        except BaseException:
            self.reader.close()  # the device's memory goes with the rig
            raise
        self.executors = executors
        direct: DirectWrites | None = None
        if rig.paths is not None and executors.direct is not None:
            direct = DirectWrites(device, self._encoder, rig.paths, executors.direct.wait_for_reads)
        self.cold_writer = ColdWriter(
            client, handle, staging=lambda size_bytes: PinnedStaging(device, size_bytes),
            direct=direct,
        )  # fmt: skip
        self.agent = TransferAgent(
            client, handle, arena, encode=self._encoder.encode, slab_of=self.slab,
            cold=self.cold_writer,
        )  # fmt: skip
        client.unmapping.append(self.forget_slabs)

    def schedule_cold(self, units: Sequence[ColdUnit]) -> None:
        """Read these cold units, step after step, from now on. Outside a step's work."""
        if isinstance(self.executors, Executors):
            self.reader.set_schedule(units)
        else:
            self.executors.schedule_cold(units)

    def promote(self, ascents: Sequence[Ascent]) -> None:
        """Copy and decode warm pages to hot ones. Inside the epoch, between steps.

        Once this returns no warm slot is read any more, and who attends next sees whole pages.
        Raises StaleGeneration, DeviceFailed.
        """
        if isinstance(self.executors, Executors):
            for ascent in ascents:
                decode_to_hot(ascent.run.addresses, ascent.targets, ascent.run.layout)
        else:
            self.executors.promote(ascents)

    def cold_page(
        self, table: PageTableView, layer: int, block: int, layout: PageLayout
    ) -> ColdPage:
        """Return where a cold page stands, and what its slot's header must say."""
        slab, slot = int(table.slab[layer, block]), int(table.slot[layer, block])
        expected = SlotHeader(
            store_uuid=self._handle.store_uuid,
            slab=slab,
            slot=slot,
            generation=int(table.generation[layer, block]),
            codec=layout.codec,
            dtype=layout.dtype,
            session=self._handle.number,
            layer=layer,
            block=block,
            namespace_digest=self._namespace_digest,
            logical_bytes=self.arena.geometry.page_bytes,
            stored_bytes=layout.payload_bytes,
            payload_digest=b"",  # the header's own; the daemon's index knows it, we need not
        )
        return ColdPage(
            layer, block, self._client.slab(slab).fd, slot * layout.slot_bytes,
            SlotCheck(expected), expected.generation,
        )  # fmt: skip

    def slab(self, slab_id: int) -> MappedSlab:
        """Return a slab, pinned where that is of use. As Client.slab."""
        slab = self._client.slab(slab_id)
        if self._rig is not None and slab.address:
            self._pin(slab.address, slab.slot_bytes * slab.slots, slab.slot_bytes)
        return slab

    def _pin(self, address: int, size_bytes: int, slot_bytes: int) -> None:
        if self._rig is not None and address not in self._pinned:
            self._rig.pins.add(address, size_bytes, slot_bytes)
            self._pinned.add(address)

    def forget_slabs(self) -> None:
        """Unpin every slab, because it is unmapped next. No step may be running."""
        if self._rig is None:
            return
        ring = self.reader.ring.base_address
        for address in self._pinned - {ring}:
            self._rig.pins.remove(address)
        self._pinned &= {ring}

    @property
    def cold_pages_verified(self) -> int:
        """Cold pages read and checked so far, by the CPU or on the device."""
        return self.reader.pages_read + (self._direct.pages if self._direct else 0)

    @property
    def cold_bytes_read(self) -> int:
        """Bytes of them, headers too."""
        return self.reader.bytes_read + (self._direct.bytes if self._direct else 0)

    @property
    def _direct(self) -> DirectCounts | None:
        direct = None if isinstance(self.executors, Executors) else self.executors.direct
        return None if direct is None else direct.counts

    @property
    def encoder_bytes(self) -> int:
        """Bytes of the encoder's staging on the device, and of slots that a disk takes there."""
        own = 0 if self._encoder is None else self._encoder.total_bytes
        return own + self.cold_writer.device_bytes

    def figures(self) -> dict[str, Any] | None:
        """Return the report's section on the device; None on the host."""
        if self._rig is None:
            return None
        from tierd_engine.device.executors import DeviceExecutors

        assert isinstance(self.executors, DeviceExecutors)
        pins, stager, near = (
            self._rig.pins.figures(), self.executors.stager.counts, self.executors.near.counts
        )  # fmt: skip
        return {
            "name": self._rig.device.name,
            "pinned_bytes": pins.pinned_bytes,
            "pageable_bytes": pins.pageable_bytes,
            "pageable_reason": pins.reason,
            "streamed_bytes": stager.copied_bytes,
            "copies": stager.copies,
            "near_bytes": near.bytes,
            "near_share": self.executors.rates.share,
            "cold_paths": [] if self._rig.paths is None else self._rig.paths.figures(),
            "direct": None if self.executors.direct is None else self.executors.direct.figures(),
            "direct_writes": self.cold_writer.figures()["direct"],
        }

    def close(self) -> None:
        """Stop reading, and give the device's memory back. Gives a running step up. Idempotent."""
        self.cold_writer.close()
        if self._encoder is not None and self._rig is not None:
            self.executors.close()
            self._encoder.close()
            self.arena.close()
            self._encoder = None
            self.reader.close()
            self._client.unmapping.remove(self.forget_slabs)
            self.forget_slabs()
            self._rig.pins.remove(self.reader.ring.base_address)
            self._pinned.clear()
            return
        self.reader.close()

    def check_integrity(self) -> None:
        """Raise AssertionError unless every part is whole."""
        self.arena.check_integrity()
        self.reader.check_integrity()
        self.cold_writer.check_integrity()
        self.executors.check_integrity()
        if self._rig is not None:
            self._rig.pins.check_integrity()
            self._rig.device.check_integrity()


def _reader(geometry: Geometry, *, cuts_ring: bool) -> ColdReader:
    ring = StagingRing(page_layout(geometry, CodecId.RAW).slot_bytes)
    return ColdReader(ring, cuts_ring=cuts_ring)
