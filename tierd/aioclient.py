"""The async client: what a program that schedules work needs, hints with feedback foremost.

It reads and hints; sessions are opened by engines, through `tierd.client`.

Invariants:
  every call has a deadline, and so has the answer to each command of a hint stream
  after the daemon was started again a read is made anew, within its deadline; what changes
  something is made once, and the call after a failed one connects anew
  a stream's answers find their askers by tag; when it ends, every asker is told
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from tierd.errors import DaemonUnavailable, DeadlineExceeded, TierdError, TierFull, error_for_reason
from tierd.openfiles import CLIENT_FILES, require_files
from tierd.rpc import wire
from tierd.rpc.aio import keep_aio_up
from tierd.rpc.calls import (
    CALL_SECONDS,
    CHANNEL_OPTIONS,
    call_metadata,
    check_boot_id,
    hint_request,
    ticket_to_dict,
    typed_error,
)
from tierd.rpc.handshake import TOOL, BootstrapClient
from tierd.rpc.v1 import tierd_pb2 as pb
from tierd.rpc.v1 import tierd_pb2_grpc as pb_grpc

_AGAIN_SECONDS = 0.1  # between tries to reach the next daemon
_LEAVING_SECONDS = 1.0  # for calls on a dead daemon's channel to end, each with its own error

# A stream may be silent for an hour; whether the daemon lives is asked meanwhile.
_KEEPALIVE = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
)


@dataclass(frozen=True, slots=True)
class Settled:
    """How a hint ended: useful, late, wasted or cancelled."""

    hint_id: int
    outcome: str


class AsyncClient:
    """A connection to the daemon at a socket, of kind "tool"; to the next one when it is lost.

    Use as an async context, in one event loop. Hints and streams end with their daemon.
    """

    def __init__(self, bootstrap: BootstrapClient, socket: str) -> None:
        self.socket = socket
        self._closed = False
        self._renewing = asyncio.Lock()  # held while connecting, which has a deadline
        keep_aio_up()
        self._attach(bootstrap)

    def _attach(self, bootstrap: BootstrapClient) -> None:
        self.boot_id = bootstrap.boot_id
        self._bootstrap = bootstrap
        self._metadata = call_metadata(bootstrap)
        self._channel = grpc.aio.insecure_channel(
            bootstrap.rpc_target, options=(*CHANNEL_OPTIONS, *_KEEPALIVE)
        )
        stubs: Any = pb_grpc  # generated without types
        self._sessions = stubs.SessionsStub(self._channel)
        self._hints = stubs.HintsStub(self._channel)
        self._stats = stubs.StatsStub(self._channel)

    @classmethod
    async def connect(cls, socket: str, *, deadline_seconds: float = 5.0) -> AsyncClient:
        """Connect to the daemon at `socket`. Raises as Client.connect."""
        require_files(CLIENT_FILES, "a client of a daemon")
        bootstrap = await asyncio.to_thread(BootstrapClient.connect, socket, TOOL, deadline_seconds)
        return cls(bootstrap, socket)

    async def sessions(self) -> list[dict[str, Any]]:
        """Return a row for each session the daemon keeps, oldest first."""
        reply = await self._read(lambda: self._sessions.List, pb.ListRequest())
        return [wire.session_info_to_dict(info) for info in reply.sessions]

    async def stats(self) -> dict[str, Any]:
        """Return the daemon's figures, as Client.stats."""
        reply = await self._read(lambda: self._stats.Snapshot, pb.SnapshotRequest())
        return wire.snapshot_to_dict(reply)

    async def watch(self, interval_seconds: float) -> AsyncIterator[dict[str, Any]]:
        """Yield the figures now and at each interval, until the daemon drains."""
        await self._renew(CALL_SECONDS)
        call = self._stats.Watch(
            pb.WatchRequest(interval_seconds=interval_seconds), metadata=self._metadata
        )
        try:
            while True:
                async with asyncio.timeout(interval_seconds + CALL_SECONDS):
                    reply = await call.read()
                if reply is grpc.aio.EOF:
                    return
                yield wire.snapshot_to_dict(reply)
        except TimeoutError:
            raise DeadlineExceeded(f"the daemon at {self.socket} sends no more figures") from None
        except grpc.RpcError as failure:
            raise self._error(failure) from None
        finally:
            call.cancel()

    async def hint(
        self,
        session_id: str,
        *,
        deadline_seconds: float,
        first_token: int = 0,
        last_token: int | None = None,
        confidence: float = 1.0,
        priority: int = 0,
    ) -> dict[str, Any]:
        """Give one hint, as Client.hint; it ends with this client."""
        request = hint_request(
            session_id, deadline_seconds, first_token, last_token, confidence, priority
        )
        return ticket_to_dict(await self._call(lambda: self._hints.Hint, request))

    async def cancel_hint(self, hint_id: int) -> None:
        """Cancel a hint of this client. Raises NotFound if it is settled or unknown."""
        await self._call(lambda: self._hints.Cancel, pb.CancelHintRequest(hint_id=hint_id))

    @contextlib.asynccontextmanager
    async def hint_stream(self) -> AsyncIterator[HintStream]:
        """Open a stream of hints with feedback; its hints are cancelled when it is left."""
        await self._renew(CALL_SECONDS)
        stream = HintStream(self._hints.Stream(metadata=self._metadata), self._error)
        try:
            yield stream
        finally:
            await stream.close()

    async def _read(self, method: Callable[[], Any], request: Any) -> Any:
        """Make a call that changes nothing: again with the next daemon, if this one is lost."""
        loop = asyncio.get_running_loop()
        end = loop.time() + CALL_SECONDS
        while True:
            try:
                return await self._call(method, request, end - loop.time())
            except DaemonUnavailable:
                is_last = loop.time() + _AGAIN_SECONDS >= end
                if is_last or self._closed or not self._bootstrap.lost:
                    raise
            await asyncio.sleep(_AGAIN_SECONDS)

    async def _renew(self, deadline_seconds: float) -> None:
        """Connect to the daemon that answers now, if the last one is lost.

        Raises DaemonUnavailable: nothing is changed.
        """
        async with self._renewing:
            if self._closed or not self._bootstrap.lost:
                return
            bootstrap = await asyncio.to_thread(
                BootstrapClient.connect, self.socket, TOOL, deadline_seconds
            )
            if self._closed:  # meanwhile
                bootstrap.close()
                return
            lost_channel, lost_bootstrap = self._channel, self._bootstrap
            self._attach(bootstrap)
            lost_bootstrap.close()
            await lost_channel.close(grace=_LEAVING_SECONDS)

    async def _call(
        self, method: Callable[[], Any], request: Any, deadline_seconds: float = CALL_SECONDS
    ) -> Any:
        """Make one call; `method` gives its stub, once connected."""
        end = asyncio.get_running_loop().time() + deadline_seconds
        await self._renew(deadline_seconds)
        left_seconds = max(0.0, end - asyncio.get_running_loop().time())
        boot_id = self.boot_id
        try:
            call = method()(request, timeout=left_seconds, metadata=self._metadata)
            reply = await call
        except grpc.RpcError as failure:
            raise self._error(failure) from None
        except grpc.aio.UsageError:
            raise DaemonUnavailable(f"this client of {self.socket} is closed") from None
        check_boot_id(await call.trailing_metadata(), boot_id, self.socket)
        return reply

    def _error(self, failure: Any) -> TierdError:
        return typed_error(failure, self.boot_id, self.socket)

    async def close(self) -> None:
        """Leave: the daemon cancels what this client hinted. Idempotent."""
        self._closed = True
        await self._channel.close()
        self._bootstrap.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()


class HintStream:
    """Hints with feedback. Made by AsyncClient.hint_stream."""

    def __init__(self, call: Any, error_of_call: Any) -> None:
        self._call = call
        self._error_of_call = error_of_call
        self._next_tag = 1
        self._writing = asyncio.Lock()
        self._asked: dict[int, asyncio.Future[Any]] = {}
        # At most as many outcomes wait here as hints may be open in all: 1,024.
        # The last entry is the stream's end: an error, or None. It stays, for every reader.
        self._settled: asyncio.Queue[Settled | TierdError | None] = asyncio.Queue()
        self._reader = asyncio.create_task(self._read())

    async def hint(
        self,
        session_id: str,
        *,
        deadline_seconds: float,
        first_token: int = 0,
        last_token: int | None = None,
        confidence: float = 1.0,
        priority: int = 0,
    ) -> dict[str, Any]:
        """Give a hint and return its ticket. Raises as Client.hint."""
        request = hint_request(
            session_id, deadline_seconds, first_token, last_token, confidence, priority
        )
        event = await self._ask(pb.HintCommand(hint=request))
        return ticket_to_dict(event.ticket)

    async def cancel(self, hint_id: int) -> None:
        """Cancel one of this stream's hints. Raises NotFound if it is settled or unknown."""
        await self._ask(pb.HintCommand(cancel=pb.CancelHintRequest(hint_id=hint_id)))

    async def outcomes(self) -> AsyncIterator[Settled]:
        """Yield each hint's outcome as it is known, until the stream ends."""
        while isinstance(settled := await self._settled.get(), Settled):
            yield settled
        self._settled.put_nowait(settled)
        if settled is not None:
            raise settled

    async def _ask(self, command: Any) -> Any:
        command.tag = self._next_tag
        self._next_tag += 1
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._asked[command.tag] = answer
        try:
            async with asyncio.timeout(CALL_SECONDS):
                if self._reader.done():
                    raise DaemonUnavailable("the hint stream has ended")
                async with self._writing:  # gRPC takes one write at a time
                    await self._call.write(command)
                return await answer
        except TimeoutError:
            raise DeadlineExceeded("the daemon did not answer a hint within its deadline") from None
        except grpc.RpcError as failure:
            raise self._ended_by(failure) from None
        except asyncio.InvalidStateError:
            raise DaemonUnavailable("the hint stream has ended") from None
        finally:
            self._asked.pop(command.tag, None)

    async def _read(self) -> None:
        error: TierdError | None = None  # none: it was left, or the daemon drains
        try:
            async for event in self._call:
                self._take(event)
        except grpc.RpcError as failure:
            error = self._ended_by(failure)
        finally:
            self._settled.put_nowait(error)
            for answer in self._asked.values():
                if not answer.done():
                    answer.set_exception(error or DaemonUnavailable("the hint stream has ended"))

    def _ended_by(self, failure: Any) -> TierdError:
        error = self._error_of_call(failure)
        if failure.code() is grpc.StatusCode.INTERNAL:
            # What gRPC makes of a write that met the stream's end.
            return DaemonUnavailable("the hint stream has ended")
        assert isinstance(error, TierdError)
        return error

    def _take(self, event: Any) -> None:
        kind = event.WhichOneof("event")
        if kind == "settled":
            outcome = pb.HintOutcome.Name(event.settled.outcome)
            name = outcome.removeprefix("HINT_OUTCOME_").lower()
            self._settled.put_nowait(Settled(event.settled.hint_id, name))
            return
        answer = self._asked.get(event.tag)
        if answer is None or answer.done():
            return
        if kind == "refusal":
            error = error_for_reason(event.refusal.reason, event.refusal.message)
            if isinstance(error, TierFull):
                error.retry_after_seconds = event.refusal.retry_after_seconds
            answer.set_exception(error)
        else:
            answer.set_result(event)

    async def close(self) -> None:
        """End the stream. Idempotent."""
        self._call.cancel()
        self._reader.cancel()
        await asyncio.wait([self._reader], timeout=CALL_SECONDS)
