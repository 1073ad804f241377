"""A stretch of a step, written down: products of a row and operators, with their memory.

attention/stretch.py runs it. What it reads and writes stands at fixed addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch

from tierd_engine.attention.stretch import OPERATOR, PHASE, Records, stretch_address
from tierd_engine.attention.team import run_team, workers_for
from tierd_engine.fewrows import RowsLinear
from tierd_engine.rowproduct import KINDS, RowProducts


class Stretch:
    """A run of calls as one job. `inputs`: memory for what is copied in, in the order of a run.

    Once it has ended: `phases`, a PHASE each, and `reads` and `weight_bytes` of its products.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._phases: list[_Phase] = []
        self.inputs: list[torch.Tensor] = []
        self._kept: list[object] = []
        self._records: Records | None = None
        self.workers = numba.get_num_threads()

    def take(self, example: torch.Tensor) -> torch.Tensor:
        """Return memory for an input like `example`."""
        self.inputs.append(torch.empty(example.shape, dtype=example.dtype))
        return self.inputs[-1]

    def multiply(self, linear: RowsLinear, x: torch.Tensor, out: torch.Tensor) -> None:
        """Add a product of a row x: beside the others of the same x."""
        for phase in self._phases:
            if phase.x is x and linear.is_like(phase.linears[0]):
                break
        else:
            phase = _Phase(x)
            self._phases.append(phase)
        phase.linears.append(linear)
        phase.outs.append(out)

    def operate(self, kind: int, tensors: Sequence[torch.Tensor], **fields: Any) -> None:
        """Add an operator; `tensors`: what it reads, and last what it writes."""
        if not self._phases:
            self._phases.append(_Phase(None))
        record = np.zeros(1, dtype=OPERATOR)
        *read, out = tensors
        named = dict(zip("abcd", read, strict=False)) | {"out": out}
        for name, value in (("kind", kind), *fields.items()):
            record[name] = value
        for name, tensor in named.items():
            record[name] = tensor.data_ptr()
        self._phases[-1].operators.append(record)
        self._kept.extend(tensors)

    def end(self) -> None:
        """Write everything down: it may run now."""
        bound = [phase.bound(self.dtype, self.workers) for phase in self._phases]
        self._kept.extend((bound, self._phases))
        self.phases = [record for record, _ in bound]
        products = [products for _, products in bound if products is not None]
        self.weight_bytes = sum(one.weight_bytes for one in products)
        self.reads = products[0].reads
        self.work = stretch_address(KINDS[self.dtype])
        self._records = Records(self.phases)

    def fill(self, values: Sequence[torch.Tensor]) -> None:
        """Copy in the inputs."""
        for memory, value in zip(self.inputs, values, strict=True):
            memory.copy_(value)

    def run(self, *values: torch.Tensor) -> None:
        """Copy in the inputs and compute."""
        assert self._records is not None
        self.fill(values)
        # A wait ends each phase: how much one holds says whether a second thread is worth it.
        workers = min(workers_for(self.weight_bytes // len(self.phases)), self.workers)
        self._records.begin(workers)
        run_team(self.work, self._records.address, workers, self.reads)


@dataclass(slots=True)
class _Phase:
    x: torch.Tensor | None
    linears: list[RowsLinear] = field(default_factory=list)
    outs: list[torch.Tensor] = field(default_factory=list)
    operators: list[npt.NDArray[np.void]] = field(default_factory=list)

    def bound(self, dtype: torch.dtype, workers: int) -> tuple[Any, RowProducts | None]:
        """Return the record [1] of PHASE, and the products that it points into."""
        record = np.zeros(1, dtype=PHASE)
        products = None
        if self.x is not None:
            products = RowProducts([linear.factor() for linear in self.linears], dtype)
            record["work"], record["job"], record["claimed"] = products.bind(
                self.x, self.outs, workers
            )
            record["claims"] = len(self.outs)
        if self.operators:
            self.operators[:] = [np.concatenate(self.operators)]
            record["operators"] = self.operators[0].ctypes.data
            record["count"] = len(self.operators[0])
        return record, products
