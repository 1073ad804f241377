"""The near executor on a GPU host: q comes down, the CPU attends in RAM, (o, lse) goes up.

Invariants:
  one question is open at a time: `ask`, then `answer`, or the next `ask` after a failure
  the near stream and its buffers are this object's alone
  the host reads q after the event of its copy; compute reads the partial after that of its

While the CPU works, the GPU attends over hot and streamed pages: their kernels are on the
compute stream before the host waits for q. No buffer is used twice at once: the next
layer's q is made from this layer's merge, which waited for the partial.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tierd.types import Geometry
from tierd_engine.arena import TORCH_DTYPES
from tierd_engine.attention.cpu import attend_pages, merge_partials
from tierd_engine.attention.plan import PageRun
from tierd_engine.device.fences import Fence
from tierd_engine.device.parts import Part
from tierd_engine.device.port import Device

QUERIES_MAX = 16  # the CPU's fused kernel takes no more
# q is behind one layer's kernels and streamed pieces: as long as a step's copies, stager.py.
QUERY_SECONDS = 10.0


@dataclass(slots=True)
class NearCounts:
    """What the CPU attended over, and how long it computed."""

    pages: int = 0
    bytes: int = 0
    seconds: float = 0.0


class NearLink:
    """Questions to the CPU, `QUERIES_MAX` queries at most. Used by one thread."""

    def __init__(self, device: Device, geometry: Geometry, heads: int) -> None:
        self._device = device
        self._dtype = TORCH_DTYPES[geometry.dtype]
        self._shape = (heads, geometry.head_dim)
        rows = QUERIES_MAX * heads
        self._q = device.allocate(rows * geometry.head_dim * geometry.dtype.itemsize)
        self._q_host = device.allocate_host(self._q.size_bytes)
        self._partial = device.allocate(rows * (geometry.head_dim + 1) * 4)
        self._partial_host = device.allocate_host(self._partial.size_bytes)
        self._stream = device.new_stream("near", urgent=True)
        self._query = device.new_event("q of the layer")
        self._query_down = device.new_event("q in RAM")
        self._partial_up = device.new_event("the CPU's partial in VRAM")
        self.counts = NearCounts()

    def ask(self, q: torch.Tensor) -> None:
        """Send q down: [n, heads, head_dim] in the model's dtype, on the device. Does not wait."""
        assert q.dtype == self._dtype and q.shape[1:] == self._shape and len(q) <= QUERIES_MAX
        device, size = self._device, q.numel() * q.element_size()
        kept = self._q.tensor[:size].view(self._dtype).view(q.shape)
        device.launch(device.compute, lambda: _copy(kept, q))
        device.record(self._query, device.compute, Fence.RECORD_QUERY)
        device.wait(self._stream, self._query, Fence.WAIT_QUERY)
        device.copy_out(self._stream, self._q.address, self._q_host.address, size)
        device.record(self._query_down, self._stream, Fence.RECORD_QUERY_DOWN)

    def answer(self, n: int, runs: Sequence[PageRun], scale: float, part: Part) -> None:
        """Attend over `runs` here, and put the one partial of all of them into `part` [1, ...].

        Waits for q, not for the rest of the device. Raises DeviceFailed.
        """
        device, (heads, head_dim) = self._device, self._shape
        device.wait_host(self._query_down, QUERY_SECONDS, Fence.WAIT_QUERY_DOWN)
        q_elements = n * heads * head_dim
        q = self._q_host.tensor.view(self._dtype)[:q_elements].float().view(n, heads, head_dim)
        floats = self._partial_host.tensor.view(torch.float32)
        used = q_elements + n * heads
        o = floats[:q_elements].view(n, heads, head_dim)
        lse = floats[q_elements:used].view(n, heads)
        self._attend(q, runs, scale, o, lse)
        device.copy_in(self._stream, self._partial_host.address, self._partial.address, used * 4)
        device.record(self._partial_up, self._stream, Fence.RECORD_PARTIAL_UP)
        device.wait(device.compute, self._partial_up, Fence.WAIT_PARTIAL_UP)
        up = self._partial.tensor.view(torch.float32)
        up_o, up_lse = up[:q_elements].view(o.shape), up[q_elements:used].view(lse.shape)

        def kernel() -> None:
            part.o[0].copy_(up_o)
            part.lse[0].copy_(up_lse)

        device.launch(device.compute, kernel)

    def _attend(
        self, q: torch.Tensor, runs: Sequence[PageRun], scale: float, o: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:  # fmt: skip
        began = time.perf_counter()
        pages = sum(len(run.addresses) for run in runs)
        page_o = np.empty((pages, *q.shape), np.float32)
        page_lse = np.empty((pages, *q.shape[:2]), np.float32)
        done, queries = 0, q.numpy()
        for run in runs:
            part = slice(done, done + len(run.addresses))
            attend_pages(
                queries, run.addresses, run.tokens, run.layout, scale, page_o[part], page_lse[part]
            )
            done = part.stop
            self.counts.bytes += len(run.addresses) * run.layout.payload_bytes
        merge_partials(page_o, page_lse, o.numpy(), lse.numpy())
        self.counts.pages += pages
        self.counts.seconds += time.perf_counter() - began

    @property
    def total_bytes(self) -> int:
        """Bytes on the device."""
        return self._q.size_bytes + self._partial.size_bytes

    def close(self) -> None:
        """Give the buffers back, once what is on the near stream has run."""
        ended = self._device.new_event("all that is on the near stream")
        self._device.record(ended, self._stream, Fence.RECORD_NEAR_ENDED)
        self._device.wait_host(ended, QUERY_SECONDS, Fence.WAIT_NEAR_ENDED)
        for buffer in (self._q, self._q_host, self._partial, self._partial_host):
            self._device.free(buffer)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)
