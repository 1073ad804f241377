"""Spans cover the tasks once, whatever the threads do."""

from __future__ import annotations

import multiprocessing
import threading

import pytest

from tierd.codec.workers import SPAN_BYTES_MIN, run_spans

MUCH = 1000 * SPAN_BYTES_MIN


@pytest.mark.parametrize("tasks", [0, 1, 2, 7, 100])
@pytest.mark.parametrize("threads", [None, 1, 3, 64])
def test_every_task_is_done_once(tasks: int, threads: int | None) -> None:
    done: list[int] = []
    run_spans(lambda first, end: done.extend(range(first, end)), tasks, MUCH, threads)
    assert sorted(done) == list(range(tasks))


def test_little_work_stays_on_the_callers_thread() -> None:
    seen: set[int] = set()
    run_spans(lambda first, end: seen.add(threading.get_ident()), 100, SPAN_BYTES_MIN, None)
    assert seen == {threading.get_ident()}


def test_what_a_span_raises_reaches_the_caller() -> None:
    def body(first: int, end: int) -> None:
        raise ValueError("span")

    with pytest.raises(ValueError, match="span"):
        run_spans(body, 8, MUCH, 2)


def test_spans_may_be_run_from_within_a_span() -> None:
    done: list[int] = []
    run_spans(
        lambda first, end: run_spans(lambda a, b: done.extend(range(a, b)), 8, MUCH, 2), 2, MUCH, 2
    )
    assert sorted(done) == sorted(list(range(8)) * 2)


def test_a_forked_child_makes_threads_of_its_own() -> None:
    run_spans(lambda first, end: None, 8, MUCH, 2)  # the parent's pool exists now
    child = multiprocessing.get_context("fork").Process(
        target=run_spans, args=(_nothing, 8, MUCH, 2)
    )
    child.start()
    child.join(30)
    assert child.exitcode == 0


def _nothing(first: int, end: int) -> None:
    pass
