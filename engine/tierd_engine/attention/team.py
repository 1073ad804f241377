"""A team of threads that run one compiled worker: the only parallel loop of the kernels.

The caller posts a job to as many members as take part, works too, and waits.
How long a thread waits awake, before it sleeps, can be changed at any time
(patience.py says when). GNU OpenMP's threads, which PyTorch's operators run on, cannot do
that: they spin for milliseconds, or for so few microseconds that each kernel
pays for waking them.

Invariants:
  a member runs only between a post to it and its count in `remaining`
  a call returns when `remaining` is 0: no member touches a job after it
  a token is given exactly once to each that was seen asleep, and is taken by it
  the words of a team are never freed: a thread may look at them until the process ends
  a list that members read ahead by is kept until two later jobs have ended

Steps repeat: what a job is followed by, it was followed by at the last step. So members
that have nothing to do, while the caller is in Python, ask for the memory that the next
job will read; they stop when it comes. Only while they wait awake.

Words are int64, one line of 64 bytes for what one thread writes:
  line 0: worker's address, job's address, the token 1, spins; to read ahead: address of a
          list of addresses, how many, how many bytes at each
  line 1: remaining, the caller's state, its eventfd, room for its token
  line 1 + i: tickets posted to member i, its state, its eventfd, room for its token
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from tierd_engine.attention.atomics import (
    add_word,
    exchange,
    give_token,
    load_word,
    pause,
    store_word,
    take_token,
    wait_awake,
)
from tierd_engine.attention.compiling import compile_cached, step
from tierd_engine.attention.simd import Const, ConstType, load_int64, prefetch_lines

_SOURCES = Const(0)
_LINE = 64
_WORKER, _JOB, _ONE, _SPINS, _AHEAD, _AHEAD_COUNT, _AHEAD_BYTES = range(0, 56, 8)  # in line 0
_COUNT, _STATE, _FD, _TOKEN = 0, 8, 16, 24  # offsets in the other lines
_AWAKE, _ASLEEP = 0, 1
_AHEAD_STEP_BYTES = 4096  # between two looks at whether a job has come
_AHEAD_BYTES_MAX = 2 << 20  # what a gap of 0.1 ms has time for, and caches have room for
_FOLLOWERS_MAX = 2048  # jobs of a step, several hundred a model; more, and learning starts again
_MEMBERS_MAX = 1024  # 64 KiB of words
_END_SECONDS = 1.0
_TRIAL_PAUSES = 2000  # some tens of microseconds
BRIEF_SECONDS = 5e-6  # beside other jobs: half of what it takes to wake a thread
# Below this a sleeping thread is not worth waking: that takes about 0.1 ms, one thread reads at
# about 13 GB/s, and two save half of that time: 0.1 ms x 13 GB/s / 0.5.
WORTH_WAKING_BYTES = 2_600_000
# And below this a thread that is awake is not worth posting to: it takes about 2 us.
WORTH_POSTING_BYTES = 65536

# One job at a time. A wait for this lock ends when the other call's computation does, and takes
# no core.
_one_job = threading.Lock()


@intrinsic
def call_work(typingctx: Any, function: Any, job: Any, index: Any) -> Any:
    """Call the compiled worker at address `function` with a job's address and its own index."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(64)
        const = ir.IntType(8).as_pointer()
        work = ir.FunctionType(ir.VoidType(), [const, const, const, word, word])
        nothing = [ir.Constant(const, None)] * 3  # its three Consts: a type is all they are
        builder.call(builder.inttoptr(args[0], work.as_pointer()), [*nothing, args[1], args[2]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@step
def _wait(line: Any, value: Any, spins: Any) -> Any:
    """Return the word of `line` once it differs from `value`: awake at first, then asleep."""
    while not wait_awake(line + _COUNT, value, spins):
        exchange(line + _STATE, _ASLEEP)
        if load_word(line + _COUNT) != value and exchange(line + _STATE, _AWAKE) == _ASLEEP:
            break
        # Either nothing came yet, or the one who brings it saw a sleeper and gives it a token.
        take_token(load_word(line + _FD), line + _TOKEN)
    return load_word(line + _COUNT)


@step
def _wake(line: Any, words: Any) -> None:
    """Wake the thread of `line` if it sleeps or is about to."""
    if exchange(line + _STATE, _AWAKE) == _ASLEEP:
        give_token(load_word(line + _FD), words + _ONE)


@step
def _read_ahead(line: Any, tickets: Any, addresses: Any, count: Any, size: Any) -> None:
    for i in range(count):
        start = load_int64(addresses + 8 * i)
        for at in range(start, start + size, _AHEAD_STEP_BYTES):
            if load_word(line + _COUNT) != tickets:
                return
            prefetch_lines(at, min(at + _AHEAD_STEP_BYTES, start + size))


def _serve(sources: Any, words: Any, index: Any) -> None:
    """A member's life: run what is posted until a job without a worker comes."""
    line = words + _LINE * (1 + index)
    tickets = 0
    while True:
        tickets = _wait(line, tickets, load_word(words + _SPINS))
        worker = load_word(words + _WORKER)
        if worker == 0:
            return
        call_work(worker, load_word(words + _JOB), index)
        # Read before the count: after it the caller may post the next job.
        addresses, count = load_word(words + _AHEAD), load_word(words + _AHEAD_COUNT)
        size = load_word(words + _AHEAD_BYTES)
        if add_word(words + _LINE + _COUNT, -1) == 1:
            _wake(words + _LINE, words)
        _read_ahead(line, tickets, addresses, count, size)


def _run(
    sources: Any, words: Any, worker: Any, job: Any, workers: Any, addresses: Any, count: Any,
    size: Any,
) -> None:  # fmt: skip
    store_word(words + _WORKER, worker)
    store_word(words + _JOB, job)
    store_word(words + _AHEAD, addresses)
    store_word(words + _AHEAD_COUNT, count)
    store_word(words + _AHEAD_BYTES, size)
    store_word(words + _LINE + _COUNT, workers - 1)
    for index in range(1, workers):
        line = words + _LINE * (1 + index)
        add_word(line + _COUNT, 1)
        _wake(line, words)
    if worker == 0:
        return
    call_work(worker, job, 0)
    spins = load_word(words + _SPINS)
    left = load_word(words + _LINE + _COUNT)
    while left != 0:
        left = _wait(words + _LINE, left, spins)


def _pause_often(sources: Any, count: Any) -> None:
    for _ in range(count):
        pause()


@functools.cache
def _compiled() -> tuple[Callable[..., None], ...]:
    words = types.int64
    wanted = ((_serve, 2), (_run, 7), (_pause_often, 1))
    return tuple(
        compile_cached(function, (ConstType(0), *(words,) * count), nogil=True).call
        for function, count in wanted
    )


def _pause_seconds(pause_often: Callable[..., None]) -> float:
    """Return how long a pause takes here: the quickest of a few trials."""
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        pause_often(_SOURCES, _TRIAL_PAUSES)
        seconds.append(time.perf_counter() - start)
    return min(seconds) / _TRIAL_PAUSES


class Reads:
    """What a job reads: `size_bytes` at each of `addresses`, [count] absolute; kept alive here.

    Only the first of them are asked for ahead. Members never touch what stands there.
    """

    __slots__ = ("addresses", "count", "key", "size_bytes")

    def __init__(self, addresses: npt.NDArray[np.int64], size_bytes: int) -> None:
        self.addresses = addresses
        self.key = int(addresses.__array_interface__["data"][0])
        self.size_bytes = min(size_bytes, _AHEAD_BYTES_MAX)
        self.count = min(len(addresses), _AHEAD_BYTES_MAX // max(1, self.size_bytes))


_NOTHING = Reads(np.zeros(0, dtype=np.int64), 0)


class _Team:
    """The members of one process. Threads are started when a job first wants them."""

    def __init__(self) -> None:
        size = _LINE * (_MEMBERS_MAX + 2)
        libc = ctypes.CDLL(None)
        libc.malloc.restype = ctypes.c_void_p
        self.address = int(libc.malloc(ctypes.c_size_t(size)) or 0)
        assert self.address, "no memory for a team's words"
        self.address += -self.address % _LINE
        buffer = (ctypes.c_int64 * (size // 8 - 8)).from_address(self.address)
        self._words = np.ctypeslib.as_array(buffer).reshape(-1, _LINE // 8)
        self._words[:] = 0
        self._words[0, _ONE // 8] = 1
        self._words[1, _FD // 8] = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_SEMAPHORE)
        self.threads: list[threading.Thread] = []
        self.serve, self.run, pause_often = _compiled()
        self._pause_seconds = _pause_seconds(pause_often)
        self._followers: dict[int, Reads] = {}
        self._last = self._ahead = self._ahead_before = _NOTHING
        self.wait_awake(BRIEF_SECONDS)
        atexit.register(self.end)

    def wait_awake(self, seconds: float) -> None:
        """Let waiting threads sleep after so long."""
        self.is_brief = seconds <= BRIEF_SECONDS
        self._words[0, _SPINS // 8] = int(seconds / self._pause_seconds)

    def grow(self, members: int) -> None:
        """Have at least `members` threads beside the caller."""
        assert members <= _MEMBERS_MAX
        while len(self.threads) < members:
            index = len(self.threads) + 1
            self._words[1 + index, _FD // 8] = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_SEMAPHORE)
            thread = threading.Thread(
                target=self.serve, args=(_SOURCES, self.address, index),
                name=f"tierd-team-{index}", daemon=True,
            )  # fmt: skip
            thread.start()
            self.threads.append(thread)

    def ahead_of(self, reads: Reads) -> Reads:
        """Note what is read now; return what was read after it the last time."""
        followers = self._followers
        if len(followers) >= _FOLLOWERS_MAX:
            followers.clear()
        followers[self._last.key] = reads
        self._last = reads
        self._ahead_before = self._ahead
        self._ahead = _NOTHING if self.is_brief else followers.get(reads.key, _NOTHING)
        return self._ahead

    def end(self) -> None:
        """Let every member return: a thread that spins would outlive what it looks at."""
        if not _one_job.acquire(timeout=_END_SECONDS):
            return  # a job runs in a thread of its own, and is left to it
        try:
            self.run(_SOURCES, self.address, 0, 0, 1 + len(self.threads), 0, 0, 0)
            for thread in self.threads:
                thread.join(_END_SECONDS)
            self.threads.clear()
        finally:
            _one_job.release()


_team: _Team | None = None


def _forget() -> None:
    global _team
    _team = None  # after a fork the parent's threads are not there


os.register_at_fork(after_in_child=_forget)


def prepare_team() -> _Team:
    """Return this process's team; compile its loops first, or load them from disk."""
    global _team
    if _team is None:
        _team = _Team()
    return _team


def set_patience(seconds: float) -> None:
    """Let waiting threads of the team stay awake for so long."""
    prepare_team().wait_awake(seconds)


def member_ids() -> list[int]:
    """Return the operating system's ids of the threads beside the caller."""
    return [thread.native_id for thread in prepare_team().threads if thread.native_id]


def workers_for(size_bytes: int) -> int:
    """Return how many threads are worth taking for a job that reads so many bytes."""
    team = _team or prepare_team()
    if size_bytes < (WORTH_WAKING_BYTES if team.is_brief else WORTH_POSTING_BYTES):
        return 1
    count: int = numba.get_num_threads()
    return count


def run_team(work_address: int, job_address: int, workers: int, reads: Reads = _NOTHING) -> None:
    """Run the worker `workers` times, with the job's address and 0, 1, ...; wait for all."""
    team = _team or prepare_team()
    with _one_job:
        if len(team.threads) < workers - 1:
            team.grow(workers - 1)
        ahead = team.ahead_of(reads)
        team.run(
            _SOURCES, team.address, work_address, job_address, workers,
            ahead.key, ahead.count, ahead.size_bytes,
        )  # fmt: skip
