"""Rehearsal: the model reads again what its session holds, so that the guard hears it copy.

A lossy cache costs most where a model copies from afar: retrieval heads then put their
weight on single tokens, and each logit follows. Elsewhere in the same text it costs a
hundredth of that, so that queries taken as they come tell nothing of what a later page
will do (SmolLM2-135M, int4, CPython's topics at 8,192 tokens: KL 1.1e-2 where the text
repeats itself, three quarters of it by one layer of thirty; 2e-4 before). So before pages
leave hot for the first time, tokens of theirs are fed once more, in a pass that the
session knows nothing of, and its queries are those that the codec is judged by.

A pass runs the model over a cache that is no session's (`RehearsalKV`): plain attention
over a scene in RAM and over itself. A backward pass from its logits tells what each
layer's output matters (outputerror.py has the formula); the weights need no gradient.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from tierd_engine.cache import TierCache, cached_in
from tierd_engine.outputerror import QUERIES_MAX, Heard, Scene
from tierd_engine.session import SessionKV

RUN_IN_TOKENS = 8  # until the model sees that it has read this before


def judge_codecs(model: Any, kv: SessionKV, token_ids: Sequence[int]) -> None:
    """Let the guard of `kv` decide on codecs for what may leave hot now, if it is due.

    token_ids: the session's, from its first. Nothing of the session is changed but the codecs.
    """
    guard = kv.guard
    scene = kv.scene()
    if guard is None or scene is None:
        return
    heard = rehearse(model, scene, passage(scene, token_ids))
    guard.decide(scene, heard, kv.position)
    kv.follow_verdict()


def passage(scene: Scene, token_ids: Sequence[int]) -> Sequence[int]:
    """Return the tokens to read again: from the middle of what is measured."""
    tokens = scene.arena.geometry.block_tokens
    block = scene.measured[len(scene.measured) // 2]
    start = block * tokens + max(0, (tokens - QUERIES_MAX) // 2)
    return token_ids[start : min(start + QUERIES_MAX, scene.at)]


def rehearse(model: Any, scene: Scene, token_ids: Sequence[int], seed: int = 0) -> Heard:
    """Run the model over `token_ids` at the scene; `seed`: of the gradient's direction."""
    started = time.perf_counter()
    kv = RehearsalKV(scene)
    run_in = min(RUN_IN_TOKENS, len(token_ids) - 1)
    # transformers' models tell where they are; without one, the CPU.
    ids = torch.tensor([list(token_ids)], device=getattr(model, "device", None))
    with torch.inference_mode(False), torch.enable_grad():
        output = model(
            input_ids=ids,
            **cached_in(model, TierCache(kv)),
            use_cache=True,
            logits_to_keep=len(token_ids) - run_in,
        )
        logits = output.logits[0].float()
        direction = _fisher_direction(logits.detach(), seed)
        gradients = torch.autograd.grad((logits * direction).sum(), kv.changes)
    heard = kv.heard(torch.stack(gradients), run_in)
    return replace(heard, seconds=time.perf_counter() - started)


def _fisher_direction(logits: torch.Tensor, seed: int) -> torch.Tensor:
    """Return F^(1/2) x, x standard normal, for logits [n, vocab].

    F = diag(p) - p p^T = A A^T with A = diag(sqrt p) - p sqrt(p)^T: A x has covariance F.
    """
    p = logits.softmax(-1)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(p.shape, generator=generator).to(p.device)
    scaled = p.sqrt() * x
    return scaled - p * scaled.sum(-1, keepdim=True)


class RehearsalKV:
    """What a TierCache needs of a session, over a scene: one step, of which nothing is kept."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self.geometry = scene.arena.geometry
        self.position, self.step_tokens = scene.at, 0
        self.max_tokens = scene.at + QUERIES_MAX
        self.changes: list[torch.Tensor] = []  # a zero added to each layer's output
        self._queries: list[torch.Tensor] = []
        self._own: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._scale = 1.0

    def begin(self, n: int) -> None:
        """Take a step of `n` tokens."""
        self.step_tokens = n

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Nothing to do: `attend` gets them too."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """See SessionKV; differentiable in each layer's `changes`."""
        q, own = query.reshape(query.shape[-3:]), (keys[0], values[0])
        self._queries.append(q.detach())
        self._own.append((own[0].detach(), own[1].detach()))
        self._scale = scale
        some, arena = slice(layer, layer + 1), self._scene.arena
        k, v = (
            torch.cat([self._scene.exact(part, some)[0].to(q.device), mine], dim=1)
            for part, mine in zip((arena.keys, arena.values), own, strict=True)
        )
        o: torch.Tensor = torch.nn.functional.scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=self._scene.seen(q.shape[1]).to(q.device),
            scale=scale, enable_gqa=True,
        )[0].transpose(0, 1)  # fmt: skip
        self.changes.append(torch.zeros_like(o, requires_grad=True))
        return o + self.changes[-1]

    def finish(self) -> None:
        """End the step."""
        self.step_tokens = 0

    def cancel(self) -> None:
        """Undo the step."""
        self.step_tokens = 0

    def truncate(self, tokens: int) -> None:
        """Refuse: there is nothing to shorten."""
        raise AssertionError("a rehearsal holds no tokens")

    def heard(self, gradients: torch.Tensor, run_in: int) -> Heard:
        """Return what was heard, in RAM, with the gradients by `changes`."""
        own = zip(*self._own, strict=True)
        keys, values = (torch.stack(part).float().cpu() for part in own)
        queries = torch.stack(self._queries).float().cpu()
        return Heard(queries, keys, values, gradients.float().cpu(), self._scale, run_in)
