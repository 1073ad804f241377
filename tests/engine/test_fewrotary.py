"""Rotary positions of one token: the model's own bits, inside a step, and its own elsewhere."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers.models.llama import modeling_llama

from tierd_engine import fewrotary
from tierd_engine.fewrotary import FewRowsRotary

DTYPES = [torch.float32, torch.bfloat16]
OWN = modeling_llama.apply_rotary_pos_emb


def model_of(module) -> object:
    return type("Model", (), {"__module__": module.__name__})()


def draw(heads: int, kv_heads: int, n: int, head_dim: int, dtype: torch.dtype):
    """As a layer hands them over: [1, n, heads, head_dim] transposed."""
    shapes = [(1, n, heads, head_dim), (1, n, kv_heads, head_dim), *[(1, n, head_dim)] * 2]
    return tuple(torch.randn(shape).to(dtype) for shape in shapes)


@pytest.fixture
def counted(monkeypatch):
    """How often the model's own function is called."""
    calls = []

    def own(*args, **named):
        calls.append(args)
        return OWN(*args, **named)

    monkeypatch.setattr(modeling_llama, fewrotary.NAME, own)
    rotary = FewRowsRotary(model_of(modeling_llama))
    assert rotary.stands
    calls.clear()
    return rotary, calls


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(9, 3, 64), (32, 8, 128), (1, 1, 2), (4, 4, 80)]
)
def test_one_token_is_turned_to_the_same_bits_without_the_models_own(
    counted, dtype, heads, kv_heads, head_dim
):
    rotary, calls = counted
    for _ in range(5):
        q, k, cos, sin = draw(heads, kv_heads, 1, head_dim, dtype)
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        with torch.inference_mode(), rotary.inside():
            found = modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)
        assert all(torch.equal(a, b) for a, b in zip(found, OWN(q, k, cos, sin), strict=True))
    assert not calls


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_else_is_the_models_own(counted, dtype):
    rotary, calls = counted
    cases = []
    q, k, cos, sin = draw(4, 2, 3, 64, dtype)  # several tokens
    cases.append((q.transpose(1, 2), k.transpose(1, 2), cos, sin))
    q, k, cos, sin = draw(4, 2, 1, 64, dtype)  # a part of each head
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    cases.append((q[..., :32], k[..., :32], cos[..., :32], sin[..., :32]))
    cases.append((q, k, cos.double(), sin.double()))  # another dtype
    cases.append((q.expand(2, 4, 1, 64), k.expand(2, 2, 1, 64), cos, sin))  # a batch
    with torch.inference_mode(), rotary.inside():
        for case in cases:
            found = modeling_llama.apply_rotary_pos_emb(*case)
            assert all(torch.equal(a, b) for a, b in zip(found, OWN(*case), strict=True))
        modeling_llama.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1)
    with rotary.inside(), torch.enable_grad():
        modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)
    assert len(calls) == len(cases) + 2


def test_outside_a_step_and_after_an_error_in_one_the_models_own_stands(counted):
    rotary, _ = counted
    before = modeling_llama.apply_rotary_pos_emb
    with pytest.raises(ZeroDivisionError), rotary.inside():
        assert modeling_llama.apply_rotary_pos_emb is not before
        raise ZeroDivisionError
    assert modeling_llama.apply_rotary_pos_emb is before


def test_after_steps_that_overlap_the_models_own_stands(counted):
    rotary, _ = counted
    before = modeling_llama.apply_rotary_pos_emb
    first = rotary.inside()
    first.__enter__()
    other = FewRowsRotary(model_of(modeling_llama))
    second = other.inside()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert modeling_llama.apply_rotary_pos_emb is before


@pytest.mark.parametrize("own", [
    lambda q, k, cos, sin: (q * cos + q * sin, k * cos + k * sin),  # other pairs
    lambda x, freqs: x,  # another signature
    lambda q, k, cos, sin: (q[..., :1], k),  # another shape
])  # fmt: skip
def test_a_function_of_other_numbers_stays(monkeypatch, own):
    module = SimpleNamespace(**{fewrotary.NAME: own})
    monkeypatch.setitem(fewrotary.sys.modules, "a_model", module)
    rotary = FewRowsRotary(type("Model", (), {"__module__": "a_model"})())
    assert not rotary.stands
    with rotary.inside():
        assert getattr(module, fewrotary.NAME) is own


def test_a_model_without_such_a_function_is_left_alone():
    assert not FewRowsRotary(torch.nn.Linear(2, 2)).stands
