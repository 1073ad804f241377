"""The encoder on a device: hot pages in VRAM become encoded bytes in warm slots.

Invariants:
  the copy-out stream and the staging are this object's alone
  a page is read only after the event of the kernel that wrote it
  when `encode` has returned, or was interrupted, nothing writes to the slots any more
  a round's copies go after the copies that a running step waits for

Encoding runs on the copy-out stream itself: it takes a hundredth of the copy's time, and the
stream's order is then the only fence between a round's kernel, its copies and the next round.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from tierd.codec import encode_pages
from tierd.codec.layout import PageLayout
from tierd.errors import DeviceFailed
from tierd.types import CodecId
from tierd.units import CACHE_LINE_BYTES, MIB, round_up
from tierd_engine.attention.plan import IntArray
from tierd_engine.device.arena import DeviceArena
from tierd_engine.device.fences import Fence
from tierd_engine.device.kernels import PageKernels
from tierd_engine.device.port import Device, Event

OUT_STAGING_BYTES = 16 * MIB
ROUND_PAGES_MAX = 1024
# A round is 16 MiB, behind at most four chunks of demand: 0.8 s at 64 MiB/s, the slowest link.
ROUND_SECONDS = 10.0


class DeviceEncoder:
    """Encodes hot pages of one arena into mapped slots. Used by one thread.

    `demand`: the event after which the copies go that a step waits for.
    """

    def __init__(
        self,
        device: Device,
        kernels: PageKernels,
        arena: DeviceArena,
        demand: Event,
        *,
        staging_bytes: int = OUT_STAGING_BYTES,
    ) -> None:
        self._device, self._kernels, self._arena, self._demand = device, kernels, arena, demand
        page_bytes = arena.layout.payload_bytes
        self._staging = device.allocate(max(staging_bytes, page_bytes))
        self._raw: torch.Tensor | None = None
        self._host_staging = device.allocate_host(max(staging_bytes, page_bytes))
        # Source and target addresses, int64, then statuses, int32: of one round.
        self._host_words = device.allocate_host(ROUND_PAGES_MAX * 20)
        self._words = device.allocate(ROUND_PAGES_MAX * 20)
        self._stream = device.new_stream("copy out")
        self._copied_out = device.new_event("the round's pages in RAM")
        self.rounds = 0

    def encode(
        self, source: IntArray, target: IntArray, layout: PageLayout
    ) -> npt.NDArray[np.uint8]:
        """Encode hot pages at device addresses into slots at host addresses; a status each.

        As tierd.codec.encode_pages: 0 encoded, 1 NaN or infinity, 2 beyond float16's range.
        Raises DeviceFailed: then slots may still be written to, and must not be given back.
        """
        status = np.zeros(len(source), np.uint8)
        per_page = round_up(max(layout.payload_bytes, self._page_bytes), CACHE_LINE_BYTES)
        pages_max = min(self._staging.size_bytes // per_page, ROUND_PAGES_MAX) or 1
        for start in range(0, len(source), pages_max):
            part = slice(start, start + pages_max)
            try:
                status[part] = self._round(source[part], target[part], layout)
            except DeviceFailed:
                raise
            except BaseException:
                self._end_round()
                raise
        return status

    def _end_round(self) -> None:
        """Wait for what an interruption left under way: the slots are given back next."""
        self._device.record(self._copied_out, self._stream, Fence.RECORD_OUT_ENDED)
        self._device.wait_host(self._copied_out, ROUND_SECONDS, Fence.WAIT_OUT_ENDED)

    @property
    def _page_bytes(self) -> int:
        return self._arena.layout.payload_bytes

    def _round(
        self, source: IntArray, target: IntArray, layout: PageLayout
    ) -> npt.NDArray[np.uint8]:
        device, stream = self._device, self._stream
        device.wait(stream, self._arena.written, Fence.WAIT_WRITTEN)
        device.wait(stream, self._demand, Fence.WAIT_DEMAND)
        on_device = layout.codec is not CodecId.RAW and self._kernels.can_encode(layout.codec)
        on_host = layout.codec is not CodecId.RAW and not on_device
        if on_device:
            self._launch(source, layout)
            step = round_up(layout.payload_bytes, CACHE_LINE_BYTES)
            self._copy_out(self._staging.address + step * _numbers(source), target, layout)
            self._copy_status(len(source))
        elif on_host:
            into = self._host_staging.address + self._page_bytes * _numbers(source)
            self._copy_out(source, into, self._arena.layout)
        else:
            self._copy_out(source, target, layout)
        device.record(self._copied_out, stream, Fence.RECORD_COPIED_OUT)
        device.wait_host(self._copied_out, ROUND_SECONDS, Fence.WAIT_COPIED_OUT)
        self.rounds += 1
        if on_host:
            return encode_pages(into, target, layout)
        return self._status(len(source)) if on_device else np.zeros(len(source), np.uint8)

    def _launch(self, source: IntArray, layout: PageLayout) -> None:
        """Put the encode kernel on the stream, its addresses before it."""
        pages = len(source)
        step = round_up(layout.payload_bytes, CACHE_LINE_BYTES)
        words = self._host_words.tensor.view(torch.int64).numpy()
        words[:pages] = source
        words[ROUND_PAGES_MAX : ROUND_PAGES_MAX + pages] = self._staging.address + step * _numbers(
            source
        )
        size = ROUND_PAGES_MAX * 16
        self._device.copy_in(self._stream, self._host_words.address, self._words.address, size)
        on_device = self._words.tensor[:size].view(torch.int64)
        sources, targets = on_device[:pages], on_device[ROUND_PAGES_MAX : ROUND_PAGES_MAX + pages]
        status = self._words.tensor[size:].view(torch.int32)[:pages]
        self._device.launch(
            self._stream, lambda: self._kernels.encode(sources, targets, layout, status)
        )

    def _copy_out(self, source: IntArray, target: IntArray, layout: PageLayout) -> None:
        for begin, end in zip(source.tolist(), target.tolist(), strict=True):
            self._device.copy_out(self._stream, begin, end, layout.payload_bytes)

    def _copy_status(self, pages: int) -> None:
        offset = ROUND_PAGES_MAX * 16
        self._device.copy_out(
            self._stream, self._words.address + offset, self._host_words.address + offset, pages * 4
        )

    def _status(self, pages: int) -> npt.NDArray[np.uint8]:
        words = self._host_words.tensor[ROUND_PAGES_MAX * 16 :].view(torch.int32)
        return words[:pages].numpy().astype(np.uint8)

    @property
    def total_bytes(self) -> int:
        """Bytes of staging on the device."""
        return self._staging.size_bytes + self._words.size_bytes

    def close(self) -> None:
        """Give the staging back."""
        for buffer in (self._staging, self._host_staging, self._host_words, self._words):
            self._device.free(buffer)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the words hold a round."""
        assert self._words.size_bytes == self._host_words.size_bytes == ROUND_PAGES_MAX * 20


def _numbers(array: IntArray) -> IntArray:
    return np.arange(len(array), dtype=np.int64)
