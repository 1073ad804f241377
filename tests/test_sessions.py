"""Sessions: open, suspend, resume, truncate, close; whose they are."""

import numpy as np
import pytest

from tests.rig import GEOMETRY, INT8, LAYERS, RAW
from tests.storesteps import assert_empty, checked_rig, commit, plan, warm
from tierd.errors import (
    InvalidArgument,
    LayoutMismatch,
    NotFound,
    PageMiss,
    StaleGeneration,
)
from tierd.memory.pagetable import PageTableReader
from tierd.store import IDLE_SECONDS
from tierd.types import CodecId, Geometry, Namespace, PageKey, SessionState, Tier

rig = pytest.fixture(checked_rig, name="rig")


def test_suspend_keeps_pages_and_resume_publishes_them_in_a_new_table(rig):
    session = rig.stored(blocks=4)
    assert session.state is SessionState.SUSPENDED and session.table is None
    rig.engine(2)
    resumed = rig.store.resume_session(2, session.number, INT8, 2048)
    assert resumed is session and resumed.sealed_blocks == 4
    assert np.frombuffer(resumed.token_ids, "<u4").tolist() == list(range(64))
    reader = PageTableReader(resumed.table.fd)
    assert reader.max_blocks == 128
    assert int((reader.read(128).tier == Tier.WARM).sum()) == 4 * LAYERS
    reader.close()
    expected = rig.payload(session, PageKey(session.number, 1, 3), CodecId.INT8)
    assert rig.bytes_of(session, 1, 3) == expected


def test_suspend_drops_blocks_beyond_the_sealed_ones_and_frees_open_demotions(rig):
    session = rig.session()
    rig.demote(session, [0, 1, 2, 3], first=True)
    plan(rig, session, [5])
    rig.suspend(session, 2)
    assert session.index.blocks_from(0) == [0, 1]
    assert warm(rig)["reserved_slots"] == 0


def test_a_sessions_tokens_are_those_kept_or_those_whose_blocks_are_below_hot(rig):
    session = rig.session()
    assert session.tokens == 0
    rig.demote(session, [0, 1, 2], first=True)
    assert session.tokens == 3 * session.block_tokens
    rig.suspend_with(session, bytes(4 * (3 * session.block_tokens + 5)), 3)
    assert session.tokens == 3 * session.block_tokens + 5


def test_suspend_with_a_page_still_hot_is_refused_and_names_it(rig):
    session = rig.session()
    rig.demote(session, [0, 2], first=True)
    with pytest.raises(PageMiss) as miss:
        rig.suspend(session, 3)
    assert (miss.value.layer, miss.value.block) == (0, 1)
    assert session.state is SessionState.RUNNING


@pytest.mark.parametrize(("token_bytes", "sealed"), [(63, 0), (64, 2), (64, -1), (4 * 1025, 0)])
def test_suspend_with_wrong_token_ids_is_refused(rig, token_bytes, sealed):
    session = rig.session()
    with pytest.raises(InvalidArgument):
        rig.suspend_with(session, bytes(token_bytes), sealed)


def test_a_session_of_no_sealed_block_can_be_suspended_and_resumed(rig):
    session = rig.session()
    rig.suspend_with(session, bytes(40), 0)
    assert rig.store.resume_session(1, session.number, INT8, 16).token_ids == bytes(40)


def other_namespaces():
    yield Namespace(GEOMETRY, "other", CodecId.INT8)
    yield RAW
    yield Namespace(GEOMETRY, "weights", CodecId.INT8, revision="2")
    yield Namespace(GEOMETRY, "weights", CodecId.INT8, adapters="a")
    yield Namespace(GEOMETRY, "weights", CodecId.INT8, rope="b")
    yield Namespace(GEOMETRY, "weights", CodecId.INT8, tenant_salt="c")
    yield Namespace(Geometry(2, 1, 128, GEOMETRY.dtype, 32), "weights", CodecId.INT8)


@pytest.mark.parametrize("namespace", list(other_namespaces()))
def test_a_session_of_another_namespace_is_not_resumed(rig, namespace):
    session = rig.stored(blocks=1)
    with pytest.raises(LayoutMismatch):
        rig.store.resume_session(1, session.number, namespace, 1024)


def test_resume_is_refused_when_running_unknown_or_too_small(rig):
    running = rig.session()
    with pytest.raises(StaleGeneration):
        rig.store.resume_session(1, running.number, INT8, 1024)
    with pytest.raises(NotFound):
        rig.store.resume_session(1, 999, INT8, 1024)
    stored = rig.stored(blocks=4)
    with pytest.raises(InvalidArgument):
        rig.store.resume_session(1, stored.number, INT8, 48)
    assert stored.state is SessionState.SUSPENDED


def test_sessions_of_another_engine_are_not_found(rig):
    rig.engine(2)
    session = rig.session(1)
    number = session.number
    for call in (
        lambda: rig.store.session(number, engine_id=2),
        lambda: rig.store.plan_demotion(2, number, [1], 1),
        lambda: rig.store.truncate(2, number, 0),
        lambda: rig.store.begin_suspend(2, number, b"", 0),
        lambda: rig.store.close_session(number, engine_id=2),
    ):
        with pytest.raises(NotFound):
            call()


@pytest.mark.parametrize("max_tokens", [0, -1, 1 << 40])
def test_a_session_of_impossible_size_is_refused(rig, max_tokens):
    with pytest.raises(InvalidArgument):
        rig.store.open_session(1, INT8, max_tokens)
    assert rig.store.sessions() == []


def test_an_unregistered_engine_opens_nothing(rig):
    with pytest.raises(NotFound):
        rig.store.open_session(9, INT8, 1024)


def test_truncate_retires_the_suffix_and_revokes_its_demotions(rig):
    session = rig.session()
    rig.demote(session, [1, 2, 3])
    kept, lost = plan(rig, session, [4]), plan(rig, session, [5, 6])
    assert rig.store.truncate(1, session.number, 5) == 0
    assert rig.store.truncate(1, session.number, 2) == 2 * LAYERS
    assert session.index.blocks_from(0) == [1]
    for planned in (kept, lost):
        with pytest.raises(StaleGeneration):
            commit(rig, session, planned)
    rig.demote(session, [2, 3, 4, 5, 6], version=1)
    key = PageKey(session.number, 0, 2)
    assert rig.bytes_of(session, 0, 2) == rig.payload(session, key, CodecId.INT8, version=1)


def test_truncate_counts_a_page_that_the_engine_found_damaged(rig):
    session = rig.session()
    rig.demote(session, [1, 2])
    rig.store.truncate(1, session.number, 2, damaged_layer=1)
    rig.store.truncate(1, session.number, 2, damaged_layer=1)  # nothing there: not counted
    assert rig.store.stats()["corrupt"] == 1
    with pytest.raises(InvalidArgument):
        rig.store.truncate(1, session.number, 65)


def test_a_quiet_session_is_idle_and_runs_again_when_used(rig):
    session = rig.session()
    rig.clock.advance(IDLE_SECONDS)
    rig.store.tick()
    assert session.state is SessionState.IDLE
    plan(rig, session, [1])
    assert session.state is SessionState.RUNNING


def test_a_session_whose_engine_is_in_a_step_is_not_idle(rig):
    session = rig.session()
    rig.epochs[1].enter(rig.store.placement.epochs.now)
    for _ in range(3):
        rig.clock.advance(IDLE_SECONDS)
        rig.store.tick()
    assert session.state is SessionState.RUNNING
    rig.epochs[1].leave()
    rig.clock.advance(IDLE_SECONDS)
    rig.store.tick()
    assert session.state is SessionState.IDLE


def test_an_operator_closes_a_running_session_without_freeing_what_its_engine_writes(rig):
    session = rig.session()
    rig.demote(session, [1])
    planned = plan(rig, session, [2])
    digests = rig.write(session, planned)
    rig.store.close_session(session.number)
    rig.store.check_integrity()
    assert warm(rig)["reserved_slots"] == LAYERS
    with pytest.raises(StaleGeneration):
        rig.store.commit(1, planned.reservation, digests)
    rig.store.tick()
    assert_empty(rig)
