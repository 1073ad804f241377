"""Quality guard: layers whose codec would cost too much get a better one.

Before sealed blocks leave hot, each layer's codec is judged by what it does to the model
where it reads again what it has read (rehearsal.py): once before the first leave, and again
each time the session is GROWTH times as long. The rule:

    the mean KL of a pass over encoded pages is the sum of the layers' (outputerror.py).
    While it is over the limit, the bar of the codec that was asked for, the layer with the
    largest share gets the next better codec.

Measured on SmolLM2-135M in float32 on CPython's topics:
  what layers cost one by one adds up to 0.84 to 1.3 of what all cost together (int4, keys and
  values, natural text and rehearsed, at 2,048 to 8,192 tokens)
  of what a rehearsed pass over the whole context costs, the estimate from a scene was 0.13 to 3.7
  (int4), 0.9 to 5.8 (k8v4), 0.6 to 2.6 (int8): the KL stands in a few tokens, and 24 are heard.
  The layers that cost most, 18 and 20 of 30, are always found
  a text that repeats nothing costs a tenth to a hundredth of that, so there the guard is on the
  safe side; 15 runs of int4, five texts at three contexts, ended at 0.06 to 1.0 of the limit
It is no certificate: pages made before a layer rose stay as they are, and one layer's error on
what a later one attends to, which outliers amplify, is not seen.

Invariants:
  a layer's codec is the namespace's or a better one, and only rises
  a resumed session goes on as its newest pages are
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
import numpy.typing as npt

from tierd.layercodecs import better_codecs, layer_codecs
from tierd.types import CodecId, Namespace
from tierd_engine.outputerror import Cost, Heard, OutputProbe, Scene

# The fidelity bars of the design: mean KL against the full-precision cache. fp8 has none; it
# is a codec of 8 bits as coarse as one of 4, and held to theirs.
KL_LIMITS = {
    CodecId.RAW: 0.0,
    CodecId.INT8: 1e-4,
    CodecId.K8V4: 3e-4,
    CodecId.INT4: 1.5e-3,
    CodecId.FP8: 1.5e-3,
}
GROWTH = 4.0  # of a session of 128k tokens, a quarter hot, two moments


def kl_limit(codecs: Sequence[CodecId]) -> float:
    """Return the mean KL that a session may cost whose layers have these codecs."""
    return fmean(KL_LIMITS[codec] for codec in codecs)


@dataclass(frozen=True, slots=True)
class LayerReading:
    """One layer: the codec asked for, what it costs, and the chosen one.

    `error`: relative L2 error of attention's output by `asked`; `kl`: its share of the mean
    KL; `chosen_kl`: that of `chosen`. NaN: not measured.
    """

    layer: int
    asked: CodecId
    chosen: CodecId
    error: float
    kl: float
    chosen_kl: float


@dataclass(slots=True)
class Verdict:
    """What was decided. `source`: "measured", or "resumed" as the session's pages already are.

    Of the last moment: readings. Of all: the rest.
    """

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
    def kl_limit(self) -> float:
        """The mean KL that is allowed."""
        return kl_limit([reading.asked for reading in self.readings])

    @property
    def kl_asked(self) -> float | None:
        """The mean KL that the codecs asked for cost in rehearsal; None if not measured."""
        return self._sum(reading.kl for reading in self.readings)

    @property
    def kl_chosen(self) -> float | None:
        """The mean KL that the chosen codecs cost in rehearsal; None if not measured."""
        return self._sum(reading.chosen_kl for reading in self.readings)

    def _sum(self, parts: Iterable[float]) -> float | None:
        return float(np.nansum(list(parts))) if self.source == "measured" else None

    @property
    def raised(self) -> list[LayerReading]:
        """The layers that got a better codec than was asked for."""
        return [reading for reading in self.readings if reading.chosen is not reading.asked]


class QualityGuard:
    """Decides on one session's codecs; `verdict` is None until it has a first time."""

    def __init__(self, namespace: Namespace) -> None:
        self._asked = layer_codecs(namespace)
        self.base = namespace.codec
        self._next_position = 0
        self.verdict: Verdict | None = None

    def codecs(self) -> tuple[CodecId, ...]:
        """Return every codec that pages may get."""
        return tuple({c for asked in self._asked for c in (asked, *better_codecs(asked))})

    def is_due(self, position: int) -> bool:
        """Whether pages that leave hot at `position` tokens ask for a measurement first."""
        if all(asked is CodecId.RAW for asked in self._asked):
            return False
        if self.verdict is None:
            return True
        return self.verdict.source == "measured" and position >= self._next_position

    def decide(self, scene: Scene, heard: Heard, position: int) -> None:
        """Judge by what was heard at `scene`, in a session of `position` tokens.

        Layers keep what they got.
        """
        started = time.perf_counter()
        past = self.verdict or Verdict("measured", [])
        readings = choose_codecs(
            self._asked, OutputProbe(scene, heard).cost, past.codecs or self._asked
        )
        self._next_position = int(position * GROWTH)
        self.verdict = Verdict(
            "measured",
            readings,
            moments=past.moments + 1,
            tokens=past.tokens + scene.coded_tokens,
            queries=past.queries + heard.q.shape[2] - heard.run_in,
            seconds=past.seconds + heard.seconds + time.perf_counter() - started,
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
            readings.append(LayerReading(layer, asked, chosen, math.nan, math.nan, math.nan))
        self.verdict = Verdict("resumed", readings)


def choose_codecs(
    asked: Sequence[CodecId],
    measure: Callable[[CodecId], Cost],
    held: Sequence[CodecId] | None = None,
) -> list[LayerReading]:
    """Return a reading a layer. `measure` is asked for each codec once at most.

    `held`: what the layers got before, which they keep or better; None: what was asked for.

    A layer that cannot be measured (NaN) is left as asked for: a page that its codec
    cannot encode goes down raw by itself.
    """
    nothing = np.zeros(len(asked))
    known: dict[CodecId, Cost] = {CodecId.RAW: Cost(nothing, nothing)}

    def cost_of(codec: CodecId) -> Cost:
        if codec not in known:
            known[codec] = measure(codec)
        return known[codec]

    chosen = list(held or asked)
    kls = [float(cost_of(codec).kl[layer]) for layer, codec in enumerate(chosen)]
    while np.nansum(kls) > kl_limit(asked):
        worst = int(np.nanargmax(kls))
        chosen[worst] = better_codecs(chosen[worst])[0]
        kls[worst] = float(cost_of(chosen[worst]).kl[worst])
    readings = []
    for layer, codec in enumerate(asked):
        cost = cost_of(codec)
        error, kl = float(cost.error[layer]), float(cost.kl[layer])
        readings.append(LayerReading(layer, codec, chosen[layer], error, kl, kls[layer]))
    return readings
