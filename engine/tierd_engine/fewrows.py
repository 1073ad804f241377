"""Linear layers whose product of a few rows is ours: weights are read at the memory's speed.

With many rows (prefill) PyTorch's linear does the work. Weights are those of the
layer that is replaced, not a copy; sums are float32, the result is rounded once.
Takes and returns what the layer did, to within the order of a sum.

Layers that are called with one and the same tensor, one after the other (queries, keys and
values; gate and up), are sisters from then on: the first one's call multiplies for all. That the
object is the same says that the numbers are: no model writes into what it gave to a linear layer,
which PyTorch keeps for the gradient (in inference it counts no writes that could be looked at).

Invariants:
  what was made for a sister is given to it for that tensor object alone, once
  a call knows its sisters from one look at `Chain.seen`: another thread's are of another tensor
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


class _Seen:
    """Layers that were called with one tensor, and what is ready for those that will be."""

    __slots__ = ("layers", "ready", "x")

    def __init__(self, x: torch.Tensor | None, layers: list[RowsLinear]) -> None:
        self.x = x
        self.layers = layers
        self.ready: dict[RowsLinear, torch.Tensor] = {}


class Chain:
    """What the layers of one model were called with last."""

    def __init__(self) -> None:
        self.seen = _Seen(None, [])

    def product(self, layer: RowsLinear, x: torch.Tensor) -> torch.Tensor:
        """Return a layer's product of x, of one row."""
        seen = self.seen
        if seen.x is x:
            ready = seen.ready.pop(layer, None)
            if ready is not None:
                return ready
            leader = seen.layers[0]
            if layer not in seen.layers and layer.fits_behind(leader):
                seen.layers.append(layer)
                leader.sisters = tuple(seen.layers)
                leader.together = None
                return layer.products(x, 1)[0]
        elif seen.ready:  # made for nothing
            seen.layers[0].sisters = ()
        self.seen = seen = _Seen(x, [layer])
        if not layer.sisters:
            return layer.products(x, 1)[0]
        if layer.together is None:
            layer.together = RowProducts([s.factor() for s in layer.sisters], layer.products.dtype)
        own, *others = layer.together(x, 1)
        seen.layers = list(layer.sisters)
        seen.ready = dict(zip(layer.sisters[1:], others, strict=True))
        return own


class RowsLinear(LeanModule):
    """A linear layer, [..., in] to [..., out], whose product of a few rows is ours.

    `sisters`: itself and those that follow it with the same input, once they have.
    """

    def __init__(self, factor: Factor, dtype: torch.dtype, chain: Chain) -> None:
        super().__init__()
        self.out_features, self.in_features = factor.weights.shape
        self._chain = chain
        self.products = RowProducts([factor], dtype)
        self.sisters: tuple[RowsLinear, ...] = ()
        self.together: RowProducts | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x W^T + bias."""
        if has_torch_function_unary(x):
            return handle_torch_function(self.forward, (x,), x)
        rows = self.products.rows_of(x)
        if rows == 1:
            return self._chain.product(self, x)
        return self.products(x, rows)[0] if rows else self.many(x)

    def fits_behind(self, leader: RowsLinear) -> bool:
        """Whether one call can multiply for both."""
        return type(self) is type(leader) and self.products.dtype is leader.products.dtype

    def factor(self) -> Factor:
        """Return what the layer multiplies by."""
        raise NotImplementedError

    def many(self, x: torch.Tensor) -> torch.Tensor:
        """Return PyTorch's product of x."""
        raise NotImplementedError


class FewRowsLinear(RowsLinear):
    """A linear layer of weights [out, in] in bfloat16 or float32, and its bias [out] or None."""

    def __init__(self, linear: torch.nn.Linear, chain: Chain | None = None) -> None:
        weight, bias = linear.weight, linear.bias
        super().__init__(Factor(weight, bias=bias), weight.dtype, chain or Chain())
        self.weight, self.bias = weight, bias

    def factor(self) -> Factor:
        """Return the layer's own weights and bias."""
        return Factor(self.weight, bias=self.bias)

    def many(self, x: torch.Tensor) -> torch.Tensor:
        """Return PyTorch's product of x."""
        return torch.nn.functional.linear(x, self.weight, self.bias)


def replace_linears(
    model: Any, make: Callable[[torch.nn.Linear, Chain], RowsLinear] = FewRowsLinear
) -> int:
    """Replace the model's linear layers that ours can stand for, in place; return how many."""
    count, chain = 0, Chain()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is torch.nn.Linear and _fits(child):
                setattr(parent, name, make(child, chain))
                count += 1
    return count


def _fits(linear: torch.nn.Linear) -> bool:
    weight = linear.weight
    return weight.dtype in KINDS and weight.is_contiguous() and weight.device.type == "cpu"
