"""A model is given its cache by the name that its transformers knows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from tierd_engine.cache import cached_in


class Older:
    def forward(self, input_ids: Any = None, past_key_values: Any = None) -> None: ...


class Newer:
    def forward(
        self, input_ids: Any = None, cache: Any = None, past_key_values: Any = None
    ) -> None: ...


class Callable:
    def __call__(self, **arguments: Any) -> None: ...


@pytest.mark.parametrize(
    ("model", "name"), [(Older(), "past_key_values"), (Newer(), "cache"), (Callable(), "cache")]
)
def test_the_argument_is_the_one_that_the_model_takes(model: Any, name: str) -> None:
    cache = DynamicCache()
    assert cached_in(model, cache) == {name: cache}


def test_a_model_of_the_transformers_that_is_here_fills_the_cache_it_is_given() -> None:
    config = LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        vocab_size=32,
    )  # fmt: skip
    model, cache = LlamaForCausalLM(config), DynamicCache()
    with torch.inference_mode():
        model(input_ids=torch.tensor([[1, 2, 3]]), use_cache=True, **cached_in(model, cache))
    assert cache.get_seq_length() == 3
