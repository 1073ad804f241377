"""Transfer agent: carries pages between the hot arena and the tiers, on the daemon's orders.

Invariants:
  a hot block is released only after the daemon has published its pages
  a page's digest is taken over the bytes that stand in its slot
  a reservation ends in commit or abort, whatever is raised between; but where a device
    failed, it may still write to the slots, and they are not given back

The daemon decides (which blocks, which slots); the agent encodes and copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tierd.client import Client, Demotion, MappedSlab, SessionHandle
from tierd.codec import digest_pages, encode_pages
from tierd.codec.layout import HEADER_BYTES, PageLayout, page_layout
from tierd.errors import (
    BudgetTooSmall,
    CodecError,
    DaemonUnavailable,
    DeadlineExceeded,
    DeviceFailed,
    StaleGeneration,
    StorageError,
)
from tierd.types import CodecId, Geometry, Tier
from tierd.units import RUN_BYTES
from tierd_engine.arena import HotArena
from tierd_engine.coldwrite import ColdWriter

IntArray = npt.NDArray[np.int64]


# xxh3-128 uint8 [blocks, layers, 16]; the device's uint64 [blocks, layers], if there are any.
Digests = tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint64] | None]


class HotBlocks(Protocol):
    """Where the session keeps its hot blocks."""

    def slot_of(self, block: int) -> int:
        """Return the arena slot of a hot block."""

    def drop(self, block: int) -> None:
        """Forget a hot block and release its slot."""


@dataclass(frozen=True, slots=True)
class EncodedPages:
    """A status a page, uint8; and device digests, uint64, where the encoder makes them."""

    status: npt.NDArray[np.uint8]
    device_digests: npt.NDArray[np.uint64] | None = None


class PageEncoder(Protocol):
    """Who encodes hot pages."""

    def __call__(self, source: IntArray, target: IntArray, layout: PageLayout, /) -> EncodedPages:
        """Encode pages into slots; nothing writes there afterwards."""


def encode_on_host(source: IntArray, target: IntArray, layout: PageLayout) -> EncodedPages:
    """Encode pages with the CPU, as tierd.codec.encode_pages."""
    return EncodedPages(encode_pages(source, target, layout))


class _ColdRefused(Exception):
    """The cold slots of a plan cannot be used after all; its blocks are hot, and need another."""


class TransferAgent:
    """Demotes a session's hot blocks to the warm slots that the daemon reserves.

    With `cold` to cold ones too, where warm is full.
    """

    def __init__(
        self,
        client: Client,
        session: SessionHandle,
        arena: HotArena,
        *,
        encode: PageEncoder = encode_on_host,
        slab_of: Callable[[int], MappedSlab] | None = None,
        cold: ColdWriter | None = None,
    ) -> None:
        self.cold = cold
        self._slab_of = slab_of or client.slab
        self._encode_pages = encode
        self._client = client
        self._session = session
        self._arena = arena
        self._geometry: Geometry = arena.geometry
        self.codecs: Sequence[CodecId] | None = None  # a codec a layer; None: the namespace's
        self.codecs_refused = False
        # Blocks that are best demoted at a time. Those that go to cold together are read together,
        # a layer of them in one I/O of RUN_BYTES; for warm it does not matter.
        self.blocks_together = 1
        self.demoted_blocks = 0
        self.raw_fallback_blocks = 0
        self.encoded_bytes = 0

    def demote(
        self,
        hot: HotBlocks,
        candidates: Sequence[int],
        need_blocks: int,
        *,
        include_first: bool = False,
    ) -> None:
        """Move `need_blocks` of the candidates below the hot tier.

        A block that the session's codec cannot encode (NaN, infinity, out of
        range) goes down as `raw` instead, and is counted. Where warm can never hold
        a block of `codecs`, the namespace's are used from there on. Raises TierFull or
        DaemonUnavailable; blocks not yet published then stay hot.
        """
        remaining = list(candidates)
        moved = 0
        while moved < need_blocks:
            short = need_blocks - moved
            demotion = self._plan(remaining, short, include_first, to_cold=True)
            try:
                self._carry(demotion, hot)
            except CodecError:
                self._carry_as_raw(demotion.blocks, hot, include_first)
            except _ColdRefused:
                continue
            moved += len(demotion.blocks)
            remaining = [block for block in remaining if block not in demotion.blocks]

    def _plan(
        self, blocks: Sequence[int], need_blocks: int, include_first: bool, *, to_cold: bool = False
    ) -> Demotion:
        def ask() -> Demotion:
            return self._session.plan_demotion(
                blocks, need_blocks, codecs=self.codecs, include_first=include_first,
                writes_cold=to_cold and self.cold is not None and self.cold.can_write,
            )  # fmt: skip

        try:
            return ask()
        except BudgetTooSmall:
            if self.codecs is None:
                raise
            self.codecs, self.codecs_refused = None, True
            return ask()

    def _carry_as_raw(self, blocks: Sequence[int], hot: HotBlocks, include_first: bool) -> None:
        for block in blocks:
            demotion = self._plan([block], 1, include_first)
            try:
                self._carry(demotion, hot)
            except CodecError:
                codecs = [CodecId.RAW] * self._geometry.layers
                raw = self._session.plan_demotion(
                    [block], 1, codecs=codecs, include_first=include_first
                )
                self._carry(raw, hot)
                self.raw_fallback_blocks += 1

    def _carry(self, demotion: Demotion, hot: HotBlocks) -> None:
        if demotion.cold:
            self._carry_to_cold(demotion, hot)
            return
        try:
            digests, device_digests = self._encode(demotion, hot)
        except DeviceFailed:
            raise
        except BaseException:
            self._session.abort(demotion)
            raise
        self._session.commit(demotion, digests, device_digests)
        self.blocks_together = 1
        self._drop(demotion, hot)

    def _drop(self, demotion: Demotion, hot: HotBlocks) -> None:
        for block in demotion.blocks:
            hot.drop(block)
        self.demoted_blocks += len(demotion.blocks)

    def _carry_to_cold(self, demotion: Demotion, hot: HotBlocks) -> None:
        """As `_carry`, of cold slots. Raises _ColdRefused where another plan is needed."""
        cold = self.cold
        assert cold is not None, "cold slots were lent unasked"
        source = self._hot_addresses(hot, demotion.blocks)
        try:
            with cold.lent(demotion) as loan:
                written = cold.write(
                    loan, demotion, source, self._encode_pages, self._require_encoded
                )
                self._session.commit(demotion, *written)
                codecs, pages = np.unique(demotion.codec, return_counts=True)
                for codec, count in zip(codecs.tolist(), pages.tolist(), strict=True):
                    layout = page_layout(self._geometry, CodecId(codec))
                    self.encoded_bytes += count * layout.payload_bytes
                usual = page_layout(self._geometry, CodecId(codecs[pages.argmax()]))
                self.blocks_together = -(-RUN_BYTES // usual.slot_bytes)
        except (StorageError, StaleGeneration, DeadlineExceeded) as error:
            cold.failed()
            if self._has_ended(demotion):
                raise _ColdRefused from error
        except (DaemonUnavailable, DeviceFailed):
            raise
        except BaseException:
            self._session.abort(demotion)
            raise
        self._drop(demotion, hot)

    def _has_ended(self, demotion: Demotion) -> bool:
        """Abort a demotion whose commit has failed; say whether nothing of it is published."""
        try:
            self._session.abort(demotion)
        except StaleGeneration:  # the daemon is done with it: the commit's answer may be lost
            table = self._session.table.read(max(demotion.blocks) + 1)
            return not bool((table.tier[:, demotion.blocks] != Tier.NONE).all())
        return True

    def _encode(self, demotion: Demotion, hot: HotBlocks) -> Digests:
        """Encode every page into its slot; return digests [blocks, layers, 16], and the device's.

        Device digests are [blocks, layers], or None where the encoder makes none.
        """
        shape = demotion.codec.shape
        on_device: npt.NDArray[np.uint64] | None = None
        digests = np.zeros((*shape, 16), dtype=np.uint8)
        source = self._hot_addresses(hot, demotion.blocks)
        for codec in map(CodecId, np.unique(demotion.codec).tolist()):
            layout = page_layout(self._geometry, codec)
            here = demotion.codec == codec
            target = self._slot_addresses(demotion, here) + HEADER_BYTES
            status = np.zeros(shape, dtype=np.uint8)
            encoded = self._encode_pages(source[here], target, layout)
            status[here] = encoded.status
            if encoded.device_digests is not None:
                on_device = np.zeros(shape, np.uint64) if on_device is None else on_device
                on_device[here] = encoded.device_digests
            self._require_encoded(status, demotion.blocks, codec)
            digests[here] = digest_pages(target, layout.payload_bytes)
            self.encoded_bytes += len(target) * layout.payload_bytes
        return digests, on_device

    def _hot_addresses(self, hot: HotBlocks, blocks: Sequence[int]) -> IntArray:
        slots = np.array([hot.slot_of(block) for block in blocks], dtype=np.int64)
        layers = np.arange(self._geometry.layers, dtype=np.int64)
        page_bytes = self._arena.layout.payload_bytes
        starts = self._arena.base_address + slots * self._arena.slot_bytes
        return starts[:, None] + layers[None, :] * page_bytes

    def _slot_addresses(self, demotion: Demotion, pages: npt.NDArray[np.bool_]) -> IntArray:
        """Return the addresses of the slots of `pages`, bool [blocks, layers]; int64 [pages]."""
        slab = demotion.slab[pages]
        addresses = np.empty(slab.shape, dtype=np.int64)
        for slab_id in np.unique(slab):
            mapped = self._slab_of(int(slab_id))
            here = slab == slab_id
            slots = demotion.slot[pages][here].astype(np.int64)
            addresses[here] = mapped.address + slots * mapped.slot_bytes
        return addresses

    def _require_encoded(
        self, status: npt.NDArray[np.uint8], blocks: Sequence[int], codec: CodecId
    ) -> None:
        if not status.any():
            return
        row, layer = (int(index[0]) for index in np.nonzero(status))
        cause = {1: "NaN or infinity", 2: "a value out of float16's range"}[int(status[row, layer])]
        raise CodecError(
            f"layer {layer} block {blocks[row]} has {cause}, "
            f"which codec {codec.name.lower()} cannot encode"
        )
