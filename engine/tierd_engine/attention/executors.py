"""Executors: who attends over which pages, and the one merge behind them.

    resident   hot pages, where they lie in the arena
    near       warm pages, where they lie in host RAM; cold pages once staged
    stream     warm pages after a copy into the staging ring; cold pages once staged

For a few queries (decode, drafted tokens) all three run the same fused kernel
over encoded pages and leave partials that one merge joins in the plan's order.
For many (a prefill chunk) pages are decoded run by run into float32 staging
and PyTorch's flash attention does the work.

Buffers are made once; the decode path allocates nothing after warm-up.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt
import torch

from tierd.codec import decode_pages
from tierd.codec.layout import HEADER_BYTES, PageLayout
from tierd.types import CodecId, Geometry
from tierd_engine.arena import HotArena
from tierd_engine.attention.copying import copy_pages
from tierd_engine.attention.cpu import attend_pages, merge_partials
from tierd_engine.attention.flash import FlashPartial, attend_own, attend_past, merge_into
from tierd_engine.attention.layercall import CallScratch, LayerCall, Segment
from tierd_engine.attention.plan import IntArray, LayerPlan, PageRun, PlanMode, StepPlan
from tierd_engine.attention.simd import BFLOAT16, FLOAT32
from tierd_engine.coldread import ColdReader
from tierd_engine.staging import DecodeStaging, StagingRing

FEW_QUERIES_MAX = 16  # up to here the fused kernel; a prefill chunk of more goes to flash

Float32Array = npt.NDArray[np.float32]
_KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}  # of queries, as kernels take them


@dataclass(frozen=True, slots=True)
class StepView:
    """The running step: `positions` int64 [n] of its tokens, from `first_position` on.

    hot_tokens: int32 [hot blocks of the plan], the valid tokens of each.
    """

    first_position: int
    positions: IntArray
    hot_tokens: npt.NDArray[np.int32]


class Executors:
    """Runs one layer's plan. `require_valid` raises if a copy just made must not be used.

    A step is `begin`, `attend` for each layer, then `finish`; or `cancel`.
    """

    def __init__(
        self,
        geometry: Geometry,
        heads: int,
        arena: HotArena,
        reader: ColdReader,
        ring: StagingRing,
        require_valid: Callable[[], None],
    ) -> None:
        self.geometry = geometry
        self.heads = heads
        self.arena = arena
        self.reader = reader
        self.ring = ring
        self.staging = DecodeStaging(geometry)
        # Warm pages that stream copies get a ring of their own: cold reads run ahead in theirs.
        self.copy_ring = StagingRing(0)
        self._require_valid = require_valid
        self._running: tuple[StepPlan, StepView, PlanMode] | None = None
        self._o: Float32Array = np.empty(0, dtype=np.float32)
        self._lse: Float32Array = np.empty(0, dtype=np.float32)
        # One a layer, made for a plan, a number of queries and a mode; they read the two arrays.
        self._called: tuple[StepPlan, int, PlanMode] | None = None
        self._calls: list[LayerCall | None] = []
        self._call_scratch = CallScratch()
        self._hot_tokens = np.zeros(0, dtype=np.int32)
        self._positions = np.zeros(FEW_QUERIES_MAX, dtype=np.int64)

    # -- a step -------------------------------------------------------------------
    def begin(self, plan: StepPlan, view: StepView, mode: PlanMode) -> None:
        """Start on a step."""
        n = len(view.positions)
        if n <= FEW_QUERIES_MAX:
            if self._called is None or self._called[0] is not plan or self._called[1:] != (n, mode):
                self._called = plan, n, mode
                self._calls = [None] * len(plan.layers)
                self._hot_tokens = np.zeros(len(plan.hot_blocks), dtype=np.int32)
            self._positions[:n], self._hot_tokens[:] = view.positions, view.hot_tokens
        self._running = plan, view, mode

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """Return o [n, heads, head_dim] in the query's dtype, over every token up to each query.

        query: [heads, n, head_dim]; keys, values: [kv_heads, n, head_dim], the step's own. A
        leading 1 is allowed.
        """
        if query.shape[-2] <= FEW_QUERIES_MAX:
            return self.attend_few(layer, query, scale)
        plan, view, mode = self._step()
        query, keys, values = (part.reshape(part.shape[-3:]) for part in (query, keys, values))
        o = self.attend_many(
            layer, plan, query.float(), keys.float(), values.float(), view.first_position,
            PlanMode.STREAM if mode is PlanMode.AUTO else mode, scale,
        )  # fmt: skip
        return o.transpose(0, 1).to(query.dtype)

    def _step(self) -> tuple[StepPlan, StepView, PlanMode]:
        assert self._running is not None, "no step is running"
        return self._running

    def finish(self) -> None:
        """End a step; nothing of it is left under way."""
        self._running = None

    def cancel(self) -> None:
        """Give a step up at any point. Idempotent."""
        self._running = None

    def warm_up(self, codecs: Collection[CodecId]) -> None:
        """Compile every kernel that a session over pages of these codecs runs."""
        from tierd_engine.warmup import warm_up

        warm_up(self.geometry, self.heads, self.staging, codecs)

    # -- few queries, and many ------------------------------------------------------
    def attend_few(self, layer: int, query: torch.Tensor, scale: float) -> torch.Tensor:
        """As `attend`, with the step's own keys and values in the arena already."""
        n, q = query.shape[-2], query
        if n > 1 or not q.is_contiguous():
            q = q.reshape(q.shape[-3:]).transpose(0, 1).contiguous()
        if q.dtype not in _KINDS:
            q = q.float()
        call = self._calls[layer]
        if call is None or call.scale != scale or call.kind != _KINDS[q.dtype]:
            call = self._calls[layer] = self._make_call(layer, n, scale, _KINDS[q.dtype])
        out = torch.empty((n, self.heads, self.geometry.head_dim), dtype=q.dtype)
        if call.brought is not None:
            call.brought[:] = self.reader.take()
            call.run(q.data_ptr(), out.data_ptr())
            self.reader.release()
        else:
            call.run(q.data_ptr(), out.data_ptr())
        if not call.merges:
            merged = self._add_moved(layer, q.float().view(out.shape).numpy(), call.parts, scale)
            out.copy_(torch.from_numpy(merged))
        return out if q.dtype == query.dtype else out.to(query.dtype)

    def lone_calls(self, scales: Sequence[float], kind: int) -> Sequence[LayerCall] | None:
        """Return each layer's call for the running step of one query, where it is all there is.

        Of cold pages a call has one unit at most, and those are the reader's next ones. None
        where more has to be brought. kind: of queries, FLOAT32 or BFLOAT16.
        """
        for layer, scale in enumerate(scales):
            call = self._calls[layer]
            if call is None or call.scale != scale or call.kind != kind:
                call = self._calls[layer] = self._make_call(layer, 1, scale, kind)
            if not call.merges:
                return None
            if call.brought is not None and self.reader.pool_for_job() is None:
                return None
        return cast(list[LayerCall], self._calls)

    def _make_call(self, layer: int, n: int, scale: float, kind: int) -> LayerCall:
        """Return the call over what is attended where it lies, and over a lone cold unit."""
        plan, _, mode = self._step()
        o, lse = self._scratch(plan.parts_max, n)
        below = plan.layers[layer]
        causal = (plan.hot_first, self._positions[:n]) if n > 1 else None
        segments = [Segment(self.arena.layout, plan.hot_addresses[layer], self._hot_tokens, causal)]
        if mode is not PlanMode.STREAM:
            segments += [Segment(run.layout, run.addresses, run.tokens) for run in below.warm]
        merges, brought = mode is not PlanMode.STREAM or not below.warm, None
        if merges and len(below.cold) == 1:
            brought = np.zeros(len(below.cold[0].pages), dtype=np.int64)
            tokens = np.full(len(brought), self.geometry.block_tokens, dtype=np.int32)
            segments.append(Segment(below.cold[0].layout, brought, tokens))
        elif below.cold:
            merges = False
        return LayerCall(
            segments, self.heads, n, scale, o, lse, self._call_scratch, kind=kind, merges=merges,
            brought=brought,
        )  # fmt: skip

    def _add_moved(self, layer: int, q: Float32Array, parts: int, scale: float) -> Float32Array:
        """Attend over what is brought to staging, and merge it with the `parts` there are."""
        plan, _, mode = self._step()
        n = len(q)
        o, lse = self._scratch(plan.parts_max, n)
        for layout, addresses, tokens in self._moved(layer, plan, mode):
            end = parts + len(addresses)
            attend_pages(
                q, addresses, tokens, layout, scale, o[parts:end], lse[parts:end], None, None
            )
            parts = end
        out = np.empty((n, self.heads, self.geometry.head_dim), dtype=np.float32)
        out_lse = np.empty((n, self.heads), dtype=np.float32)
        merge_partials(o[:parts], lse[:parts], out, out_lse)
        return out

    def attend_many(
        self,
        layer: int,
        plan: StepPlan,
        q: torch.Tensor,
        own_keys: torch.Tensor,
        own_values: torch.Tensor,
        first_position: int,
        mode: PlanMode,
        scale: float,
    ) -> torch.Tensor:
        """Return o [heads, n, head_dim] for a chunk that starts at `first_position`.

        q: [heads, n, head_dim]; own_keys, own_values: [kv_heads, n, head_dim]; float32.
        """
        result = attend_own(q, own_keys, own_values, scale)
        filled = self._stage_hot(layer, plan, first_position, q, result, scale)
        for layout, addresses, _ in self._encoded(layer, plan, mode):
            filled = self._stage_encoded(layout, addresses, filled, q, result, scale)
        self._attend_staged(filled, q, result, scale)
        return result.o

    def _encoded(
        self, layer: int, plan: StepPlan, mode: PlanMode
    ) -> Iterator[tuple[PageLayout, IntArray, npt.NDArray[np.int32]]]:
        """Yield (layout, payload addresses, tokens) of pages below hot, in plan order.

        Addresses are valid until the next one is asked for.
        """
        if mode is not PlanMode.STREAM:
            for run in plan.layers[layer].warm:
                yield run.layout, run.addresses, run.tokens
        yield from self._moved(layer, plan, mode)

    def _moved(
        self, layer: int, plan: StepPlan, mode: PlanMode
    ) -> Iterator[tuple[PageLayout, IntArray, npt.NDArray[np.int32]]]:
        """As `_encoded`, of those alone that are brought to staging first."""
        layer_plan: LayerPlan = plan.layers[layer]
        if mode is PlanMode.STREAM:
            for run in layer_plan.warm:
                yield from self._streamed(run)
        for unit in layer_plan.cold:
            addresses = self.reader.take()
            tokens = np.full(len(addresses), self.geometry.block_tokens, dtype=np.int32)
            yield unit.layout, addresses, tokens
            self.reader.release()

    def _streamed(
        self, run: PageRun
    ) -> Iterator[tuple[PageLayout, IntArray, npt.NDArray[np.int32]]]:
        slot_bytes = run.layout.slot_bytes
        per_chunk = self.copy_ring.chunk_bytes // slot_bytes
        for i, start in enumerate(range(0, len(run.addresses), per_chunk)):
            source = run.addresses[start : start + per_chunk]
            base = self.copy_ring.address(i % self.copy_ring.chunks) + HEADER_BYTES
            staged = base + np.arange(len(source), dtype=np.int64) * slot_bytes
            copy_pages(source, staged, run.layout.payload_bytes)
            self._require_valid()
            yield run.layout, staged, run.tokens[start : start + per_chunk]

    def _stage_hot(
        self,
        layer: int,
        plan: StepPlan,
        first_position: int,
        q: torch.Tensor,
        result: FlashPartial,
        scale: float,
    ) -> int:
        """Gather the hot tokens before the chunk into staging; return how many stand there."""
        tokens = self.geometry.block_tokens
        filled = 0
        for block, slot in zip(plan.hot_blocks, plan.hot_slots, strict=True):
            count = min(tokens, first_position - block * tokens)
            if count <= 0:
                continue
            if filled + count > self.staging.capacity_tokens:
                self._attend_staged(filled, q, result, scale)
                filled = 0
            end = filled + count
            self.staging.keys[:, filled:end] = self.arena.keys[slot, layer, :, :count]
            self.staging.values[:, filled:end] = self.arena.values[slot, layer, :, :count]
            filled = end
        return filled

    def _stage_encoded(
        self,
        layout: PageLayout,
        addresses: IntArray,
        filled: int,
        q: torch.Tensor,
        result: FlashPartial,
        scale: float,
    ) -> int:
        tokens = self.geometry.block_tokens
        done = 0
        while done < len(addresses):
            room = (self.staging.capacity_tokens - filled) // tokens
            if room == 0:
                self._attend_staged(filled, q, result, scale)
                filled = 0
                continue
            part = addresses[done : done + room]
            decode_pages(part, layout, self.staging.keys_array, self.staging.values_array, filled)
            filled += len(part) * tokens
            done += len(part)
        return filled

    def _attend_staged(
        self, filled: int, q: torch.Tensor, result: FlashPartial, scale: float
    ) -> None:
        if filled == 0:
            return
        keys = self.staging.keys[:, :filled]
        values = self.staging.values[:, :filled]
        merge_into(result, attend_past(q, keys, values, scale))

    def _scratch(self, parts: int, n: int) -> tuple[Float32Array, Float32Array]:
        """Return o [parts, n, heads, head_dim] and lse [parts, n, heads], both contiguous."""
        rows, head_dim = parts * n * self.heads, self.geometry.head_dim
        if self._lse.size < rows:
            self._calls = [None] * len(self._calls)  # they write to what is replaced
            self._lse = np.empty(2 * rows, dtype=np.float32)
            self._o = np.empty(2 * rows * head_dim, dtype=np.float32)
        o = self._o[: rows * head_dim].reshape(parts, n, self.heads, head_dim)
        return o, self._lse[:rows].reshape(parts, n, self.heads)

    @property
    def staging_bytes(self) -> int:
        """Bytes of all staging: they do not grow with the context."""
        return self.ring.total_bytes + self.copy_ring.total_bytes + self.staging.total_bytes

    def close(self) -> None:
        """Nothing to do: the reader is its owner's."""

    def check_integrity(self) -> None:
        """Raise AssertionError unless partials have room for their lse."""
        assert self._o.size == self._lse.size * self.geometry.head_dim, f"{self._o.size=}"
