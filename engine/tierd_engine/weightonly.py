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
from tierd_engine.fewnorms import replace_norms
from tierd_engine.fewrows import FewRowsLinear, RowsLinear, replace_linears
from tierd_engine.rowproduct import FEW_ROWS_MAX, Factor

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


class Int8Linear(RowsLinear):
    """A linear layer of int8 weights [out, in] and a bfloat16 scale [out] each.

    Takes and returns the dtype of the layer that it replaces.
    """

    def __init__(self, linear: torch.nn.Linear) -> None:
        weight = linear.weight.detach().float()
        # The scale is rounded first, so that codes are made for the one that is used.
        scales = (weight.abs().amax(dim=1) / CODE_MAX).to(torch.bfloat16)
        safe = torch.where(scales == 0, torch.ones_like(scales), scales).float()
        codes = (weight / safe[:, None]).round().clamp(-CODE_MAX, CODE_MAX)
        codes = codes.to(torch.int8).contiguous()
        factor = Factor(codes, scales, linear.bias)
        super().__init__(factor, linear.weight.dtype)
        self.codes: torch.Tensor
        self.scales: torch.Tensor
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)
        self.bias = linear.bias

    def factor(self) -> Factor:
        """Return the layer's codes, scales and bias."""
        return Factor(self.codes, self.scales, self.bias)

    def many(self, x: torch.Tensor) -> torch.Tensor:
        """Return PyTorch's product of x by the widened weights."""
        return torch.nn.functional.linear(x, self.widened(x.dtype), self.bias)

    def widened(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weights [out, in] that the codes stand for."""
        return self.codes.to(dtype) * self.scales.to(dtype)[:, None]


def apply_weights(model: Any, weights: Weights) -> int:
    """Replace the model's linear layers, in place, as chosen; return how many.

    AUTO changes no weight: only who multiplies a few rows by them (fewrows.py). Norms are ours
    either way (fewnorms.py), and are not counted.
    """
    replace_norms(model)
    return replace_linears(model, Int8Linear if weights is Weights.INT8 else FewRowsLinear)
