"""The merge of partials by log-sum-exp on the GPU, in index order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tierd_engine.gpu.elements import FUSED
from tierd_engine.gpu.shapes import padded

PARTS = tl.constexpr(16)  # at a time; fixed, so that a run repeats bit for bit
# Left to itself, ptxas takes 32 registers and spills one for occupancy that a merge cannot use.
MERGE = {**FUSED, "maxnreg": 64}
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["parts", "rows"])  # as in attending.py
def merge_kernel(
    o: tl.tensor, lse: tl.tensor, out: tl.tensor, out_lse: tl.tensor, parts: tl.tensor,
    rows: tl.tensor, D: tl.constexpr, PADDED: tl.constexpr,
) -> None:  # fmt: skip
    """One program: one row, a query's head. A partial of weight 0 is not read."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    channel = tl.arange(0, PADDED)
    inside = channel < D
    tops = tl.full([PARTS], float("-inf"), tl.float32)
    for first in range(0, parts, PARTS):
        at = (first + part) * rows + row
        tops = tl.maximum(tops, tl.load(lse + at, mask=first + part < parts, other=float("-inf")))
    top = tl.max(tops, axis=0)
    safe_top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros([PARTS], tl.float32)
    merged = tl.zeros([PADDED], tl.float32)
    for first in range(0, parts, PARTS):
        at = (first + part) * rows + row
        behind = tl.load(lse + at, mask=first + part < parts, other=float("-inf")) - safe_top
        weight = tl.exp2(behind * LOG2_E)
        total += weight
        is_read = (weight > 0)[:, None] & inside[None, :]
        value = tl.load(o + at[:, None] * D + channel[None, :], mask=is_read, other=0.0)
        merged += tl.sum(weight[:, None] * value, axis=0)
    whole = tl.sum(total, axis=0)
    is_empty = whole == 0
    safe = tl.where(is_empty, 1.0, whole)
    tl.store(out + row * D + channel, tl.div_rn(merged, safe), mask=inside)
    tl.store(out_lse + row, tl.where(is_empty, float("-inf"), safe_top + tl.log(safe)))


def merge_partials(
    o: torch.Tensor, lse: torch.Tensor, out: torch.Tensor, out_lse: torch.Tensor
) -> None:
    """Merge `parts` partials in index order into out and out_lse; float32, contiguous.

    o: [parts, n, heads, head_dim]; lse: [parts, n, heads], natural logarithm; out: [n, heads,
    head_dim]; out_lse: [n, heads]. An lse of -inf marks an empty partial, whose o may be
    anything; if all are empty, so is the result: o = 0, lse = -inf. Zero parts is allowed.
    """
    parts, n, heads, head_dim = o.shape
    assert lse.shape == (parts, n, heads)
    assert out.shape == (n, heads, head_dim) and out_lse.shape == (n, heads)
    for tensor in (o, lse, out, out_lse):
        assert tensor.dtype == torch.float32 and tensor.is_contiguous()
    if n:
        grid = (n * heads,)
        merge_kernel[grid](
            o, lse, out, out_lse, parts, n * heads, head_dim, padded(head_dim), **MERGE
        )
