"""Weight-only int8 layers, and the threads of a small step."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tierd.errors import InvalidArgument
from tierd.types import CodecId, DType
from tierd_engine import hf
from tierd_engine.stepthreads import LAYER_BYTES_MIN, StepThreads, mean_layer_bytes
from tierd_engine.weightonly import ROWS_MAX, Int8Linear, Weights, apply_weights


class Model(torch.nn.Module):
    """Three linear layers, one of an odd width, between embedding and head."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = torch.nn.Embedding(1000, width)
        self.up = torch.nn.Linear(width, 2 * width)
        self.down = torch.nn.Linear(2 * width, width, bias=False)
        self.odd = torch.nn.Linear(width, 33)
        self.head = torch.nn.Linear(width, 1024, bias=False)

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.embed

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head


def test_int8_layers_differ_by_half_a_code_a_weight():
    linear = Model().up
    layer = Int8Linear(linear)
    step = linear.weight.detach().abs().amax(1) / 127
    error = (layer.widened(torch.float32) - linear.weight.detach()).abs()
    # Half a code; the scale was rounded to bfloat16, so the largest code may be clamped: 1 in 256.
    assert bool((error <= step[:, None] * (0.51 + 127 / 256)).all())
    assert float(error.mean() / step.mean()) < 0.27


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, ROWS_MAX, ROWS_MAX + 1])
def test_few_and_many_rows_give_the_product_of_the_same_weights(rows: int, dtype: torch.dtype):
    linear = Model().up.to(dtype)
    layer = Int8Linear(linear)
    x = torch.randn(1, rows, 64).to(dtype)
    with torch.inference_mode():
        expected = torch.nn.functional.linear(
            x.float(), layer.widened(torch.float32), linear.bias.float()
        )
        found = layer(x)
    assert found.dtype == dtype and found.shape == expected.shape
    assert float((found.float() - expected).abs().max()) < 0.02 * float(expected.abs().max())


def test_a_row_of_zeros_stays_zero():
    linear = torch.nn.Linear(32, 32, bias=False)
    with torch.no_grad():
        linear.weight[3] = 0
    assert not Int8Linear(linear).widened(torch.float32)[3].any()


def test_every_linear_layer_is_replaced_and_nothing_else():
    model = Model()
    assert apply_weights(Model(), Weights.AUTO) == 4  # by who multiplies, not by the weights
    assert apply_weights(model, Weights.INT8) == 4
    assert isinstance(model.head, Int8Linear) and isinstance(model.odd, Int8Linear)
    assert isinstance(model.embed, torch.nn.Embedding)


def test_weights_are_named():
    assert Weights.parse("int8") is Weights.INT8
    with pytest.raises(InvalidArgument, match="none of auto, int8"):
        Weights.parse("int7")


def test_small_layers_step_on_one_thread_and_prefill_gets_them_back():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with StepThreads(Model()).few_queries():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
        with pytest.raises(KeyError), StepThreads(Model()).few_queries():
            raise KeyError
        assert torch.get_num_threads() == 2
        large = torch.nn.Linear(1024, 1024)
        assert large.weight.nbytes > LAYER_BYTES_MIN
        model = Model()
        model.up = model.down = model.odd = large
        with StepThreads(model).few_queries():
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_mean_layer_leaves_embedding_and_head_out():
    sizes = [64 * 128 * 4, 64 * 128 * 4, 33 * 64 * 4]
    assert mean_layer_bytes(Model()) == sum(sizes) / 3


def test_kv_of_other_weights_is_of_another_namespace(tmp_path: Path):
    shape = hf.ModelShape(2, 4, 2, 64, 2048, rope="")
    digests = {
        hf.namespace_for(tmp_path, shape, DType.FLOAT32, CodecId.INT8, 64, weights=kind).digest()
        for kind in Weights
    }
    assert len(digests) == 2


def test_a_decode_step_runs_on_few_threads_and_a_chunk_on_all(monkeypatch: pytest.MonkeyPatch):
    from tierd_engine import generator

    seen = []

    class Kv:
        position = 0

        def step_tokens_max(self) -> int:
            return 512

        def awaits_verdict(self, n: int) -> bool:
            return False

    class Stepping(Model):
        def forward(self, input_ids: torch.Tensor, **named: object) -> SimpleNamespace:
            seen.append((input_ids.shape[1], torch.get_num_threads()))
            driver.kv.position += input_ids.shape[1]
            return SimpleNamespace(logits=torch.zeros(1, 1, 8))

    monkeypatch.setattr(generator, "TierCache", lambda kv: SimpleNamespace(kv=kv))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        driver = generator.Generator(Stepping(), Kv())  # type: ignore[arg-type]
        driver.feed([1] * 40)
        driver.feed([1])
    finally:
        torch.set_num_threads(before)
    assert seen == [(40, 2), (1, 1)]
