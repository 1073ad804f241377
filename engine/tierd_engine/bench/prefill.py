"""Prefill over tiers beside the model's own, alternating in one run, on real text."""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

from tierd.types import CodecId, DType
from tierd_engine import hf
from tierd_engine.attention.plan import PlanMode
from tierd_engine.bench.machine import describe_machine
from tierd_engine.bench.rig import open_session_kv
from tierd_engine.bench.texts import python_reference
from tierd_engine.fidelity import OwnCacheRun
from tierd_engine.generator import Generator
from tierd_engine.sizing import size_tiers

RATIO_MIN = 0.7
_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """Median tokens/s of both, and the median of the rounds' ratios."""

    context_tokens: int
    codec: str
    dtype: str
    tokens_per_second: float
    own_tokens_per_second: float
    ratio_to_own: float

    @property
    def holds(self) -> bool:
        """Whether the bar is met."""
        return self.ratio_to_own >= RATIO_MIN


def bench_prefill(context: int, codec: CodecId, dtype: DType, hot: str) -> PrefillRow:
    """Prefill `context` tokens of CPython's language reference, hot and warm shares of the KV."""
    folder = hf.resolve_model(hf.PACKAGED_MODEL)
    config = hf.load_config(folder)
    shape = hf.model_shape(config)
    model = hf.load_model(folder, config, dtype)
    tokenizer = hf.load_tokenizer(folder)
    ids = tokenizer(python_reference(), add_special_tokens=False, verbose=False)["input_ids"]
    ids = ids[:context]
    sizes = size_tiers(
        shape, dtype, codec, context_tokens=context, max_new_tokens=1, hot=hot, warm="25%",
        block_tokens=None,
    )  # fmt: skip
    geometry = shape.geometry(dtype, sizes.block_tokens)
    ours, own = [], []
    for _ in range(_ROUNDS):
        run = OwnCacheRun(model)
        run.prefill(ids)
        own.append(run.prefill_seconds)
        with open_session_kv(
            geometry, codec, shape.heads, hot_bytes=sizes.hot_budget_bytes,
            warm_bytes=sizes.warm_budget_bytes, total_tokens=context + 1, plan=PlanMode.AUTO,
        ) as kv:  # fmt: skip
            start = time.perf_counter()
            Generator(model, kv).feed(ids)
            ours.append(time.perf_counter() - start)
    ratio = statistics.median(b / a for a, b in zip(ours, own, strict=True))
    rates = (context / statistics.median(ours), context / statistics.median(own))
    return PrefillRow(context, codec.name.lower(), str(dtype), *rates, ratio)


def print_prefill(row: PrefillRow) -> None:
    """Print the row on stdout."""
    print(f"prefill, SmolLM2-135M {row.dtype}; {describe_machine()}")
    print(
        f"tierd {row.codec} {row.context_tokens} tokens: {row.tokens_per_second:.0f} tokens/s, "
        f"the model's own {row.own_tokens_per_second:.0f}; ratio {row.ratio_to_own:.2f}, "
        f"limit {RATIO_MIN} {'ok' if row.holds else 'FAILS'}"
    )


def prefill_to_dict(row: PrefillRow) -> dict[str, Any]:
    """Return the versioned JSON object."""
    return {"version": 1, "benchmark": "prefill", "holds": row.holds, "row": asdict(row)}
