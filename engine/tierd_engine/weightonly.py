"""Linear layers with 8-bit weights: less to read at each decode step, at a stated loss.

A step reads every weight once, so with few queries it costs bytes ÷ bandwidth,
and PyTorch's own product of one row is far from even that: on two cores 33 ms of
SmolLM2's 40 ms a step went into it in float32 or bfloat16, where this takes 5.
Weights are symmetric int8 with one scale an output channel, made once from the
loaded weights; the product is PyTorch's (`_weight_int8pack_mm`, what torchao's
weight-only layers are lowered to), in bfloat16 with float32 sums. For many rows
(prefill) the weights are widened for the call, and PyTorch's linear does the work.

The loss is the user's choice (`--weights int8`): `scripts/bench weights` measures
it. Embeddings, norms and layers that PyTorch's kernel cannot take stay as they are.
"""

from __future__ import annotations

import enum
from typing import Any

import torch

from tierd.errors import InvalidArgument
from tierd_engine.fewrows import replace_linears

CODE_MAX = 127
ROWS_MAX = 16  # up to here the weight-only kernel; a prefill chunk of more widens the weights


class Weights(enum.StrEnum):
    """AUTO: the numbers that were loaded, in their dtype. INT8: linear layers in 8 bits."""

    AUTO = "auto"
    INT8 = "int8"

    @classmethod
    def parse(cls, text: str) -> Weights:
        """Return the choice named `text`. Raises InvalidArgument."""
        try:
            return cls(text)
        except ValueError:
            raise InvalidArgument(f"weights {text!r} is none of auto, int8") from None


class Int8Linear(torch.nn.Module):
    """A linear layer of int8 weights [out, in] and a bfloat16 scale [out] each.

    Takes and returns the dtype of its input; with few rows it computes in bfloat16.
    """

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach().float()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        # The scale is rounded first, so that codes are made for the one that is used.
        scales = (weight.abs().amax(dim=1) / CODE_MAX).to(torch.bfloat16)
        safe = torch.where(scales == 0, torch.ones_like(scales), scales).float()
        codes = (weight / safe[:, None]).round().clamp(-CODE_MAX, CODE_MAX)
        self.codes: torch.Tensor
        self.scales: torch.Tensor
        self.register_buffer("codes", codes.to(torch.int8).contiguous())
        self.register_buffer("scales", scales)
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x W^T + bias: [..., in] to [..., out]."""
        rows = x.reshape(-1, self.in_features)
        if rows.shape[0] > ROWS_MAX:
            return torch.nn.functional.linear(x, self.widened(x.dtype), self.bias)
        y = torch._weight_int8pack_mm(rows.to(torch.bfloat16), self.codes, self.scales)
        y = y.to(x.dtype).view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias

    def widened(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weights [out, in] that the codes stand for."""
        return self.codes.to(dtype) * self.scales.to(dtype)[:, None]


def apply_weights(model: Any, weights: Weights) -> int:
    """Replace the model's linear layers, in place, as chosen; return how many.

    AUTO changes no weight: only who multiplies a few rows by them (fewrows.py).
    """
    if weights is Weights.AUTO:
        return replace_linears(model)
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is torch.nn.Linear and _fits(child):
                setattr(parent, name, Int8Linear(child))
                count += 1
    return count


def _fits(linear: torch.nn.Linear) -> bool:
    # What PyTorch's kernel takes without a tail; every transformer's layers do.
    return linear.in_features % 32 == 0 and linear.out_features % 32 == 0
