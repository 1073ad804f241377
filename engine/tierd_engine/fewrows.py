"""Linear layers whose product of a few rows is ours: weights are read at the memory's speed.

With many rows (prefill) PyTorch's linear does the work. Weights are those of the
layer that is replaced, not a copy; sums are float32, the result is rounded once.
Takes and returns what the layer did, to within the order of a sum.

Invariants:
  a product's record and the common scratch are used under the lock, by one call at a time
"""

from __future__ import annotations

import struct
import threading
from typing import Any

import numpy as np
import torch

from tierd.units import CACHE_LINE_BYTES, round_up
from tierd_engine.attention.product import (
    PRODUCT_FIELDS,
    ROWS_MAX,
    make_product_job,
    product_address,
)
from tierd_engine.attention.simd import BFLOAT16, FLOAT32, INT8
from tierd_engine.attention.team import Reads, run_team, workers_for

FEW_ROWS_MAX = 16  # up to here ours; beyond, PyTorch's products of blocks are better
_KINDS = {torch.bfloat16: BFLOAT16, torch.float32: FLOAT32}
_PER_CALL = struct.Struct(f"={PRODUCT_FIELDS.index('weights') + 1}q")

_lock = threading.Lock()  # held while a product runs: a wait for it ends when that does
_claimed = np.zeros(8, dtype=np.int64)
_claimed_address = int(_claimed.ctypes.data)


class _Scratch:
    """Grows to what the widest layer needs."""

    def __init__(self) -> None:
        self._bytes = np.zeros(0, dtype=np.uint8)
        self._address = 0

    def address(self, size_bytes: int) -> int:
        if self._bytes.size < size_bytes + CACHE_LINE_BYTES:
            self._bytes = np.zeros(size_bytes + CACHE_LINE_BYTES, dtype=np.uint8)
            self._address = round_up(int(self._bytes.ctypes.data), CACHE_LINE_BYTES)
        return self._address


_scratch = _Scratch()


class RowProduct:
    """x W^T + bias for a few rows x in `dtype`: bfloat16 or float32.

    weights: [outputs, width], in `dtype`, or int8 with `scales` [outputs]; bias: [outputs] or
    None. Weights may move, but not change shape or dtype; scales and bias are copied.
    """

    def __init__(
        self,
        weights: torch.Tensor,
        dtype: torch.dtype,
        scales: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
    ) -> None:
        self.dtype = dtype
        outputs, width = weights.shape
        self._outputs, self._width = outputs, width
        self._bytes = weights.nbytes
        job = make_product_job(width, outputs, weights.element_size())
        self._kept = [None if part is None else part.detach().float() for part in (scales, bias)]
        for name, part in zip(("scales", "bias"), self._kept, strict=True):
            job[name] = 0 if part is None else part.data_ptr()
        x_kind = _KINDS[dtype]
        kind = x_kind if scales is None else INT8
        self._work = product_address(kind, 1, x_kind), product_address(kind, ROWS_MAX, x_kind)
        self._job = job
        self._fields = job.view(np.uint8).data
        self._job_address = int(job.ctypes.data)
        self._scratch_bytes = int(job["scratch_bytes"][0])
        self._reads = Reads(np.array([weights.data_ptr()], dtype=np.int64), self._bytes)

    def rows_of(self, x: torch.Tensor) -> int:
        """Return how many rows x [..., width] has, if few, in RAM, and no gradient is wanted; or 0.

        Those are taken.
        """
        rows = x.numel() // self._width
        if rows > FEW_ROWS_MAX or x.dtype is not self.dtype or not x.is_cpu:
            return 0
        return 0 if torch.is_grad_enabled() else rows

    def __call__(self, x: torch.Tensor, rows: int, weights: torch.Tensor) -> torch.Tensor:
        """Return the product [..., outputs] for the rows of x that are taken.

        `weights`: where they are now.
        """
        x = x.contiguous()
        out = torch.empty((*x.shape[:-1], self._outputs), dtype=self.dtype)
        workers = workers_for(self._bytes)
        with _lock:
            _claimed[0] = 0
            # A step does this some hundred times: NumPy takes six times as long.
            _PER_CALL.pack_into(
                self._fields, 0, x.data_ptr(), out.data_ptr(), rows, _claimed_address,
                _scratch.address(workers * self._scratch_bytes), weights.data_ptr(),
            )  # fmt: skip
            run_team(self._work[rows > 1], self._job_address, workers, self._reads)
        return out


class FewRowsLinear(torch.nn.Module):
    """A linear layer of weights [out, in] in bfloat16 or float32, and its bias [out] or None."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self._product = RowProduct(linear.weight, linear.weight.dtype, bias=linear.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x W^T + bias: [..., in] to [..., out]."""
        rows = self._product.rows_of(x)
        if rows:
            return self._product(x, rows, self.weight)
        return torch.nn.functional.linear(x, self.weight, self.bias)


def replace_linears(model: Any) -> int:
    """Replace the model's linear layers that ours can stand for, in place; return how many."""
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is torch.nn.Linear and _fits(child):
                setattr(parent, name, FewRowsLinear(child))
                count += 1
    return count


def _fits(linear: torch.nn.Linear) -> bool:
    weight = linear.weight
    return weight.dtype in _KINDS and weight.is_contiguous() and weight.device.type == "cpu"
