"""The guard: tokens, limits, draining, rich errors, boot id; over a real gRPC server."""

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from tierd.errors import NotFound, PermissionDenied, StorageError, TierFull
from tierd.interceptors import Guard, Tokens, current_caller
from tierd.rpc.aio import collect_aio
from tierd.rpc.errors import BOOT_ID_KEY, CLIENT_KEY, TOKEN_KEY, error_of
from tierd.rpc.v1 import tierd_pb2 as pb
from tierd.rpc.v1 import tierd_pb2_grpc as pb_grpc

RIGHT = ((CLIENT_KEY, "1"), (TOKEN_KEY, "secret"))


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Let pytest run an async test, 20 s at most."""

    @wraps(test)
    def run(*args: Any, **options: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **options), 20.0))

    return run


class House(pb_grpc.StatsServicer):
    """Answers when the gate is open, or raises."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.callers: list[int] = []
        self.error: Exception | None = None

    async def Snapshot(self, request: Any, context: Any) -> Any:
        self.callers.append(current_caller.get().client_id)
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return pb.SnapshotReply(clients=1)

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        yield pb.SnapshotReply(clients=2)
        if self.error is not None:
            raise self.error


class Scene:
    """A server with the guard and a stub of it."""

    def __init__(self, folder: Path, in_flight_max: int = 2) -> None:
        self.ended: list[tuple[str, str]] = []
        self.tokens = Tokens(in_flight_max)
        self.tokens.issue("secret", 1, "engine")
        self.guard = Guard(self.tokens, "boot", lambda m, code, s: self.ended.append((m, code)))
        self.house = House()
        self.server: Any = grpc.aio.server(interceptors=[self.guard])
        pb_grpc.add_StatsServicer_to_server(self.house, self.server)
        self.target = f"unix:{folder}/rpc.sock"
        self.server.add_insecure_port(self.target)

    async def call(self, metadata: Any = RIGHT) -> Any:
        return await self.stub.Snapshot(pb.SnapshotRequest(), metadata=metadata, timeout=5.0)


@asynccontextmanager
async def scene(folder: Path, in_flight_max: int = 2) -> AsyncIterator[Scene]:
    made = Scene(folder, in_flight_max)
    await made.server.start()
    async with grpc.aio.insecure_channel(made.target) as channel:
        made.stub = pb_grpc.StatsStub(channel)
        yield made
    await made.server.stop(0)
    made.server = None
    await collect_aio()


@in_loop
async def test_a_right_token_lets_its_client_in(tmp_path: Path) -> None:
    async with scene(tmp_path) as s:
        call = s.stub.Snapshot(pb.SnapshotRequest(), metadata=RIGHT, timeout=5.0)
        assert (await call).clients == 1
        assert s.house.callers == [1]
        assert (BOOT_ID_KEY, "boot") in tuple(await call.trailing_metadata())
        assert s.ended == [("/tierd.rpc.v1.Stats/Snapshot", "OK")]


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        ((CLIENT_KEY, "1"),),
        ((TOKEN_KEY, "secret"),),
        ((CLIENT_KEY, "1"), (TOKEN_KEY, "")),
        ((CLIENT_KEY, "1"), (TOKEN_KEY, "secret2")),
        ((CLIENT_KEY, "2"), (TOKEN_KEY, "secret")),
        ((CLIENT_KEY, "2"), (TOKEN_KEY, "")),
        ((CLIENT_KEY, "one"), (TOKEN_KEY, "secret")),
        ((CLIENT_KEY, "9" * 5000), (TOKEN_KEY, "secret")),
    ],
)
@in_loop
async def test_a_wrong_token_is_refused_and_nothing_runs(tmp_path: Path, metadata: Any) -> None:
    async with scene(tmp_path) as s:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await s.call(metadata)
        error = error_of(refused.value, "here")
        assert type(error) is PermissionDenied and "secret" not in str(error)
        assert (BOOT_ID_KEY, "boot") in tuple(refused.value.trailing_metadata())
        assert s.house.callers == []


@in_loop
async def test_a_daemon_without_fds_says_that_the_limit_is_its_own(tmp_path: Path) -> None:
    async with scene(tmp_path) as s:
        s.house.error = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await s.call()
        error = error_of(refused.value, "here")
        assert type(error) is StorageError
        assert f"the daemon, process {os.getpid()}, may open" in str(error)


@in_loop
async def test_a_departed_clients_token_opens_nothing(tmp_path: Path) -> None:
    async with scene(tmp_path) as s:
        s.tokens.revoke(1)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await s.call()
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED


@in_loop
async def test_calls_beyond_the_limit_are_refused_and_then_let_in_again(tmp_path: Path) -> None:
    async with scene(tmp_path) as s:
        s.house.gate.clear()
        held = [asyncio.create_task(s.call()) for _ in range(2)]
        while len(s.house.callers) < 2:
            await asyncio.sleep(0.005)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await s.call()
        error = error_of(refused.value, "here")
        assert type(error) is TierFull and error.retry_after_seconds > 0
        s.house.gate.set()
        await asyncio.gather(*held)
        await s.call()
        s.tokens.check_integrity()


@in_loop
async def test_a_cancelled_call_is_no_longer_counted(tmp_path: Path) -> None:
    async with scene(tmp_path, in_flight_max=1) as s:
        s.house.gate.clear()
        with pytest.raises(grpc.aio.AioRpcError):
            await s.stub.Snapshot(pb.SnapshotRequest(), metadata=RIGHT, timeout=0.1)
        while len(s.ended) < 1:
            await asyncio.sleep(0.005)
        assert s.ended == [("/tierd.rpc.v1.Stats/Snapshot", "CANCELLED")]
        s.house.gate.set()
        await s.call()


@in_loop
async def test_a_draining_guard_refuses_what_is_new(tmp_path: Path) -> None:
    async with scene(tmp_path) as s:
        s.house.gate.clear()
        held = asyncio.create_task(s.call())
        while not s.house.callers:
            await asyncio.sleep(0.005)
        s.guard.draining = True
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await s.call()
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        s.house.gate.set()
        assert (await held).clients == 1


@in_loop
async def test_errors_leave_rich_from_calls_and_from_streams(tmp_path: Path) -> None:
    async with scene(tmp_path) as s:
        s.house.error = NotFound("no such thing")
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await s.call()
        assert type(error_of(failed.value, "here")) is NotFound
        replies = []
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            async for reply in s.stub.Watch(pb.WatchRequest(), metadata=RIGHT, timeout=5.0):
                replies.append(reply)
        assert type(error_of(failed.value, "here")) is NotFound
        assert len(replies) == 1
        assert [code for _, code in s.ended] == ["NOT_FOUND", "NOT_FOUND"]


@in_loop
async def test_a_bug_is_not_dressed_up_as_a_typed_error(tmp_path: Path) -> None:
    async with scene(tmp_path) as s:
        s.house.error = ZeroDivisionError("a bug")
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await s.call()
        assert failed.value.code() is grpc.StatusCode.UNKNOWN
        assert s.ended == [("/tierd.rpc.v1.Stats/Snapshot", "INTERNAL")]
        s.tokens.check_integrity()
