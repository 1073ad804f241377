"""Prefill over tiers on a GPU: pages decoded run by run into staging, PyTorch's attention with lse.

Memory does not grow with the context: one staging buffer holds the decoded tokens of a run, the
attention over it leaves (o, lse), and a merge joins that to what is there. All is launched on one
stream, in order, so the buffer needs no second copy of itself; nothing waits. What is launched
changes nothing but tensors that were there before: a fake device may run it later.

The staging's dtype says how exact it is. In float32 partials are what they are on the CPU. In the
model's own 16-bit dtype, many times faster on tensor cores, decoded elements and each run's o are
rounded to it, as the model's own prefill rounds them once: o by at most 2^-9 (bfloat16) of a run's
largest, however many runs there are, since the merge's weights, in float32 as lse is, add up to 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from tierd.codec.layout import PageLayout
from tierd.types import DType, Geometry
from tierd_engine.arena import TORCH_DTYPES
from tierd_engine.attention.flash import FlashPartial, merge_into

# A layer of Llama-3's takes 4 KiB a token in bfloat16: runs of 16,384 tokens, so the launches and
# the merge (12 bytes of o an element read and written) are lost in the attention over them.
STAGING_BYTES = 64 << 20
FLASH_HEAD_DIM_MAX = 256
_ATEN = torch.ops.aten
_DIM_STEP = 8  # of head_dim: what the GPU's kernels take


# Decodes whole pages at addresses int64 [pages]: layout, the staging, its first token.
Decode = Callable[[PageLayout, torch.Tensor, "PrefillStaging", int], None]
Launch = Callable[[Callable[[], None]], None]


class Run(NamedTuple):
    """Pages of one layout, hot ones (raw) or encoded, in any order.

    addresses: int64 [pages] on the device, 64-byte aligned; tokens: [pages] of each, from its
    first on, that the chunk's queries see: all before the chunk. What is not counted is not read.
    """

    layout: PageLayout
    addresses: torch.Tensor
    tokens: Sequence[int]


class PrefillStaging:
    """K and V, [kv_heads, capacity_tokens, head_dim] each, of float32 or the model's dtype.

    Whole blocks are decoded, so it holds one at least. `memory`: uint8 of `staging_bytes`, which
    stays its owner's; None: its own. `decode` None: the GPU's kernel.
    """

    def __init__(
        self,
        geometry: Geometry,
        device: torch.device,
        dtype: DType,
        budget_bytes: int = STAGING_BYTES,
        *,
        memory: torch.Tensor | None = None,
        decode: Decode | None = None,
    ) -> None:
        assert dtype in (DType.FLOAT32, geometry.dtype)
        self.dtype = dtype
        self.row_bytes = geometry.head_dim * dtype.itemsize
        total_bytes = staging_bytes(geometry, dtype, budget_bytes)
        token_bytes = 2 * geometry.kv_heads * self.row_bytes
        self.capacity_tokens = total_bytes // token_bytes
        shape = (2, geometry.kv_heads, self.capacity_tokens, geometry.head_dim)
        if memory is None:
            memory = torch.empty(total_bytes, dtype=torch.uint8, device=device)
        self._both = memory[:total_bytes].view(TORCH_DTYPES[dtype]).view(shape)
        self._decode = decode or decode_on_gpu
        self.keys, self.values = self._both

    @property
    def total_bytes(self) -> int:
        """Bytes of both."""
        return self._both.numel() * self._both.element_size()

    def decode(self, layout: PageLayout, addresses: torch.Tensor, start: int) -> None:
        """Decode whole pages to tokens `start` on, one after the other."""
        self._decode(layout, addresses, self, start)


def staging_bytes(geometry: Geometry, dtype: DType, budget_bytes: int = STAGING_BYTES) -> int:
    """Return the bytes of staging within a budget: whole blocks, one at least."""
    block_bytes = 2 * geometry.kv_heads * geometry.head_dim * dtype.itemsize * geometry.block_tokens
    return max(1, budget_bytes // block_bytes) * block_bytes


def decode_on_gpu(
    layout: PageLayout, addresses: torch.Tensor, staging: PrefillStaging, start: int
) -> None:
    from tierd_engine.gpu.decoding import decode_pages

    pages = torch.arange(len(addresses), dtype=torch.int64, device=addresses.device)
    offsets = (start + layout.block_tokens * pages) * staging.row_bytes
    keys_to, values_to = (part.data_ptr() + offsets for part in (staging.keys, staging.values))
    head_bytes = staging.capacity_tokens * staging.row_bytes
    decode_pages(addresses, keys_to, values_to, head_bytes, layout, staging.dtype)


def _at_once(kernel: Callable[[], None]) -> None:
    kernel()


def attend_many(
    q: torch.Tensor,
    own_keys: torch.Tensor,
    own_values: torch.Tensor,
    runs: Iterable[Run],
    staging: PrefillStaging,
    scale: float,
    *,
    launch: Launch = _at_once,
) -> FlashPartial:
    """Return (o, lse) of a chunk's queries over its own tokens, causally, and over all `runs`.

    q: [heads, n, head_dim]; own_keys, own_values: [kv_heads, n, head_dim]; on the staging's
    device, any float dtype. Returns o [heads, n, head_dim] and lse [heads, n] (natural logarithm),
    float32. When the next run is asked for, all reads of the last one's pages have been launched:
    who lends them may record an event there, and reuse them after it. No runs is allowed.
    `launch`: puts a kernel on the stream; the result is there once all of them have run.
    """
    q, own_keys, own_values = (x.to(staging.keys.dtype) for x in (q, own_keys, own_values))
    with torch.inference_mode(False):  # written to by kernels that may run outside it
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        result = FlashPartial(torch.empty(q.shape, dtype=torch.float32, device=q.device), lse)
    launch(lambda: _attend_own(q, own_keys, own_values, scale, result))
    filler = _Filler(q, result, staging, scale, launch)
    for run in runs:
        for count, addresses in _stretches(run):
            filler.stage(run.layout, addresses, count)
    filler.attend()
    return result


def _stretches(run: Run) -> Iterable[tuple[int, torch.Tensor]]:
    """Yield (tokens of each, addresses) of neighbours that are whole, and each other page alone.

    The page after one that is not whole is decoded over its tail: not in the same launch.
    """
    whole = run.layout.block_tokens
    assert run.addresses.dtype == torch.int64 and len(run.addresses) == len(run.tokens)
    assert all(0 <= count <= whole for count in run.tokens)
    at = 0
    for count, group in groupby(run.tokens):
        pages = len(list(group))
        step = pages if count == whole else 1
        for start in range(at, at + pages, step):
            if count:
                yield count, run.addresses[start : start + step]
        at += pages


class _Filler:
    """Fills the staging with tokens, and attends over them when it is full."""

    def __init__(
        self, q: torch.Tensor, result: FlashPartial, staging: PrefillStaging, scale: float,
        launch: Launch,
    ) -> None:  # fmt: skip
        self._q, self._result, self._staging = q, result, staging
        self._scale, self._launch = scale, launch
        self._filled = 0

    def stage(self, layout: PageLayout, addresses: torch.Tensor, count: int) -> None:
        """Decode pages of `count` tokens each behind what stands there."""
        staging, done = self._staging, 0
        while done < len(addresses):
            room = (staging.capacity_tokens - self._filled) // layout.block_tokens
            if room == 0:
                self.attend()
                continue
            part = addresses[done : done + room]
            self._launch(partial(staging.decode, layout, part, self._filled))
            self._filled += len(part) * count
            done += len(part)

    def attend(self) -> None:
        """Merge the attention over what stands there into the result; it is empty then."""
        filled, self._filled = self._filled, 0
        if filled:
            q, result, staging, scale = self._q, self._result, self._staging, self._scale
            self._launch(lambda: _attend_staged(filled, q, result, staging, scale))


def _attend_staged(
    filled: int, q: torch.Tensor, result: FlashPartial, staging: PrefillStaging, scale: float
) -> None:
    """Merge the attention over the first `filled` staged tokens into `result`."""
    heads, n, head_dim = q.shape
    keys, values = staging.keys[:, :filled], staging.values[:, :filled]
    # Heads that share K and V are queries of one: neither is repeated.
    folded = q.reshape(len(keys), heads // len(keys) * n, head_dim)
    o, lse = attend_rows(folded, keys, values, scale, is_causal=False)
    merged = FlashPartial(result.o, result.lse)
    merge_into(merged, FlashPartial(o.reshape(heads, n, head_dim), lse.reshape(heads, n)))
    result.lse.copy_(merged.lse)


def _attend_own(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, result: FlashPartial
) -> None:
    repeats = len(q) // len(keys)
    keys, values = (x.repeat_interleave(repeats, 0) for x in (keys, values))
    o, lse = attend_rows(q, keys, values, scale, is_causal=True)
    result.o.copy_(o)
    result.lse.copy_(lse)


def attend_rows(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, *, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return PyTorch's o [heads, n, d] and lse [heads, n], natural logarithm; float32.

    q: [heads, n, d]; keys, values: [heads, m, d], m >= 1; all of one dtype. Causal: n = m, query i
    sees tokens 0 to i. On the CPU, and on a GPU in 16 bits, PyTorch's flash attention; else, on a
    GPU, its memory-efficient one. All three give lse to the base e.
    """
    d = q.shape[2]
    if q.device.type == "cpu":
        o, lse = _ATEN._scaled_dot_product_flash_attention_for_cpu(
            q[None], keys[None], values[None], 0.0, is_causal, scale=scale
        )
        return o[0].float(), lse[0]
    if d % _DIM_STEP:  # no model's; zeros change no product
        q, keys, values = (pad(x, (0, -d % _DIM_STEP)) for x in (q, keys, values))
    q, keys, values = q[None], keys[None], values[None]
    if q.dtype != torch.float32 and d <= FLASH_HEAD_DIM_MAX:
        o, lse, *_ = _ATEN._scaled_dot_product_flash_attention(
            q, keys, values, 0.0, is_causal, False, scale=scale
        )
    else:
        o, lse, *_ = _ATEN._scaled_dot_product_efficient_attention(
            q, keys, values, None, True, 0.0, is_causal, scale=scale
        )
    # The memory-efficient one pads its queries' lse to a multiple of 32.
    return o[0, :, :, :d].float(), lse[0, :, : q.shape[2]].float().contiguous()
