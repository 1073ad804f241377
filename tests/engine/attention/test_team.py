"""The team: every member runs once a job, awake or asleep; who waits, and how long."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba import types

from tierd.codec.intrinsics import as_array
from tierd_engine.attention import patience, team
from tierd_engine.attention.atomics import add_word
from tierd_engine.attention.compiling import compile_cached
from tierd_engine.attention.patience import HOLD_SECONDS_MAX, WINDOW_SECONDS, Patience
from tierd_engine.attention.simd import ConstType
from tierd_engine.attention.team import BRIEF_SECONDS, Reads, run_team, set_patience


def _count(a: Any, b: Any, c: Any, job: Any, index: Any) -> None:
    add_word(job + 64 * index, 1)
    delays = as_array(job + 8, 1, np.int64)
    total = 0
    for i in range(delays[0] * index):  # members end one after the other
        total += i & job
    add_word(job + 64 * index + 16, total)


@pytest.fixture(scope="module")
def work() -> int:
    constants = [ConstType(0)] * 3
    signature = (*constants, types.int64, types.int64)
    return compile_cached(_count, signature, nogil=True).address


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    yield
    set_patience(BRIEF_SECONDS)


@pytest.mark.parametrize("seconds", [0.0, 1e-6, BRIEF_SECONDS, 1e-3])
def test_each_member_runs_once_a_job_however_long_threads_wait(work: int, seconds: float):
    words = np.zeros((8, 8), dtype=np.int64)
    set_patience(seconds)
    expected = np.zeros(8, dtype=np.int64)
    rng = np.random.default_rng(7)
    for _ in range(300):
        workers = int(rng.integers(1, 6))
        words[0, 1] = int(rng.integers(0, 2000))
        run_team(work, words.ctypes.data, workers)
        expected[:workers] += 1
        assert (words[:, 0] == expected).all()  # all have ended when the call returns


def test_calls_from_several_threads_take_turns(work: int):
    words = np.zeros((8, 8), dtype=np.int64)

    def call() -> None:
        for _ in range(200):
            run_team(work, words.ctypes.data, 3)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert words[:3, 0].tolist() == [800] * 3


def test_members_read_ahead_by_what_followed_last_time_and_only_awake(work: int):
    found = team.prepare_team()
    first, second = (Reads(np.zeros(3, dtype=np.int64), 4096) for _ in range(2))
    set_patience(1e-3)
    for reads in (first, second, first):
        ahead = found.ahead_of(reads)
    assert ahead is second
    assert (ahead.count, ahead.size_bytes) == (3, 4096)
    set_patience(BRIEF_SECONDS)
    assert found.ahead_of(second).count == 0


def test_no_more_is_read_ahead_than_caches_hold():
    many = Reads(np.zeros(10_000, dtype=np.int64), 100_000)
    assert 0 < many.count * many.size_bytes <= 2 << 20
    assert Reads(np.zeros(1, dtype=np.int64), 1 << 30).size_bytes == 2 << 20


def test_an_address_that_is_not_mapped_may_be_read_ahead(work: int):
    words = np.zeros((8, 8), dtype=np.int64)
    set_patience(2e-3)
    nowhere = Reads(np.array([4096, 1 << 46], dtype=np.int64), 65536)
    for _ in range(20):
        run_team(work, words.ctypes.data, 2, nowhere)
    assert words[1, 0] == 20


def test_a_small_job_is_the_callers_alone():
    set_patience(BRIEF_SECONDS)
    assert team.workers_for(team.WORTH_WAKING_BYTES - 1) == 1
    all_of_them = team.workers_for(team.WORTH_WAKING_BYTES)
    set_patience(1e-3)
    assert team.workers_for(team.WORTH_POSTING_BYTES) == all_of_them
    assert team.workers_for(team.WORTH_POSTING_BYTES - 1) == 1


_CHILD = """
import os, numpy as np
from tierd_engine.attention import team
from tests.engine.attention.test_team import _count, compile_cached, ConstType, types
work = compile_cached(_count, (*[ConstType(0)] * 3, types.int64, types.int64), nogil=True).address
words = np.zeros((8, 8), dtype=np.int64)
team.set_patience(1e-2)
team.run_team(work, words.ctypes.data, 3)
child = os.fork()
team.run_team(work, words.ctypes.data, 3)  # in the child with threads of its own
assert words[:3, 0].tolist() == [2, 2, 2], words[:3, 0]
if child:
    assert os.waitpid(child, 0)[1] == 0
print("ended", flush=True)
"""


def test_a_fork_has_a_team_of_its_own_and_a_process_ends_while_members_wait():
    done = subprocess.run(
        [sys.executable, "-c", _CHILD], capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "ended\nended\n"


class Machine:
    """A clock, and threads that wait for a core a share of the time."""

    def __init__(self) -> None:
        self.now, self.queued, self.share = 100.0, 0.0, 0.0
        self.unknown = False

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.queued += seconds * self.share

    def patience(self) -> Patience:
        return Patience(lambda ids: None if self.unknown else self.queued, lambda: self.now)


def look_on(found: Patience, machine: Machine, seconds: float) -> float:
    """Look every window for so long; return for how much of it waits were long."""
    long = 0.0
    for _ in range(round(seconds / (2 * WINDOW_SECONDS))):
        machine.pass_time(2 * WINDOW_SECONDS)
        found.look()
        long += 2 * WINDOW_SECONDS * found.is_long
    return long


def test_threads_wait_long_on_a_machine_of_their_own():
    machine = Machine()
    found = machine.patience()
    assert look_on(found, machine, 10) > 9


def test_beside_others_they_wait_briefly_and_try_ever_more_rarely():
    machine = Machine()
    found = machine.patience()
    look_on(found, machine, 1)
    machine.share = 0.5
    look_on(found, machine, 60)
    assert look_on(found, machine, 60) < 0.03 * 60
    machine.share = 0.0
    assert look_on(found, machine, 2 * HOLD_SECONDS_MAX) > HOLD_SECONDS_MAX / 2


def test_others_that_come_for_a_moment_change_nothing():
    machine = Machine()
    found = machine.patience()
    look_on(found, machine, 1)
    long = 0.0
    for _ in range(100):
        for share in (0.5, 0.0, 0.0):
            machine.share = share
            long += look_on(found, machine, 2 * WINDOW_SECONDS)
    assert long == pytest.approx(300 * 2 * WINDOW_SECONDS)


def test_others_that_show_only_while_threads_wait_long_are_met_rarely():
    machine = Machine()
    found = machine.patience()
    long = 0.0
    for _ in range(1200):
        machine.share = 0.4 if found.is_long else 0.0
        long += look_on(found, machine, 2 * WINDOW_SECONDS)
    assert long < 0.05 * 1200 * 2 * WINDOW_SECONDS


def test_where_nothing_is_counted_or_threads_are_to_be_passive_waits_are_brief(monkeypatch):
    machine = Machine()
    machine.unknown = True
    assert look_on(machine.patience(), machine, 5) == 0
    machine.unknown = False
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    assert look_on(machine.patience(), machine, 5) == 0


def counted(ids: list[int]) -> float:
    found = patience.held_off_seconds(ids)
    if found is None:
        pytest.skip("this kernel does not count")
    return found


def test_the_kernel_counts_how_long_a_thread_was_ready_and_had_no_core():
    ids = [threading.get_native_id()]
    before = counted(ids)
    end = time.perf_counter() + 0.02
    while time.perf_counter() < end:
        pass
    # What other threads of this process run meanwhile is taken off, but there is next to none.
    assert counted(ids) >= before - 0.01
    assert patience.held_off_seconds([2**30]) is None


def test_a_core_that_our_own_other_threads_take_is_not_held_off_by_others():
    """Four threads of ours that read and hash, on the two or so cores that there are."""
    stop = threading.Event()
    block = bytes(1 << 20)

    def hash_on() -> None:
        while not stop.is_set():
            hashlib.sha256(block).digest()

    threads = [threading.Thread(target=hash_on) for _ in range(2 * (os.cpu_count() or 1))]
    cores = os.sched_getaffinity(0)
    ids = [threading.get_native_id()]
    for thread in threads:
        thread.start()
    os.sched_setaffinity(0, {min(cores)})  # this thread alone: so that it does have to wait
    schedstat = Path(f"/proc/self/task/{ids[0]}/schedstat")
    try:
        before, start = counted(ids), time.perf_counter()
        waited = -int(schedstat.read_text().split()[1])
        end = start + 0.3
        while time.perf_counter() < end:
            hashlib.sha256(block).digest()
        after = counted(ids)
        waited += int(schedstat.read_text().split()[1])
        assert waited > 0.05e9, "this thread did not have to wait at all"
        assert after - before < waited / 1e9 / 2
    finally:
        stop.set()
        os.sched_setaffinity(0, cores)
        for thread in threads:
            thread.join(10.0)
