"""Executors on a device: hot pages where they lie, encoded ones through the ring or on the CPU.

    resident   hot pages in VRAM
    stream     warm and cold pages, copied into the ring while others are attended
    near       a share of the warm pages, by the CPU where they lie

All leave partials that one merge joins, in a fixed order: hot, streamed in the plan's
order, near. A prefill chunk goes another way, over the same pages (prefill.py).

Invariants:
  between steps no copy is under way
  a plan's pieces and tensors are made once, when the plan or the share changes
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from tierd.codec.layout import page_layout
from tierd.types import CodecId, Geometry
from tierd.units import SECTOR_BYTES, round_up
from tierd_engine.attention.executors import FEW_QUERIES_MAX, StepView
from tierd_engine.attention.plan import LayerPlan, PageRun, PlanMode, StepPlan
from tierd_engine.coldread import ColdReader, ColdUnit
from tierd_engine.device.arena import DeviceArena
from tierd_engine.device.coldpath import ColdPath
from tierd_engine.device.direct import DirectCold
from tierd_engine.device.kernels import PageKernels
from tierd_engine.device.near import NearLink
from tierd_engine.device.parts import Parts
from tierd_engine.device.pinning import Pins
from tierd_engine.device.port import Device
from tierd_engine.device.prefill import DevicePrefill
from tierd_engine.device.split import Rates, StepTimes, corrected_rates, near_pages
from tierd_engine.device.stager import Piece, Stager, layer_pieces
from tierd_engine.promotion import Ascent
from tierd_engine.staging import RING_CHUNK_BYTES

if TYPE_CHECKING:
    from tierd_engine.gpu.prefill import Run


@dataclass(frozen=True, slots=True)
class _Step:
    """What a running step needs on the device. `near`: the CPU's runs of each layer."""

    plan: StepPlan
    share: float
    pieces: tuple[tuple[Piece, ...], ...]
    near: tuple[tuple[PageRun, ...], ...]
    hot_addresses: tuple[torch.Tensor, ...]  # of each layer
    hot_first: torch.Tensor


@dataclass(slots=True)
class _Clock:
    """Times of the running step, for the split."""

    began: float = 0.0
    near_bytes: int = 0
    near_seconds: float = 0.0
    copied_bytes: int = 0
    late_layers: int = 0  # of which the streamed pieces ended after the CPU's pages
    layers: int = 0
    n: int = 0
    positions: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    hot_tokens: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    hot_before: list[int] = field(default_factory=list)  # tokens of each that precede the step's


class DeviceExecutors:
    """Runs plans on one device. Used by one thread.

    A step is `begin`, `attend` for each layer, then `finish`; or `cancel`. `rates`: what the
    split between near and stream starts from. `require_valid`: see Stager. `path_for`: see
    DirectCold; None where nothing goes from disk to VRAM past RAM.
    """

    def __init__(
        self,
        device: Device,
        kernels: PageKernels,
        geometry: Geometry,
        heads: int,
        arena: DeviceArena,
        reader: ColdReader,
        pins: Pins,
        require_valid: Callable[[], None],
        rates: Rates,
        *,
        chunk_bytes: int | None = None,
        path_for: Callable[[int], ColdPath | None] | None = None,
    ) -> None:
        self.geometry, self.heads, self.arena, self.reader = geometry, heads, arena, reader
        self._device, self._kernels, self._pins = device, kernels, pins
        slot_bytes_max = page_layout(geometry, CodecId.RAW).slot_bytes
        chunk_bytes = round_up(max(chunk_bytes or RING_CHUNK_BYTES, slot_bytes_max), SECTOR_BYTES)
        self.direct: DirectCold | None = None
        if path_for is not None:
            self.direct = DirectCold(device, kernels, reader, path_for, chunk_bytes)
        self.stager = Stager(
            device, reader, slot_bytes_max, require_valid, chunk_bytes=chunk_bytes,
            direct=self.direct,
        )  # fmt: skip
        self.near = NearLink(device, geometry, heads)
        self._parts = Parts(device, kernels, geometry, heads)
        self._prefill = DevicePrefill(device, kernels, geometry)
        self.rates = rates
        self._step: _Step | None = None
        self._clock = _Clock()
        self._running = False

    def schedule_cold(self, units: Sequence[ColdUnit]) -> None:
        """Read these cold units, step after step; call it at each new plan, outside a step."""
        if self.direct is None:
            self.reader.set_schedule(units)
        else:
            self.direct.schedule(units)

    def promote(self, ascents: Sequence[Ascent]) -> None:
        """Bring warm pages to hot ones, through the ring. Inside the epoch, between steps.

        Once this returns no copy is left; the decoding is on the compute stream, before all that
        may read or overwrite those hot pages. Raises StaleGeneration, DeviceFailed.
        """
        chunk_bytes, targets = self.stager.chunk_bytes, []
        pieces: list[Piece] = []
        for ascent in ascents:
            plan, done = LayerPlan((ascent.run,), ()), 0
            for piece in layer_pieces(ascent.layer, plan, chunk_bytes, self._pins.pieces_of):
                part = ascent.targets[done : done + piece.count].copy()
                targets.append(torch.from_numpy(part).to(self._device.torch_device))
                pieces.append(piece)
                done += piece.count
        self._running = True
        try:
            self.stager.begin(pieces)
            for target in targets:
                self._decode_staged(target)
            self.arena.record_written()
            self.stager.settle()
            self._running = False
        finally:
            self.cancel()

    def _decode_staged(self, target: torch.Tensor) -> None:
        staged = self.stager.take()
        self.stager.wait_filled(staged)
        source, layout = staged.addresses, staged.piece.layout
        self._device.launch(
            self._device.compute, lambda: self._kernels.decode_hot(source, target, layout)
        )
        self.stager.release()

    # -- a step -------------------------------------------------------------------
    def begin(self, plan: StepPlan, view: StepView, mode: PlanMode) -> None:
        """Start copying what the step needs. Inside the epoch."""
        n = len(view.positions)
        share = self._share(mode, n)
        if self._step is None or self._step.plan is not plan or self._step.share != share:
            self._step = self._adopt(plan, share)
        step, device = self._step, self._device.torch_device
        end = view.first_position + n
        tokens = (end - step.hot_first).clamp(0, self.geometry.block_tokens).to(torch.int32)
        positions = torch.arange(view.first_position, end, dtype=torch.int64, device=device)
        self._clock = _Clock(
            time.perf_counter(), self.near.counts.bytes, self.near.counts.seconds,
            self.stager.counts.copied_bytes, n=n, positions=positions, hot_tokens=tokens,
            hot_before=(view.first_position - plan.hot_first)
            .clip(0, self.geometry.block_tokens).tolist(),
        )  # fmt: skip
        self._running = True
        self.stager.begin([piece for layer in step.pieces for piece in layer])

    def _share(self, mode: PlanMode, n: int) -> float:
        """Return near's share. It follows the rates only when a plan is made anew."""
        if mode is PlanMode.STREAM or n > FEW_QUERIES_MAX:
            return 0.0
        return 1.0 if mode is PlanMode.NEAR else self._rounded_share

    @property
    def _rounded_share(self) -> float:
        # To a sixteenth: a new share makes all pieces anew, which takes longer than it may gain.
        return round(self.rates.share * 16) / 16

    def _adopt(self, plan: StepPlan, share: float) -> _Step:
        pieces, near = [], []
        for layer, layer_plan in enumerate(plan.layers):
            counts = near_pages([len(run.addresses) for run in layer_plan.warm], share)
            pieces.append(
                layer_pieces(
                    layer, layer_plan, self.stager.chunk_bytes, self._pins.pieces_of, counts
                )
            )
            near.append(_near_runs(layer_plan, counts))
        device = self._device.torch_device
        return _Step(
            plan, share, tuple(pieces), tuple(near),
            tuple(torch.from_numpy(row.copy()).to(device) for row in plan.hot_addresses),
            torch.from_numpy(plan.hot_first).to(device),
        )  # fmt: skip

    def lone_calls(self, scales: Sequence[float], kind: int) -> None:
        """None: a device's pages are attended layer by layer."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """Return o [n, heads, head_dim] in the query's dtype, over every token up to each query.

        query: [heads, n, head_dim] on the device. `keys`, `values`: in the arena already.
        """
        step, clock = self._current(), self._clock
        query = query.reshape(query.shape[-3:])
        if clock.n > FEW_QUERIES_MAX:
            keys, values = (part.reshape(part.shape[-3:]) for part in (keys, values))
            out = self._prefill.attend(query, keys, values, self._runs(layer, step), scale)
            self._device.follow(self._device.compute)
            return out
        q = query.transpose(0, 1).contiguous()
        near = step.near[layer]
        self._parts.start(clock.n)
        if near:
            self.near.ask(q)
        self._attend_hot(layer, step, q, scale)
        for _ in step.pieces[layer]:
            self._attend_staged(q, scale)
        if near:
            self.near.answer(clock.n, near, scale, self._parts.reserve(1))
            clock.layers += 1
            clock.late_layers += not self.stager.has_caught_up()
        out = self._parts.merged()
        self._device.follow(self._device.compute)
        return out.to(query.dtype)

    def _runs(self, layer: int, step: _Step) -> Iterator[Run]:
        """Lend what lies before a prefill chunk: hot pages, then each piece in the ring."""
        from tierd_engine.gpu.prefill import Run

        if step.plan.hot_blocks:
            yield Run(self.arena.layout, step.hot_addresses[layer], self._clock.hot_before)
        for _ in step.pieces[layer]:
            staged = self.stager.take()
            self.stager.wait_filled(staged)
            piece = staged.piece
            yield Run(piece.layout, staged.addresses, [self.geometry.block_tokens] * piece.count)
            self.stager.release()

    def _attend_hot(self, layer: int, step: _Step, q: torch.Tensor, scale: float) -> None:
        pages = len(step.plan.hot_blocks)
        if pages == 0:
            return
        each = self._parts.pages_each(pages)
        part = self._parts.reserve(-(-pages // each))
        addresses, tokens = step.hot_addresses[layer], self._clock.hot_tokens
        firsts, positions = (step.hot_first, self._clock.positions) if len(q) > 1 else (None, None)
        layout = self.arena.layout
        self._device.launch(
            self._device.compute,
            lambda: self._kernels.attend(
                q, addresses, tokens, layout, scale, part.o, part.lse, firsts, positions, each
            ),
        )

    def _attend_staged(self, q: torch.Tensor, scale: float) -> None:
        staged = self.stager.take()
        each = self._parts.pages_each(staged.piece.count)
        part = self._parts.reserve(-(-staged.piece.count // each))
        self.stager.wait_filled(staged)
        self._device.launch(
            self._device.compute,
            lambda: self._kernels.attend(
                q, staged.addresses, staged.tokens, staged.piece.layout, scale, part.o, part.lse,
                None, None, each,
            ),
        )  # fmt: skip
        self.stager.release()

    def finish(self) -> None:
        """End a step: no copy is left, and no page was given away while it was read.

        Raises StaleGeneration or DeviceFailed; then `cancel` it.
        """
        self.stager.settle()
        self._running = False
        clock = self._clock
        if clock.n > FEW_QUERIES_MAX:
            return
        is_late = 2 * clock.late_layers > clock.layers
        elapsed = time.perf_counter() - clock.began
        times = StepTimes(
            self.near.counts.bytes - clock.near_bytes,
            self.near.counts.seconds - clock.near_seconds,
            self.stager.counts.copied_bytes - clock.copied_bytes,
            elapsed if is_late else 0.0,
        )
        self.rates = corrected_rates(self.rates, times)

    def cancel(self) -> None:
        """Give a step up at any point; when this returns, no copy is left. Idempotent."""
        if self._running:
            self.stager.abandon()
            self._running = False

    def _current(self) -> _Step:
        assert self._step is not None and self._running, "no step is running"
        return self._step

    def warm_up(self, codecs: Collection[CodecId]) -> None:
        """Compile what the CPU's share needs, so that no step waits for it."""
        from tierd_engine import coldpool
        from tierd_engine.attention.cpu import prepare

        coldpool.warm_up()
        layouts = [page_layout(self.geometry, codec) for codec in sorted({CodecId.RAW, *codecs})]
        for layout in layouts:
            prepare(layout, self.heads)
        self.stager.prepare(layouts)

    @property
    def staging_bytes(self) -> int:
        """Bytes of all staging, host's and device's: they do not grow with the context."""
        parts = self.stager, self._parts, self.near, self._prefill
        on_device = sum(part.total_bytes for part in parts)
        if self.direct is not None:
            on_device += self.direct.total_bytes
        return self.reader.ring.total_bytes + on_device

    def close(self) -> None:
        """Give the device's memory back. A running step is given up."""
        self.cancel()
        self._device.follow(self._device.compute)
        for part in (self.stager, self.near, self._parts, self._prefill):
            part.close()
        if self.direct is not None:
            self.direct.close()

    def check_integrity(self) -> None:
        """Raise AssertionError unless ring and parts add up."""
        self.stager.check_integrity()
        self._parts.check_integrity()
        if self.direct is not None:
            self.direct.check_integrity()


def _near_runs(plan: LayerPlan, counts: tuple[int, ...]) -> tuple[PageRun, ...]:
    return tuple(
        PageRun(run.layout, run.addresses[:count], run.tokens[:count])
        for run, count in zip(plan.warm, counts, strict=True)
        if count
    )
