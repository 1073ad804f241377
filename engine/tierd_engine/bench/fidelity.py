"""Fidelity of a lossy codec on real text: KL, perplexity and top-1 against the exact cache.

The reference is the model's own full-precision cache, teacher-forced. A row
for the q8_0 layout (groups of 32 along the channel, symmetric) rounds the very
tokens that the tiers have below hot, at the same moments, on the same text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from tierd.codec.layout import page_layout
from tierd.types import CodecId, DType
from tierd_engine import hf
from tierd_engine.arena import hot_block_bytes
from tierd_engine.attention.executors import FEW_QUERIES_MAX
from tierd_engine.attention.plan import PlanMode
from tierd_engine.bench.machine import describe_machine
from tierd_engine.bench.rig import open_session_kv
from tierd_engine.bench.texts import python_reference
from tierd_engine.cache import TierCache
from tierd_engine.fidelity import own_attention
from tierd_engine.generator import Generator

_BLOCK_TOKENS = 256
_HOT_BLOCKS = 2
_Q8_GROUP = 32

Rounding = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class FidelityBar:
    """The limits of the design for one codec; `below_q8_0`: KL below that layout's, too."""

    kl_mean: float
    perplexity_change: float = math.inf
    top1: float = 0.0
    below_q8_0: bool = False


BARS = {  # fp8, for GPUs that read it as it stands, has none
    CodecId.RAW: FidelityBar(1e-6, 1e-4, 1.0),
    CodecId.INT8: FidelityBar(1e-4, 1e-3, 0.995, below_q8_0=True),
    CodecId.K8V4: FidelityBar(3e-4, top1=0.99),
    CodecId.INT4: FidelityBar(1.5e-3, 3e-3),
}


@dataclass(frozen=True, slots=True)
class FidelityRow:
    """One layout on one text. `perplexity_change` is relative; `kl_limit` inf for no bar."""

    name: str
    context_tokens: int
    tokens: int
    kl_mean: float
    kl_p99: float
    perplexity_change: float
    top1: float
    kl_limit: float
    holds: bool


def bench_fidelity(context: int, codec: CodecId, tokens: int) -> list[FidelityRow]:
    """Measure `codec` over tiers, and the q8_0 layout, on CPython's language reference."""
    folder = hf.resolve_model(hf.PACKAGED_MODEL)
    config = hf.load_config(folder)
    shape = hf.model_shape(config)
    model = hf.load_model(folder, config, DType.FLOAT32)
    tokenizer = hf.load_tokenizer(folder)
    ids = tokenizer(python_reference(), add_special_tokens=False, verbose=False)["input_ids"]
    prompt, forced = ids[:context], ids[context : context + tokens]
    fed, first = [*prompt, *forced[:-1]], len(prompt) - 1
    exact = _own_logits(model, fed, first, lambda x: x)
    q8_logits = _own_logits(model, fed, first, round_q8_0)
    tier_logits = _tier_logits(model, shape, codec, prompt, forced)
    q8 = _row("q8_0 layout", context, exact, q8_logits, forced, None)
    bar = BARS.get(codec)
    ours = _row(f"tierd {codec.name.lower()}", context, exact, tier_logits, forced, bar)
    if bar is not None and bar.below_q8_0 and ours.kl_mean >= q8.kl_mean:
        ours = FidelityRow(**{**asdict(ours), "holds": False})
    return [ours, q8]


def _own_logits(model: Any, ids: list[int], first: int, rounding: Rounding) -> torch.Tensor:
    """Return logits [tokens - first, vocab] of the own cache after each token from `first` on.

    Before each block is fed, the tokens that the tiers would have below hot by
    then are rounded, each once: so the layout's error goes through prefill as theirs does.
    """
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    rounded, start = _BLOCK_TOKENS, 0
    rows = []
    with own_attention(model), torch.inference_mode():
        while start < len(ids):
            end = min(max(start + _BLOCK_TOKENS, _HOT_BLOCKS * _BLOCK_TOKENS), len(ids))
            if start > rounded:
                for layer in cache.layers:
                    for part in (layer.keys, layer.values):
                        part[:, :, rounded:start] = rounding(part[:, :, rounded:start])
                rounded = start
            output = model(input_ids=torch.tensor([ids[start:end]]), cache=cache, use_cache=True)
            rows.append(output.logits[0, max(first - start, 0) :].float())
            start = end
    return torch.cat(rows)


def round_q8_0(x: torch.Tensor) -> torch.Tensor:
    """Return x rounded to 8 bits, symmetric, float16 scales over groups of 32 channels."""
    grouped = x.reshape(*x.shape[:-1], -1, _Q8_GROUP)
    scale = (grouped.abs().amax(-1, keepdim=True) / 127).half().float()
    codes = torch.where(scale > 0, (grouped / scale).round(), torch.zeros_like(grouped))
    rounded: torch.Tensor = (codes.clamp(-127, 127) * scale).flatten(-2)
    return rounded


def _tier_logits(
    model: Any, shape: hf.ModelShape, codec: CodecId, prompt: list[int], forced: list[int]
) -> torch.Tensor:
    geometry = shape.geometry(DType.FLOAT32, _BLOCK_TOKENS)
    total = len(prompt) + len(forced)
    block = geometry.layers * page_layout(geometry, codec).slot_bytes
    # Half the pages warm, half cold: both are read by every step.
    warm_bytes = max(2, geometry.blocks_for(total) // 2) * block
    with open_session_kv(
        geometry, codec, shape.heads, hot_bytes=_HOT_BLOCKS * hot_block_bytes(geometry),
        warm_bytes=warm_bytes, total_tokens=total, plan=PlanMode.NEAR,
    ) as kv:  # fmt: skip
        generator = Generator(model, kv)
        rows = [generator.feed(list(prompt))[None]]
        cache = TierCache(kv)
        start = 0
        while start < len(forced) - 1:
            # Few enough queries for the fused kernel: what is measured is decode's own path.
            n = min(FEW_QUERIES_MAX, kv.step_tokens_max(), len(forced) - 1 - start)
            with torch.inference_mode():
                ids = torch.tensor([forced[start : start + n]])
                rows.append(model(input_ids=ids, cache=cache, use_cache=True).logits[0].float())
            start += n
        return torch.cat(rows)


def _row(
    name: str,
    context: int,
    exact: torch.Tensor,
    other: torch.Tensor,
    forced: Sequence[int],
    bar: FidelityBar | None,
) -> FidelityRow:
    log_p = torch.log_softmax(exact.double(), -1)
    log_q = torch.log_softmax(other.double(), -1)
    divergence = (log_p.exp() * (log_p - log_q)).sum(-1).clamp(min=0).numpy()
    targets = torch.tensor(list(forced))[:, None]
    change = math.exp(float((log_p - log_q).gather(1, targets).mean())) - 1
    top1 = float((exact.argmax(-1) == other.argmax(-1)).double().mean())
    kl_mean = float(np.mean(divergence))
    holds = bar is None or (
        kl_mean < bar.kl_mean and abs(change) < bar.perplexity_change and top1 >= bar.top1
    )
    limit = bar.kl_mean if bar else math.inf
    return FidelityRow(
        name, context, len(forced), kl_mean, float(np.percentile(divergence, 99)),
        change, top1, limit, holds,
    )  # fmt: skip


def print_fidelity(rows: list[FidelityRow]) -> None:
    """Print the rows as a table on stdout."""
    print(f"fidelity, SmolLM2-135M float32, CPython's language reference; {describe_machine()}")
    print(
        f"{'':16} {'context':>8} {'tokens':>6} {'KL mean':>9} {'limit':>9} {'ratio':>6} "
        f"{'KL p99':>9} {'dppl':>9} {'top-1':>7}"
    )
    for row in rows:
        print(
            f"{row.name:16} {row.context_tokens:8d} {row.tokens:6d} {row.kl_mean:9.2e} "
            f"{row.kl_limit:9.0e} {row.kl_mean / row.kl_limit:6.2f} {row.kl_p99:9.2e} "
            f"{row.perplexity_change:9.3%} {row.top1:7.2%} {'ok' if row.holds else 'FAILS'}"
        )


def fidelity_to_dict(rows: list[FidelityRow]) -> dict[str, Any]:
    """Return the versioned JSON object."""
    plain = [
        {**asdict(row), "kl_limit": row.kl_limit if row.kl_limit < 1 else None} for row in rows
    ]
    return {
        "version": 1,
        "benchmark": "fidelity",
        "holds": all(row.holds for row in rows),
        "rows": plain,
    }
