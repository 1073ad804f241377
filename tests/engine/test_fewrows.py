"""Linear layers of few rows: the product of the same weights, whoever computes it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numba
import pytest
import torch

from tierd_engine import rowproduct
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


class Branches(torch.nn.Module):
    """Layers of one input, and one of another; `skipped` are not called."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        sizes = {"q": (64, 96), "k": (64, 32), "v": (64, 32), "o": (96, 64)}
        for name, (width, outputs) in sizes.items():
            setattr(self, name, torch.nn.Linear(width, outputs, bias=name == "k").to(dtype))
        self.skipped: set[str] = set()

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        out = {n: getattr(self, n)(x) for n in "qkv" if n not in self.skipped}
        return [*out.values(), self.o(out["q"] if "q" in out else x.new_ones((1, 96)))]


def alone(model: Branches) -> Branches:
    """The same layers, each with a chain of its own: nobody's sister."""
    other = Branches()
    for name in "qkvo":
        setattr(other, name, FewRowsLinear(getattr(model, name)))
    return other


def assert_same_bits(model: Branches, other: Branches, x: torch.Tensor) -> None:
    for found, expected in zip(model(x), other(x), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sisters_give_the_bits_that_each_gives_alone(dtype):
    model = Branches(dtype)
    other = alone(model)
    replace_linears(model)
    with torch.inference_mode():
        for _ in range(4):
            x = torch.randn(1, 64).to(dtype)
            assert_same_bits(model, other, x)
    assert [len(getattr(model, name).sisters) for name in "qkvo"] == [3, 0, 0, 0]


def test_sisters_are_multiplied_in_one_call(monkeypatch):
    model = Branches()
    replace_linears(model)
    calls = []
    run = rowproduct.run_team
    monkeypatch.setattr(rowproduct, "run_team", lambda *args: (calls.append(args), run(*args))[1])
    with torch.inference_mode():
        for expected in (4, 2, 2):
            calls.clear()
            model(torch.randn(1, 64))
            assert len(calls) == expected


def test_a_sister_that_is_not_called_costs_once_and_gets_nothing_stale():
    model = Branches()
    other = alone(model)
    replace_linears(model)
    with torch.inference_mode():
        for step in range(12):
            model.skipped = other.skipped = (
                {"v"} if step % 4 == 1 else {"q"} if step % 4 == 3 else set()
            )
            x = torch.randn(1, 64)
            assert_same_bits(model, other, x)


def test_a_tensor_that_is_filled_anew_between_steps_is_read_anew():
    model = Branches()
    other = alone(model)
    replace_linears(model)
    model.skipped = other.skipped = {"v"}
    x = torch.empty(1, 64)
    with torch.inference_mode():
        for step in range(6):
            model.skipped = other.skipped = {"v"} if step % 2 else set()
            x.copy_(torch.randn(1, 64))
            assert_same_bits(model, other, x)


def test_threads_that_share_a_model_get_their_own_products():
    model = Branches()
    other = alone(model)
    replace_linears(model)
    wrong = []

    def work(seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        with torch.inference_mode():
            for _ in range(200):
                x = torch.randn(1, 64, generator=draw)
                pairs = zip(model(x), other(x), strict=True)
                wrong.extend(1 for found, expected in pairs if not torch.equal(found, expected))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not wrong


def test_rows_of_another_width_are_refused_as_pytorch_does():
    layer = make(64, 32, torch.float32)
    for width in (32, 48, 96):
        with torch.inference_mode(), pytest.raises(RuntimeError, match="shapes"):
            layer(torch.randn(1, width))
