"""Linear layers of few rows: the product of the same weights, whoever computes it."""

from __future__ import annotations

from collections.abc import Iterator

import numba
import pytest
import torch

from tierd_engine.attention.team import BRIEF_SECONDS, set_patience
from tierd_engine.fewrows import FewRowsLinear, replace_linears
from tierd_engine.rowproduct import FEW_ROWS_MAX

# Of the sum of |x w|: a float32 sum of up to 2,048 terms in blocks; and bfloat16's rounding.
_TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-8}


def make(width: int, outputs: int, dtype: torch.dtype, *, bias: bool = False) -> FewRowsLinear:
    return FewRowsLinear(torch.nn.Linear(width, outputs, bias=bias).to(dtype))


def check(layer: FewRowsLinear, x: torch.Tensor) -> torch.Tensor:
    weight = layer.weight.detach().double()
    bias = 0 if layer.bias is None else layer.bias.detach().double()
    with torch.inference_mode():
        found = layer(x)
    expected = x.double() @ weight.T + bias
    scale = x.double().abs() @ weight.T.abs() + abs(bias)
    assert found.dtype == x.dtype and found.shape == expected.shape
    assert bool(((found.double() - expected).abs() <= _TOLERANCE[x.dtype] * scale + 1e-30).all())
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "outputs"), [(64, 1), (576, 192), (77, 33), (15, 7), (1536, 64)])
@pytest.mark.parametrize("bias", [False, True])
def test_few_rows_and_many_match_the_product_in_double(dtype, width, outputs, bias):
    layer = make(width, outputs, dtype, bias=bias)
    for rows in (1, 2, 3, 4, 5, FEW_ROWS_MAX, FEW_ROWS_MAX + 1):
        check(layer, torch.randn(rows, width).to(dtype))
    check(layer, torch.randn(2, 3, width).to(dtype))
    check(layer, torch.randn(width, 4).to(dtype).T)  # not contiguous
    assert check(layer, torch.randn(0, width).to(dtype)).shape == (0, outputs)


@pytest.fixture
def all_threads() -> Iterator[None]:
    before = numba.get_num_threads()
    numba.set_num_threads(numba.config.NUMBA_NUM_THREADS)
    yield
    numba.set_num_threads(before)
    set_patience(BRIEF_SECONDS)


@pytest.mark.usefixtures("all_threads")
def test_the_same_bits_whatever_threads_there_are_and_however_they_wait():
    layer = make(576, 4096, torch.bfloat16)
    x = torch.randn(1, 576).to(torch.bfloat16)
    found = []
    for seconds in (BRIEF_SECONDS, 2e-3):
        set_patience(seconds)
        for threads in range(1, numba.config.NUMBA_NUM_THREADS + 1):
            numba.set_num_threads(threads)
            with torch.inference_mode():
                found += [layer(x) for _ in range(3)]
    assert all(torch.equal(found[0], other) for other in found)


def test_rounds_to_nearest_even_and_keeps_nan_and_infinity():
    weight = torch.tensor([[1.0, 2**-9], [1.0, 3 * 2**-9], [1.0, 2**-8 + 2**-12]])
    layer = make(2, 3, torch.bfloat16)
    layer.weight.data.copy_(weight)
    with torch.inference_mode():
        x = torch.tensor([[1.0, 1.0]]).to(torch.bfloat16)
        expected = (x.float() @ layer.weight.float().T).to(torch.bfloat16)
        assert torch.equal(layer(x), expected)
        for special in (float("nan"), float("inf"), -float("inf")):
            x = torch.tensor([[special, 1.0]]).to(torch.bfloat16)
            expected = (x.float() @ layer.weight.float().T).to(torch.bfloat16)
            assert torch.equal(layer(x).isnan(), expected.isnan())
            assert torch.equal(layer(x).isinf(), expected.isinf())


def test_gradients_go_through_pytorch():
    layer = make(64, 32, torch.float32)
    layer(torch.randn(1, 64)).sum().backward()
    assert layer.weight.grad is not None


def test_weights_are_those_of_the_layer_and_may_be_replaced():
    linear = torch.nn.Linear(64, 32)
    layer = FewRowsLinear(linear)
    assert layer.weight is linear.weight
    layer.weight.data = torch.randn(32, 64)
    check(layer, torch.randn(1, 64))


def test_layers_are_replaced_where_they_are_linear_and_of_a_dtype_that_fits():
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 8), torch.nn.Linear(8, 8).double(),
        torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Embedding(3, 4)),
    )  # fmt: skip
    assert replace_linears(model) == 2
    assert replace_linears(model) == 0
    assert isinstance(model[0], FewRowsLinear) and isinstance(model[2][0], FewRowsLinear)


def test_rows_that_are_not_in_ram_are_left_to_pytorch():
    layer = make(64, 32, torch.float32).to("meta")
    with torch.inference_mode():
        assert layer(torch.empty(1, 64, device="meta")).shape == (1, 32)


def test_rows_of_another_width_are_refused_as_pytorch_does():
    layer = make(64, 32, torch.float32)
    for width in (32, 48, 96):
        with torch.inference_mode(), pytest.raises(RuntimeError, match="shapes"):
            layer(torch.randn(1, width))
