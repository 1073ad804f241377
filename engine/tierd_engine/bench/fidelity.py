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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tierd.errors import InvalidArgument
from tierd.types import DType
from tierd_engine import hf
from tierd_engine.bench.forced import ForcedRuns, Layout, Protocol, Setting
from tierd_engine.bench.scores import Summary, TokenScores, join_scores, score_tokens, summarise
from tierd_engine.bench.texts import TEXT_NAMES, text_of

ALL_TEXTS = "all"
Q8_0 = "q8_0"
CONTEXTS = (2048, 4096, 8192)
LAYOUTS = ("raw", "int8", "k8v4", "int4", "fp8", Q8_0)
TOKENS = 256


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

    Raises InvalidArgument for contexts that overlap or names that are not there.
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


@dataclass(frozen=True, slots=True)
class FidelityRow:
    """One layout on one text, or on all together. `misses` names the bars not met."""

    layout: str
    setting: str
    protocol: str
    text: str
    context_tokens: int
    summary: Summary
    kl_limit: float | None
    misses: tuple[str, ...]
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class _Key:
    layout: str
    setting: str
    protocol: Protocol
    context: int


_Scores = dict[_Key, dict[str, TokenScores]]
Say = Callable[[str], None]
TextDone = Callable[[FidelityPlan, list[FidelityRow]], None]


def bench_fidelity(
    plan: FidelityPlan, say: Say = lambda _: None, text_done: TextDone = lambda _, __: None
) -> list[FidelityRow]:
    """Run the plan on SmolLM2 in float32; `say` gets a line of progress a run.

    `text_done` gets, after each text, the plan of the texts so far and their rows: the whole
    takes an hour on two cores, and what was measured should outlive an interruption.
    Rows of a layout stand together: all texts first, then one by one.
    Raises InvalidArgument if a text is too short for the longest context.
    """
    layouts = [Layout.parse(name) for name in plan.layouts]
    settings = [Setting.parse(text) for text in plan.settings]
    folder = hf.resolve_model(hf.PACKAGED_MODEL)
    config = hf.load_config(folder)
    model = hf.load_model(folder, config, DType.FLOAT32)
    tokenizer = hf.load_tokenizer(folder)
    scores: _Scores = {}
    rows: list[FidelityRow] = []
    for count, text in enumerate(plan.texts, 1):
        ids = tokenizer(text_of(text), add_special_tokens=False, verbose=False)["input_ids"]
        _require_long_enough(text, len(ids), plan)
        runs = ForcedRuns(model, hf.model_shape(config), ids, plan.contexts, plan.tokens)
        _run_text(runs, text, layouts, settings, plan.protocols, scores, say)
        rows = make_rows(scores, plan.seed)
        text_done(replace(plan, texts=tuple(plan.texts[:count])), rows)
    return rows


def _require_long_enough(text: str, length: int, plan: FidelityPlan) -> None:
    needed = plan.contexts[-1] + plan.tokens
    if length < needed:
        raise InvalidArgument(f"text {text} has {length} tokens; {needed} are needed")


def _run_text(
    runs: ForcedRuns,
    text: str,
    layouts: Sequence[Layout],
    settings: Sequence[Setting],
    protocols: Sequence[Protocol],
    scores: _Scores,
    say: Say,
) -> None:
    say(f"{text}: the model's own cache")
    own = runs.own()
    for layout in layouts:
        for setting in settings:
            for protocol in protocols:
                say(f"{text}: {layout.name} {setting.name}, protocol {protocol.value}")
                logits = runs.over_tiers(layout, setting, protocol, own)
                for context in runs.contexts:
                    key = _Key(layout.name, setting.name, protocol, context)
                    scores.setdefault(key, {})[text] = score_tokens(
                        own.logits[context], logits[context], runs.targets(context)
                    )


def make_rows(scores: _Scores, seed: int) -> list[FidelityRow]:
    """Return the judged rows: for each key all texts together, then each text."""
    rows = []
    for key, by_text in scores.items():
        reference = scores.get(_Key(Q8_0, key.setting, key.protocol, key.context))
        for text in (ALL_TEXTS, *by_text):
            q8 = _of_text(reference, text).divergence.mean() if reference else math.inf
            summary = summarise(_of_text(by_text, text), seed)
            bar = BARS.get(key.layout)
            misses = find_misses(summary, bar, float(q8)) if bar else ()
            limit = bar.kl_mean if bar else None
            row = FidelityRow(
                key.layout, key.setting, key.protocol.value, text, key.context, summary,
                limit, misses, judge(summary, bar, misses),
            )  # fmt: skip
            rows.append(row)
    return rows


def _of_text(by_text: dict[str, TokenScores], text: str) -> TokenScores:
    return join_scores(list(by_text.values())) if text == ALL_TEXTS else by_text[text]


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


def fidelity_to_dict(plan: FidelityPlan, rows: Sequence[FidelityRow]) -> dict[str, Any]:
    """Return the versioned JSON object; `holds`: no judged row fails."""
    return {
        "version": 2,
        "benchmark": "fidelity",
        "tokens": plan.tokens,
        "holds": all(row.verdict is not Verdict.FAILS for row in judged(rows)),
        "rows": [_flat(asdict(row)) for row in rows],
    }


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, **row.pop("summary")}
