"""Fidelity of codecs on real text: KL, perplexity and top-1 against the exact cache.

The reference is the model's own full-precision cache, teacher-forced. Every
codec, and the q8_0 layout (groups of 32 along the channel, symmetric) as a
reference, is run over real tiers under two protocols (bench/forced.py), on
texts of several kinds, and held against the design's bars on all texts
together at each context; the rows of single texts stand beside.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tierd.errors import InvalidArgument, TierdError
from tierd.types import DType
from tierd_engine import hf
from tierd_engine.bench.forced import ForcedRuns, Protocol, Setting
from tierd_engine.bench.layouts import Q8_0, Layout, PagesHeld
from tierd_engine.bench.scores import Summary, TokenScores, join_scores, score_tokens, summarise
from tierd_engine.bench.texts import TEXT_NAMES, text_of

ALL_TEXTS = "all"
CONTEXTS = (2048, 4096, 8192)
LAYOUTS = ("raw", "int8", "k8v4", "int4", "fp8", Q8_0)
TOKENS = 448  # as in attention.md's table: perplexity needs as many


class Verdict(enum.StrEnum):
    """UNSURE: only the perplexity change is beyond its bar, and its interval reaches within."""

    HOLDS = "holds"
    FAILS = "fails"
    UNSURE = "unsure"
    NO_BAR = "-"


@dataclass(frozen=True, slots=True)
class FidelityBar:
    """The limits of the design for one codec; `below_q8_0`: KL below that layout's, too."""

    kl_mean: float
    perplexity_change: float = math.inf
    top1: float = 0.0
    below_q8_0: bool = False
    logit_difference: float = math.inf


BARS = {  # fp8, for GPUs that read it as it stands, has none; nor has the reference row
    "raw": FidelityBar(1e-6, 1e-4, 1.0, logit_difference=3e-4),
    "int8": FidelityBar(1e-4, 1e-3, 0.995, below_q8_0=True),
    "k8v4": FidelityBar(3e-4, top1=0.99),
    "int4": FidelityBar(1.5e-3, 3e-3),
}


@dataclass(frozen=True, slots=True)
class FidelityPlan:
    """What to run: names of layouts and texts, and `tokens` forced after each context.

    Raises InvalidArgument for contexts that overlap, names that are not there, or a guarded
    layout under the prefix protocol.
    """

    layouts: Sequence[str] = LAYOUTS
    contexts: Sequence[int] = CONTEXTS
    texts: Sequence[str] = TEXT_NAMES
    settings: Sequence[str] = ("near",)
    protocols: Sequence[Protocol] = tuple(Protocol)
    tokens: int = TOKENS
    seed: int = 0

    def __post_init__(self) -> None:
        if self.tokens < 1 or min(self.contexts, default=0) < 1:
            raise InvalidArgument("contexts and tokens are at least 1")
        if any(b - a < self.tokens for a, b in itertools.pairwise(self.contexts)):
            raise InvalidArgument(
                f"contexts rise by the {self.tokens} forced tokens at least; "
                f"{', '.join(map(str, self.contexts))} do not"
            )
        guarded = [name for name in self.layouts if Layout.parse(name).guarded]
        if guarded and Protocol.PREFIX in self.protocols:
            raise InvalidArgument(
                f"{guarded[0]}: the guard decides on the prefill's queries, and protocol prefix "
                "has none; give --protocol tiers"
            )


@dataclass(frozen=True, slots=True)
class FidelityRow:
    """One layout on one text, or on all together. `misses` names the bars not met.

    `bar_name`: the codec whose bar it is judged by. `held`: what its pages took, a text each.
    """

    layout: str
    setting: str
    protocol: str
    text: str
    context_tokens: int
    summary: Summary
    kl_limit: float | None
    misses: tuple[str, ...]
    verdict: Verdict
    bar_name: str
    held: dict[str, PagesHeld]

    @property
    def element_bits(self) -> float | None:
        """Bits an element of K or V, mean over the texts; None: not known, as of q8_0."""
        bits = [held.element_bits for held in self.held.values()]
        return sum(bits) / len(bits) if bits else None


@dataclass(frozen=True, slots=True)
class MissingRun:
    """A run that failed: which, and the error's one line."""

    layout: str
    setting: str
    protocol: str
    text: str
    why: str

    def __str__(self) -> str:
        return f"{self.layout}, {self.setting}, protocol {self.protocol}, {self.text}: {self.why}"


@dataclass(slots=True)
class FidelityResult:
    """The judged rows, and the runs without which some of them are not there."""

    rows: list[FidelityRow] = field(default_factory=list)
    missing: list[MissingRun] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Key:
    layout: str
    setting: str
    protocol: Protocol
    context: int
    bar_name: str


@dataclass(frozen=True, slots=True)
class _Scored:
    scores: TokenScores
    held: PagesHeld | None = None


_Scores = dict[_Key, dict[str, _Scored]]
Say = Callable[[str], None]
TextDone = Callable[[FidelityPlan, FidelityResult], None]


def bench_fidelity(
    plan: FidelityPlan, say: Say = lambda _: None, text_done: TextDone = lambda _, __: None
) -> FidelityResult:
    """Run the plan on SmolLM2 in float32; `say` gets a line of progress a run.

    `text_done` gets, after each text, the plan of the texts so far and their result: the whole
    takes an hour on two cores, and what was measured should outlive an interruption. For the
    same reason a run that fails is named, and the others go on; its layout then has no row
    of all texts.
    Rows of a layout stand together: all texts first, then one by one.
    Raises InvalidArgument if a text is too short for the longest context.
    """
    folder = hf.resolve_model(hf.PACKAGED_MODEL)
    config = hf.load_config(folder)
    model = hf.load_model(folder, config, DType.FLOAT32)
    tokenizer = hf.load_tokenizer(folder)
    scores: _Scores = {}
    result = FidelityResult()
    for count, text in enumerate(plan.texts, 1):
        ids = tokenizer(text_of(text), add_special_tokens=False, verbose=False)["input_ids"]
        _require_long_enough(text, len(ids), plan)
        runs = ForcedRuns(model, hf.model_shape(config), ids, plan.contexts, plan.tokens)
        result.missing += run_text(runs, text, plan, scores, say)
        result.rows = make_rows(scores, plan.seed, plan.texts[:count])
        text_done(replace(plan, texts=tuple(plan.texts[:count])), result)
    return result


def _require_long_enough(text: str, length: int, plan: FidelityPlan) -> None:
    needed = plan.contexts[-1] + plan.tokens
    if length < needed:
        raise InvalidArgument(f"text {text} has {length} tokens; {needed} are needed")


def run_text(
    runs: ForcedRuns, text: str, plan: FidelityPlan, scores: _Scores, say: Say
) -> list[MissingRun]:
    """Run every layout, setting and protocol of the plan; add their scores; return the failed."""
    say(f"{text}: the model's own cache")
    own = runs.own()
    missing = []
    layouts = [Layout.parse(name) for name in plan.layouts]
    settings = [Setting.parse(name) for name in plan.settings]
    for layout, setting, protocol in itertools.product(layouts, settings, plan.protocols):
        say(f"{text}: {layout.name} {setting.name}, protocol {protocol.value}")
        try:
            run = runs.over_tiers(layout, setting, protocol, own)
        except TierdError as error:
            # An embedded daemon that did not stop in time on a busy machine: seen once.
            missing.append(MissingRun(layout.name, setting.name, protocol.value, text, str(error)))
            say(f"failed, and left out: {missing[-1]}")
            continue
        for context, logits in run.logits.items():
            key = _Key(layout.name, setting.name, protocol, context, layout.bar_name)
            scored = score_tokens(own.logits[context], logits, runs.targets(context))
            scores.setdefault(key, {})[text] = _Scored(scored, run.held[context])
    return missing


def make_rows(scores: _Scores, seed: int, texts: Collection[str]) -> list[FidelityRow]:
    """Return the judged rows: for each key all `texts` together, unless one failed, then each."""
    rows = []
    for key, by_text in scores.items():
        reference = scores.get(replace(key, layout=Q8_0, bar_name=Q8_0), {})
        together = (ALL_TEXTS,) if set(by_text) == set(texts) else ()
        for text in (*together, *by_text):
            wanted = list(by_text) if text == ALL_TEXTS else [text]
            q8 = math.inf  # where the reference was not run on the same texts
            if set(wanted) <= set(reference):
                q8 = float(_joined(reference, wanted).divergence.mean())
            summary = summarise(_joined(by_text, wanted), seed)
            bar = BARS.get(key.bar_name)
            misses = find_misses(summary, bar, q8) if bar else ()
            held = {name: by_text[name].held for name in wanted}
            row = FidelityRow(
                key.layout, key.setting, key.protocol.value, text, key.context, summary,
                bar.kl_mean if bar else None, misses, judge(summary, bar, misses), key.bar_name,
                {name: pages for name, pages in held.items() if pages is not None},
            )  # fmt: skip
            rows.append(row)
    return rows


def _joined(by_text: dict[str, _Scored], texts: Sequence[str]) -> TokenScores:
    return join_scores([by_text[text].scores for text in texts])


def find_misses(summary: Summary, bar: FidelityBar, q8_0_kl: float) -> tuple[str, ...]:
    """Return which bars are not met: "KL", "q8_0", "top-1", "dlogit", "dppl" (always last)."""
    met = {
        "KL": summary.kl_mean < bar.kl_mean,
        "q8_0": not bar.below_q8_0 or summary.kl_mean < q8_0_kl,
        "top-1": summary.top1 >= bar.top1,
        "dlogit": summary.logit_difference_max < bar.logit_difference,
        "dppl": abs(summary.perplexity_change) < bar.perplexity_change,
    }
    return tuple(name for name, is_met in met.items() if not is_met)


def judge(summary: Summary, bar: FidelityBar | None, misses: tuple[str, ...]) -> Verdict:
    """Return the verdict on a row whose missed bars are `misses`."""
    if bar is None:
        return Verdict.NO_BAR
    if not misses:
        return Verdict.HOLDS
    limit = bar.perplexity_change
    reaches = summary.perplexity_change_low < limit and summary.perplexity_change_high > -limit
    return Verdict.UNSURE if misses == ("dppl",) and reaches else Verdict.FAILS


def judged(rows: Sequence[FidelityRow]) -> list[FidelityRow]:
    """Return the rows that the bars are for: all texts together."""
    return [row for row in rows if row.text == ALL_TEXTS]


def fidelity_to_dict(plan: FidelityPlan, result: FidelityResult) -> dict[str, Any]:
    """Return the versioned JSON object; `holds`: no judged row fails, and no run is missing."""
    failed = [row for row in judged(result.rows) if row.verdict is Verdict.FAILS]
    return {
        "version": 2,
        "benchmark": "fidelity",
        "tokens": plan.tokens,
        "holds": not failed and not result.missing,
        "missing": [asdict(run) for run in result.missing],
        "rows": [_flat(asdict(row)) for row in result.rows],
    }


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, **row.pop("summary")}
