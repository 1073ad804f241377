"""Prefill over tiers beside the model's own, alternating in one run, on real text.

As a job runs it: the quality guard is on, and its share stands beside. So does the memory
that prefill takes beyond the tiers themselves: it is chunked, so that this does not grow
with the context.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tierd.types import CodecId, DType
from tierd.units import format_size
from tierd_engine import hf
from tierd_engine.attention.plan import PlanMode
from tierd_engine.bench.machine import describe_machine, load_average, reset_peak_rss
from tierd_engine.bench.memory import PeakMemory, pss_bytes
from tierd_engine.bench.rig import open_session_kv
from tierd_engine.bench.runners import below_bytes
from tierd_engine.bench.texts import python_reference
from tierd_engine.fidelity import OwnCacheRun
from tierd_engine.generator import Generator
from tierd_engine.runner import use_all_cores
from tierd_engine.sizing import size_tiers

RATIO_MIN = 0.9
_POLL_SECONDS = 0.5  # a look at a large process takes milliseconds


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """Median tokens/s of both, and the median of the rounds' ratios.

    `beyond_tiers_bytes`: the peak of a round of its own less what hot and warm hold.
    `guard_share`: the quality guard's part of the time, in the last round.
    """

    context_tokens: int
    codec: str
    dtype: str
    tokens_per_second: float
    own_tokens_per_second: float
    ratio_to_own: float
    beyond_tiers_bytes: int
    guard_share: float

    @property
    def holds(self) -> bool:
        """Whether the bar is met."""
        return self.ratio_to_own >= RATIO_MIN


def bench_prefill(
    context: int, codec: CodecId, dtype: DType, hot: str, rounds: int = 3
) -> PrefillRow:
    """Prefill `context` tokens of CPython's language reference, hot and warm shares of the KV."""
    use_all_cores()
    folder = hf.resolve_model(hf.PACKAGED_MODEL)
    config = hf.load_config(folder)
    shape = hf.model_shape(config)
    model = hf.load_model(folder, config, dtype)
    tokenizer = hf.load_tokenizer(folder)
    ids = tokenizer(python_reference(), add_special_tokens=False, verbose=False)["input_ids"]
    ids = ids[:context]
    sizes = size_tiers(
        shape, dtype, codec, context_tokens=context, max_new_tokens=1, hot=hot, warm="25%",
        block_tokens=None, guarded=True,
    )  # fmt: skip
    geometry = shape.geometry(dtype, sizes.block_tokens)

    def open_kv() -> Any:
        return open_session_kv(
            geometry, codec, shape.heads, hot_bytes=sizes.hot_budget_bytes,
            warm_bytes=sizes.warm_budget_bytes, total_tokens=context + 1, plan=PlanMode.AUTO,
            guarded=True,
        )  # fmt: skip

    ours, own = [], []
    guard_share = 0.0
    for _ in range(rounds):
        run = OwnCacheRun(model)
        run.prefill(ids)
        own.append(run.prefill_seconds)
        del run
        with open_kv() as kv:
            start = time.perf_counter()
            Generator(model, kv).feed(ids)
            ours.append(time.perf_counter() - start)
            guard_share = kv.guard.verdict.seconds / ours[-1] if kv.guard.verdict else 0.0
    beyond = _beyond_tiers(model, open_kv, ids)
    ratio = statistics.median(b / a for a, b in zip(ours, own, strict=True))
    rates = (context / statistics.median(ours), context / statistics.median(own))
    return PrefillRow(context, codec.name.lower(), str(dtype), *rates, ratio, beyond, guard_share)


def _beyond_tiers(model: Any, open_kv: Callable[[], Any], ids: list[int]) -> int:
    """Prefill once, untimed: to look at a process's memory holds it up."""
    reset_peak_rss()
    before, peak = pss_bytes(), PeakMemory(_POLL_SECONDS)
    with open_kv() as kv:
        Generator(model, kv).feed(ids)
        held: int = kv.arena.peak_bytes + below_bytes(kv)[0]
        return peak.end() - before - held


def print_prefill(rows: Sequence[PrefillRow]) -> None:
    """Print the rows on stdout, and how memory grows with the context."""
    for row in rows:
        print(f"prefill, SmolLM2-135M {row.dtype}, load {load_average():.1f}; {describe_machine()}")
        print(
            f"tierd {row.codec} {row.context_tokens} tokens: {row.tokens_per_second:.0f} tokens/s, "
            f"the model's own {row.own_tokens_per_second:.0f}; ratio {row.ratio_to_own:.2f}, "
            f"limit {RATIO_MIN} {'ok' if row.holds else 'FAILS'}; "
            f"{format_size(max(0, row.beyond_tiers_bytes))} beyond the tiers, "
            f"{row.guard_share:.1%} of the time the quality guard's"
        )
    if len(rows) > 1:
        grown = memory_growth(rows)
        print(f"memory beyond the tiers grows by {grown:.0f} bytes a token of context")


def memory_growth(rows: Sequence[PrefillRow]) -> float:
    """Return the bytes beyond the tiers that a token of context adds: least squares."""
    x = [row.context_tokens for row in rows]
    return float(np.polyfit(x, [row.beyond_tiers_bytes for row in rows], 1)[0])


def prefill_to_dict(rows: Sequence[PrefillRow]) -> dict[str, Any]:
    """Return the versioned JSON object."""
    return {
        "version": 3,
        "benchmark": "prefill",
        "holds": all(row.holds for row in rows),
        "rows": [asdict(row) for row in rows],
    }
