"""The client against a real daemon in this process: sessions, pages, typed errors, deadlines."""

import ctypes
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.wirerig import (
    BLOCK_BYTES,
    GEOMETRY,
    INT8,
    LAYERS,
    MAX_TOKENS,
    OTHER,
    codec_at,
    demote,
    eventually,
    page_bytes,
    read_page,
    small_config,
    store_session,
    write_pages,
)
from tierd.client import Client, SessionHandle
from tierd.daemon import EmbeddedDaemon
from tierd.disk.header import SlotHeader
from tierd.errors import (
    BudgetTooSmall,
    DaemonUnavailable,
    DeadlineExceeded,
    InvalidArgument,
    LayoutMismatch,
    NotFound,
    PageMiss,
    PermissionDenied,
    StaleGeneration,
    TierFull,
)
from tierd.rpc.v1 import tierd_pb2 as pb
from tierd.types import CodecId, DType, Geometry, Namespace, Tier


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[EmbeddedDaemon]:
    with EmbeddedDaemon(small_config(tmp_path)) as running:
        yield running


@pytest.fixture
def client(daemon: EmbeddedDaemon) -> Iterator[Client]:
    with Client.connect(daemon.socket) as connected:
        yield connected


@pytest.fixture
def handle(client: Client) -> Iterator[SessionHandle]:
    opened = client.open_session(INT8, MAX_TOKENS)
    yield opened
    opened.close()


def test_a_committed_page_is_found_through_the_page_table(
    client: Client, handle: SessionHandle
) -> None:
    version = handle.table.version()
    demote(client, handle, [1, 2, 3])
    assert handle.table.version() > version
    table = handle.table.read(5)
    assert (table.tier[:, 1:4] == Tier.WARM).all() and not table.tier[:, [0, 4]].any()
    for block in (1, 2, 3):
        for layer in range(LAYERS):
            expected = page_bytes(layer, block, CodecId.INT8)
            assert read_page(client, handle, layer, block) == expected


def test_a_page_is_not_found_before_its_commit(client: Client, handle: SessionHandle) -> None:
    plan = handle.plan_demotion([1, 2], 2)
    digests = write_pages(client, plan)
    assert not handle.table.read(3).tier.any()
    handle.commit(plan, digests)
    assert handle.table.read(3).tier[:, 1:].all()


def test_the_header_in_the_slot_says_which_page_it_is(
    client: Client, handle: SessionHandle
) -> None:
    plan = handle.plan_demotion([4], 1)
    given = np.array([[3, 2**64 - 1]], np.uint64)
    with pytest.raises(InvalidArgument, match="device digests"):
        handle.commit(plan, write_pages(client, plan), given[:, :1])
    handle.commit(plan, write_pages(client, plan), given)
    slab = client.slab(int(plan.slab[0, 1]))
    start = slab.address + int(plan.slot[0, 1]) * slab.slot_bytes
    header = SlotHeader.unpack(ctypes.string_at(start, 4096))
    assert (header.session, header.layer, header.block) == (handle.number, 1, 4)
    assert header.store_uuid == handle.store_uuid
    assert header.namespace_digest == INT8.digest()
    assert header.device_digest == given[0, 1]


def test_an_aborted_plan_gives_its_slots_back(client: Client, handle: SessionHandle) -> None:
    plan = handle.plan_demotion([1], 1)
    handle.abort(plan)
    assert client.stats()["tiers"]["warm"]["reserved_slots"] == 0
    with pytest.raises(StaleGeneration):
        handle.commit(plan, np.zeros((1, LAYERS, 16), np.uint8))


def test_pages_that_do_not_fit_warm_spill_and_are_read_from_the_file(tmp_path: Path) -> None:
    with (
        EmbeddedDaemon(small_config(tmp_path, warm_bytes=8 * BLOCK_BYTES)) as daemon,
        Client.connect(daemon.socket) as client,
    ):
        handle = client.open_session(INT8, MAX_TOKENS)
        demote(client, handle, range(1, 33))
        tiers = handle.table.read(33).tier[:, 1:]
        assert (tiers == Tier.COLD).any() and (tiers != Tier.NONE).all()
        for block in range(1, 33):
            assert read_page(client, handle, 0, block) == page_bytes(0, block, CodecId.INT8)
        assert client.stats()["spills"] > 0
        handle.close()


def test_promoted_pages_come_back_to_warm(tmp_path: Path) -> None:
    with (
        EmbeddedDaemon(small_config(tmp_path, warm_bytes=8 * BLOCK_BYTES)) as daemon,
        Client.connect(daemon.socket) as client,
    ):
        session_id = store_session(client, 16)
        handle = client.resume(session_id, INT8, MAX_TOKENS)
        tiers = handle.table.read(16).tier
        cold = [block for block in range(1, 9) if (tiers[:, block] == Tier.COLD).all()][:2]
        assert len(cold) == 2, "a third of the session fits warm: its oldest blocks are cold"
        handle.truncate(9)
        assert handle.promote(cold) == 2 * LAYERS
        assert (handle.table.read(16).tier[:, cold] == Tier.WARM).all()
        for block in cold:
            assert read_page(client, handle, 1, block) == page_bytes(1, block, CodecId.INT8)
        handle.close()


def test_a_suspended_session_is_resumed_with_its_tokens_and_pages(client: Client) -> None:
    session_id = store_session(client, 4)
    handle = client.resume(session_id, INT8, MAX_TOKENS)
    assert handle.sealed_blocks == 4
    assert handle.token_ids.tolist() == list(range(4 * GEOMETRY.block_tokens))
    for block in range(4):
        assert read_page(client, handle, 1, block) == page_bytes(1, block, codec_at(block))
    handle.close()


def test_another_engine_resumes_what_the_first_left(daemon: EmbeddedDaemon) -> None:
    with Client.connect(daemon.socket) as first:
        session_id = store_session(first, 3)
    with Client.connect(daemon.socket) as second:
        handle = second.resume(session_id, INT8, MAX_TOKENS)
        assert read_page(second, handle, 0, 2) == page_bytes(0, 2, CodecId.INT8)
        handle.close()


def test_a_truncated_block_is_gone_and_may_be_demoted_anew(
    client: Client, handle: SessionHandle
) -> None:
    demote(client, handle, [1, 2, 3])
    handle.truncate(2, damaged_layer=1)
    assert (handle.table.read(4).tier[:, 2:] == Tier.NONE).all()
    assert client.stats()["corrupt"] == 1
    demote(client, handle, [2])
    assert read_page(client, handle, 0, 2) == page_bytes(0, 2, CodecId.INT8)


def test_errors_of_the_daemon_arrive_typed(client: Client, handle: SessionHandle) -> None:
    with pytest.raises(NotFound):
        client.resume("0" * 15 + "1", INT8, MAX_TOKENS)
    with pytest.raises(StaleGeneration):
        client.resume(handle.id, INT8, MAX_TOKENS)
    with pytest.raises(InvalidArgument):
        handle.plan_demotion([1], 0)
    with pytest.raises(InvalidArgument):
        client.open_session(INT8, 0)
    with pytest.raises(NotFound):
        client.slab(9999)
    with pytest.raises(PageMiss) as miss:
        handle.suspend(np.arange(16, dtype=np.uint32), 1)
    assert (miss.value.layer, miss.value.block) == (0, 0)
    session_id = store_session(client, 1)
    with pytest.raises(LayoutMismatch):
        client.resume(session_id, OTHER, MAX_TOKENS)
    plan = handle.plan_demotion([1], 1)
    with pytest.raises(InvalidArgument, match="digests"):
        handle.commit(plan, np.zeros((2, LAYERS, 16), np.uint8))


def test_a_codec_that_cannot_store_the_models_heads_is_refused_by_name(client: Client) -> None:
    geometry = Geometry(LAYERS, kv_heads=1, head_dim=80, dtype=DType.FLOAT32, block_tokens=16)
    with pytest.raises(InvalidArgument, match=r"int4 .*head_dim is 80"):
        client.open_session(Namespace(geometry, "weights", CodecId.INT4), MAX_TOKENS)


def test_numbers_that_fit_no_field_are_refused(client: Client, handle: SessionHandle) -> None:
    for attempt in (
        lambda: client.open_session(INT8, -1),
        lambda: handle.plan_demotion([-1], 1),
        lambda: handle.plan_demotion([1], -1),
        lambda: handle.truncate(-1),
        lambda: handle.suspend(np.zeros(0, np.uint32), -1),
        lambda: handle.promote([2**40]),
        lambda: client.cancel_hint(-1),
    ):
        with pytest.raises(InvalidArgument):
            attempt()


def test_a_suspension_whose_reply_is_lost_is_kept(
    daemon: EmbeddedDaemon, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = client.open_session(INT8, MAX_TOKENS)
    demote(client, handle, range(2), include_first=True)
    real = client.call

    def lossy(method: Any, request: Any, deadline_seconds: float = 5.0) -> Any:
        reply = real(method, request, deadline_seconds)
        if isinstance(request, pb.SuspendRequest):
            raise DeadlineExceeded("the reply is lost")
        return reply

    monkeypatch.setattr(client, "call", lossy)
    with pytest.raises(DeadlineExceeded):
        handle.suspend(np.arange(32, dtype=np.uint32), 2)
    handle.close()
    assert client.session(handle.id)["state"] == "suspended"


@pytest.mark.parametrize("stored", [True, False])
def test_a_session_that_got_no_handle_is_as_before(
    client: Client, monkeypatch: pytest.MonkeyPatch, stored: bool
) -> None:
    session_id = store_session(client, 2) if stored else ""

    def fail(number: int) -> int:
        raise DeadlineExceeded("no fd came")

    with monkeypatch.context() as patched:
        patched.setattr(client._bootstrap, "session_fds", fail)
        with pytest.raises(DeadlineExceeded):
            if stored:
                client.resume(session_id, INT8, MAX_TOKENS)
            else:
                client.open_session(INT8, MAX_TOKENS)
    assert client.stats()["sessions"]["running"] == 0
    if stored:
        handle = client.resume(session_id, INT8, MAX_TOKENS)
        assert handle.sealed_blocks == 2
        handle.close()


def test_a_slab_that_does_not_come_holds_up_no_other_call(
    daemon: EmbeddedDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Client.connect(daemon.socket, deadline_seconds=1.0) as client:
        waiting = threading.Thread(target=lambda: refused(lambda: client.slab(1)))
        with daemon.paused():
            waiting.start()
            started = time.monotonic()
            with pytest.raises(DeadlineExceeded):
                client.call(client._stats.Snapshot, pb.SnapshotRequest(), 0.2)
            assert time.monotonic() - started < 0.6
            waiting.join(timeout=5.0)


def refused(attempt: Callable[[], object]) -> None:
    with pytest.raises(DeadlineExceeded):
        attempt()


def test_a_page_format_that_the_daemon_does_not_keep_is_refused(client: Client) -> None:
    with pytest.raises(LayoutMismatch, match="format 2"):
        client.open_session(Namespace(GEOMETRY, "w", format_version=2), MAX_TOKENS)


def test_a_tier_too_small_for_one_block_is_named_with_what_it_needs(client: Client) -> None:
    large = Geometry(64, kv_heads=8, head_dim=128, dtype=DType.FLOAT32, block_tokens=64)
    handle = client.open_session(Namespace(large, "w"), 1024)
    with pytest.raises(BudgetTooSmall) as small:
        handle.plan_demotion([1], 1)
    assert small.value.smallest_bytes > 4 << 20
    handle.close()


def test_a_full_warm_tier_is_typed_within_the_deadline(tmp_path: Path) -> None:
    config = small_config(tmp_path, warm_bytes=4 * BLOCK_BYTES)
    with EmbeddedDaemon(config) as daemon, Client.connect(daemon.socket) as client:
        handle = client.open_session(INT8, MAX_TOKENS)
        plans = [handle.plan_demotion([block], 1) for block in range(1, 5)]
        started = time.monotonic()
        with pytest.raises(TierFull) as full:
            handle.plan_demotion([9], 1, deadline_seconds=0.5)
        assert time.monotonic() - started < 0.5
        assert full.value.retry_after_seconds > 0
        handle.abort(plans[0])
        assert handle.plan_demotion([9], 1).blocks == [9]
        handle.close()


def test_a_daemon_that_hangs_is_a_deadline_exceeded(
    daemon: EmbeddedDaemon, handle: SessionHandle
) -> None:
    with daemon.paused():
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            handle.plan_demotion([1], 1, deadline_seconds=0.3)
        assert time.monotonic() - started < 1.0


def test_no_daemon_is_unavailable_and_names_the_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "none.sock")
    with pytest.raises(DaemonUnavailable, match=path):
        Client.connect(path)


def test_a_daemon_that_ended_is_unavailable(tmp_path: Path) -> None:
    with EmbeddedDaemon(small_config(tmp_path)) as daemon:
        client = Client.connect(daemon.socket)
        handle = client.open_session(INT8, MAX_TOKENS)
    started = time.monotonic()
    for attempt in (client.stats, client.sessions, lambda: client.slab(1)):
        with pytest.raises(DaemonUnavailable):
            attempt()
    handle.close()
    client.close()
    assert time.monotonic() - started < 2.0


def test_a_closed_client_says_so(daemon: EmbeddedDaemon) -> None:
    client = Client.connect(daemon.socket)
    client.close()
    client.close()
    with pytest.raises(DaemonUnavailable, match="closed"):
        client.stats()


def test_an_engine_reads_neither_slabs_nor_tables_of_others(daemon: EmbeddedDaemon) -> None:
    with Client.connect(daemon.socket) as mine, Client.connect(daemon.socket) as theirs:
        handle = mine.open_session(INT8, MAX_TOKENS)
        demote(mine, handle, [1])
        slab = int(handle.table.read(2).slab[0, 1])
        other = theirs.open_session(OTHER, MAX_TOKENS)
        with pytest.raises(NotFound):
            theirs.slab(slab)
        with pytest.raises(NotFound):
            theirs._bootstrap.session_fds(handle.number)
        with pytest.raises(NotFound):
            theirs._handle(handle.number, INT8, b"", 0)
        same = theirs.open_session(INT8, MAX_TOKENS)  # now its namespace has these slabs
        assert theirs.slab(slab).slots == mine.slab(slab).slots
        for opened in (handle, other, same):
            opened.close()


def test_a_tool_reads_but_changes_nothing(daemon: EmbeddedDaemon) -> None:
    with Client.connect(daemon.socket, kind="tool") as tool:
        assert tool.epochs is None
        assert tool.sessions() == [] and tool.stats()["engines"] == 0
        with pytest.raises(PermissionDenied):
            tool.open_session(INT8, MAX_TOKENS)


def test_an_operator_lists_and_closes_sessions(daemon: EmbeddedDaemon, client: Client) -> None:
    session_id = store_session(client, 2)
    with Client.connect(daemon.socket, kind="tool") as tool:
        (row,) = tool.sessions()
        assert (row["id"], row["state"], row["warm_pages"]) == (session_id, "suspended", 4)
        assert tool.session(session_id)["tokens"] == 32
        tool.close_session(session_id)
        with pytest.raises(NotFound):
            tool.session(session_id)
        assert tool.stats()["tiers"]["warm"]["pages"] == 0


def test_an_engine_does_not_close_the_session_of_another(
    daemon: EmbeddedDaemon, handle: SessionHandle
) -> None:
    with Client.connect(daemon.socket) as other, pytest.raises(NotFound):
        other.close_session(handle.id)


def test_hints_give_tickets_and_are_cancelled_by_their_owner_alone(
    daemon: EmbeddedDaemon, client: Client, handle: SessionHandle
) -> None:
    session_id = store_session(client, 2)
    with Client.connect(daemon.socket, kind="tool") as tool:
        ticket = tool.hint(session_id, deadline_seconds=5.0)
        assert set(ticket) == {
            "hint_id", "pages", "moving", "estimated_seconds", "left_cold", "why"
        }  # fmt: skip
        assert (ticket["moving"], ticket["estimated_seconds"]) == (0, None)  # all of it is warm
        with pytest.raises(NotFound):
            client.cancel_hint(ticket["hint_id"])
        tool.cancel_hint(ticket["hint_id"])
        tool.hint(session_id, deadline_seconds=5.0, last_token=15)
        with pytest.raises(InvalidArgument):
            tool.hint(handle.id, deadline_seconds=5.0)  # it is running
        for wrong in ({"first_token": -1}, {"priority": 10**12}, {"confidence": 2.0}):
            with pytest.raises(InvalidArgument):
                tool.hint(session_id, deadline_seconds=5.0, **wrong)  # type: ignore[arg-type]
    eventually(lambda: client.stats()["hints"]["open"] == 0)
    assert client.stats()["hints"]["cancelled"] == 2


def test_calls_are_counted_and_steps_need_none(client: Client, handle: SessionHandle) -> None:
    demote(client, handle, [1])
    assert client.epochs is not None
    before = client.rpc_count
    with client.epochs.step(handle.table.epoch()):
        read_page(client, handle, 0, 1)
    assert client.rpc_count == before
    client.stats()
    assert client.rpc_count == before + 1


def test_new_slabs_come_without_being_asked_for(tmp_path: Path) -> None:
    config = small_config(tmp_path, warm_bytes=8 * BLOCK_BYTES)
    with EmbeddedDaemon(config) as daemon, Client.connect(daemon.socket) as client:
        handle = client.open_session(INT8, MAX_TOKENS)
        for block in range(1, 33):  # warm fills up, and then cold
            before = client.rpc_count
            demote(client, handle, [block])
            assert client.rpc_count == before + 2, "the plan and the commit"
        table = handle.table.read(33)
        before = client.rpc_count
        for slab in np.unique(table.slab[table.tier != Tier.NONE]):
            assert client.slab(int(slab)).tier in (Tier.WARM, Tier.COLD)
        assert client.rpc_count == before
        with Client.connect(daemon.socket) as other:
            theirs = other.open_session(OTHER, MAX_TOKENS)
            assert other._bootstrap.pushed_slab(int(table.slab[0, 32])) is None
            theirs.close()
        handle.close()


def test_a_slot_is_not_reused_under_a_step(tmp_path: Path) -> None:
    config = small_config(tmp_path, warm_bytes=4 * BLOCK_BYTES)
    with EmbeddedDaemon(config) as daemon, Client.connect(daemon.socket) as client:
        handle = client.open_session(INT8, MAX_TOKENS)
        demote(client, handle, range(1, 5))
        table = handle.table.read(5)
        slab, slot = client.slab(int(table.slab[0, 1])), int(table.slot[0, 1])
        with Client.connect(daemon.socket) as other:
            assert client.epochs is not None
            with client.epochs.step(handle.table.epoch()):
                theirs = other.open_session(INT8, MAX_TOKENS)
                with pytest.raises(TierFull):
                    theirs.plan_demotion([1, 2, 3], 3, deadline_seconds=0.5)
                held = client.stats()["tiers"]["warm"]
                assert held["retired_slots"] > 0
            plan = theirs.plan_demotion([1, 2, 3], 3, deadline_seconds=5.0)
            assert slab.slots > slot and plan.blocks
            theirs.close()
        handle.close()


def test_threads_share_a_client(client: Client) -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            handle = client.open_session(INT8, MAX_TOKENS)
            demote(client, handle, range(1, 4))
            assert read_page(client, handle, 1, 3) == page_bytes(1, 3, CodecId.INT8)
            handle.close()
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30.0)
    assert not failures
    assert client.stats()["sessions"]["running"] == 0


def test_importing_the_client_loads_nothing_heavy() -> None:
    script = "import sys, tierd.client; print(*sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=True
    )
    heavy = {"numba", "torch", "structlog", "prometheus_client", "aiofiles", "tierd.store"}
    assert not heavy & set(done.stdout.split())
