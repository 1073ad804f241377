"""Linear layers whose product of a few rows is ours: exact weights, read at the memory's speed.

With many rows (prefill) PyTorch's linear does the work. Weights are those of the
layer that is replaced, not a copy; sums are float32, the result is rounded once.
Takes and returns what the layer did, to within the order of a sum.

Invariants:
  a layer's record and the common scratch are used under the lock, by one call at a time
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tierd.units import CACHE_LINE_BYTES, round_up
from tierd_engine.attention.product import (
    PRODUCT_FIELDS,
    ROWS_MAX,
    make_product_job,
    product_address,
)
from tierd_engine.attention.simd import BFLOAT16, FLOAT32
from tierd_engine.attention.team import Reads, run_team, workers_for

FEW_ROWS_MAX = 16  # up to here ours; beyond, PyTorch's products of blocks are better
_KINDS = {torch.bfloat16: BFLOAT16, torch.float32: FLOAT32}
_PER_CALL = PRODUCT_FIELDS.index("weights") + 1

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


class FewRowsLinear(torch.nn.Module):
    """A linear layer of weights [out, in] in bfloat16 or float32, and its bias [out] or None."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self._dtype = linear.weight.dtype
        self._kind = _KINDS[self._dtype]
        size = linear.weight.element_size()
        self._job: npt.NDArray[np.void] = make_product_job(
            self.in_features, self.out_features, size
        )
        self._fields = self._job.view(np.int64)[:_PER_CALL]
        self._job_address = int(self._job.ctypes.data)
        self._scratch_bytes = int(self._job["scratch_bytes"][0])
        self._bias32 = None if linear.bias is None else linear.bias.detach().float()
        self._job["bias"] = 0 if self._bias32 is None else self._bias32.data_ptr()
        self._work = product_address(self._kind, 1), product_address(self._kind, ROWS_MAX)
        self.nbytes = linear.weight.nbytes
        self._reads = Reads(np.array([linear.weight.data_ptr()], dtype=np.int64), self.nbytes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x W^T + bias: [..., in] to [..., out]."""
        rows = x.numel() // self.in_features
        weight = self.weight
        if rows > FEW_ROWS_MAX or rows == 0 or x.dtype != self._dtype or torch.is_grad_enabled():
            return torch.nn.functional.linear(x, weight, self.bias)
        x = x.contiguous()
        out = torch.empty((*x.shape[:-1], self.out_features), dtype=self._dtype)
        workers = workers_for(self.nbytes)
        with _lock:
            _claimed[0] = 0
            self._fields[:] = (
                x.data_ptr(), out.data_ptr(), rows, _claimed_address,
                _scratch.address(workers * self._scratch_bytes), weight.data_ptr(),
            )  # fmt: skip
            run_team(self._work[rows > 1], self._job_address, workers, self._reads)
        return out


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
