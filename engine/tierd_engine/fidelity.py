"""Fidelity: a run over tiers beside the model's own full-precision cache.

The own cache is fed the very tokens that the run over tiers produced (teacher
forcing), so the two are compared step by step even after a first difference.
Since both are greedy, the texts are identical exactly when the own cache's
argmax is the produced token at every step.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tierd.errors import UnsupportedModel

OWN_ATTENTION = "sdpa"
# One piece up to 8k tokens as a user of the model would run it; beyond, the
# logits buffer and sdpa's workspace of one piece would not fit small hosts.
_OWN_CHUNK_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class FidelityReport:
    """Tokens compared, KL(own || tiers) per token in nats, and how fast the own cache was."""

    tokens: int
    tokens_identical: bool
    first_difference: int | None
    kl_mean: float
    kl_p99: float
    top1: float
    logit_difference_max: float
    own_prefill_seconds: float
    own_decode_seconds: float


@contextlib.contextmanager
def own_attention(model: Any) -> Iterator[None]:
    """Run the model with its own attention implementation inside the block."""
    before = model.config._attn_implementation
    model.config._attn_implementation = OWN_ATTENTION
    try:
        yield
    finally:
        model.config._attn_implementation = before


class OwnCacheRun:
    """The model over its own cache: prefill once, then one token at a time."""

    def __init__(self, model: Any) -> None:
        from transformers import DynamicCache

        from tierd_engine.cache import cached_in

        self._model = model
        self._cached = cached_in(model, DynamicCache(config=model.config))
        self.prefill_seconds = 0.0
        self.decode_seconds = 0.0

    def prefill(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Return the logits [vocab] float32 after the last token."""
        start = time.perf_counter()
        for first in range(0, len(token_ids), _OWN_CHUNK_TOKENS):
            logits = self._forward(list(token_ids[first : first + _OWN_CHUNK_TOKENS]))
        self.prefill_seconds = time.perf_counter() - start
        return logits

    def decode(self, token_id: int) -> torch.Tensor:
        """Append one token and return the logits [vocab] float32 after it."""
        start = time.perf_counter()
        logits = self._forward([token_id])
        self.decode_seconds += time.perf_counter() - start
        return logits

    def _forward(self, token_ids: list[int]) -> torch.Tensor:
        with own_attention(self._model), torch.inference_mode():
            output = self._model(
                input_ids=torch.tensor([token_ids], device=self._model.device),
                **self._cached,
                use_cache=True,
                logits_to_keep=1,
            )
        return finite(output.logits[0, -1].float().cpu())


def finite(logits: torch.Tensor) -> torch.Tensor:
    """Return `logits`. Raises UnsupportedModel where they are NaN or infinite: argmax and
    every comparison of them would pass in silence."""
    if not bool(torch.isfinite(logits).all()):
        raise UnsupportedModel(
            "the model's logits are not finite (NaN or infinity): its weights are damaged, or "
            "its values do not fit the dtype"
        )
    return logits


def compare_with_own_cache(
    model: Any,
    prompt_ids: Sequence[int],
    new_ids: Sequence[int],
    tier_logits: Sequence[torch.Tensor],
    advanced: Callable[[int], None] | None = None,
) -> FidelityReport:
    """Compare each step's logits [vocab]; `tier_logits[i]` is what `new_ids[i]` was chosen from."""
    run = OwnCacheRun(model)
    own = run.prefill(prompt_ids)
    divergences: list[float] = []
    agreed: list[bool] = []
    difference = 0.0
    for i, (token, tiers) in enumerate(zip(new_ids, tier_logits, strict=True)):
        divergences.append(kl_divergence(own, tiers))
        agreed.append(int(own.argmax()) == token)
        difference = max(difference, float((own - tiers).abs().max()))
        if advanced is not None:
            advanced(i + 1)
        if i + 1 < len(new_ids):
            own = run.decode(token)
    return FidelityReport(
        tokens=len(new_ids),
        tokens_identical=all(agreed),
        first_difference=None if all(agreed) else agreed.index(False),
        kl_mean=float(np.mean(divergences)),
        kl_p99=float(np.percentile(divergences, 99)),
        top1=float(np.mean(agreed)),
        logit_difference_max=difference,
        own_prefill_seconds=run.prefill_seconds,
        own_decode_seconds=run.decode_seconds,
    )


def kl_divergence(reference: torch.Tensor, other: torch.Tensor) -> float:
    """Return KL(reference || other) in nats for two logit vectors [vocab], in float64."""
    log_p = torch.log_softmax(reference.double(), -1)
    log_q = torch.log_softmax(other.double(), -1)
    return max(0.0, float((log_p.exp() * (log_p - log_q)).sum()))
