"""Quality guard: layers whose codec would move attention's output too far get a better one.

Before a session's first sealed blocks leave hot, the codec's error is measured
in each layer on real queries (outputerror.py), once. The rule:

    a small change of the outputs costs KL in proportion to its square, and the
    changes of layers add up (both to first order: Kullback, Information Theory
    and Statistics, 2.6: KL(p, p + dp) is a quadratic form of dp). So
        KL = KL_PER_ERROR * sum over layers of error²,
    and the budget of a layer is sqrt(KL limit / (KL_PER_ERROR * layers)), the
    limit being the bar of the codec that was asked for. Layers may lend
    each other of it: while the sum is over budget, the layer with the largest
    error, which then is over its own, gets the next better codec.

KL_PER_ERROR is measured, on SmolLM2-135M in float32: three texts of 2,048 tokens of
CPython's topics, first block and last 256 tokens exact, the KL of 128 forced tokens
over the sum of error². Means: 0.08 (int8), 0.02 (k8v4), 0.08 (int4), 0.06 (fp8), where
KL itself goes from 4e-6 to 2e-3: so it holds within a factor of three over more than two
decades. A model far from that one may lie further off: the guard tells outliers of ten
and a hundred times from what is well; it is no certificate.

Invariants:
  what a session's pages got is decided once, and holds for the session's life here
  a layer's codec is the namespace's or a better one
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from tierd.layercodecs import better_codecs, layer_codecs
from tierd.types import CodecId, Namespace
from tierd_engine.arena import HotArena
from tierd_engine.outputerror import OutputProbe, Queries

KL_PER_ERROR = 0.06
# The fidelity bars of the design: mean KL against the full-precision cache. fp8 has none; it
# is a codec of 8 bits as coarse as one of 4, and held to theirs.
KL_LIMITS = {
    CodecId.RAW: 0.0,
    CodecId.INT8: 1e-4,
    CodecId.K8V4: 3e-4,
    CodecId.INT4: 1.5e-3,
    CodecId.FP8: 1.5e-3,
}
QUERIES = 4  # per layer, of every head: 36 outputs a layer in the smallest model
MEASURED_TOKENS = 256
RECENT_TOKENS_MAX = 128  # half a block: what an open block holds on the average


def layer_budget(codec: CodecId, layers: int) -> float:
    """Return the relative error of attention's output that a layer of `codec` may have."""
    return math.sqrt(KL_LIMITS[codec] / (KL_PER_ERROR * layers))


def expected_kl(errors: Sequence[float]) -> float:
    """Return the mean KL that relative errors of the layers' outputs amount to; NaN: left out."""
    return KL_PER_ERROR * float(np.nansum(np.square(errors)))


@dataclass(frozen=True, slots=True)
class LayerReading:
    """One layer: the codec asked for and its error (NaN: not measured), the chosen one and its."""

    layer: int
    asked: CodecId
    chosen: CodecId
    error: float
    chosen_error: float
    budget: float


@dataclass(slots=True)
class Verdict:
    """What was decided. `source`: "measured", or "resumed" as the session's pages already are."""

    source: str
    readings: list[LayerReading]
    tokens: int = 0
    queries: int = 0
    seconds: float = 0.0

    @property
    def codecs(self) -> tuple[CodecId, ...]:
        """A codec a layer."""
        return tuple(reading.chosen for reading in self.readings)

    @property
    def kl_expected(self) -> float | None:
        """The mean KL that the codecs asked for would cost; None if nothing was measured."""
        errors = [reading.error for reading in self.readings]
        return expected_kl(errors) if self.source == "measured" else None

    @property
    def kl_expected_chosen(self) -> float | None:
        """The mean KL that the chosen codecs will cost; None if nothing was measured."""
        errors = [reading.chosen_error for reading in self.readings]
        return expected_kl(errors) if self.source == "measured" else None

    @property
    def raised(self) -> list[LayerReading]:
        """The layers that got a better codec than was asked for."""
        return [reading for reading in self.readings if reading.chosen is not reading.asked]


@dataclass(slots=True)
class _Sample:
    """Queries of the newest step that had enough of them; whole once every layer has come."""

    q: torch.Tensor
    rows: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    positions: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    scale: float = 1.0
    whole: bool = False


class QualityGuard:
    """Watches one session's queries until it has decided; `verdict` is None before."""

    def __init__(self, namespace: Namespace, heads: int) -> None:
        geometry = namespace.geometry
        self._geometry = geometry
        self._asked = layer_codecs(namespace)
        self.base = namespace.codec
        self._recent_tokens = min(RECENT_TOKENS_MAX, geometry.block_tokens // 2)
        self._sample = _Sample(torch.empty(geometry.layers, heads, QUERIES, geometry.head_dim))
        self.verdict: Verdict | None = None

    def codecs(self) -> tuple[CodecId, ...]:
        """Return every codec that pages may get."""
        return tuple({c for asked in self._asked for c in (asked, *better_codecs(asked))})

    # -- queries --------------------------------------------------------------------
    def observe(self, layer: int, query: torch.Tensor, first_position: int, scale: float) -> None:
        """Keep some queries of a step, [heads, n, head_dim], the newest of them at the end."""
        sample, n = self._sample, query.shape[1]
        if n < QUERIES and sample.whole:
            return
        if layer == 0:
            newest = min(n, max(QUERIES, self._recent_tokens))
            sample.rows = torch.linspace(n - newest, n - 1, min(n, QUERIES)).long()
            sample.positions = sample.rows + first_position
            sample.scale, sample.whole = scale, False
        sample.q[layer, :, : len(sample.rows)] = query[:, sample.rows]
        if layer == self._geometry.layers - 1:
            sample.whole = True

    def forget_step(self) -> None:
        """A step was cancelled: its queries are not those of one moment."""
        self._sample.whole = False

    # -- the decision ------------------------------------------------------------------
    def decide(
        self, arena: HotArena, slots: dict[int, int], candidates: Sequence[int], position: int
    ) -> None:
        """Measure on the first of the candidates, hot sealed blocks, if there are queries for it.

        slots: arena slot by hot block; position: tokens of the session.
        """
        blocks_max = max(1, MEASURED_TOKENS // self._geometry.block_tokens)
        measured = sorted(block for block in candidates if block > 0)[:blocks_max]
        if not self._sample.whole or not measured:
            return
        started = time.perf_counter()
        sample = self._sample
        n = len(sample.positions)
        queries = Queries(sample.q[:, :, :n], sample.positions, sample.scale)
        # What the probe reads: the measured blocks, the first, and those near the queries.
        oldest = int(sample.positions.min()) - self._recent_tokens
        tokens = self._geometry.block_tokens
        read = {b: s for b, s in slots.items() if b == 0 or (b + 1) * tokens > oldest}
        read |= {block: slots[block] for block in measured}
        arena, slots = arena.on_host(read)
        probe = OutputProbe(arena, slots, measured, queries, position, self._recent_tokens)
        if not probe.is_telling:
            return
        readings = choose_codecs(self._asked, probe.errors)
        measured_tokens = len(measured) * tokens
        self.verdict = Verdict(
            "measured", readings, measured_tokens, n, time.perf_counter() - started
        )

    def adopt(self, codecs: npt.NDArray[np.uint8]) -> None:
        """Go on as a resumed session's pages are: codecs [layers, blocks], the first block's too.

        A block that its codec could not encode is raw in every layer: the coarsest counts.
        """
        if codecs.shape[1] < 2:
            return
        readings = []
        for layer, asked in enumerate(self._asked):
            found = set(codecs[layer, 1:].tolist())
            ladder = (asked, *better_codecs(asked))
            chosen = next((codec for codec in ladder if int(codec) in found), asked)
            budget = layer_budget(asked, len(self._asked))
            readings.append(LayerReading(layer, asked, chosen, math.nan, math.nan, budget))
        self.verdict = Verdict("resumed", readings)


def choose_codecs(
    asked: Sequence[CodecId], measure: Callable[[CodecId], npt.NDArray[np.float64]]
) -> list[LayerReading]:
    """Return a reading a layer. `measure(codec)` gives errors [layers]; each codec once at most.

    A layer that cannot be measured (NaN) is left as asked for: a page that its codec
    cannot encode goes down raw by itself.
    """
    known: dict[CodecId, npt.NDArray[np.float64]] = {CodecId.RAW: np.zeros(len(asked))}

    def error_of(layer: int, codec: CodecId) -> float:
        if codec not in known:
            known[codec] = measure(codec)
        return float(known[codec][layer])

    budgets = [layer_budget(codec, len(asked)) for codec in asked]
    chosen = list(asked)
    before = [error_of(layer, codec) for layer, codec in enumerate(asked)]
    errors = list(before)
    limit = sum(budget**2 for budget in budgets)
    while np.nansum(np.square(errors)) > limit:
        worst = int(np.nanargmax(errors))
        chosen[worst] = better_codecs(chosen[worst])[0]
        errors[worst] = error_of(worst, chosen[worst])
    return [
        LayerReading(*row)
        for row in zip(range(len(asked)), asked, chosen, before, errors, budgets, strict=True)
    ]
