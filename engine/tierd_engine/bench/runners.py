"""What `scripts/bench decode` runs: a session over tiers, or transformers' own cache.

KV is synthetic (random): right for throughput, no claim about quality.
"""

from __future__ import annotations

import contextlib
import gc
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tierd.codec.layout import page_layout
from tierd.types import CodecId, DType, Geometry, Tier
from tierd_engine import hf
from tierd_engine.arena import TORCH_DTYPES, hot_block_bytes
from tierd_engine.attention.plan import PlanMode
from tierd_engine.bench.machine import peak_rss_bytes, reset_peak_rss
from tierd_engine.bench.rig import open_session_kv
from tierd_engine.bench.synthetic import fill_own_cache, fill_session
from tierd_engine.cache import TierCache, cached_in
from tierd_engine.fidelity import own_attention
from tierd_engine.recorded import DecodeStep
from tierd_engine.session import SessionKV
from tierd_engine.stepthreads import StepThreads

TOKEN = 17


@dataclass(frozen=True, slots=True)
class TierShares:
    """A row's tiers: shares of the KV that are hot and warm; the rest is cold."""

    codec: CodecId
    hot: float
    warm: float = 1.0

    @property
    def name(self) -> str:
        """How the table calls it."""
        text = f"tierd {self.codec.name.lower()} hot {self.hot:.0%}"
        return text if self.warm >= 1 else f"{text} warm {self.warm:.0%}, rest cold"


@dataclass(frozen=True, slots=True)
class Runner:
    """Something that decodes: `step()` makes one more token.

    `memory_bytes`, `cold_bytes`: read by a step from RAM and from disk.
    """

    name: str
    step: Callable[[], None]
    memory_bytes: int
    rss_before_bytes: int
    cold_bytes: int = 0
    kv: SessionKV | None = None

    def peak_rss_bytes(self) -> int:
        """Return how much the process has grown at its peak since before this was set up."""
        return max(0, peak_rss_bytes() - self.rss_before_bytes)


@dataclass(frozen=True, slots=True)
class BenchModel:
    """A loaded model and its shape."""

    model: Any
    config: Any
    shape: hf.ModelShape
    dtype: DType

    @classmethod
    def load(cls, dtype: DType = DType.BFLOAT16) -> BenchModel:
        """Load SmolLM2."""
        folder = hf.resolve_model(hf.PACKAGED_MODEL)
        config = hf.load_config(folder)
        return cls(hf.load_model(folder, config, dtype), config, hf.model_shape(config), dtype)

    @property
    def geometry(self) -> Geometry:
        """Of the KV, in blocks of 256 tokens."""
        return self.shape.geometry(self.dtype, 256)


@contextlib.contextmanager
def tier_runner(
    bench: BenchModel, shares: TierShares, context: int, total: int, cold_folder: str | None
) -> Iterator[Runner]:
    """Yield a session filled to `context` tokens, with room for `total`."""
    geometry = bench.geometry
    slots = geometry.layers * page_layout(geometry, shares.codec).slot_bytes
    blocks = geometry.blocks_for(total)
    warm_blocks = blocks + 2 if shares.warm >= 1 else max(1, int(shares.warm * blocks))
    hot_bytes = max(2 * hot_block_bytes(geometry), int(shares.hot * geometry.token_bytes * total))
    before = reset_peak_rss()
    with (
        tempfile.TemporaryDirectory(dir=cold_folder) as folder,
        open_session_kv(
            geometry, shares.codec, bench.shape.heads, hot_bytes=hot_bytes,
            warm_bytes=warm_blocks * slots, total_tokens=total, plan=PlanMode.NEAR,
            cold_folder=folder, cold_needed_bytes=max(0, blocks - warm_blocks) * slots,
        ) as kv,
    ):  # fmt: skip
        fill_session(kv, context, TORCH_DTYPES[bench.dtype])
        warm, cold = below_bytes(kv)
        step = _tier_step(bench.model, kv)
        yield Runner(shares.name, step, warm + kv.arena.used_bytes, before, cold_bytes=cold, kv=kv)
    gc.collect()


def _tier_step(model: Any, kv: SessionKV) -> Callable[[], None]:
    decode, threads = DecodeStep(model, TierCache(kv)), StepThreads(model)
    ids = torch.tensor([[TOKEN]])

    def step() -> None:
        with threads.few_queries(), torch.inference_mode():
            decode(ids)

    return step


def below_bytes(kv: SessionKV) -> tuple[int, int]:
    """Return the bytes of warm payloads and of cold slots: what a step reads."""
    table = kv.handle.table.read(kv.sealed_blocks)
    found = {Tier.WARM: 0, Tier.COLD: 0}
    for tier in found:
        for codec in np.unique(table.codec[table.tier == tier]).tolist():
            layout = page_layout(kv.geometry, CodecId(codec))
            count = int(((table.tier == tier) & (table.codec == codec)).sum())
            size = layout.payload_bytes if tier is Tier.WARM else layout.slot_bytes
            found[tier] += count * size
    return found[Tier.WARM], found[Tier.COLD]


def own_runner(bench: BenchModel, context: int, *, quantised: bool = False) -> Runner:
    """Return transformers' own cache at `context` tokens."""
    before = reset_peak_rss()
    make = _quantised_cache if quantised else None
    cache = fill_own_cache(bench.config, bench.geometry, context, TORCH_DTYPES[bench.dtype], make)
    name = "transformers quantised fp8" if quantised else "transformers own cache bf16"
    ids = torch.tensor([[TOKEN]])

    def step() -> None:
        with own_attention(bench.model), torch.inference_mode():
            bench.model(
                input_ids=ids, use_cache=True, logits_to_keep=1, **cached_in(bench.model, cache)
            )

    size = bench.geometry.token_bytes * context
    return Runner(name, step, size // 2 if quantised else size, before)


def _quantised_cache(config: Any) -> Any:
    from transformers import QuantizedCache

    return QuantizedCache("fp8", config)  # the others need packages that are not ours
