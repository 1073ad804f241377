"""Prefill attention with lse, against float64."""

import pytest
import torch

from tierd_engine.attention.flash import FlashPartial, attend_own, attend_past, merge_into

SHAPES = [(9, 3, 64), (8, 8, 32), (14, 2, 64), (4, 1, 128)]


def drawn(heads: int, kv_heads: int, head_dim: int, n: int, m: int) -> list[torch.Tensor]:
    shapes = [(heads, n, head_dim), (kv_heads, m, head_dim), (kv_heads, m, head_dim)]
    return [torch.randn(shape) for shape in shapes]


def reference(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, *, own_from: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """o and lse in float64; query i sees the tokens up to `own_from` + i."""
    group = q.shape[0] // keys.shape[0]
    keys, values = (part.double().repeat_interleave(group, 0) for part in (keys, values))
    scores = q.double() @ keys.transpose(1, 2) * scale
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(own_from + 1)
    scores = scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(-1) @ values, scores.logsumexp(-1)


def assert_close(found: FlashPartial, expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    assert found.o.dtype == found.lse.dtype == torch.float32
    torch.testing.assert_close(found.o.double(), expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.lse.double(), expected[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("heads, kv_heads, head_dim", SHAPES)
@pytest.mark.parametrize("n", [1, 17, 127, 128, 129, 300, 512])
def test_a_chunk_sees_itself_causally(heads: int, kv_heads: int, head_dim: int, n: int) -> None:
    q, keys, values = drawn(heads, kv_heads, head_dim, n, n)
    scale = head_dim**-0.5
    assert_close(attend_own(q, keys, values, scale), reference(q, keys, values, scale, own_from=0))


def test_a_chunk_as_a_model_gives_it_is_not_contiguous() -> None:
    q, keys, values = drawn(9, 3, 64, 200, 200)
    strided = [part.transpose(0, 1).contiguous().transpose(0, 1) for part in (q, keys, values)]
    assert_close(attend_own(*strided, 0.125), reference(q, keys, values, 0.125, own_from=0))


@pytest.mark.parametrize("heads, kv_heads, head_dim", SHAPES)
def test_own_and_past_merge_to_attention_over_both(
    heads: int, kv_heads: int, head_dim: int
) -> None:
    past, n, scale = 333, 150, head_dim**-0.5
    q, keys, values = drawn(heads, kv_heads, head_dim, n, past + n)
    found = attend_own(q, keys[:, past:], values[:, past:], scale)
    for start in range(0, past, 111):
        end = start + 111
        merge_into(found, attend_past(q, keys[:, start:end], values[:, start:end], scale))
    assert_close(found, reference(q, keys, values, scale, own_from=past))


def test_masks_made_in_inference_serve_outside_of_it() -> None:
    q, keys, values = drawn(4, 2, 16, 140, 140)
    with torch.inference_mode():
        first = attend_own(q, keys, values, 0.25)
    second = attend_own(q.requires_grad_(), keys, values, 0.25)
    assert torch.equal(first.o, second.o.detach())
