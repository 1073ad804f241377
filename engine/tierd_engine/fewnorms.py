"""RMS norms whose few rows are normalised by one compiled call.

Models differ in what they call an RMS norm (weights that count from 1, another order of rounding):
a module is replaced only if ours gives its own numbers, on random rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function_unary

from tierd_engine.attention.rmsnorm import compiled_norm
from tierd_engine.fewrows import LeanModule
from tierd_engine.rowproduct import FEW_ROWS_MAX, KINDS

_EPSILON_NAMES = ("variance_epsilon", "eps")
_ROWS_MAX = 32 * FEW_ROWS_MAX  # norms of queries and keys have a row a head
_TRIAL_ROWS = 8
# PyTorch's float32 is up to 4 units of 2^-24 off, ours 2. Of bfloat16 a last place, and only
# where a sum lay on the edge: a formula with another order of rounding differs in a third of the
# elements.
_TOLERANCE = {torch.float32: 2**-21, torch.bfloat16: 2**-7}
_DIFFERING_SHARE_MAX = 0.01


class FewRowsNorm(LeanModule):
    """Stands for `norm`: x / sqrt(mean(x^2) + epsilon) * weight, over the last dimension."""

    def __init__(self, norm: torch.nn.Module, epsilon: float) -> None:
        super().__init__()
        weight = norm.weight
        assert isinstance(weight, torch.nn.Parameter)
        self.weight = weight
        self._norm = (norm,)  # no child: its weight is here already
        self.epsilon = epsilon
        self.width = weight.numel()
        self._dtype = weight.dtype
        self._call = compiled_norm(KINDS[weight.dtype])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the rows of x [..., width], normalised."""
        if has_torch_function_unary(x):
            return handle_torch_function(self.forward, (x,), x)
        if not self.takes(x):
            own: torch.Tensor = self._norm[0](x)
            return own
        x = x.contiguous()
        out = torch.empty_like(x)
        self._call(
            x.data_ptr(), self.weight.data_ptr(), out.data_ptr(), x.numel() // self.width,
            self.width, self.epsilon,
        )  # fmt: skip
        return out

    def takes(self, x: torch.Tensor) -> bool:
        """Whether x [..., width] is of few rows, in RAM, and no gradient is wanted."""
        return (
            x.numel() <= _ROWS_MAX * self.width
            and x.shape[-1] == self.width
            and x.dtype is self._dtype
            and x.is_cpu
            and not torch.is_grad_enabled()
        )

    def extra_repr(self) -> str:
        """Return what PyTorch prints in the brackets."""
        return f"{self.width}, eps={self.epsilon}"


def replace_norms(model: Any) -> int:
    """Replace the model's RMS norms that ours can stand for, in place; return how many."""
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if (ours := _stand_in(child)) is not None:
                setattr(parent, name, ours)
                count += 1
    return count


def _stand_in(norm: torch.nn.Module) -> FewRowsNorm | None:
    """Return ours for a module that is an RMS norm and of the same numbers, else None."""
    if not type(norm).__name__.endswith("RMSNorm"):
        return None
    weight = getattr(norm, "weight", None)
    epsilon = next(
        (e for name in _EPSILON_NAMES if isinstance(e := getattr(norm, name, None), float)), None
    )
    if not isinstance(weight, torch.nn.Parameter) or weight.dim() != 1 or epsilon is None:
        return None
    if weight.dtype not in KINDS or weight.device.type != "cpu" or not weight.is_contiguous():
        return None
    if any(name != "weight" for name, _ in norm.named_parameters()):
        return None
    ours = FewRowsNorm(norm, epsilon)
    return ours if _agree(norm, ours) else None


def _agree(norm: torch.nn.Module, ours: FewRowsNorm) -> bool:
    """Whether both give the same numbers for rows of sizes from 1e-3 to 1e3."""
    dtype, width = ours.weight.dtype, ours.weight.numel()
    generator = torch.Generator().manual_seed(width)
    sizes = torch.logspace(-3, 3, _TRIAL_ROWS)[:, None]
    x = (torch.randn(_TRIAL_ROWS, width, generator=generator) * sizes).to(dtype)
    with torch.inference_mode():
        expected, found = norm(x), ours(x)
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return False
    off = (found.double() - expected.double()).abs()
    close = off <= _TOLERANCE[dtype] * expected.double().abs() + torch.finfo(dtype).tiny
    if dtype is torch.bfloat16 and (off > 0).double().mean() > _DIFFERING_SHARE_MAX:
        return False
    return bool(close.all())
