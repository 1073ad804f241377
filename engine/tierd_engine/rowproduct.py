"""Products of a few rows by matrices of weights, in one call of the team.

Invariants:
  records and the common scratch are used under the lock, by one call at a time
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from tierd.units import CACHE_LINE_BYTES, round_up
from tierd_engine.attention.product import (
    PRODUCT,
    PRODUCT_FIELDS,
    ROWS_MAX,
    make_job,
    make_products,
    product_address,
)
from tierd_engine.attention.simd import BFLOAT16, FLOAT32, INT8
from tierd_engine.attention.team import Reads, run_team, workers_for

FEW_ROWS_MAX = 16  # up to here ours; beyond, PyTorch's products of blocks are better
KINDS = {torch.bfloat16: BFLOAT16, torch.float32: FLOAT32}
_PER_CALL = struct.Struct(f"={PRODUCT_FIELDS.index('weights') + 1}q")
_AHEAD_BYTES = 64 << 10  # of weights that lie together: what is asked for ahead at an address

_lock = threading.Lock()  # held while products run: a wait for it ends when they do


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


@dataclass(frozen=True, slots=True, eq=False)
class Factor:
    """A matrix of weights [outputs, width], and what its product is scaled by and added to.

    `scales` [outputs]: of int8 weights, else None; `bias` [outputs] or None.
    """

    weights: torch.Tensor
    scales: torch.Tensor | None = None
    bias: torch.Tensor | None = None


class RowProducts:
    """x W^T + bias of the same few rows x in `dtype`, bfloat16 or float32, by each of `factors`.

    Weights are all in `dtype`, or all int8 with scales, and of one width. A parameter's data may
    move, but not change shape or dtype; scales and biases are copied.
    """

    def __init__(self, factors: Sequence[Factor], dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._weights = [factor.weights for factor in factors]
        self._outputs = [len(weights) for weights in self._weights]
        first = self._weights[0]
        self._width = first.shape[1]
        products = make_products(self._width, self._outputs, first.element_size())
        self._kept: list[object] = [products]
        for product, factor in zip(products, factors, strict=True):
            for name, part in (("scales", factor.scales), ("bias", factor.bias)):
                widened = None if part is None else part.detach().float()
                product[name] = 0 if widened is None else widened.data_ptr()
                self._kept.append(widened)
        x_kind = KINDS[dtype]
        kind = x_kind if factors[0].scales is None else INT8
        self._work = product_address(kind, 1, x_kind), product_address(kind, ROWS_MAX, x_kind)
        self._claimed = np.zeros(len(factors), dtype=np.int64)
        self._claimed_at = [int(self._claimed.ctypes.data) + 8 * i for i in range(len(factors))]
        self._fields = products.view(np.uint8).data
        job = make_job(products)
        self._kept.append(job)
        self._job_address = int(job.ctypes.data)
        self._scratch_bytes = int(products["scratch_bytes"][0])
        self.weight_bytes = sum(weights.nbytes for weights in self._weights)
        self.reads = Reads(_pieces(self._weights), _AHEAD_BYTES)

    def rows_of(self, x: torch.Tensor) -> int:
        """Return how many rows x [..., width] has, if few, in RAM, and no gradient is wanted; or 0.

        Those are taken. Rows of another width are PyTorch's, to refuse.
        """
        rows = x.numel() // self._width
        if rows > FEW_ROWS_MAX or x.dtype is not self.dtype or not x.is_cpu:
            return 0
        if x.shape[-1] != self._width:
            return 0
        return 0 if torch.is_grad_enabled() else rows

    def __call__(self, x: torch.Tensor, rows: int) -> list[torch.Tensor]:
        """Return the products [..., outputs] for the rows of x that are taken."""
        x = x.contiguous()
        shape = x.shape[:-1]
        out = [x.new_empty((*shape, outputs)) for outputs in self._outputs]
        workers = workers_for(self.weight_bytes)
        with _lock:
            self._claimed[:] = 0
            self._fill(x, out, rows, _scratch.address(workers * self._scratch_bytes))
            run_team(self._work[rows > 1], self._job_address, workers, self.reads)
        return out

    def bind(self, x: torch.Tensor, outs: Sequence[torch.Tensor], workers: int) -> Bound:
        """Make these the products of the row x [..., width], from now on, into `outs`.

        For a caller that has them run, by so many workers at most, and keeps the tensors. The
        claimed words are 0 before each run.
        """
        scratch = _Scratch()
        self._kept.append(scratch)
        self._fill(x, outs, 1, scratch.address(workers * self._scratch_bytes))
        return Bound(self._work[0], self._job_address, self._claimed_at[0])

    def _fill(self, x: torch.Tensor, outs: Sequence[torch.Tensor], rows: int, scratch: int) -> None:
        at, x_address = 0, x.data_ptr()
        for weights, one, claimed in zip(self._weights, outs, self._claimed_at, strict=True):
            # Some hundred times a step: NumPy takes six times as long.
            _PER_CALL.pack_into(
                self._fields, at, x_address, one.data_ptr(), rows, claimed, scratch,
                weights.data_ptr(),
            )  # fmt: skip
            at += PRODUCT.itemsize


class Bound(NamedTuple):
    """Addresses: of a worker, of its job, of the words (int64) that its workers claim by."""

    work: int
    job: int
    claimed: int


def _pieces(weights: Sequence[torch.Tensor]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return addresses from which _AHEAD_BYTES each are the weights, in their order."""
    starts = [
        np.arange(one.data_ptr(), one.data_ptr() + one.nbytes, _AHEAD_BYTES, dtype=np.int64)
        for one in weights
    ]
    return np.concatenate(starts)
