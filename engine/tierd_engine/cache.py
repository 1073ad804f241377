"""TierCache: a transformers cache whose layers keep their KV in tierd's tiers.

The model calls `update` of a layer, then its attention function. `update`
appends to the hot tier and leaves the layer in a hand-off of this thread; the
attention function registered as "tierd" takes it from there and attends over
all tiers. No model code is touched.
"""

from __future__ import annotations

import functools
import inspect
import threading
from typing import Any, Protocol

import torch
from torch.overrides import handle_torch_function, has_torch_function_unary
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin

from tierd.errors import InvalidArgument, UnsupportedModel
from tierd.types import Geometry

ATTENTION_NAME = "tierd"

# What a model may pass to attention and tiers do not compute: refused, never ignored.
_REFUSED_ARGUMENTS = ("sliding_window", "softcap", "s_aux", "position_bias", "head_mask")

_handoff = threading.local()


class StepKV(Protocol):
    """What a TierCache asks of a SessionKV, which says what each means."""

    geometry: Geometry
    position: int
    step_tokens: int
    max_tokens: int

    def begin(self, n: int) -> None:
        """Start a step of `n` tokens."""

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Take the step's K and V of a layer."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """Return a layer's attention output [n, heads, head_dim]."""

    def finish(self) -> None:
        """End the step."""

    def cancel(self) -> None:
        """Undo the step."""

    def truncate(self, tokens: int) -> None:
        """Keep the first tokens only."""


class TierLayer(CacheLayerMixin):
    """One layer's share of a StepKV. Holds no tensors itself."""

    is_sliding = False

    def __init__(self, kv: StepKV, layer: int) -> None:
        super().__init__()
        self.kv = kv
        self.layer = layer
        self.is_initialized = True
        self.has_begun = False  # of the first layer: somebody began the step that comes

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the session's geometry is known."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append K and V, [1, kv_heads, n, head_dim], and return them as they are."""
        if key_states.shape[0] != 1:
            raise InvalidArgument(
                f"tierd attends for one sequence at a time; the batch is {key_states.shape[0]}"
            )
        self.take(key_states, value_states)
        _handoff.layer = self
        return key_states, value_states

    def take(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Append K and V [1, kv_heads, n, head_dim]; the first layer's begin a step."""
        if has_torch_function_unary(keys):
            handle_torch_function(self.take, (keys,), keys, values)
            return
        geometry = self.kv.geometry
        if (keys.shape[1], keys.shape[3]) != (geometry.kv_heads, geometry.head_dim):
            raise UnsupportedModel(
                f"the model gives {keys.shape[1]} KV heads of {keys.shape[3]}, and its config says "
                f"{geometry.kv_heads} of {geometry.head_dim}"
            )
        if self.layer == 0 and not self.has_begun:
            if self.kv.step_tokens:
                self.kv.cancel()
            self.kv.begin(keys.shape[2])
        self.has_begun = False
        self.kv.append(self.layer, keys, values)

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Return [1, n, heads, head_dim] of query [1, heads, n, head_dim]. The last ends a step."""
        if has_torch_function_unary(query):
            o: torch.Tensor = handle_torch_function(
                self.attend, (query,), query, keys, values, scale
            )
            return o
        o = self.kv.attend(self.layer, query, keys, values, scale)[None]
        if self.layer == self.kv.geometry.layers - 1:
            self.kv.finish()
        return o

    def get_seq_length(self) -> int:
        """Return how many tokens the session holds before the running step."""
        return self.kv.position

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (key length, offset) of the mask that a model may ask for."""
        return self.kv.position + query_length, 0

    def get_max_length(self) -> int:
        """Return how many tokens the session was opened for."""
        return self.kv.max_tokens

    def reset(self) -> None:
        """Forget every token."""
        self.kv.truncate(0)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Refuse: beam search would need every tier reordered alike."""
        raise UnsupportedModel("beam search over tiers is not supported; use greedy or sampling")


class TierCache(Cache):
    """`past_key_values` of a model whose attention implementation is "tierd"."""

    def __init__(self, kv: StepKV) -> None:
        super().__init__(layers=[TierLayer(kv, layer) for layer in range(kv.geometry.layers)])
        self.kv = kv


def cached_in(model: Any, cache: Cache) -> dict[str, Cache]:
    """Return the argument by which a model is given its cache."""
    model_class: type = type(model)
    return {_argument_of(model_class): cache}


@functools.lru_cache(maxsize=64)
def _argument_of(model_class: type) -> str:
    call = getattr(model_class, "forward", model_class.__call__)
    names = inspect.signature(call).parameters
    # transformers before 5.24 knows it by the older name alone.
    return "past_key_values" if "past_key_values" in names and "cache" not in names else "cache"


def tier_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend from query [1, heads, n, head_dim] over all tiers; return [1, n, heads, head_dim].

    Registered with transformers as the attention implementation "tierd".
    """
    layer: TierLayer | None = getattr(_handoff, "layer", None)
    _handoff.layer = None
    if layer is None or layer.layer != getattr(module, "layer_idx", None):
        raise InvalidArgument('attention "tierd" needs a TierCache as the model\'s cache')
    for name in _REFUSED_ARGUMENTS:
        if kwargs.get(name) is not None:
            raise UnsupportedModel(
                f"{type(module).__name__} passes {name} to attention; tiers do not support it yet"
            )
    if attention_mask is not None or dropout:
        raise UnsupportedModel("tiers attend causally: attention masks and dropout are not taken")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return layer.attend(query, key, value, scale), None


AttentionInterface.register(ATTENTION_NAME, tier_attention)
