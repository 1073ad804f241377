"""A stretch of a decode step as one job of the team: products, and the small operators between.

Between two layers' attention a step multiplies by some matrices and does small things to the
results. As calls of their own, each product wakes the team and each small thing takes Python
longer than itself. So they are written down once, as phases: products of rows that are there, by
all workers; then operators on the results, by the worker that ends last, while the others wait.

Invariants:
  a phase's products begin when all of the phases before it is done
  between runs every claimed word and the count of arrived workers is 0
  an operator writes only to its own result
  whether a run ends early is said by who ends a phase last, so all leave after the same one
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types

from tierd.codec.intrinsics import as_array
from tierd.units import CACHE_LINE_BYTES
from tierd_engine.attention.atomics import (
    add_word,
    load_word,
    now_ns,
    pause,
    sleep_while,
    store_word,
    wake_sleepers,
)
from tierd_engine.attention.compiling import compile_cached, inlined, step
from tierd_engine.attention.rmsnorm import normalise
from tierd_engine.attention.rotary import rotate_both
from tierd_engine.attention.simd import (
    FLOAT32,
    NARROW,
    ConstType,
    add,
    divide,
    element_bytes,
    exp2,
    load_int64,
    load_narrow,
    load_scalar,
    maximum,
    multiply,
    number,
    splat,
    store,
    store_narrow,
    store_rounded,
    subtract,
    zeros,
)
from tierd_engine.attention.team import call_work
from tierd_engine.attention.writing import copy_row

NORM, ROTARY, ADD, MULTIPLY, SILU, SCALE, DIVIDE, WRITE = range(8)
_LOG2_E = 1.4426950408889634
# Of an operator: `a`, `b`, `c`, `d` and `out` are addresses. NORM: rows of a, weight b. ROTARY:
# queries a, keys b, cos c, sin d; `rows` heads, `more` KV heads. WRITE: keys a and values b, `rows`
# heads of `width` bytes, to addresses `more` bytes apart, from the address that stands at `out` on,
# plus c or d. The others: `width` elements; SCALE and DIVIDE: of a, by `factor`.
OPERATOR = np.dtype(
    [(name, np.int64) for name in ("kind", "a", "b", "c", "d", "out", "rows", "more", "width")]
    + [("epsilon", np.float64), ("factor", np.float64)]
)
# Of a phase: its products' worker and job (0: it has none) and their claimed words; its operators.
PHASE = np.dtype(
    [(name, np.int64) for name in ("work", "job", "claimed", "claims", "operators", "count")]
)
# `stop`: address of a word that is not 0 once a run is to end early; `sleepers`: see sleep_while.
_FIELDS = ("workers", "phases", "count", "arrived", "done", "scratch", "sleepers", "stop")
STRETCH = np.dtype([(name, np.int64) for name in _FIELDS])
_PAUSES = 500  # some tens of microseconds: longer than shares differ on a machine of our own
_SLEEP_NS = 10**9  # of one sleep; who is waited for ends its share, and wakes the sleepers
_STOPPED = 2**31 - 1  # phases done, where a run ends early
_LINE_WORDS = CACHE_LINE_BYTES // 8


class Records:
    """A stretch's records, and the words that its workers meet at. `address`: of its job."""

    def __init__(self, phases: Sequence[npt.NDArray[np.void]]) -> None:
        """`phases`: [1] arrays of PHASE; what they point at is the caller's to keep."""
        self._phases = np.concatenate(phases)
        # arrived; done; scratch; sleepers; of a run that nothing stops: stop
        self._words = np.zeros((5, _LINE_WORDS), dtype=np.int64)
        words = [int(line.ctypes.data) for line in self._words]
        self._record = np.zeros(1, dtype=STRETCH)
        self._record[0] = 1, self._phases.ctypes.data, len(phases), *words
        self.address = int(self._record.ctypes.data)

    def replace(self, place: int, work: int, job: int) -> None:
        """Have a phase without products run another job than it did."""
        self._phases["work"][place], self._phases["job"][place] = work, job

    def begin(self, workers: int, stop: int = 0) -> None:
        """Make ready for a run by so many workers, which ends early once the word `stop` is not 0.

        `stop`: its address; 0: there is none.
        """
        self._record["workers"] = workers
        self._record["stop"] = stop or int(self._words[-1].ctypes.data)
        self._words[0, 0] = self._words[1, 0] = 0


@inlined
def _silu(x: Any) -> Any:
    """x / (1 + e^-x), by powers of numbers that are not positive."""
    nothing = zeros(NARROW)
    negative = subtract(nothing, maximum(subtract(nothing, x), nothing))
    size = maximum(x, subtract(nothing, x))
    above = exp2(multiply(negative, splat(NARROW, _LOG2_E)))
    below = add(splat(NARROW, 1.0), exp2(multiply(size, splat(NARROW, -_LOG2_E))))
    return multiply(x, divide(above, below))


@inlined
def _store(kind: Any, value: Any, address: Any, count: Any, scratch: Any) -> None:
    if number(kind) == FLOAT32:
        store_narrow(value, address, count)
        return
    store(value, scratch)
    for i in range(min(NARROW, count)):
        store_rounded(kind, load_scalar(scratch + 4 * i), address + element_bytes(kind) * i)


@step
def _elementwise(kind: Any, op: Any, scratch: Any) -> None:
    size = element_bytes(kind)
    for c in range(0, op.width, NARROW):
        left = op.width - c
        x, out = load_narrow(kind, op.a + size * c, left), op.out + size * c
        if op.kind == SILU:
            _store(kind, _silu(x), out, left, scratch)
        elif op.kind == SCALE:
            by = splat(NARROW, np.float32(op.factor))
            _store(kind, multiply(x, by), out, left, scratch)
        elif op.kind == DIVIDE:
            by = splat(NARROW, np.float32(op.factor))
            _store(kind, divide(x, by), out, left, scratch)
        elif op.kind == ADD:
            _store(kind, add(x, load_narrow(kind, op.b + size * c, left)), out, left, scratch)
        else:
            _store(kind, multiply(x, load_narrow(kind, op.b + size * c, left)), out, left, scratch)


@step
def _write(op: Any) -> None:
    start = load_int64(op.out)
    for head in range(op.rows):
        source, target = head * op.width, start + head * op.more
        copy_row(op.a + source, target + op.c, op.width)
        copy_row(op.b + source, target + op.d, op.width)


@step
def _operate(kind: Any, op: Any, scratch: Any) -> None:
    if op.kind == NORM:
        normalise(kind, op.a, op.b, op.out, op.rows, op.width, op.epsilon)
    elif op.kind == ROTARY:
        rotate_both(kind, op.a, op.b, op.c, op.d, op.out, op.rows, op.more, op.width)
    elif op.kind == WRITE:
        _write(op)
    else:
        _elementwise(kind, op, scratch)


@step
def _wait_for(word: Any, value: Any, sleepers: Any) -> Any:
    """Wait until a word is beyond `value`, as long as another worker takes for its share.

    Returns it. Awake at first, then asleep: a job beside ours may have the other's core.
    """
    for _ in range(_PAUSES):
        found = load_word(word)
        if found > value:
            return found
        pause()
    found = load_word(word)
    while found <= value:
        found = sleep_while(word, found, sleepers, now_ns() + _SLEEP_NS)
    return found


def _work(kind: Any, _b: Any, _c: Any, stretch_address: Any, index: Any) -> None:
    stretch = as_array(stretch_address, 1, STRETCH)[0]
    phases = as_array(stretch.phases, stretch.count, PHASE)
    for i in range(stretch.count):
        phase = phases[i]
        if phase.work != 0:
            call_work(phase.work, phase.job, index)
        if add_word(stretch.arrived, 1) + 1 < stretch.workers:
            if i + 1 == stretch.count or _wait_for(stretch.done, i, stretch.sleepers) == _STOPPED:
                return
            continue
        store_word(stretch.arrived, 0)
        for j in range(phase.claims):
            store_word(phase.claimed + 8 * j, 0)
        done = i + 1
        if load_word(stretch.stop):
            done = _STOPPED
        else:
            operators = as_array(phase.operators, phase.count, OPERATOR)
            for j in range(phase.count):
                _operate(kind, operators[j], stretch.scratch)
        store_word(stretch.done, done)
        if load_word(stretch.sleepers):
            wake_sleepers(stretch.done)
        if done == _STOPPED:
            return


@functools.cache
def stretch_address(kind: int) -> int:
    """Return the address of the compiled worker for rows of `kind`, FLOAT32 or BFLOAT16."""
    constants = (ConstType(kind),) * 3
    return compile_cached(_work, (*constants, types.int64, types.int64), nogil=True).address
