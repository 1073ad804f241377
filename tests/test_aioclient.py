"""The async client: reads, hints with feedback, watching; ends are told to who waits."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.rig import in_loop
from tests.wirerig import (
    BLOCK_BYTES,
    GEOMETRY,
    INT8,
    LAYERS,
    MAX_TOKENS,
    small_config,
    store_session,
)
from tierd import aioclient
from tierd.aioclient import AsyncClient, Settled
from tierd.client import Client
from tierd.daemon import Daemon, EmbeddedDaemon
from tierd.errors import DaemonUnavailable, DeadlineExceeded, InvalidArgument, NotFound


@asynccontextmanager
async def house(tmp_path: Path) -> AsyncIterator[tuple[Daemon, AsyncClient, str]]:
    """Run a daemon in this loop; yield it, a client, and a suspended session, half of it cold."""
    config = small_config(tmp_path, warm_bytes=16 * BLOCK_BYTES)
    async with Daemon(config) as daemon:
        session_id = await asyncio.to_thread(suspended_session, daemon.socket)
        async with await AsyncClient.connect(daemon.socket) as client:
            yield daemon, client, session_id


def suspended_session(socket: str) -> str:
    with Client.connect(socket) as engine:
        return store_session(engine, 24)


def resume(socket: str, session_id: str) -> None:
    with Client.connect(socket) as engine:
        handle = engine.resume(session_id, INT8, MAX_TOKENS)
        handle.suspend(handle.token_ids, handle.sealed_blocks)


async def outcome_of(outcomes: AsyncIterator[Settled], hint_id: int) -> str:
    async for settled in outcomes:
        if settled.hint_id == hint_id:
            return settled.outcome
    raise AssertionError("the stream ended without the outcome")


@in_loop
async def test_it_reads_stats_and_sessions(tmp_path: Path) -> None:
    async with house(tmp_path) as (_, client, session_id):
        (row,) = await client.sessions()
        assert row["id"] == session_id and row["state"] == "suspended"
        assert row["warm_pages"] > 0 and row["cold_pages"] > 0
        assert (await client.stats())["sessions"]["suspended"] == 1


@in_loop
async def test_watching_gives_figures_until_the_daemon_drains(tmp_path: Path) -> None:
    async with house(tmp_path) as (daemon, client, _):
        seen = 0
        async for stats in client.watch(0.1):
            seen += 1
            assert stats["sessions"]["suspended"] == 1
            if seen == 3:
                await daemon.rpc.stop(0.2)
        assert seen >= 3
        with pytest.raises(DaemonUnavailable):
            await client.stats()


@in_loop
async def test_a_wrong_interval_is_refused(tmp_path: Path) -> None:
    async with house(tmp_path) as (_, client, _):
        with pytest.raises(InvalidArgument, match="interval"):
            await anext(aiter(client.watch(0.001)))


@in_loop
async def test_a_hint_brings_pages_up_and_is_useful_when_the_session_is_used(
    tmp_path: Path,
) -> None:
    async with house(tmp_path) as (daemon, client, session_id), client.hint_stream() as hints:
        outcomes = hints.outcomes()
        await asyncio.to_thread(suspended_session, daemon.socket)  # warm has its pages now
        last_token = 4 * GEOMETRY.block_tokens - 1
        ticket = await hints.hint(session_id, deadline_seconds=25.0, last_token=last_token)
        assert ticket["pages"] == 4 * LAYERS and ticket["estimated_seconds"] > 0
        while (await client.stats())["promotions"] < ticket["pages"]:
            await asyncio.sleep(0.02)
        await asyncio.to_thread(resume, daemon.socket, session_id)
        assert await outcome_of(outcomes, ticket["hint_id"]) == "useful"


@in_loop
async def test_a_stream_answers_each_command_and_tells_each_end(tmp_path: Path) -> None:
    async with house(tmp_path) as (_, client, session_id), client.hint_stream() as hints:
        outcomes = hints.outcomes()
        first, second = await asyncio.gather(
            hints.hint(session_id, deadline_seconds=20.0),
            hints.hint(session_id, deadline_seconds=30.0, priority=3),
        )
        assert first["hint_id"] != second["hint_id"]
        await hints.cancel(first["hint_id"])
        assert await outcome_of(outcomes, first["hint_id"]) == "cancelled"
        with pytest.raises(NotFound):
            await hints.cancel(first["hint_id"])
        with pytest.raises(NotFound):
            await hints.hint("0" * 16, deadline_seconds=1.0)
        with pytest.raises(InvalidArgument):
            await hints.hint(session_id, deadline_seconds=-1.0)


@in_loop
async def test_hints_end_with_their_stream(tmp_path: Path) -> None:
    async with house(tmp_path) as (_, client, session_id):
        async with client.hint_stream() as hints:
            await hints.hint(session_id, deadline_seconds=30.0)
            assert (await client.stats())["hints"]["open"] == 1
        while (await client.stats())["hints"]["open"]:
            await asyncio.sleep(0.01)
        assert (await client.stats())["hints"]["cancelled"] == 1


@in_loop
async def test_single_hints_are_given_and_cancelled(tmp_path: Path) -> None:
    async with house(tmp_path) as (_, client, session_id):
        ticket = await client.hint(session_id, deadline_seconds=30.0)
        await client.cancel_hint(ticket["hint_id"])
        with pytest.raises(NotFound):
            await client.cancel_hint(ticket["hint_id"])


@in_loop
async def test_a_daemon_that_ends_ends_the_stream(tmp_path: Path) -> None:
    async with house(tmp_path) as (daemon, client, session_id), client.hint_stream() as hints:
        await hints.hint(session_id, deadline_seconds=30.0)
        await daemon.rpc.stop(0.2)
        with pytest.raises(DaemonUnavailable):
            await hints.hint(session_id, deadline_seconds=30.0)


@in_loop
async def test_outcomes_end_for_every_listener(tmp_path: Path) -> None:
    async with house(tmp_path) as (_, client, session_id):
        async with client.hint_stream() as hints:
            await hints.hint(session_id, deadline_seconds=30.0)
            listeners = [asyncio.create_task(all_of(hints.outcomes())) for _ in range(2)]
            await asyncio.sleep(0)
        heard = await asyncio.wait_for(asyncio.gather(*listeners), 2.0)
        assert heard == [[], []]
        assert await asyncio.wait_for(all_of(hints.outcomes()), 2.0) == []


async def all_of(outcomes: AsyncIterator[Settled]) -> list[Settled]:
    return [settled async for settled in outcomes]


@in_loop
async def test_a_departed_clients_streams_end_and_take_no_hint(tmp_path: Path) -> None:
    async with house(tmp_path) as (daemon, client, session_id), client.hint_stream() as hints:
        await hints.hint(session_id, deadline_seconds=30.0)
        figures = client.watch(0.1)
        await anext(figures)
        client._bootstrap.close()
        assert [stats async for stats in figures] == []
        with pytest.raises(DaemonUnavailable):
            await hints.hint(session_id, deadline_seconds=30.0)
        assert len(daemon.store.hints) == 0


@in_loop
async def test_watching_a_hung_daemon_is_a_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aioclient, "CALL_SECONDS", 0.2)
    with EmbeddedDaemon(small_config(tmp_path)) as daemon:
        async with await AsyncClient.connect(daemon.socket) as client:
            figures = client.watch(0.1)
            await anext(figures)
            with daemon.paused(), pytest.raises(DeadlineExceeded):
                async for _ in figures:
                    pass


@in_loop
async def test_a_closed_client_says_so(tmp_path: Path) -> None:
    async with house(tmp_path) as (_, client, _):
        await client.close()
        with pytest.raises(DaemonUnavailable, match="closed"):
            await client.stats()


@in_loop
async def test_no_daemon_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(DaemonUnavailable, match=r"none\.sock"):
        await AsyncClient.connect(str(tmp_path / "none.sock"))


@in_loop
async def test_reads_go_on_with_the_next_daemon(tmp_path: Path) -> None:
    config = small_config(tmp_path, warm_bytes=16 * BLOCK_BYTES)
    async with Daemon(config) as first:
        client = await AsyncClient.connect(first.socket)
    async with client, Daemon(config) as second:
        session_id = await asyncio.to_thread(suspended_session, second.socket)
        assert client.boot_id == first.boot_id != second.boot_id
        rows = await asyncio.gather(*(client.sessions() for _ in range(4)))
        assert client.boot_id == second.boot_id
        assert [row["id"] for (row,) in rows] == [session_id] * 4
        assert (await client.stats())["clients"] == 1


@in_loop
async def test_a_read_waits_for_the_next_daemon_within_its_deadline(tmp_path: Path) -> None:
    config = small_config(tmp_path, warm_bytes=16 * BLOCK_BYTES)
    async with Daemon(config) as first:
        client = await AsyncClient.connect(first.socket)
    async with client:
        reading = asyncio.create_task(client.stats())
        with pytest.raises(TimeoutError):  # nobody is there: it waits
            await asyncio.wait_for(asyncio.shield(reading), 0.3)
        async with Daemon(config):
            assert (await reading)["clients"] == 1


@in_loop
async def test_a_read_fails_at_its_deadline_if_no_daemon_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aioclient, "CALL_SECONDS", 0.3)
    async with Daemon(small_config(tmp_path)) as first:
        client = await AsyncClient.connect(first.socket)
    async with client:
        with pytest.raises(DaemonUnavailable, match=str(first.socket)):
            await asyncio.wait_for(client.stats(), 5.0)


@in_loop
async def test_a_hint_fails_with_its_daemon_and_the_next_call_connects_anew(
    tmp_path: Path,
) -> None:
    config = small_config(tmp_path, warm_bytes=16 * BLOCK_BYTES)
    async with Daemon(config) as first:
        session_id = await asyncio.to_thread(suspended_session, first.socket)
        client = await AsyncClient.connect(first.socket)
        stream_left = client.hint_stream()
        stream = await stream_left.__aenter__()
    async with client:
        with pytest.raises(DaemonUnavailable):
            await client.hint(session_id, deadline_seconds=1.0)
        async with Daemon(config) as second:
            session_id = await asyncio.to_thread(suspended_session, second.socket)
            ticket = await client.hint(session_id, deadline_seconds=1.0)
            with pytest.raises(DaemonUnavailable):
                await stream.hint(session_id, deadline_seconds=1.0)
            await client.cancel_hint(ticket["hint_id"])
            async with client.hint_stream() as fresh:
                assert (await fresh.hint(session_id, deadline_seconds=1.0))["hint_id"]
            async for stats in client.watch(0.1):
                assert stats["clients"] == 1
                break
        await stream_left.__aexit__(None, None, None)


@in_loop
async def test_a_closed_client_does_not_come_back(tmp_path: Path) -> None:
    async with Daemon(small_config(tmp_path)) as daemon:
        client = await AsyncClient.connect(daemon.socket)
        await client.close()
        for call in (client.stats, client.sessions):
            with pytest.raises(DaemonUnavailable, match="closed"):
                await call()
