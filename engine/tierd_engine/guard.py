"""Quality guard: layers whose codec would move attention's output too far get a better one.

Before sealed blocks leave hot, the codec's error is measured in each layer on real
queries (outputerror.py): at the first that leave, and again each time the session is a
quarter longer. The rule:

    a small change of the outputs costs KL in proportion to its square, and the
    changes of layers add up (both to first order: Kullback, Information Theory
    and Statistics, 2.6: KL(p, p + dp) is a quadratic form of dp). So
        KL = KL_PER_ERROR * sum over layers of error²,
    and the budget of a layer is sqrt(KL limit / (KL_PER_ERROR * layers)), the
    limit being the bar of the codec that was asked for. Layers may lend
    each other of it: while the sum is over budget, the layer with the largest
    error, which then is over its own, gets the next better codec.

Measured on SmolLM2-135M in float32, prose and tables of CPython's topics, 2,048 tokens, hot
as a job's, 256 forced tokens and their own queries:
  on prose the layers' own KL add up to 0.90 (int4) and 0.82 (k8v4) of that of all together
  an error of the keys costs 0.080 and 0.077 of its square, one of the values 0.025 and
  0.025: rounded values move the output in random directions, rounded keys shift weight
  between real values, along what later layers read. So a square of the values' counts
  VALUE_SHARE = 0.3 of one of the keys', and KL_PER_ERROR is 0.08 for every codec: int8's
  KL was 0.8 and 1.3 of what it says, with the queries of the forced tokens
  the share of what a query sees that is encoded must be a later step's: with one block of 256
  measured it was half where it is four fifths later, and KL at 4,096 tokens was three to
  six times what was expected. So all hot sealed blocks are, up to MEASURED_TOKENS
  one moment is not another: over eight moments of a text the sum of squares has a standard
  deviation of 0.3 to 0.5 of its mean, with 16 queries or 4: the text turns. So the verdict
  is that of the mean over moments, with a margin for their number (`caution`); on tables
  the first moment alone was 0.4 of the later ones
A model far from that one may lie further off: the guard tells outliers of ten and a hundred
times from what is well; it is no certificate. Nor does it see what one layer's error does to
the weights of a later one, which outliers amplify (tests/engine/test_guard.py). Pages made
before a layer rose stay as they are, and while tokens come one at a time (decode) no further
moment is taken.

Invariants:
  a layer's codec is the namespace's or a better one, and only rises
  a resumed session goes on as its newest pages are
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

KL_PER_ERROR = 0.08
# The fidelity bars of the design: mean KL against the full-precision cache. fp8 has none; it
# is a codec of 8 bits as coarse as one of 4, and held to theirs.
KL_LIMITS = {
    CodecId.RAW: 0.0,
    CodecId.INT8: 1e-4,
    CodecId.K8V4: 3e-4,
    CodecId.INT4: 1.5e-3,
    CodecId.FP8: 1.5e-3,
}
# One-sided 95 % of a mean of moments whose standard deviation is half their mean; see above.
MOMENT_SPREAD = 1.64 * 0.5
GROWTH = 1.25  # 26 moments in the first 128k tokens
QUERIES = 16  # per layer, of every head: 144 outputs a layer in the smallest model
MEASURED_TOKENS = 1024  # of four blocks hot of 256, all that may leave
RECENT_TOKENS_MAX = 128  # half a block: what an open block holds on the average


def layer_budget(codec: CodecId, layers: int, margin: float = 1.0) -> float:
    """Return the relative error of attention's output that a layer of `codec` may have.

    `margin`: how far the KL may lie above what such errors amount to.
    """
    return math.sqrt(KL_LIMITS[codec] / (KL_PER_ERROR * layers * margin))


def caution(moments: int) -> float:
    """Return how far above the mean of so many moments the mean of all may well lie."""
    return 1.0 + MOMENT_SPREAD / math.sqrt(moments)


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
    moments: int = 0
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
    """Watches one session's queries; `verdict` is None until it has decided a first time."""

    def __init__(self, namespace: Namespace, heads: int) -> None:
        geometry = namespace.geometry
        self._geometry = geometry
        self._asked = layer_codecs(namespace)
        self.base = namespace.codec
        self._recent_tokens = min(RECENT_TOKENS_MAX, geometry.block_tokens // 2)
        self._sample = _Sample(torch.empty(geometry.layers, heads, QUERIES, geometry.head_dim))
        self._means: dict[CodecId, _MeanSquares] = {
            codec: _MeanSquares(geometry.layers)
            for codec in self.codecs()
            if codec is not CodecId.RAW
        }
        self._next_position = 0
        self.verdict: Verdict | None = None

    def codecs(self) -> tuple[CodecId, ...]:
        """Return every codec that pages may get."""
        return tuple({c for asked in self._asked for c in (asked, *better_codecs(asked))})

    def wants(self, queries: int, end: int) -> bool:
        """Whether a step of so many queries, `end` tokens at its end, is to be observed.

        After a verdict: not decode's, and none before a measurement is due again.
        """
        return self.verdict is None or (queries >= QUERIES and self.is_due(end))

    def is_due(self, position: int) -> bool:
        """Whether pages that leave hot at `position` tokens ask for a measurement first."""
        if self.verdict is None:
            return True
        return self.verdict.source == "measured" and position >= self._next_position

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

        The verdict then is that of all moments so far. Layers keep what they got.
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
        for codec, mean in self._means.items():
            mean.add(probe.errors(codec))
        past = self.verdict or Verdict("measured", [])
        readings = choose_codecs(
            self._asked,
            lambda codec: self._means[codec].roots(),
            past.codecs or self._asked,
            caution(past.moments + 1),
        )
        self._next_position = int(position * GROWTH)
        self.verdict = Verdict(
            "measured",
            readings,
            moments=past.moments + 1,
            tokens=past.tokens + len(measured) * tokens,
            queries=past.queries + n,
            seconds=past.seconds + time.perf_counter() - started,
        )

    def adopt(self, codecs: npt.NDArray[np.uint8]) -> None:
        """Go on as a resumed session's pages are: codecs [layers, blocks], the first block's too.

        The newest block counts, since layers only rise; but for those that are raw in every
        layer, as one is that its codec cannot encode, where others are not.
        """
        if codecs.shape[1] < 2:
            return
        readings = []
        encoded = [block for block in codecs.T[1:] if (block != CodecId.RAW).any()]
        newest = encoded[-1] if encoded else codecs[:, -1]
        for layer, asked in enumerate(self._asked):
            found = CodecId(int(newest[layer]))
            chosen = found if found in better_codecs(asked) else asked
            budget = layer_budget(asked, len(self._asked))
            readings.append(LayerReading(layer, asked, chosen, math.nan, math.nan, budget))
        self.verdict = Verdict("resumed", readings)


class _MeanSquares:
    """Mean over moments of squared errors [layers]; a moment that could not be measured apart."""

    def __init__(self, layers: int) -> None:
        self._sums, self._counts = np.zeros(layers), np.zeros(layers)

    def add(self, errors: npt.NDArray[np.float64]) -> None:
        """Add a moment's errors [layers]; NaN: not measured."""
        self._sums += np.nan_to_num(np.square(errors))
        self._counts += ~np.isnan(errors)

    def roots(self) -> npt.NDArray[np.float64]:
        """Return the root mean squares [layers]; NaN: never measured."""
        counts = np.where(self._counts > 0, self._counts, np.nan)
        roots: npt.NDArray[np.float64] = np.sqrt(self._sums / counts)
        return roots


def choose_codecs(
    asked: Sequence[CodecId],
    measure: Callable[[CodecId], npt.NDArray[np.float64]],
    held: Sequence[CodecId] | None = None,
    margin: float = 1.0,
) -> list[LayerReading]:
    """Return a reading a layer. `measure(codec)` gives errors [layers]; each codec once at most.

    `held`: what the layers got before, which they keep or better; None: what was asked for.
    `margin`: how far the KL may lie above what is measured.

    A layer that cannot be measured (NaN) is left as asked for: a page that its codec
    cannot encode goes down raw by itself.
    """
    known: dict[CodecId, npt.NDArray[np.float64]] = {CodecId.RAW: np.zeros(len(asked))}

    def error_of(layer: int, codec: CodecId) -> float:
        if codec not in known:
            known[codec] = measure(codec)
        return float(known[codec][layer])

    budgets = [layer_budget(codec, len(asked), margin) for codec in asked]
    chosen = list(held or asked)
    before = [error_of(layer, codec) for layer, codec in enumerate(asked)]
    errors = [error_of(layer, codec) for layer, codec in enumerate(chosen)]
    limit = sum(budget**2 for budget in budgets)
    while np.nansum(np.square(errors)) > limit:
        worst = int(np.nanargmax(errors))
        chosen[worst] = better_codecs(chosen[worst])[0]
        errors[worst] = error_of(worst, chosen[worst])
    return [
        LayerReading(*row)
        for row in zip(range(len(asked)), asked, chosen, before, errors, budgets, strict=True)
    ]
