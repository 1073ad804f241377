"""A whole decode step as one job of the team.

Stretches (stretches.py) and each layer's attention (attention/layercall.py) follow one another
without a line of Python between. Between them stands the write of the token's keys and values to
the hot tier. A layer's cold pages are waited for where they are attended; they are read ahead, and
their chunks given back, by the same code. Where pages are to be copied first, or a layer's cold
pages are more than a unit, a step goes layer by layer instead.

Invariants:
  a layer's keys and values are written before it is attended to
  the addresses of a layer's attention are those of the plan of the step that runs
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tierd_engine.arena import TORCH_DTYPES
from tierd_engine.attention.layercall import LayerCall
from tierd_engine.attention.stretch import OPERATOR, PHASE, WRITE, Records
from tierd_engine.attention.team import run_team, workers_for
from tierd_engine.rowproduct import KINDS
from tierd_engine.session import SessionKV
from tierd_engine.stretches import Stretch


@dataclass(frozen=True, slots=True)
class Attended:
    """A layer's attention: where its query, keys, values [1, heads, 1, head_dim] and o stand."""

    layer: int
    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    o: torch.Tensor
    scale: float


def fits(kv: SessionKV, stretches: Sequence[Stretch], attended: Sequence[Attended]) -> bool:
    """Whether these are a step of every layer in its order, all in the dtype of the hot tier.

    One worker runs all phases, and keys and values are written to hot byte by byte.
    """
    dtypes = {one.dtype for one in stretches}
    for one in attended:
        dtypes |= {part.dtype for part in (one.query, one.keys, one.values, one.o)}
    in_order = [one.layer for one in attended] == list(range(kv.geometry.layers))
    return in_order and dtypes == {TORCH_DTYPES[kv.geometry.dtype]}


class UnfinishedStep(Exception):
    """A cold page did not come, or not as it should be. Layer by layer it is found out which."""


class WholeStep:
    """Stretches, and what is attended between each of them and the next."""

    def __init__(
        self, kv: SessionKV, stretches: Sequence[Stretch], attended: Sequence[Attended]
    ) -> None:
        assert fits(kv, stretches, attended)
        self._kv, self._first, self._attended = kv, stretches[0], attended
        self._kind = KINDS[attended[0].query.dtype]
        self._scales = [one.scale for one in attended]
        # Of a phase, as each ends with a wait for all: see Stretch.run.
        self._phase_bytes = sum(one.weight_bytes for one in stretches) // sum(
            len(one.phases) for one in stretches
        )
        self._row = np.zeros(1, dtype=np.int64)  # where the step's token stands in layer 0's page
        self._writes = [self._write(one) for one in attended]
        phases, places = list(stretches[0].phases), []
        for write, stretch in zip(self._writes, stretches[1:], strict=True):
            # Keys and values are written when their stretch is done; then all attend.
            phases.append(np.zeros(1, dtype=PHASE))
            phases[-1]["operators"], phases[-1]["count"] = write.ctypes.data, 1
            places.append(len(phases))
            phases += [np.zeros(1, dtype=PHASE), *stretch.phases]
        self._records = Records(phases)
        self._places = places
        self._kept = stretches
        self._bound: list[LayerCall | None] = [None] * len(attended)
        self._workers = 0
        self._cold_units = 0  # of the step that was begun

    def _write(self, one: Attended) -> np.ndarray[tuple[int], np.dtype[np.void]]:
        keys, values, head_bytes = self._kv.arena.rows_of(one.layer)
        record = np.zeros(1, dtype=OPERATOR)
        record["kind"], record["rows"], record["more"] = WRITE, one.keys.shape[1], head_bytes
        record["width"] = one.keys.shape[-1] * one.keys.element_size()
        record["a"], record["b"] = one.keys.data_ptr(), one.values.data_ptr()
        record["c"], record["d"], record["out"] = keys, values, self._row.ctypes.data
        return record

    def begin(self) -> bool:
        """Begin the session's step of one token; return whether it can run as one job."""
        kv = self._kv
        if kv.step_tokens:
            kv.cancel()
        kv.begin(1)
        calls = kv.executors.lone_calls(self._scales, self._kind)
        if calls is None:
            return False
        block, offset = divmod(kv.position, kv.geometry.block_tokens)
        self._row[0] = kv.arena.row_address(kv.slot_of(block), offset)
        self._bind(calls)
        return True

    def _bind(self, calls: Sequence[LayerCall]) -> None:
        workers = min(workers_for(self._phase_bytes), self._first.workers)
        reader = self._kv.reader
        pool = reader.pool_for_job()
        first = number = reader.next_number
        for i, (call, one) in enumerate(zip(calls, self._attended, strict=True)):
            # Anew each step: a step that went layer by layer has bound it elsewhere.
            place = one.query.data_ptr(), one.o.data_ptr(), workers
            if call.brought is None or pool is None:
                work, job = call.bind(*place)
            else:
                call.brought[:] = reader.addresses_of(number)
                work, job = call.bind(*place, pool.address, number)
                number += 1
            if call is not self._bound[i]:
                self._records.replace(self._places[i], work, job)
                self._bound[i] = call
        self._workers, self._cold_units = workers, number - first

    def run(self, *values: torch.Tensor) -> None:
        """Run the step that was begun, and end it. `values`: what the first stretch takes in.

        Raises UnfinishedStep: the session's step then is to be cancelled.
        """
        self.ready(values)
        run_team(self._first.work, self._records.address, self._workers, self._first.reads)
        self.end()

    def ready(self, values: Sequence[torch.Tensor]) -> None:
        """Copy in what the first stretch takes, and make ready to run."""
        self._first.fill(values)
        pool = self._kv.reader.pool_for_job() if self._cold_units else None
        self._records.begin(self._workers, pool.stop_address if pool is not None else 0)

    def end(self) -> None:
        """End the session's step. Raises UnfinishedStep."""
        if self._cold_units and not self._kv.reader.taken_by_job(self._cold_units):
            raise UnfinishedStep
        self._kv.appended()
        self._kv.finish()
