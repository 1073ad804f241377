"""Threads for blocking work: bounded, reported once, on the loop's thread."""

import asyncio
import threading

import pytest

from tests.rig import in_loop
from tierd.lanes import ThreadLanes


@in_loop
async def test_work_runs_elsewhere_and_is_reported_on_the_loops_thread():
    lanes = ThreadLanes(2, ahead=0)
    seen, done = [], asyncio.Event()

    def report() -> None:
        seen.append(threading.current_thread())
        done.set()

    lanes.begin(lambda: seen.append(threading.current_thread()), report)
    assert lanes.free() == 1
    await done.wait()
    assert seen[0] is not seen[1] is threading.current_thread()
    assert lanes.free() == 2
    lanes.stop()


@in_loop
async def test_work_that_raises_is_reported_too(monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    lanes = ThreadLanes(1, ahead=0)
    done = asyncio.Event()
    lanes.begin(lambda: 1 / 0, done.set)
    await done.wait()
    lanes.stop()
    await asyncio.to_thread(lanes._threads[0].join, 5.0)


@in_loop
async def test_no_more_is_begun_than_there_are_lanes():
    lanes = ThreadLanes(1, ahead=0)
    release = threading.Event()
    lanes.begin(lambda: release.wait(10.0), lambda: None)
    assert lanes.free() == 0
    with pytest.raises(AssertionError):
        lanes.begin(lambda: None, lambda: None)
    release.set()
    lanes.stop()


@in_loop
async def test_stop_does_not_wait_for_hung_work_and_its_threads_keep_no_process_alive():
    lanes = ThreadLanes(1, ahead=0)
    release = threading.Event()
    lanes.begin(lambda: release.wait(10.0), lambda: None)
    lanes.stop()
    assert lanes.free() == 0
    assert all(thread.daemon for thread in threading.enumerate() if "tierd-lane" in thread.name)
    release.set()


@in_loop
async def test_a_piece_that_waits_for_a_lane_runs_though_the_loop_is_busy():
    lanes = ThreadLanes(1, ahead=1)
    first_may_end, second_ran = threading.Event(), threading.Event()
    lanes.begin(lambda: first_may_end.wait(10.0), lambda: None)
    lanes.begin(second_ran.set, lambda: None)
    assert lanes.free() == 0
    assert not second_ran.is_set()
    first_may_end.set()
    assert second_ran.wait(10.0)  # the loop, which is here, has taken in no report yet
    lanes.stop()


def test_a_piece_that_waits_when_the_loop_is_closed_is_not_run():
    hangs, ran, made = threading.Event(), [], []

    async def begin() -> None:
        lanes = ThreadLanes(1, ahead=1)
        lanes.begin(lambda: hangs.wait(10.0), lambda: None)
        lanes.begin(lambda: ran.append(1), lambda: None)
        lanes.stop()
        made.append(lanes)

    asyncio.run(begin())
    hangs.set()
    made[0]._threads[0].join(5.0)
    assert not made[0]._threads[0].is_alive() and not ran
