"""The guard before every call: who calls, how many at once, and errors made rich.

Invariants:
  no method of tierd's own starts for a caller without a token, or with a departed one's;
  a departed client's streams end
  a caller has at most `in_flight_max` calls under way, streams included
  every reply carries the boot id; every error of the tree leaves as a rich status

Health and reflection are open: they tell nothing about sessions, and probes have no token.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from tierd.errors import DaemonUnavailable, PermissionDenied, TierdError, TierFull
from tierd.openfiles import said_by_daemon
from tierd.rpc.aio import keep_aio_up
from tierd.rpc.errors import BOOT_ID_KEY, CLIENT_KEY, STATUS_KEY, TOKEN_KEY, code_of, status_of

CLIENT_ID_DIGITS_MAX = 20
OPEN_PREFIXES = ("/grpc.health.", "/grpc.reflection.")
CallDone = Callable[[str, str, float], None]
"""Told of each call's end: method, gRPC code, seconds."""


@dataclass(slots=True, eq=False)
class Caller:
    """A client that may call."""

    client_id: int
    kind: str
    token: str
    in_flight: int = 0
    on_leave: set[Callable[[], None]] = field(default_factory=set)
    """Called when the client departs: its open streams end themselves."""


current_caller: ContextVar[Caller] = ContextVar("current_caller")


class Tokens:
    """Who may call. Filled and emptied by the first door."""

    def __init__(self, in_flight_max: int) -> None:
        self._in_flight_max = in_flight_max
        self._callers: dict[int, Caller] = {}

    def __len__(self) -> int:
        return len(self._callers)

    def issue(self, token: str, client_id: int, kind: str) -> None:
        """Let a client call with `token`."""
        assert client_id not in self._callers, f"client {client_id} has a token already"
        self._callers[client_id] = Caller(client_id, kind, token)

    def revoke(self, client_id: int) -> None:
        """Let a client call no more, and end its streams. Unknown ids are ignored."""
        caller = self._callers.pop(client_id, None)
        if caller is not None:
            for leave in caller.on_leave:
                leave()

    def caller_of(self, metadata: Any) -> Caller:
        """Return who calls. Raises PermissionDenied; takes the same time for any wrong token."""
        found = {key: value for key, value in metadata or () if key in (CLIENT_KEY, TOKEN_KEY)}
        number, token = str(found.get(CLIENT_KEY, "")), str(found.get(TOKEN_KEY, ""))
        known = len(number) <= CLIENT_ID_DIGITS_MAX and number.isascii() and number.isdigit()
        caller = self._callers.get(int(number)) if known else None
        expected = caller.token if caller is not None else ""
        right = hmac.compare_digest(expected.encode(), token.encode())
        if caller is None or not right:
            raise PermissionDenied("the call has no valid token: connect to the daemon's socket")
        return caller

    @contextlib.contextmanager
    def under_way(self, caller: Caller) -> Any:
        """Count a call while it runs. Raises TierFull beyond the limit."""
        if caller.in_flight >= self._in_flight_max:
            raise TierFull(f"{self._in_flight_max} calls of this client are under way already")
        caller.in_flight += 1
        try:
            yield
        finally:
            caller.in_flight -= 1

    def check_integrity(self) -> None:
        """Raise AssertionError if a caller's count is out of its range."""
        for caller in self._callers.values():
            assert 0 <= caller.in_flight <= self._in_flight_max, f"{caller=}"


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Checks each call before its method runs. `draining` refuses new ones."""

    def __init__(self, tokens: Tokens, boot_id: str, call_done: CallDone) -> None:
        keep_aio_up()
        self.draining = False
        self._tokens = tokens
        self._boot_id = boot_id
        self._call_done = call_done

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: Any
    ) -> Any:
        """Wrap the method's handler."""
        handler = await continuation(details)
        if handler is None or details.method.startswith(OPEN_PREFIXES):
            return handler
        if handler.response_streaming:
            return self._streaming(handler, details.method)
        return self._unary(handler, details.method)

    def _unary(self, handler: Any, method: str) -> Any:
        async def guarded(request: Any, context: Any) -> Any:
            async with self._admitted(context, method):
                return await handler.unary_unary(request, context)

        assert handler.unary_unary is not None, f"{method} streams requests to one reply"
        return grpc.unary_unary_rpc_method_handler(
            guarded, handler.request_deserializer, handler.response_serializer
        )

    def _streaming(self, handler: Any, method: str) -> Any:
        inner = handler.stream_stream or handler.unary_stream

        async def guarded(request: Any, context: Any) -> AsyncIterator[Any]:
            async with self._admitted(context, method):
                async for reply in inner(request, context):
                    yield reply

        make = (
            grpc.stream_stream_rpc_method_handler
            if handler.request_streaming
            else grpc.unary_stream_rpc_method_handler
        )
        return make(guarded, handler.request_deserializer, handler.response_serializer)

    @contextlib.asynccontextmanager
    async def _admitted(self, context: Any, method: str) -> AsyncIterator[None]:
        """Run one call: check, count, and turn an error of the tree into a rich status."""
        started_seconds = time.monotonic()
        code = "INTERNAL"
        trailing = ((BOOT_ID_KEY, self._boot_id),)
        context.set_trailing_metadata(trailing)
        try:
            if self.draining:
                raise DaemonUnavailable("the daemon is draining")
            caller = self._tokens.caller_of(context.invocation_metadata())
            with said_by_daemon(), self._tokens.under_way(caller):
                current_caller.set(caller)  # each call is a task of its own: nothing to reset
                yield
            code = "OK"
        except (asyncio.CancelledError, GeneratorExit):
            code = "CANCELLED"
            raise
        except TierdError as error:
            code = error.grpc_code
            details = (*trailing, (STATUS_KEY, status_of(error).SerializeToString()))
            await context.abort(code_of(error), str(error), details)
        finally:
            self._call_done(method, code, time.monotonic() - started_seconds)
