"""RMS norms of few rows: the module's own numbers, and only where they are."""

from __future__ import annotations

import pytest
import torch
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from tierd_engine.fewnorms import FewRowsNorm, replace_norms

DTYPES = [torch.float32, torch.bfloat16]


def make(kind, width: int, dtype: torch.dtype) -> torch.nn.Module:
    norm = kind(width, eps=1e-5)
    norm.weight.data.copy_(torch.randn(width))
    return torch.nn.ModuleDict({"norm": norm.to(dtype)})


def in_double(norm: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    return (wide * scale).to(x.dtype).double() * norm.weight.detach().double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [LlamaRMSNorm, Qwen3RMSNorm])
@pytest.mark.parametrize("width", [1, 15, 64, 577, 4096])
def test_few_rows_and_many_are_what_a_norm_in_double_gives(dtype, kind, width):
    model = make(kind, width, dtype)
    own = model["norm"]
    assert replace_norms(model) == 1 and isinstance(model["norm"], FewRowsNorm)
    assert model["norm"].weight is own.weight
    for shape in [(1, 1, width), (3, width), (1, 9, 4, width), (600, width), (0, width)]:
        x = (torch.randn(shape) * torch.logspace(-4, 4, shape[-2])[:, None]).to(dtype)
        with torch.inference_mode():
            found = model["norm"](x)
        assert found.dtype == dtype and found.shape == x.shape
        expected = in_double(own, x)
        ulps = 1.5 * 2**-7 if dtype is torch.bfloat16 else 2**-20  # rounded twice
        assert bool(((found.double() - expected).abs() <= ulps * expected.abs() + 1e-30).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_do_not_lie_together_are_normalised_too(dtype):
    model = make(LlamaRMSNorm, 32, dtype)
    own = model["norm"]
    replace_norms(model)
    x = torch.randn(32, 6).to(dtype).T
    with torch.inference_mode():
        assert torch.allclose(model["norm"](x), own(x), rtol=2**-7)


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_nan_and_infinity_come_out_as_the_module_has_them(dtype):
    model = make(LlamaRMSNorm, 64, dtype)
    own = model["norm"]
    replace_norms(model)
    x = torch.zeros(4, 64, dtype=dtype)
    x[1, 3], x[2, 3], x[3] = float("nan"), float("inf"), 1e-30
    with torch.inference_mode():
        found, expected = model["norm"](x), own(x)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.allclose(found.nan_to_num(), expected.nan_to_num(), rtol=2**-7)


class NamedRMSNorm(torch.nn.Module):
    """Not what its name says: it takes the mean away first."""

    def __init__(self, width, eps):
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.ones(width)), eps

    def forward(self, x):
        return torch.nn.functional.layer_norm(x, x.shape[-1:], self.weight, None, self.eps)


@pytest.mark.parametrize("kind", [GemmaRMSNorm, NamedRMSNorm])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_of_other_numbers_stays_as_it_is(kind, dtype):
    model = make(kind, 64, dtype)
    own = model["norm"]
    assert replace_norms(model) == 0 and model["norm"] is own


def test_gradients_go_through_the_module():
    model = make(LlamaRMSNorm, 16, torch.float32)
    replace_norms(model)
    model["norm"](torch.randn(2, 16)).sum().backward()
    assert model["norm"].weight.grad is not None


def test_hooks_are_called():
    model = make(LlamaRMSNorm, 16, torch.float32)
    replace_norms(model)
    seen = []
    model["norm"].register_forward_hook(lambda module, args, out: seen.append(out))
    with torch.inference_mode():
        assert model["norm"](torch.randn(1, 16)) is seen[0]


def test_rows_of_another_width_are_refused_as_the_module_does():
    model = make(LlamaRMSNorm, 16, torch.float32)
    replace_norms(model)
    for width in (8, 24, 32):
        with torch.inference_mode(), pytest.raises(RuntimeError, match="size"):
            model["norm"](torch.randn(2, width))
