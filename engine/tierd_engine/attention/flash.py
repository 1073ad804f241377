"""Prefill attention with lse: PyTorch's flash attention, and the merge of its partials.

All partials are float32 whatever the model's dtype: o and lse must not be
rounded before the merge (on the CPU float32 flash is as fast as bfloat16).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_FLASH_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(slots=True)
class FlashPartial:
    """o: [heads, n, head_dim] float32; lse: [heads, n] float32, natural logarithm."""

    o: torch.Tensor
    lse: torch.Tensor


def attend_own(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> FlashPartial:
    """Attend from a chunk's queries to the chunk's own tokens, causally.

    q: [heads, n, head_dim]; keys, values: [kv_heads, n, head_dim]; all float32.
    """
    repeats = q.shape[0] // keys.shape[0]
    o, lse = _FLASH_CPU(
        q[None],
        keys.repeat_interleave(repeats, 0)[None],
        values.repeat_interleave(repeats, 0)[None],
        0.0,
        True,
        scale=scale,
    )
    return FlashPartial(o[0], lse[0])


def attend_past(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> FlashPartial:
    """Attend from every query to every token of a run that lies before all of them.

    q: [heads, n, head_dim]; keys, values: [kv_heads, m, head_dim]; all float32.
    The query heads of one KV head are folded into its query axis, so that K and
    V are not repeated.
    """
    heads, n, head_dim = q.shape
    kv_heads = keys.shape[0]
    folded = q.reshape(1, kv_heads, heads // kv_heads * n, head_dim)
    o, lse = _FLASH_CPU(folded, keys[None], values[None], 0.0, False, scale=scale)
    return FlashPartial(o.reshape(heads, n, head_dim), lse.reshape(heads, n))


def merge_into(into: FlashPartial, other: FlashPartial) -> None:
    """Merge `other` into `into` by log-sum-exp (attention.md). Neither is empty."""
    top = torch.maximum(into.lse, other.lse)
    own_weight = torch.exp(into.lse - top)
    other_weight = torch.exp(other.lse - top)
    total = own_weight + other_weight
    into.o.mul_((own_weight / total)[..., None])
    into.o.addcmul_(other.o, (other_weight / total)[..., None])
    into.lse = top + torch.log(total)
