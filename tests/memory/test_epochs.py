"""Epochs: a step holds back what was retired since it began, and nothing else does."""

import os

import pytest

from tierd.memory.epochs import EPOCH_PAGE_BYTES, QUIESCENT, EpochClock, EpochWriter
from tierd.memory.memfd import Mapping, create_memfd


@pytest.fixture
def clock():
    clock = EpochClock()
    yield clock
    clock.check_integrity()
    clock.close()


def engine(clock: EpochClock, engine_id: int) -> EpochWriter:
    fd = create_memfd("epoch", EPOCH_PAGE_BYTES)
    writer = EpochWriter(fd)
    clock.add_engine(engine_id, Mapping(fd, EPOCH_PAGE_BYTES, writable=False))
    os.close(fd)
    return writer


def reusable(clock: EpochClock, epoch: int) -> bool:
    return epoch < clock.safe_epoch()


def test_without_engines_a_retired_slot_is_reusable_at_once(clock) -> None:
    assert reusable(clock, clock.retire())


def test_each_retirement_has_an_epoch_of_its_own(clock) -> None:
    epochs = [clock.retire() for _ in range(5)]
    assert epochs == sorted(set(epochs))
    assert clock.now == epochs[-1] + 1


def test_a_quiescent_engine_holds_nothing_back(clock) -> None:
    engine(clock, 1)
    assert reusable(clock, clock.retire())
    assert not clock.active(1)


def test_a_step_holds_back_what_is_retired_while_it_runs_until_it_ends(clock) -> None:
    writer = engine(clock, 1)
    before = clock.retire()
    writer.enter(clock.now)
    during = clock.retire()
    assert clock.active(1)
    assert reusable(clock, before)
    assert not reusable(clock, during)
    writer.leave()
    assert reusable(clock, during)


def test_a_step_that_began_after_holds_nothing_of_before(clock) -> None:
    writer = engine(clock, 1)
    before = clock.retire()
    writer.enter(clock.now)
    assert reusable(clock, before)


def test_the_slowest_engine_decides(clock) -> None:
    slow, fast = engine(clock, 1), engine(clock, 2)
    slow.enter(clock.now)
    retired = clock.retire()
    for _ in range(3):
        with fast.step(clock.now):
            assert not reusable(clock, retired)
    slow.leave()
    assert reusable(clock, retired)


def test_an_engine_that_died_in_a_step_holds_nothing_back_once_dropped(clock) -> None:
    engine(clock, 1).enter(clock.now)
    retired = clock.retire()
    assert not reusable(clock, retired)
    clock.drop_engine(1)
    clock.drop_engine(1)
    assert reusable(clock, retired)
    assert not clock.active(1)


def test_a_word_from_the_future_frees_nothing_early(clock) -> None:
    liar, honest = engine(clock, 1), engine(clock, 2)
    honest.enter(clock.now)
    retired = clock.retire()
    liar.enter(2**50)
    assert not reusable(clock, retired)
    honest.leave()
    assert clock.safe_epoch() == clock.now


def test_a_step_ends_whatever_is_raised_in_it(clock) -> None:
    writer = engine(clock, 1)
    with pytest.raises(KeyError), writer.step(clock.now):
        raise KeyError
    assert clock.word(1) == QUIESCENT


def test_steps_do_not_nest(clock) -> None:
    writer = engine(clock, 1)
    with writer.step(clock.now), pytest.raises(AssertionError):
        writer.enter(clock.now)
    with pytest.raises(AssertionError):
        writer.leave()


def test_a_new_writer_is_quiescent_whatever_the_page_held(clock) -> None:
    fd = create_memfd("epoch", EPOCH_PAGE_BYTES)
    clock.add_engine(1, Mapping(fd, EPOCH_PAGE_BYTES, writable=False))
    assert not reusable(clock, clock.retire()), "a page of zeros: the engine has not yet begun"
    EpochWriter(fd).close()
    os.close(fd)
    assert clock.word(1) == QUIESCENT


def test_closing_twice_is_allowed_and_leaves_no_fd() -> None:
    before = len(os.listdir("/proc/self/fd"))
    clock = EpochClock()
    writer = engine(clock, 1)
    writer.close()
    writer.close()
    clock.close()
    clock.close()
    assert len(os.listdir("/proc/self/fd")) == before
