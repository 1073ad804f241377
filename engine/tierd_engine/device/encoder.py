"""The encoder on a device: hot pages in VRAM become encoded bytes in warm slots, or in VRAM.

Invariants:
  the copy-out stream and the staging are this object's; who has encoded into slots in VRAM puts
    their headers there on the same stream
  a page is read only after the event of the kernel that wrote it
  when `encode` has returned, or was interrupted, nothing writes to the slots any more
  a round's copies go after the copies that a running step waits for

Encoding runs on the copy-out stream itself: it takes a hundredth of the copy's time, and the
stream's order is then the only fence between a round's kernel, its copies and the next round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tierd.codec import encode_pages
from tierd.codec.devicedigest import device_digests
from tierd.codec.layout import PageLayout
from tierd.errors import DeviceFailed
from tierd.types import CodecId
from tierd.units import CACHE_LINE_BYTES, MIB, round_up
from tierd_engine.agent import EncodedPages
from tierd_engine.attention.plan import IntArray
from tierd_engine.device.arena import DeviceArena
from tierd_engine.device.fences import Fence
from tierd_engine.device.kernels import PageKernels
from tierd_engine.device.port import Device, Event

OUT_STAGING_BYTES = 16 * MIB
ROUND_PAGES_MAX = 1024
# A round is 16 MiB, behind at most four chunks of demand: 0.8 s at 64 MiB/s, the slowest link.
ROUND_SECONDS = 10.0
_WORD_BYTES = 44  # of a page: five of 8 and one of 4
_RESULTS = ROUND_PAGES_MAX * 16  # where device digests begin; xxh3 and statuses follow them
_STATUSES = ROUND_PAGES_MAX * 40


@dataclass(frozen=True, slots=True)
class PlacedPages:
    """What is known of pages that were encoded into VRAM, one row each.

    `status`: uint8, as of tierd.codec.encode_pages. `digests`: xxh3-128, uint8 [pages, 16].
    `device_digests`: uint64, or None where none are made.
    """

    status: npt.NDArray[np.uint8]
    digests: npt.NDArray[np.uint8]
    device_digests: npt.NDArray[np.uint64] | None


class DeviceEncoder:
    """Encodes hot pages of one arena into mapped slots. Used by one thread.

    `demand`: the event after which the copies go that a step waits for. `digests`: whether
    each page's device digest is made beside it, for readers whose GPU checks what it reads.
    """

    def __init__(
        self,
        device: Device,
        kernels: PageKernels,
        arena: DeviceArena,
        demand: Event,
        *,
        staging_bytes: int = OUT_STAGING_BYTES,
        digests: bool = False,
    ) -> None:
        self._device, self._kernels, self._arena, self._demand = device, kernels, arena, demand
        self._digests = digests
        page_bytes = arena.layout.payload_bytes
        self._staging = device.allocate(max(staging_bytes, page_bytes))
        self._raw: torch.Tensor | None = None
        self._host_staging = device.allocate_host(max(staging_bytes, page_bytes))
        # Source and target addresses, device digests, xxh3 in two words, then statuses, int32:
        # of one round.
        self._host_words = device.allocate_host(ROUND_PAGES_MAX * _WORD_BYTES)
        self._words = device.allocate(ROUND_PAGES_MAX * _WORD_BYTES)
        self.stream = device.new_stream("copy out")
        self._copied_out = device.new_event("the round's pages in RAM")
        self.rounds = 0

    def encode(self, source: IntArray, target: IntArray, layout: PageLayout) -> EncodedPages:
        """Encode hot pages at device addresses into slots at host addresses; a status each.

        As tierd.codec.encode_pages: 0 encoded, 1 NaN or infinity, 2 beyond float16's range.
        Raises DeviceFailed: then slots may still be written to, and must not be given back.
        """
        status = np.zeros(len(source), np.uint8)
        digests = np.zeros(len(source), np.uint64) if self._digests else None
        per_page = round_up(max(layout.payload_bytes, self._page_bytes), CACHE_LINE_BYTES)
        pages_max = min(self._staging.size_bytes // per_page, ROUND_PAGES_MAX) or 1
        for start in range(0, len(source), pages_max):
            part = slice(start, start + pages_max)
            status[part] = self._ended(self._round, source[part], target[part], layout)
            if digests is not None:
                digests[part] = self._host_digests(len(source[part]))
        return EncodedPages(status, digests)

    def can_place(self, layout: PageLayout) -> bool:
        """Return whether `place` takes this codec."""
        return layout.codec is CodecId.RAW or self._kernels.can_encode(layout.codec)

    def place(self, source: IntArray, target: IntArray, layout: PageLayout) -> PlacedPages:
        """Encode hot pages to device addresses `target`, int64 [pages], 64-byte aligned.

        What the CPU has to know of the bytes is in RAM then; they themselves are not. Raises
        DeviceFailed.
        """
        assert self.can_place(layout)
        status = np.zeros(len(source), np.uint8)
        digests = np.zeros((len(source), 16), np.uint8)
        on_device = np.zeros(len(source), np.uint64) if self._digests else None
        for start in range(0, len(source), ROUND_PAGES_MAX):
            part = slice(start, start + ROUND_PAGES_MAX)
            status[part] = self._ended(self._place_round, source[part], target[part], layout)
            pages = len(source[part])
            halves = self._host_words.tensor.view(torch.int64)[3 * ROUND_PAGES_MAX :][: 2 * pages]
            digests[part] = halves.numpy().astype(">i8").view(np.uint8).reshape(pages, 16)
            if on_device is not None:
                on_device[part] = self._host_digests(pages)
        return PlacedPages(status, digests, on_device)

    def _ended(
        self, work: Callable[..., npt.NDArray[np.uint8]], *arguments: IntArray | PageLayout
    ) -> npt.NDArray[np.uint8]:
        """Do a round; if it is interrupted, let what it left under way end."""
        try:
            return work(*arguments)
        except DeviceFailed:
            raise
        except BaseException:
            self._end_round()
            raise

    def _end_round(self) -> None:
        """Wait for what an interruption left under way: the slots are given back next."""
        self._device.record(self._copied_out, self.stream, Fence.RECORD_OUT_ENDED)
        self._device.wait_host(self._copied_out, ROUND_SECONDS, Fence.WAIT_OUT_ENDED)

    @property
    def _page_bytes(self) -> int:
        return self._arena.layout.payload_bytes

    def _round(
        self, source: IntArray, target: IntArray, layout: PageLayout
    ) -> npt.NDArray[np.uint8]:
        self._begin_round()
        pages = len(source)
        on_device = layout.codec is not CodecId.RAW and self._kernels.can_encode(layout.codec)
        on_host = layout.codec is not CodecId.RAW and not on_device
        step = round_up(layout.payload_bytes, CACHE_LINE_BYTES)
        staged = self._staging.address + step * _numbers(source)
        if on_device or self._digests:
            self._put_words(source, staged)
        if on_device:
            self._launch_encode(pages, layout)
            self._copy_out(staged, target, layout)
        elif on_host:
            into = self._host_staging.address + self._page_bytes * _numbers(source)
            self._copy_out(source, into, self._arena.layout)
        else:
            self._copy_out(source, target, layout)
        if self._digests and not on_host:
            self._launch_digest(1 if on_device else 0, pages, layout)
        if on_device or self._digests:
            self._copy_results()
        self._wait_round()
        if on_host:
            status = encode_pages(into, target, layout)
            if self._digests:
                self._host_digests(pages)[:] = device_digests(target, layout.payload_bytes)
            return status
        return self._status(pages) if on_device else np.zeros(pages, np.uint8)

    def _place_round(
        self, source: IntArray, target: IntArray, layout: PageLayout
    ) -> npt.NDArray[np.uint8]:
        self._begin_round()
        pages = len(source)
        self._put_words(source, target)
        self._launch_encode(pages, layout)
        if self._digests:
            self._launch_digest(1, pages, layout)
        addresses = self._addresses(1, pages)
        out = self._words.tensor.view(torch.int64)[3 * ROUND_PAGES_MAX :][: 2 * pages].view(-1, 2)
        self._device.launch(
            self.stream, lambda: self._kernels.xxh3(addresses, layout.payload_bytes, out)
        )
        self._copy_results()
        self._wait_round()
        return self._status(pages)

    def _begin_round(self) -> None:
        self._device.wait(self.stream, self._arena.written, Fence.WAIT_WRITTEN)
        self._device.wait(self.stream, self._demand, Fence.WAIT_DEMAND)

    def _wait_round(self) -> None:
        self._device.record(self._copied_out, self.stream, Fence.RECORD_COPIED_OUT)
        self._device.wait_host(self._copied_out, ROUND_SECONDS, Fence.WAIT_COPIED_OUT)
        self.rounds += 1

    def _put_words(self, source: IntArray, staged: IntArray) -> None:
        """Put the round's addresses on the stream, before its kernels."""
        words = self._host_words.tensor.view(torch.int64).numpy()
        words[: len(source)] = source
        words[ROUND_PAGES_MAX : ROUND_PAGES_MAX + len(source)] = staged
        self._device.copy_in(self.stream, self._host_words.address, self._words.address, _RESULTS)

    def _addresses(self, row: int, pages: int) -> torch.Tensor:
        """Return the round's addresses on the device: row 0 of hot pages, 1 of staged ones."""
        return self._words.tensor.view(torch.int64)[row * ROUND_PAGES_MAX :][:pages]

    def _launch_encode(self, pages: int, layout: PageLayout) -> None:
        sources, targets = self._addresses(0, pages), self._addresses(1, pages)
        status = self._words.tensor[_STATUSES:].view(torch.int32)[:pages]
        self._device.launch(
            self.stream, lambda: self._kernels.encode(sources, targets, layout, status)
        )

    def _launch_digest(self, row: int, pages: int, layout: PageLayout) -> None:
        addresses = self._addresses(row, pages)
        out = self._addresses(2, pages)
        self._device.launch(
            self.stream, lambda: self._kernels.digest(addresses, layout.payload_bytes, out)
        )

    def _copy_out(self, source: IntArray, target: IntArray, layout: PageLayout) -> None:
        for begin, end in zip(source.tolist(), target.tolist(), strict=True):
            self._device.copy_out(self.stream, begin, end, layout.payload_bytes)

    def _copy_results(self) -> None:
        size = ROUND_PAGES_MAX * _WORD_BYTES - _RESULTS
        words, host = self._words.address, self._host_words.address
        self._device.copy_out(self.stream, words + _RESULTS, host + _RESULTS, size)

    def _host_digests(self, pages: int) -> npt.NDArray[np.uint64]:
        digests = self._host_words.tensor.view(torch.int64)[2 * ROUND_PAGES_MAX :][:pages]
        return digests.numpy().view(np.uint64)

    def _status(self, pages: int) -> npt.NDArray[np.uint8]:
        words = self._host_words.tensor[_STATUSES:].view(torch.int32)
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
        size = ROUND_PAGES_MAX * _WORD_BYTES
        assert self._words.size_bytes == self._host_words.size_bytes == size


def _numbers(array: IntArray) -> IntArray:
    return np.arange(len(array), dtype=np.int64)
