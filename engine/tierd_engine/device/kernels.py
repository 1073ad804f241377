"""The kernels that the device's executors launch: Triton's on a GPU, the CPU's on the fake.

All arguments are tensors on the device, absolute addresses among them. Shapes and dtypes are
those of tierd_engine.gpu: attend_pages, merge_partials and encode_pages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from tierd.codec.layout import PageLayout
from tierd.types import CodecId

if TYPE_CHECKING:
    from tierd_engine.gpu.prefill import PrefillStaging


class PageKernels(Protocol):
    """Called inside `Device.launch` only. Nothing here waits."""

    def attend(
        self, q: torch.Tensor, addresses: torch.Tensor, tokens: torch.Tensor, layout: PageLayout,
        scale: float, o: torch.Tensor, lse: torch.Tensor, firsts: torch.Tensor | None,
        positions: torch.Tensor | None, pages_each: int,
    ) -> None:  # fmt: skip
        """Write a partial for each run of `pages_each` pages to o and lse."""

    def merge(
        self, o: torch.Tensor, lse: torch.Tensor, out: torch.Tensor, out_lse: torch.Tensor
    ) -> None:
        """Merge partials in index order."""

    def can_encode(self, codec: CodecId) -> bool:
        """Return whether `encode` takes pages of this codec."""

    def encode(
        self, source: torch.Tensor, target: torch.Tensor, layout: PageLayout, status: torch.Tensor
    ) -> None:
        """Encode hot pages; write a status each, int32 [pages], 0 where it went well."""

    def digest(self, addresses: torch.Tensor, size_bytes: int, out: torch.Tensor) -> None:
        """Write device digests of payloads, int64 [pages] with uint64's bits."""

    def xxh3(self, addresses: torch.Tensor, size_bytes: int, out: torch.Tensor) -> None:
        """Write xxh3-128 digests of payloads, int64 [pages, 2] with the bits, high half first."""

    def decode(
        self, layout: PageLayout, addresses: torch.Tensor, staging: PrefillStaging, start: int
    ) -> None:
        """Decode whole pages to a staging's tokens `start` on, one after the other."""

    def decode_hot(self, source: torch.Tensor, target: torch.Tensor, layout: PageLayout) -> None:
        """Decode whole pages to hot ones at `target`, in the model's dtype; raw bit for bit."""


class TritonKernels:
    """The GPU's kernels."""

    # What gpu.encoding has kernels for; pages of another codec would be encoded by the CPU.
    _ENCODED = frozenset({CodecId.INT8, CodecId.K8V4, CodecId.INT4, CodecId.FP8})

    def attend(
        self, q: torch.Tensor, addresses: torch.Tensor, tokens: torch.Tensor, layout: PageLayout,
        scale: float, o: torch.Tensor, lse: torch.Tensor, firsts: torch.Tensor | None,
        positions: torch.Tensor | None, pages_each: int,
    ) -> None:  # fmt: skip
        """See PageKernels."""
        from tierd_engine.gpu.attending import attend_pages

        attend_pages(
            q, addresses, tokens, layout, scale, o, lse, firsts, positions, pages_each=pages_each
        )

    def merge(
        self, o: torch.Tensor, lse: torch.Tensor, out: torch.Tensor, out_lse: torch.Tensor
    ) -> None:
        """See PageKernels."""
        from tierd_engine.gpu.merging import merge_partials

        merge_partials(o, lse, out, out_lse)

    def can_encode(self, codec: CodecId) -> bool:
        """See PageKernels."""
        return codec in self._ENCODED

    def encode(
        self, source: torch.Tensor, target: torch.Tensor, layout: PageLayout, status: torch.Tensor
    ) -> None:
        """See PageKernels."""
        from tierd_engine.gpu.encoding import encode_pages

        status.copy_(encode_pages(source, target, layout))

    def digest(self, addresses: torch.Tensor, size_bytes: int, out: torch.Tensor) -> None:
        """See PageKernels."""
        from tierd_engine.gpu.digesting import digest_pages

        out.copy_(digest_pages(addresses, size_bytes))

    def xxh3(self, addresses: torch.Tensor, size_bytes: int, out: torch.Tensor) -> None:
        """See PageKernels."""
        from tierd_engine.gpu.xxhashing import xxh3_pages

        xxh3_pages(addresses, size_bytes, out)

    def decode(
        self, layout: PageLayout, addresses: torch.Tensor, staging: PrefillStaging, start: int
    ) -> None:
        """See PageKernels."""
        from tierd_engine.gpu.prefill import decode_on_gpu

        decode_on_gpu(layout, addresses, staging, start)

    def decode_hot(self, source: torch.Tensor, target: torch.Tensor, layout: PageLayout) -> None:
        """See PageKernels."""
        from tierd.codec.reference import raw_layout
        from tierd_engine.gpu.decoding import decode_pages

        hot = raw_layout(layout)
        keys, values = target + hot.keys, target + hot.values
        decode_pages(source, keys, values, hot.head_bytes, layout, layout.dtype)


class HostKernels:
    """The CPU's kernels, for a device whose memory is the host's. `encoded`: for `can_encode`."""

    def __init__(self, encoded: frozenset[CodecId] = frozenset(CodecId)) -> None:
        self._encoded = encoded

    def attend(
        self, q: torch.Tensor, addresses: torch.Tensor, tokens: torch.Tensor, layout: PageLayout,
        scale: float, o: torch.Tensor, lse: torch.Tensor, firsts: torch.Tensor | None,
        positions: torch.Tensor | None, pages_each: int,
    ) -> None:  # fmt: skip
        """See PageKernels."""
        from tierd_engine.attention.cpu import attend_pages, merge_partials

        pages, (n, heads, head_dim) = len(addresses), q.shape
        page_o = np.empty((pages, n, heads, head_dim), np.float32)
        page_lse = np.empty((pages, n, heads), np.float32)
        wide = q.float().contiguous().numpy()
        for start in range(0, n, _QUERIES_AT_ONCE):
            part = slice(start, min(start + _QUERIES_AT_ONCE, n))
            part_o = np.ascontiguousarray(page_o[:, part])
            part_lse = np.ascontiguousarray(page_lse[:, part])
            attend_pages(
                np.ascontiguousarray(wide[part]), addresses.numpy(), tokens.numpy(), layout,
                scale, part_o, part_lse, None if firsts is None else firsts.numpy(),
                None if positions is None else positions[part].contiguous().numpy(),
            )  # fmt: skip
            page_o[:, part], page_lse[:, part] = part_o, part_lse
        for number, first in enumerate(range(0, pages, pages_each)):
            run = slice(first, first + pages_each)
            merge_partials(page_o[run], page_lse[run], o[number].numpy(), lse[number].numpy())

    def merge(
        self, o: torch.Tensor, lse: torch.Tensor, out: torch.Tensor, out_lse: torch.Tensor
    ) -> None:
        """See PageKernels."""
        from tierd_engine.attention.cpu import merge_partials

        merge_partials(o.numpy(), lse.numpy(), out.numpy(), out_lse.numpy())

    def can_encode(self, codec: CodecId) -> bool:
        """See PageKernels."""
        return codec in self._encoded

    def encode(
        self, source: torch.Tensor, target: torch.Tensor, layout: PageLayout, status: torch.Tensor
    ) -> None:
        """See PageKernels."""
        from tierd.codec import encode_pages

        status.copy_(torch.from_numpy(encode_pages(source.numpy(), target.numpy(), layout)))

    def digest(self, addresses: torch.Tensor, size_bytes: int, out: torch.Tensor) -> None:
        """See PageKernels."""
        from tierd.codec.devicedigest import device_digests

        out.copy_(torch.from_numpy(device_digests(addresses.numpy(), size_bytes).view(np.int64)))

    def xxh3(self, addresses: torch.Tensor, size_bytes: int, out: torch.Tensor) -> None:
        """See PageKernels."""
        from tierd.codec import digest_pages

        halves = digest_pages(addresses.numpy(), size_bytes).view(">i8").astype(np.int64)
        out.copy_(torch.from_numpy(halves))

    def decode(
        self, layout: PageLayout, addresses: torch.Tensor, staging: PrefillStaging, start: int
    ) -> None:
        """See PageKernels."""
        from tierd.codec import decode_pages

        # NumPy knows no bfloat16: the codec takes the bits.
        bits = torch.float32 if staging.keys.dtype is torch.float32 else torch.uint16
        keys, values = (part.view(bits).numpy() for part in (staging.keys, staging.values))
        decode_pages(addresses.numpy(), layout, keys, values, start)

    def decode_hot(self, source: torch.Tensor, target: torch.Tensor, layout: PageLayout) -> None:
        """See PageKernels."""
        from tierd_engine.promotion import decode_to_hot

        decode_to_hot(source.numpy(), target.numpy(), layout)


_QUERIES_AT_ONCE = 16  # that the CPU's kernel takes
