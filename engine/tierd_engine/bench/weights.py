"""The step outside attention: what `--weights int8` and a step's threads give, and what they cost.

Speed: a step with almost no context, alternating. Loss: the model's own
full-precision cache, teacher-forced on CPython's language reference, with int8
weights against the same model without: KL in nats, perplexity change, top-1.
The cache plays no part in the loss.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from tierd.types import DType
from tierd_engine import hf
from tierd_engine.arena import TORCH_DTYPES
from tierd_engine.bench.machine import describe_machine, load_average
from tierd_engine.bench.runners import TOKEN, BenchModel
from tierd_engine.bench.synthetic import fill_own_cache
from tierd_engine.bench.texts import python_reference
from tierd_engine.cache import cached_in
from tierd_engine.fidelity import own_attention
from tierd_engine.runner import use_all_cores
from tierd_engine.stepthreads import StepThreads
from tierd_engine.weightonly import Weights, apply_weights

_ROUNDS = 8
_STEPS = 10
_CHUNK_TOKENS = 512
_DECODED_TOKENS = 16


@dataclass(frozen=True, slots=True)
class StepRow:
    """Milliseconds of one step with almost no context: median, and the fastest."""

    name: str
    step_ms: float
    fastest_ms: float


@dataclass(frozen=True, slots=True)
class LossRow:
    """A model whose weights were changed, against itself unchanged. Perplexity change: relative."""

    name: str
    tokens: int
    kl_mean: float
    kl_p99: float
    perplexity_change: float
    top1: float


def bench_step() -> list[StepRow]:
    """Time a step in bf16 and float32, as transformers has it and as the engine runs it."""
    use_all_cores()
    steps: dict[str, Callable[[], None]] = {}
    for dtype in (DType.BFLOAT16, DType.FLOAT32):
        bench = BenchModel.load(dtype)
        cache = fill_own_cache(bench.config, bench.geometry, 1, TORCH_DTYPES[dtype])
        steps[f"{dtype}, as loaded, all threads"] = _step(bench.model, cache, few=False)
        for weights in Weights:
            bench = BenchModel.load(dtype)
            apply_weights(bench.model, weights)
            cache = fill_own_cache(bench.config, bench.geometry, 1, TORCH_DTYPES[dtype])
            steps[f"{dtype}, weights {weights}"] = _step(bench.model, cache, few=True)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(_ROUNDS):
        for name, step in steps.items():
            step()
            times[name] += [_timed(step) for _ in range(_STEPS)]
    return [
        StepRow(name, statistics.median(taken) * 1e3, min(taken) * 1e3)
        for name, taken in times.items()
    ]


def _step(model: Any, cache: Any, *, few: bool) -> Callable[[], None]:
    threads, ids = StepThreads(model), torch.tensor([[TOKEN]])

    def step() -> None:
        with own_attention(model), torch.inference_mode():
            model(input_ids=ids, use_cache=True, logits_to_keep=1, **cached_in(model, cache))

    def few_step() -> None:
        with threads.few_queries():
            step()

    return few_step if few else step


def _timed(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def bench_loss(tokens: int) -> list[LossRow]:
    """Measure int8 weights in both dtypes, and bfloat16 itself, against float32 as loaded."""
    ids = _token_ids(tokens + 1)
    exact = _logits(BenchModel.load(DType.FLOAT32).model, ids)
    rows = []
    for dtype, weights in (
        (DType.FLOAT32, Weights.INT8), (DType.BFLOAT16, Weights.AUTO),
        (DType.BFLOAT16, Weights.INT8),
    ):  # fmt: skip
        bench = BenchModel.load(dtype)
        apply_weights(bench.model, weights)
        name = f"{dtype}, weights {weights}"
        rows.append(_loss(name, exact, _logits(bench.model, ids), ids[1:]))
    return rows


def _token_ids(count: int) -> list[int]:
    tokenizer = hf.load_tokenizer(hf.resolve_model(hf.PACKAGED_MODEL))
    ids = tokenizer(python_reference(), add_special_tokens=False, verbose=False)["input_ids"]
    return list(ids[:count])


def _logits(model: Any, ids: list[int]) -> torch.Tensor:
    """Return logits [len(ids) - 1, vocab] float32, each token fed as decode feeds it or few more.

    Few enough rows at a time for the weight-only kernel: what is measured is decode's own path.
    """
    from transformers import DynamicCache

    cache, rows = DynamicCache(config=model.config), []
    with own_attention(model), torch.inference_mode():
        for start in range(0, len(ids) - 1, _DECODED_TOKENS):
            part = torch.tensor([ids[start : min(start + _DECODED_TOKENS, len(ids) - 1)]])
            output = model(input_ids=part, use_cache=True, **cached_in(model, cache))
            rows.append(output.logits[0].float())
    return torch.cat(rows)


def _loss(name: str, exact: torch.Tensor, other: torch.Tensor, forced: list[int]) -> LossRow:
    divergences, ratios = [], []
    for start in range(0, len(exact), _CHUNK_TOKENS):  # float64 of a vocabulary a token: in pieces
        part = slice(start, start + _CHUNK_TOKENS)
        log_p = torch.log_softmax(exact[part].double(), -1)
        log_q = torch.log_softmax(other[part].double(), -1)
        divergences.append((log_p.exp() * (log_p - log_q)).sum(-1).clamp(min=0))
        targets = torch.tensor(forced[part])[:, None]
        ratios.append((log_p - log_q).gather(1, targets)[:, 0])
    kl = torch.cat(divergences).numpy()
    top1 = float((exact.argmax(-1) == other.argmax(-1)).double().mean())
    change = math.exp(float(torch.cat(ratios).mean())) - 1
    return LossRow(name, len(kl), float(np.mean(kl)), float(np.percentile(kl, 99)), change, top1)


def print_weights(steps: list[StepRow], losses: list[LossRow]) -> None:
    """Print both tables on stdout."""
    print(
        f"a step outside attention, SmolLM2-135M, load {load_average():.1f}; {describe_machine()}"
    )
    for step in steps:
        print(f"{step.name:42} {step.step_ms:8.1f} ms   fastest {step.fastest_ms:6.1f} ms")
    print("loss against float32 as loaded, own full-precision cache, the language reference")
    for loss in losses:
        print(
            f"{loss.name:42} {loss.tokens:6d} tokens  KL mean {loss.kl_mean:.2e}  "
            f"p99 {loss.kl_p99:.2e}  dppl {loss.perplexity_change:+.3%}  top-1 {loss.top1:.2%}"
        )


def weights_to_dict(steps: list[StepRow], losses: list[LossRow]) -> dict[str, Any]:
    """Return the versioned JSON object."""
    return {
        "version": 1,
        "benchmark": "weights",
        "step": [asdict(row) for row in steps],
        "loss": [asdict(row) for row in losses],
    }
