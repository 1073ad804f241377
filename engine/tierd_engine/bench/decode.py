"""Decode throughput over tiers beside the model's own cache, in one run, alternating.

KV is synthetic (random), the weights are SmolLM2's: right for throughput, no
claim about quality. The limit of a row is the time to read its KV bytes once
at the measured memory bandwidth, plus a step with almost no context.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from tierd.codec.layout import page_layout
from tierd.types import CodecId, DType, Tier
from tierd_engine import hf
from tierd_engine.arena import TORCH_DTYPES, hot_block_bytes
from tierd_engine.attention.plan import PlanMode
from tierd_engine.bench.machine import MemoryBandwidth, describe_machine, measure_memory
from tierd_engine.bench.rig import open_session_kv
from tierd_engine.bench.synthetic import fill_own_cache, fill_session
from tierd_engine.cache import TierCache
from tierd_engine.fidelity import own_attention
from tierd_engine.session import SessionKV

_WARM_UP_STEPS = 3
_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """One line of the table. `limit_tokens_per_second`: bytes ÷ bandwidth + an empty step."""

    name: str
    context_tokens: int
    tokens_per_second: float
    kv_bytes_per_token: int
    limit_tokens_per_second: float
    achieved_of_limit: float
    hot_peak_bytes: int = 0
    hot_budget_bytes: int = 0
    rpc_per_step: float = 0.0
    ratio_to_transformers: float | None = None


@dataclass(frozen=True, slots=True)
class _Runner:
    """Something that decodes: `step(token)` makes one more token."""

    name: str
    step: Callable[[], None]
    bytes_per_token: int
    kv: SessionKV | None = None


def bench_decode(context: int, *, hot: float, codec: CodecId, steps: int) -> list[DecodeRow]:
    """Measure tierd (plan near, `codec`, hot share `hot`) and transformers' own bf16 cache."""
    folder = hf.resolve_model(hf.PACKAGED_MODEL)
    config = hf.load_config(folder)
    shape = hf.model_shape(config)
    dtype = DType.BFLOAT16
    model = hf.load_model(folder, config, dtype)
    total = context + _WARM_UP_STEPS + _ROUNDS * steps + 1
    geometry = shape.geometry(dtype, 256)
    bandwidth = measure_memory()
    blocks = geometry.blocks_for(total)
    warm_bytes = (blocks + 2) * geometry.layers * page_layout(geometry, codec).slot_bytes
    hot_bytes = max(2 * hot_block_bytes(geometry), int(hot * geometry.token_bytes * total))
    empty_seconds = _empty_step_seconds(model, config, geometry, dtype)
    with open_session_kv(
        geometry, codec, shape.heads, hot_bytes=hot_bytes, warm_bytes=warm_bytes,
        total_tokens=total, plan=PlanMode.NEAR,
    ) as kv:  # fmt: skip
        fill_session(kv, context, TORCH_DTYPES[dtype])
        ours = _tier_runner(model, kv, f"tierd {codec.name.lower()} hot {hot:.0%} near")
        cache = fill_own_cache(config, geometry, context, TORCH_DTYPES[dtype])
        own = _own_runner(model, cache, geometry.token_bytes * context)
        seconds = _alternate([ours, own], steps)
        rows = [_row(ours, context, seconds[0], bandwidth, empty_seconds, seconds[1])]
        rows.append(_row(own, context, seconds[1], bandwidth, empty_seconds, None))
        return rows


def _tier_runner(model: Any, kv: SessionKV, name: str) -> _Runner:
    cache = TierCache(kv)
    ids = torch.tensor([[17]])

    def step() -> None:
        with torch.inference_mode():
            model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1)

    geometry = kv.geometry
    table = kv.handle.table.read(kv.sealed_blocks)
    codecs = table.codec[table.tier != Tier.NONE]
    below = sum(
        int((codecs == codec).sum()) * page_layout(geometry, codec).payload_bytes
        for codec in map(CodecId, np.unique(codecs).tolist())
    )
    return _Runner(name, step, below + kv.arena.used_bytes, kv)


def _own_runner(model: Any, cache: Any, bytes_per_token: int) -> _Runner:
    ids = torch.tensor([[17]])

    def step() -> None:
        with own_attention(model), torch.inference_mode():
            model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1)

    return _Runner("transformers own cache bf16", step, bytes_per_token)


def _empty_step_seconds(model: Any, config: Any, geometry: Any, dtype: DType) -> float:
    cache = fill_own_cache(config, geometry, 1, TORCH_DTYPES[dtype])
    runner = _own_runner(model, cache, 0)
    for _ in range(_WARM_UP_STEPS):
        runner.step()
    return statistics.median(_timed(runner.step) for _ in range(10))


def _timed(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def _alternate(runners: list[_Runner], steps: int) -> list[float]:
    """Return each runner's median seconds a step, taken in alternating rounds."""
    times: list[list[float]] = [[] for _ in runners]
    for runner in runners:
        for _ in range(_WARM_UP_STEPS):
            runner.step()
        if runner.kv is not None:
            runner.kv.start_counting()
    gc.collect()
    for _ in range(_ROUNDS):
        for runner, taken in zip(runners, times, strict=True):
            taken.extend(_timed(runner.step) for _ in range(steps))
    return [statistics.median(taken) for taken in times]


def _row(
    runner: _Runner,
    context: int,
    seconds: float,
    bandwidth: MemoryBandwidth,
    empty_seconds: float,
    own_seconds: float | None,
) -> DecodeRow:
    limit = runner.bytes_per_token / bandwidth.read_bytes_per_second + empty_seconds
    kv = runner.kv
    return DecodeRow(
        name=runner.name,
        context_tokens=context,
        tokens_per_second=1 / seconds,
        kv_bytes_per_token=runner.bytes_per_token,
        limit_tokens_per_second=1 / limit,
        achieved_of_limit=limit / seconds,
        hot_peak_bytes=kv.arena.peak_bytes if kv else 0,
        hot_budget_bytes=kv.arena.budget_bytes if kv else 0,
        rpc_per_step=kv.counts.step_rpcs / max(kv.counts.steps, 1) if kv else 0.0,
        ratio_to_transformers=own_seconds / seconds if own_seconds else None,
    )


def print_decode(rows: list[DecodeRow]) -> None:
    """Print the rows as a table on stdout."""
    print(f"decode, SmolLM2-135M, batch 1, synthetic KV; {describe_machine()}")
    print(f"{'':34} {'context':>8} {'tok/s':>7} {'limit':>7} {'of limit':>8} {'x own':>6}")
    for row in rows:
        ratio = f"{row.ratio_to_transformers:.2f}" if row.ratio_to_transformers else "1.00"
        print(
            f"{row.name:34} {row.context_tokens:8d} {row.tokens_per_second:7.2f} "
            f"{row.limit_tokens_per_second:7.2f} {row.achieved_of_limit:8.2f} {ratio:>6}"
        )


def decode_to_dict(rows: list[DecodeRow]) -> dict[str, Any]:
    """Return the versioned JSON object."""
    return {"version": 1, "benchmark": "decode", "rows": [asdict(row) for row in rows]}
