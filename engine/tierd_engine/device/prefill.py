"""Prefill chunks on a device: PyTorch's attention over decoded pages, as gpu/prefill.py has it.

A chunk of many queries is bound by its products, so that decoding each page once into staging
and using tensor cores beats the paged kernel, which decodes it for each tile of queries.

Invariants:
  all of it is launched on the compute stream, in order: the staging needs no fence of its own
  a lent page is asked for nothing more once the next one is asked for
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from tierd.types import Geometry
from tierd_engine.device.kernels import PageKernels
from tierd_engine.device.port import Buffer, Device

if TYPE_CHECKING:
    from tierd_engine.gpu.prefill import PrefillStaging, Run


class DevicePrefill:
    """Attends over a session's chunks. Its staging is made at the first, and kept until `close`."""

    def __init__(self, device: Device, kernels: PageKernels, geometry: Geometry) -> None:
        self._device, self._kernels, self._geometry = device, kernels, geometry
        self._buffer: Buffer | None = None
        self._staging: PrefillStaging | None = None

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
        runs: Iterable[Run], scale: float,
    ) -> torch.Tensor:  # fmt: skip
        """Return o [n, heads, head_dim] in the query's dtype, once `compute` gets there.

        query: [heads, n, head_dim]; keys, values: [kv_heads, n, head_dim], the chunk's own;
        `runs`: what lies before the chunk, each lent until the next is asked for.
        """
        from tierd_engine.gpu.prefill import attend_many

        device, compute = self._device, self._device.compute
        result = attend_many(
            query, keys, values, runs, self._made(), scale,
            launch=lambda kernel: device.launch(compute, kernel),
        )  # fmt: skip
        heads, n, head_dim = query.shape
        with torch.inference_mode(False):  # written to by a kernel that may run outside it
            out = torch.empty((n, heads, head_dim), dtype=query.dtype, device=query.device)
        device.launch(compute, lambda: _transpose(result.o, out))
        return out

    def _made(self) -> PrefillStaging:
        from tierd_engine.gpu.prefill import PrefillStaging, staging_bytes

        if self._staging is None:
            geometry, device = self._geometry, self._device
            self._buffer = device.allocate(staging_bytes(geometry, geometry.dtype))
            self._staging = PrefillStaging(
                geometry, device.torch_device, geometry.dtype,
                memory=self._buffer.tensor, decode=self._kernels.decode,
            )  # fmt: skip
        return self._staging

    @property
    def total_bytes(self) -> int:
        """Bytes of staging on the device: they do not grow with the context."""
        return 0 if self._buffer is None else self._buffer.size_bytes

    def close(self) -> None:
        """Give the staging back; nothing on any stream may use it any more. Idempotent."""
        if self._buffer is not None:
            self._device.free(self._buffer)
            self._buffer = self._staging = None


def _transpose(o: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(o.transpose(0, 1))
