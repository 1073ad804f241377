"""Rotary positions of a decode step by one compiled call, inside our steps alone.

transformers' models call a function of their module, `apply_rotary_pos_emb`. While a step of ours
runs, a function stands there that turns one token's queries and keys itself, and gives everything
else to the one it stands for. It stands only where both gave the same bits for random rows.

Invariant: after the last of overlapping steps, of any threads, the model's own function is there.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function_unary

from tierd_engine.attention.rotary import compiled_rotary
from tierd_engine.rowproduct import KINDS

NAME = "apply_rotary_pos_emb"
_STANDS_FOR = "stands_for"  # an attribute of ours
_TRIAL_HEADS, _TRIAL_KV_HEADS = 4, 2
Rotation = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class FewRowsRotary:
    """Where a model's step turns queries and keys, and what does so in our steps."""

    def __init__(self, model: Any) -> None:
        self._module = _module_of(model)
        self._ours: Rotation | None = None
        if self._module is not None:
            there: Rotation = getattr(self._module, NAME)
            self._own = getattr(there, _STANDS_FOR, there)  # ours, in another thread's step
            ours = _standing_for(self._own)
            if all(_agree(self._own, ours, dtype) for dtype in KINDS):
                self._ours = ours

    @property
    def stands(self) -> bool:
        """Whether ours stands for the model's own in a step."""
        return self._ours is not None

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Let ours stand there inside the block."""
        if self._ours is None:
            yield
            return
        setattr(self._module, NAME, self._ours)
        try:
            yield
        finally:
            setattr(self._module, NAME, self._own)


def _module_of(model: Any) -> ModuleType | None:
    module = sys.modules.get(type(model).__module__)
    return module if callable(getattr(module, NAME, None)) else None


def _standing_for(own: Rotation) -> Rotation:
    def apply_rotary_pos_emb(
        q: torch.Tensor,
        k: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        *args: Any,
        **named: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Turn q [1, heads, 1, head_dim] and k [1, kv_heads, 1, head_dim]; the rest is `own`'s."""
        if has_torch_function_unary(q):
            return handle_torch_function(apply_rotary_pos_emb, (q,), q, k, cos, sin, *args, **named)
        if args or named or not are_one_token(q, k, cos, sin):
            return own(q, k, cos, sin, *args, **named)
        _, heads, _, head_dim = q.shape
        kv_heads = k.shape[1]
        out = q.new_empty((1, heads + kv_heads, 1, head_dim))
        compiled_rotary(KINDS[q.dtype])(
            q.data_ptr(), k.data_ptr(), cos.data_ptr(), sin.data_ptr(), out.data_ptr(),
            heads, kv_heads, head_dim,
        )  # fmt: skip
        return out[:, :heads], out[:, heads:]

    setattr(apply_rotary_pos_emb, _STANDS_FOR, own)
    return apply_rotary_pos_emb


def is_ours(function: Any) -> bool:
    """Whether a function stands for a model's own."""
    return hasattr(function, _STANDS_FOR)


def are_one_token(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    """Whether ours turns these: one token's, in RAM, and no gradient is wanted."""
    dtype = q.dtype
    return (
        q.is_cpu and dtype in KINDS and not torch.is_grad_enabled()
        and dtype is k.dtype is cos.dtype is sin.dtype
        and _is_one_token(q) and _is_one_token(k)
        and cos.numel() == sin.numel() == q.shape[3] == k.shape[3]
        and cos.is_contiguous() and sin.is_contiguous()
    )  # fmt: skip


def _is_one_token(x: torch.Tensor) -> bool:
    """Whether x [1, heads, 1, head_dim] lies head after head, and halves of a head are whole."""
    if x.dim() != 4 or x.shape[0] != 1 or x.shape[2] != 1 or x.shape[3] % 2:
        return False
    return x.stride(3) == 1 and (x.stride(1) == x.shape[3] or x.shape[1] == 1)


def _agree(own: Rotation, ours: Rotation, dtype: torch.dtype) -> bool:
    """Whether both give the same bits for random queries and keys of some head sizes."""
    draw = torch.Generator().manual_seed(0)
    for head_dim in (64, 128):
        q, k, cos, sin = (
            torch.randn(shape, generator=draw).to(dtype)
            for shape in (
                (1, _TRIAL_HEADS, 1, head_dim), (1, _TRIAL_KV_HEADS, 1, head_dim),
                (1, 1, head_dim), (1, 1, head_dim),
            )
        )  # fmt: skip
        with torch.inference_mode():
            try:
                expected = own(q, k, cos, sin)
            except (RuntimeError, TypeError, ValueError, IndexError):
                return False  # another signature: of other models
            found = ours(q, k, cos, sin)
        if not all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)):
            return False
    return True
