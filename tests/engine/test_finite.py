"""A model whose logits are not finite is refused, never certified."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.e2e.support import MODEL, Engine, embedded, prompt
from tests.engine.support import own_greedy, tiny_model
from tierd.errors import UnsupportedModel


def test_nan_weights_are_an_error_in_both_runs(tmp_path: Path) -> None:
    tiny = tiny_model(MODEL)
    with torch.no_grad():
        tiny.model.model.layers[0].input_layernorm.weight[0] = float("nan")
    with (
        embedded(tiny, tmp_path, warm_blocks=4) as daemon,
        Engine(daemon.socket, tiny) as job,
        pytest.raises(UnsupportedModel, match="not finite"),
    ):
        job.prefill(prompt(20))
    with pytest.raises(UnsupportedModel, match="not finite"):
        own_greedy(tiny.model, list(prompt(20)), 2)
