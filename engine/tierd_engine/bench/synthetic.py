"""Synthetic KV: random keys and values, for throughput only, never for quality."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tierd_engine.session import SessionKV

_CHUNK_TOKENS = 512


def fill_session(kv: SessionKV, tokens: int, dtype: torch.dtype, seed: int = 0) -> None:
    """Fill a session to `tokens` tokens through its own append, demotion and spill path."""
    geometry = kv.geometry
    keys, values = _random_kv(geometry.kv_heads, _CHUNK_TOKENS, geometry.head_dim, dtype, seed)
    while kv.position < tokens:
        n = min(_CHUNK_TOKENS, kv.step_tokens_max(), tokens - kv.position)
        kv.begin(n)
        for layer in range(geometry.layers):
            kv.append(layer, keys[:, :n], values[:, :n])
        kv.finish()


def fill_own_cache(
    config: Any,
    geometry: Any,
    tokens: int,
    dtype: torch.dtype,
    make: Callable[[Any], Any] | None = None,
) -> Any:
    """Return a transformers cache, a DynamicCache unless `make(config)` says else, of random KV."""
    from transformers import DynamicCache

    cache = make(config) if make is not None else DynamicCache(config=config)
    for layer in range(geometry.layers):
        keys, values = _random_kv(geometry.kv_heads, tokens, geometry.head_dim, dtype, layer)
        cache.update(keys[None], values[None], layer)
    return cache


def _random_kv(
    kv_heads: int, tokens: int, head_dim: int, dtype: torch.dtype, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (kv_heads, tokens, head_dim)
    keys = torch.randn(shape, generator=generator).to(dtype)
    values = torch.randn(shape, generator=generator).to(dtype)
    return keys, values
