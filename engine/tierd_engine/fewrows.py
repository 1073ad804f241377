"""Linear layers whose product of a few rows is ours: weights are read at the memory's speed.

With many rows (prefill) PyTorch's linear does the work. Weights are those of the
layer that is replaced, not a copy; sums are float32, the result is rounded once.
Takes and returns what the layer did, to within the order of a sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function_unary

from tierd_engine.rowproduct import KINDS, Factor, RowProducts


class LeanModule(torch.nn.Module):
    """A module of one input that is called some hundred times a step.

    What PyTorch does around `forward` takes 4 us a call: it is left out where there is no hook.
    """

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return `forward(x)`."""
        hooks = self._forward_hooks or self._forward_pre_hooks
        if hooks or self._backward_hooks or self._backward_pre_hooks:
            hooked: torch.Tensor = super().__call__(x)
            return hooked
        return self.forward(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the module makes of x."""
        raise NotImplementedError


class RowsLinear(LeanModule):
    """A linear layer, [..., in] to [..., out], whose product of a few rows is ours."""

    def __init__(self, factor: Factor, dtype: torch.dtype) -> None:
        super().__init__()
        self.out_features, self.in_features = factor.weights.shape
        self.products = RowProducts([factor], dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x W^T + bias."""
        if has_torch_function_unary(x):
            out: torch.Tensor = handle_torch_function(self.forward, (x,), x)
            return out
        rows = self.products.rows_of(x)
        return self.products(x, rows)[0] if rows else self.many(x)

    def is_like(self, other: RowsLinear) -> bool:
        """Whether one call can multiply for both."""
        return type(self) is type(other) and self.products.dtype is other.products.dtype

    def factor(self) -> Factor:
        """Return what the layer multiplies by."""
        raise NotImplementedError

    def many(self, x: torch.Tensor) -> torch.Tensor:
        """Return PyTorch's product of x."""
        raise NotImplementedError


class FewRowsLinear(RowsLinear):
    """A linear layer of weights [out, in] in bfloat16 or float32, and its bias [out] or None."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        weight, bias = linear.weight, linear.bias
        super().__init__(Factor(weight, bias=bias), weight.dtype)
        self.weight, self.bias = weight, bias

    def factor(self) -> Factor:
        """Return the layer's own weights and bias."""
        return Factor(self.weight, bias=self.bias)

    def many(self, x: torch.Tensor) -> torch.Tensor:
        """Return PyTorch's product of x."""
        return torch.nn.functional.linear(x, self.weight, self.bias)


def replace_linears(
    model: Any, make: Callable[[torch.nn.Linear], RowsLinear] = FewRowsLinear
) -> int:
    """Replace the model's linear layers that ours can stand for, in place; return how many."""
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is torch.nn.Linear and _fits(child):
                setattr(parent, name, make(child))
                count += 1
    return count


def _fits(linear: torch.nn.Linear) -> bool:
    weight = linear.weight
    return weight.dtype in KINDS and weight.is_contiguous() and weight.device.type == "cpu"
