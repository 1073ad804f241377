"""A stretch's operators against float64, and its workers' meetings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tierd_engine.attention.stretch import (
    ADD,
    DIVIDE,
    MULTIPLY,
    NORM,
    OPERATOR,
    PHASE,
    ROTARY,
    SCALE,
    SILU,
    WRITE,
    Records,
    stretch_address,
)
from tierd_engine.attention.team import run_team
from tierd_engine.rowproduct import KINDS, Factor, RowProducts

DTYPES = [torch.float32, torch.bfloat16]
# Of a result: a few float32 roundings (silu's power is of an argument that is rounded), or one
# rounding to bfloat16 and those before it.
_TOLERANCE = {torch.float32: 2**-18, torch.bfloat16: 2**-7}


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


def operator(kind: int, *tensors: torch.Tensor, **fields: Any) -> np.ndarray:
    """One operator's record; the last tensor is what it writes."""
    record = np.zeros(1, dtype=OPERATOR)
    *read, out = tensors
    for name, tensor in [*zip("abcd", read, strict=False), ("out", out)]:
        record[name] = tensor.data_ptr()
    for name, value in {"kind": kind, **fields}.items():
        record[name] = value
    return record


def phase(operators: list[np.ndarray], products: Any = None, claims: int = 0) -> np.ndarray:
    """A phase's record, which keeps its operators."""
    record = np.zeros(1, dtype=PHASE)
    if products is not None:
        record["work"], record["job"], record["claimed"] = products
        record["claims"] = claims
    if operators:
        together = np.concatenate(operators)
        _kept.append(together)
        record["operators"], record["count"] = together.ctypes.data, len(together)
    return record


_kept: list[object] = []


def run(phases: list[np.ndarray], dtype: torch.dtype, workers: int = 1, times: int = 1) -> None:
    records = Records(phases)
    for _ in range(times):
        records.begin(workers)
        run_team(stretch_address(KINDS[dtype]), records.address, workers)


def check(found: torch.Tensor, expected: torch.Tensor, scale: float = 1.0) -> None:
    size = expected.abs() + 2**-126
    assert not found.isnan().any()
    off = (found.double() - expected).abs() / size
    assert float(off.max()) <= scale * _TOLERANCE[found.dtype], float(off.max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 15, 16, 17, 1536, 5001])
def test_operators_on_elements_are_what_double_gives(dtype: torch.dtype, width: int) -> None:
    sizes = torch.logspace(-3, 1, width)
    a, b = ((torch.randn(width) * sizes).to(dtype) for _ in range(2))
    outs = [poisoned(width, dtype=dtype) for _ in range(5)]
    by = float(torch.randn(1).double()) + 0.3
    records = [
        operator(ADD, a, b, outs[0], width=width),
        operator(MULTIPLY, a, b, outs[1], width=width),
        operator(SILU, a, outs[2], width=width),
        operator(SCALE, a, outs[3], width=width, factor=by),
        operator(DIVIDE, a, outs[4], width=width, factor=by),
    ]
    run([phase(records)], dtype)
    assert torch.equal(outs[0], a + b) and torch.equal(outs[1], a * b)
    assert torch.equal(outs[3], a * by) and torch.equal(outs[4], a / by)
    check(outs[2], a.double() * torch.sigmoid(a.double()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_at_its_ends(dtype: torch.dtype) -> None:
    x = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 80.0, -80.0, 1e30, -1e30], dtype=dtype)
    odd = torch.tensor([float("nan"), float("inf")] * 8, dtype=dtype)
    out, of_odd = poisoned(8, dtype=dtype), torch.zeros(16, dtype=dtype)
    run([phase([operator(SILU, x, out, width=8), operator(SILU, odd, of_odd, width=16)])], dtype)
    expected = x.double() * torch.sigmoid(x.double())
    assert torch.allclose(out.double(), expected, rtol=1e-2, atol=1e-30)
    assert of_odd[::2].isnan().all() and (of_odd[1::2] == float("inf")).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 577), (9, 64), (3, 4096)])
def test_norms_and_rotary_positions_are_pytorchs(dtype: torch.dtype, rows: int, width: int) -> None:
    x, weight, out = torch.randn(rows, width).to(dtype), torch.randn(width).to(dtype), None
    out = poisoned(rows, width, dtype=dtype)
    heads, more, head_dim = 6, 2, 64
    q, k = torch.randn(heads, head_dim).to(dtype), torch.randn(more, head_dim).to(dtype)
    cos, sin = (torch.randn(head_dim).to(dtype) for _ in range(2))
    turned = poisoned(heads + more, head_dim, dtype=dtype)
    run([phase([
        operator(NORM, x, weight, out, rows=rows, width=width, epsilon=1e-5),
        operator(ROTARY, q, k, cos, sin, turned, rows=heads, more=more, width=head_dim),
    ])], dtype)  # fmt: skip
    wide = x.double()
    scaled = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(dtype).double()
    check(out, scaled * weight.double(), 1.5)
    both = torch.cat((q, k))
    half = torch.cat((-both[:, head_dim // 2 :], both[:, : head_dim // 2]), -1)
    assert torch.equal(turned, both * cos + half * sin)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_phases_wait_for_what_they_need_and_repeat_bit_for_bit(
    dtype: torch.dtype, workers: int
) -> None:
    """Three products in a row, each of the last one's result, with operators between."""
    width, hidden = 96, 1500
    up, gate = (torch.randn(hidden, width).to(dtype) / 10 for _ in range(2))
    down, last = torch.randn(width, hidden).to(dtype) / 40, torch.randn(33, width).to(dtype)
    x = torch.randn(1, width).to(dtype)
    outs = {
        name: poisoned(1, size, dtype=dtype)
        for name, size in (("up", hidden), ("gate", hidden), ("silu", hidden), ("both", hidden),
                           ("down", width), ("sum", width), ("last", 33))
    }  # fmt: skip
    first = RowProducts([Factor(up), Factor(gate)], dtype)
    second, third = RowProducts([Factor(down)], dtype), RowProducts([Factor(last)], dtype)
    phases = [
        phase([
            operator(SILU, outs["gate"], outs["silu"], width=hidden),
            operator(MULTIPLY, outs["silu"], outs["up"], outs["both"], width=hidden),
        ], first.bind(x, [outs["up"], outs["gate"]], workers), 2),
        phase([operator(ADD, x, outs["down"], outs["sum"], width=width)],
              second.bind(outs["both"], [outs["down"]], workers), 1),
        phase([], third.bind(outs["sum"], [outs["last"]], workers), 1),
    ]  # fmt: skip
    run(phases, dtype, workers)
    found = outs["last"].clone()
    with torch.inference_mode():
        a, b = RowProducts([Factor(up), Factor(gate)], dtype)(x, 1)
        both = torch.nn.functional.silu(b) * a
        (c,) = RowProducts([Factor(down)], dtype)(both, 1)
        (expected,) = RowProducts([Factor(last)], dtype)(x + c, 1)
    torch.testing.assert_close(found, expected)
    for _ in range(50):
        outs["last"].fill_(float("nan"))
        run(phases, dtype, workers, times=4)
        assert torch.equal(outs["last"], found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [5, 64])
def test_a_row_is_written_and_nothing_beside_it(dtype: torch.dtype, head_dim: int) -> None:
    heads, tokens, at = 3, 4, 3
    keys, values = (torch.randn(heads, head_dim).to(dtype) for _ in range(2))
    page = torch.full((2, heads, tokens, head_dim), 7.0, dtype=dtype)
    row = np.array([page.data_ptr() + at * page.stride(2) * page.element_size()])
    record = operator(
        WRITE, keys, values, page, rows=heads, width=head_dim * page.element_size(),
        more=page.stride(1) * page.element_size(), d=page.stride(0) * page.element_size(),
    )  # fmt: skip
    record["out"] = row.ctypes.data
    run([phase([record])], dtype)
    assert torch.equal(page[0, :, at], keys) and torch.equal(page[1, :, at], values)
    assert bool((page[:, :, :at] == 7).all())
