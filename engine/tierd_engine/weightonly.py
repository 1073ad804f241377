"""Linear layers with 8-bit weights: less to read at each decode step, at a stated loss.

A step reads every weight once, so with few queries it costs bytes ÷ bandwidth.
Weights are symmetric int8 with one scale an output channel, made once from the
loaded weights; the product of a few rows is ours (fewrows.py), with float32
sums. For many rows (prefill) the weights are widened for the call, and
PyTorch's linear does the work.

The loss is the user's choice (`--weights int8`): `scripts/bench weights` measures
it. Embeddings, norms and layers of other dtypes stay as they are.
"""

from __future__ import annotations

import enum
from typing import Any

import torch

from tierd.errors import InvalidArgument
from tierd_engine.fewrows import FEW_ROWS_MAX, RowProduct, replace_linears

CODE_MAX = 127
ROWS_MAX = FEW_ROWS_MAX  # up to here codes are read; a prefill chunk of more widens the weights


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

    Takes and returns the dtype of the layer that it replaces.
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
        self._product = RowProduct(self.codes, linear.weight.dtype, scales, linear.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x W^T + bias: [..., in] to [..., out]."""
        rows = self._product.rows_of(x)
        if rows:
            return self._product(x, rows, self.codes)
        return torch.nn.functional.linear(x, self.widened(x.dtype), self.bias)

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
    return linear.weight.dtype in (torch.float32, torch.bfloat16)
