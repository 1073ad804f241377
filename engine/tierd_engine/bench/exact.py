"""Exactness on the real model: tokens over raw tiers against the model's own cache, all cells.

For each context length the model runs once as transformers has it, with its own
cache; each (hot budget, plan) cell then runs over tiers, as a job runs it (its
linear layers too), and must give the same greedy tokens, with logits within 3e-4
of those in float32 (attention.md).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tierd.errors import BudgetTooSmall
from tierd.types import CodecId, DType
from tierd_engine import hf
from tierd_engine.attention.plan import PlanMode
from tierd_engine.bench.machine import describe_machine
from tierd_engine.bench.rig import open_session_kv
from tierd_engine.fidelity import OwnCacheRun
from tierd_engine.generator import Generator
from tierd_engine.prompt import build_prompt
from tierd_engine.sizing import JobSizes, size_tiers
from tierd_engine.weightonly import Weights, apply_weights

LOGIT_DIFFERENCE_MAX = 3e-4
NEW_TOKENS = 256
CONTEXTS = (255, 256, 257, 300, 1000, 4096, 8000)
SMALLEST = "smallest"
HOT_BUDGETS = ("25%", "10%", SMALLEST)


@dataclass(frozen=True, slots=True)
class ExactCell:
    """One context, hot budget and plan: what was compared.

    `off_steps`: the steps whose logits are beyond the limit. One alone was computed wrong; from
    one on to the end, it is the KV that is wrong. `recomputed_tokens`: after pages were lost.
    """

    context_tokens: int
    hot: str
    plan: str
    block_tokens: int
    hot_budget_bytes: int
    hot_peak_bytes: int
    tokens_identical: bool
    logit_difference_max: float
    seconds: float
    off_steps: tuple[int, ...] = ()
    recomputed_tokens: int = 0

    @property
    def holds(self) -> bool:
        """Whether this cell meets every part of the bar."""
        return (
            self.tokens_identical
            and self.logit_difference_max < LOGIT_DIFFERENCE_MAX
            and self.hot_peak_bytes <= self.hot_budget_bytes
        )


@dataclass(frozen=True, slots=True)
class _Reference:
    prompt: list[int]
    tokens: list[int]
    logits: list[Any]


def bench_exact(
    contexts: Sequence[int], document: str, new_tokens: int = NEW_TOKENS
) -> list[ExactCell]:
    """Run every cell of the given contexts on SmolLM2 in float32, `new_tokens` greedy tokens."""
    folder = hf.resolve_model(hf.PACKAGED_MODEL)
    config = hf.load_config(folder)
    shape = hf.model_shape(config)
    model, as_loaded = (hf.load_model(folder, config, DType.FLOAT32) for _ in range(2))
    apply_weights(model, Weights.AUTO)
    tokenizer = hf.load_tokenizer(folder)
    cells = []
    for context in contexts:
        prompt = build_prompt(tokenizer, document, "What is this about?", context).token_ids
        reference = _reference(as_loaded, prompt, new_tokens)
        for hot in HOT_BUDGETS:
            sizes = _sizes(shape, context, new_tokens, hot)
            for plan in (PlanMode.NEAR, PlanMode.STREAM):
                cell = _cell(model, shape, reference, hot, sizes, plan)
                print(_line(cell), file=sys.stderr, flush=True)
                cells.append(cell)
    return cells


def _reference(model: Any, prompt: list[int], new_tokens: int) -> _Reference:
    run = OwnCacheRun(model)
    logits = [run.prefill(prompt)]
    tokens = [int(logits[0].argmax())]
    while len(tokens) < new_tokens:
        logits.append(run.decode(tokens[-1]))
        tokens.append(int(logits[-1].argmax()))
    return _Reference(prompt, tokens, logits)


def _sizes(shape: hf.ModelShape, context: int, new_tokens: int, hot: str) -> JobSizes:
    def sized(hot_text: str) -> JobSizes:
        return size_tiers(
            shape, DType.FLOAT32, CodecId.RAW, context_tokens=context,
            max_new_tokens=new_tokens, hot=hot_text, warm="25%", block_tokens=None,
        )  # fmt: skip

    if hot != SMALLEST:
        return sized(hot)
    try:
        return sized("1")
    except BudgetTooSmall as error:
        return sized(str(error.smallest_bytes))


def _cell(
    model: Any,
    shape: hf.ModelShape,
    reference: _Reference,
    hot: str,
    sizes: JobSizes,
    plan: PlanMode,
) -> ExactCell:
    start = time.perf_counter()
    geometry = shape.geometry(DType.FLOAT32, sizes.block_tokens)
    with open_session_kv(
        geometry, CodecId.RAW, shape.heads, hot_bytes=sizes.hot_budget_bytes,
        warm_bytes=sizes.warm_budget_bytes, total_tokens=sizes.total_tokens, plan=plan,
    ) as kv:  # fmt: skip
        generator = Generator(model, kv)
        logits = generator.feed(reference.prompt)
        differences, identical = [], True
        for i, (token, expected) in enumerate(zip(reference.tokens, reference.logits, strict=True)):
            differences.append(float((logits - expected).abs().max()))
            identical &= int(logits.argmax()) == token
            if i + 1 < len(reference.tokens):
                logits = generator.feed([token])
        kv.check_integrity()
        return ExactCell(
            len(reference.prompt), hot, str(plan), sizes.block_tokens, kv.arena.budget_bytes,
            kv.arena.peak_bytes, identical, max(differences), time.perf_counter() - start,
            tuple(i for i, d in enumerate(differences) if d >= LOGIT_DIFFERENCE_MAX),
            generator.recomputed_tokens,
        )  # fmt: skip


def _line(cell: ExactCell) -> str:
    return (
        f"{cell.context_tokens:8d} {cell.hot:>9} {cell.plan:>7} {cell.block_tokens:6d} "
        f"{cell.hot_peak_bytes:>12d} {cell.hot_budget_bytes:>12d} "
        f"{'yes' if cell.tokens_identical else 'NO':>9} {cell.logit_difference_max:10.2e} "
        f"{cell.seconds:7.1f}  {'ok' if cell.holds else f'FAILS at steps {cell.off_steps}'}"
    )


def print_exact(cells: list[ExactCell]) -> None:
    """Print every cell and the worst figure against its limit."""
    print(f"exactness, SmolLM2-135M float32, codec raw, {NEW_TOKENS} tokens; {describe_machine()}")
    print(
        f"{'context':>8} {'hot':>9} {'plan':>7} {'block':>6} {'hot peak':>12} "
        f"{'hot budget':>12} {'identical':>9} {'|dlogit|':>10} {'seconds':>7}"
    )
    for cell in cells:
        print(_line(cell))
    worst = max(cell.logit_difference_max for cell in cells)
    print(
        f"{sum(cell.holds for cell in cells)} of {len(cells)} cells hold; "
        f"worst |dlogit| {worst:.2e}, limit {LOGIT_DIFFERENCE_MAX:.0e}, "
        f"ratio {worst / LOGIT_DIFFERENCE_MAX:.2f}"
    )


def exact_to_dict(cells: list[ExactCell]) -> dict[str, Any]:
    """Return the versioned JSON object."""
    return {
        "version": 1,
        "benchmark": "exact",
        "holds": all(cell.holds for cell in cells),
        "cells": [asdict(cell) for cell in cells],
    }
