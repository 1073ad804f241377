"""The gRPC service: each method turns a message into calls of the store or the mover.

Runs on the daemon's event loop, as the store does. Nothing is kept here but open
hint streams; what a client holds is the store's, under the client's id.

Invariants:
  only an engine opens, resumes and changes sessions, and only its own
  every wait ends by the call's own deadline, with a tenth left for the answer's way
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from tierd.adoption import Found, Offers, inspect
from tierd.codec.layout import page_layout
from tierd.errors import (
    InvalidArgument,
    LayoutMismatch,
    PermissionDenied,
    StorageError,
    TierdError,
    TierFull,
)
from tierd.hints import Hint as OpenHint
from tierd.hints import Outcome
from tierd.interceptors import current_caller
from tierd.layercodecs import layer_codecs
from tierd.mover import Mover
from tierd.rpc import wire
from tierd.rpc.handshake import ENGINE
from tierd.rpc.v1 import tierd_pb2 as pb
from tierd.rpc.v1 import tierd_pb2_grpc as pb_grpc
from tierd.sessions import Session
from tierd.store import Store
from tierd.types import FORMAT_VERSION, CodecId, Namespace, SessionState, Tier
from tierd.waiters import PARK_SECONDS_MAX, WAIT_SECONDS_MAX

DEADLINE_SHARE = 0.9
DEADLINE_DEFAULT_SECONDS = 10.0  # for a caller that set none
WATCH_SECONDS_MIN, WATCH_SECONDS_MAX = 0.1, 3600.0
# A stream's reader waits while this many answers are unread; besides them there are at
# most as many outcomes as hints may be open in all.
UNREAD_EVENTS_MAX = 64
UNREAD_CHECK_SECONDS = 0.05

_STATES = {
    SessionState.RUNNING: pb.SESSION_STATE_RUNNING,
    SessionState.IDLE: pb.SESSION_STATE_IDLE,
    SessionState.SUSPENDED: pb.SESSION_STATE_SUSPENDED,
}
_OUTCOMES = {
    Outcome.USEFUL: pb.HINT_OUTCOME_USEFUL,
    Outcome.LATE: pb.HINT_OUTCOME_LATE,
    Outcome.WASTED: pb.HINT_OUTCOME_WASTED,
    Outcome.CANCELLED: pb.HINT_OUTCOME_CANCELLED,
}


def _engine_id() -> int:
    caller = current_caller.get()
    if caller.kind != ENGINE:
        raise PermissionDenied("only an engine may do this; connect as one")
    return caller.client_id


def _client_id() -> str:
    return str(current_caller.get().client_id)


def _seconds_to_answer(context: Any, seconds_max: float = WAIT_SECONDS_MAX) -> float:
    remaining = context.time_remaining()
    seconds = DEADLINE_DEFAULT_SECONDS if remaining is None else remaining
    return float(min(max(seconds * DEADLINE_SHARE, 0.001), seconds_max))


class SessionsService(pb_grpc.SessionsServicer):
    """Sessions: open, get, list, truncate, suspend, resume, close, adopt."""

    def __init__(self, store: Store, mover: Mover, offers: Callable[[int], Offers]) -> None:
        self._store = store
        self._offers = offers
        self._mover = mover

    async def Open(self, request: Any, context: Any) -> Any:
        """Open a session for the calling engine."""
        namespace = _known_namespace(request.namespace)
        session = self._store.open_session(_engine_id(), namespace, request.max_tokens)
        return pb.OpenReply(session=session.number)

    async def Get(self, request: Any, context: Any) -> Any:
        """Return one session."""
        self._store.keeper.look()
        return self._info(self._store.session(request.session))

    async def List(self, request: Any, context: Any) -> Any:
        """Return all sessions, oldest first."""
        self._store.keeper.look()
        return pb.ListReply(sessions=[self._info(session) for session in self._store.sessions()])

    async def Truncate(self, request: Any, context: Any) -> Any:
        """Drop the pages from a block on."""
        damaged = request.damaged_layer if request.HasField("damaged_layer") else None
        dropped = self._store.truncate(
            _engine_id(), request.session, request.first_block, damaged_layer=damaged
        )
        self._mover.wake()
        return pb.TruncateReply(dropped_pages=dropped)

    async def Suspend(self, request: Any, context: Any) -> Any:
        """Keep a session without its engine."""
        await self._mover.suspend(
            _engine_id(),
            request.session,
            request.token_ids,
            request.sealed_blocks,
            deadline_seconds=_seconds_to_answer(context, PARK_SECONDS_MAX),
        )
        self._mover.wake()
        return pb.SuspendReply()

    async def Resume(self, request: Any, context: Any) -> Any:
        """Give a suspended session to the calling engine."""
        session = self._store.resume_session(
            _engine_id(), request.session, _known_namespace(request.namespace), request.max_tokens
        )
        await self._mover.acks.recorded()
        return pb.ResumeReply(token_ids=session.token_ids, sealed_blocks=session.sealed_blocks)

    async def Close(self, request: Any, context: Any) -> Any:
        """Drop a session: an engine its own or a suspended one, an operator any.

        One that was kept is gone for good when this is answered.
        """
        caller = current_caller.get()
        session = self._store.session(request.session)
        by_owner = request.owned or (caller.kind == ENGINE and session.engine_id is not None)
        await self._mover.acks.close_session(
            request.session,
            engine_id=caller.client_id if by_owner else None,
            discard=request.discard,
            deadline_seconds=_seconds_to_answer(context),
        )
        self._mover.wake()
        return pb.CloseReply()

    async def Adopt(self, request: Any, context: Any) -> Any:
        """Take a session's pages back from its engine, after a restart."""
        engine_id, store = _engine_id(), self._store
        namespace = _known_namespace(request.namespace)
        offers = self._offers(engine_id)
        refused: dict[int, str] = {}
        for number, slab in list(offers.slabs.items()):
            try:
                store.placement.hold_warm_slab(slab.record, slab.fd)
            except (TierFull, StorageError) as error:  # warm is smaller now: its pages are lost
                refused[number] = str(error)
        blocks = namespace.geometry.blocks_for(request.max_tokens)
        uuid = store.placement.store_uuid
        own = offers.copy()

        def look() -> Found:
            with contextlib.closing(own):  # here: a cancelled call does not end its thread
                return inspect(own, request.session, namespace, uuid, blocks)

        found = await asyncio.to_thread(look)
        found.refused = refused
        session = store.adopt_session(
            engine_id, request.session, namespace, request.max_tokens, found
        )
        await self._mover.acks.recorded()
        return pb.AdoptReply(
            warm_pages=session.index.pages_in(Tier.WARM),
            cold_pages=session.index.pages_in(Tier.COLD),
            wrong_pages=len(found.wrong),
        )

    def _info(self, session: Session) -> Any:
        unused_seconds = self._store.clock.monotonic() - session.last_used_seconds
        suspended = session.state is SessionState.SUSPENDED
        keeper = self._store.keeper
        ram_only = keeper.ram_only_blocks(session) if suspended else 0
        return pb.SessionInfo(
            session=session.number,
            state=_STATES[session.state],
            engine_id=session.engine_id or 0,
            codec=wire.codec_to_wire(session.namespace.codec),
            codec_layers=session.namespace.codec_layers,
            layers=session.layers,
            block_tokens=session.block_tokens,
            tokens=session.tokens,
            sealed_blocks=session.sealed_blocks,
            warm_pages=session.index.pages_in(Tier.WARM),
            cold_pages=keeper.cold_pages(session),
            unused_seconds=unused_seconds,
            namespace_digest=session.namespace_digest,
            page_codecs=wire.codecs_to_wire(keeper.page_codecs(session)),
            kept=keeper.is_kept(session),
            ram_only_blocks=ram_only,
            removed_blocks=keeper.removed_blocks(session) if suspended else 0,
        )


def _known_namespace(message: Any) -> Namespace:
    """Return a namespace whose pages this daemon can lay out. Raises LayoutMismatch too."""
    namespace = wire.namespace_from_wire(message)
    if namespace.format_version != FORMAT_VERSION:
        raise LayoutMismatch(
            f"pages of format {namespace.format_version}; this daemon keeps format {FORMAT_VERSION}"
        )
    for codec in {*layer_codecs(namespace), CodecId.RAW}:
        page_layout(namespace.geometry, codec)
    return namespace


class PlacementService(pb_grpc.PlacementServicer):
    """Placement: plan demotion, commit, abort, promote."""

    def __init__(self, store: Store, mover: Mover) -> None:
        self._store = store
        self._mover = mover

    async def PlanDemotion(self, request: Any, context: Any) -> Any:
        """Lend slots, waiting for room until shortly before the caller's deadline.

        The ledger knows the session before it can have a page: one whose opening's answer
        was lost has none, and no restart waits for it.
        """
        known = self._store.session(request.session).recorded
        plan = await self._mover.plan_demotion(
            _engine_id(),
            request.session,
            list(request.hot_blocks),
            request.need_blocks,
            codecs=wire.codecs_of(request.codecs),
            include_first=request.include_first,
            writes_cold=request.writes_cold,
            deadline_seconds=_seconds_to_answer(context),
        )
        if not known:
            await self._mover.acks.recorded()
        return wire.plan_to_wire(plan.reservation, plan.blocks, plan.places)

    async def Commit(self, request: Any, context: Any) -> Any:
        """Publish a plan's pages."""
        await self._mover.commit(
            _engine_id(),
            request.reservation,
            request.digests,
            request.device_digests,
            deadline_seconds=_seconds_to_answer(context),
        )
        return pb.CommitReply()

    async def Abort(self, request: Any, context: Any) -> Any:
        """Take a plan's slots back."""
        self._store.abort(_engine_id(), request.reservation)
        self._mover.wake()
        return pb.AbortReply()

    async def Promote(self, request: Any, context: Any) -> Any:
        """Bring cold pages to warm, as many as come by shortly before the caller's deadline."""
        pages = await self._mover.promote(
            _engine_id(),
            request.session,
            list(request.blocks),
            deadline_seconds=_seconds_to_answer(context),
        )
        return pb.PromoteReply(warm_pages=pages)


@dataclass(slots=True, eq=False)
class _Stream:
    """One open hint stream: its hints, and events not yet read. None ends it."""

    client_id: str
    hints: set[int] = field(default_factory=set)
    events: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)
    ended: bool = False

    def put(self, event: Any) -> None:
        self.events.put_nowait(event)


class HintsService(pb_grpc.HintsServicer):
    """Hints: one at a time, or a stream with feedback."""

    def __init__(self, store: Store, mover: Mover) -> None:
        self._store = store
        self._mover = mover
        self._streams: set[_Stream] = set()
        store.hints.on_settled = self._settled

    async def Hint(self, request: Any, context: Any) -> Any:
        """Take a hint in."""
        return self._take(_client_id(), request)

    async def Cancel(self, request: Any, context: Any) -> Any:
        """Cancel one of the caller's hints."""
        self._store.cancel_hint(_client_id(), request.hint_id)
        return pb.CancelHintReply()

    async def Stream(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        """Answer commands, and tell each hint's outcome, until both sides are done."""
        stream, caller = _Stream(_client_id()), current_caller.get()

        def leave() -> None:
            stream.put(None)

        caller.on_leave.add(leave)
        self._streams.add(stream)
        reader = asyncio.create_task(self._read(stream, requests))
        try:
            while (event := await stream.events.get()) is not None:
                yield event
        finally:
            reader.cancel()
            caller.on_leave.discard(leave)
            self._streams.discard(stream)
            for hint_id in stream.hints:
                with contextlib.suppress(TierdError):  # settled in this very moment
                    self._store.cancel_hint(stream.client_id, hint_id)

    def end_streams(self) -> None:
        """End every stream: the daemon drains."""
        for stream in self._streams:
            stream.put(None)

    async def _read(self, stream: _Stream, requests: AsyncIterator[Any]) -> None:
        try:
            async for command in requests:
                while stream.events.qsize() >= UNREAD_EVENTS_MAX:
                    await asyncio.sleep(UNREAD_CHECK_SECONDS)
                stream.put(self._answer(stream, command))
        finally:
            stream.ended = True
            if not stream.hints:
                stream.put(None)

    def _answer(self, stream: _Stream, command: Any) -> Any:
        event = pb.HintEvent(tag=command.tag)
        try:
            match command.WhichOneof("command"):
                case "hint":
                    ticket = self._take(stream.client_id, command.hint)
                    stream.hints.add(ticket.hint_id)
                    event.ticket.CopyFrom(ticket)
                case "cancel":
                    self._store.cancel_hint(stream.client_id, command.cancel.hint_id)
                    event.cancelled.SetInParent()
                case _:
                    raise InvalidArgument("hint stream: a command is empty or unknown")
        except TierdError as error:
            event.refusal.reason, event.refusal.message = error.reason, str(error)
            if isinstance(error, TierFull):
                event.refusal.retry_after_seconds = error.retry_after_seconds
        return event

    def _take(self, client_id: str, request: Any) -> Any:
        ticket = self._mover.hint(
            client_id,
            request.session,
            deadline_seconds=request.deadline_seconds,
            first_token=request.first_token,
            last_token=request.last_token if request.HasField("last_token") else None,
            confidence=request.confidence if request.HasField("confidence") else 1.0,
            priority=request.priority,
        )
        return pb.HintTicket(
            hint_id=ticket.hint_id,
            pages=ticket.pages,
            estimated_seconds=ticket.estimated_seconds,
            left_cold=ticket.left_cold,
            why=ticket.why,
        )

    def _settled(self, hint: OpenHint, outcome: Outcome) -> None:
        for stream in self._streams:
            if hint.hint_id in stream.hints:
                stream.hints.discard(hint.hint_id)
                settled = pb.HintSettled(hint_id=hint.hint_id, outcome=_OUTCOMES[outcome])
                stream.put(pb.HintEvent(settled=settled))
                if stream.ended and not stream.hints:
                    stream.put(None)


class StatsService(pb_grpc.StatsServicer):
    """Stats: one snapshot, or one every so often."""

    def __init__(self, snapshot: Callable[[], Any]) -> None:
        self._snapshot = snapshot
        self._drained = False
        self._watches: set[asyncio.Event] = set()  # each is set to end its watch

    def end_streams(self) -> None:
        """End every watch: the daemon drains."""
        self._drained = True
        for over in self._watches:
            over.set()

    async def Snapshot(self, request: Any, context: Any) -> Any:
        """Return the figures as they stand."""
        return self._snapshot()

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """Send the figures now and at each interval, until the caller leaves or we drain."""
        seconds = request.interval_seconds
        if not WATCH_SECONDS_MIN <= seconds <= WATCH_SECONDS_MAX:
            raise InvalidArgument(
                f"watch: interval_seconds is {seconds}, must be {WATCH_SECONDS_MIN} to "
                f"{WATCH_SECONDS_MAX:g}"
            )
        over, caller = asyncio.Event(), current_caller.get()
        self._watches.add(over)
        caller.on_leave.add(over.set)
        try:
            while not self._drained and not over.is_set():
                yield self._snapshot()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(over.wait(), seconds)
        finally:
            caller.on_leave.discard(over.set)
            self._watches.discard(over)


class AdminService(pb_grpc.AdminServicer):
    """Admin: drain."""

    def __init__(self, drain: Callable[[], None]) -> None:
        self._drain = drain

    async def Drain(self, request: Any, context: Any) -> Any:
        """End the daemon; this call is answered first."""
        self._drain()
        return pb.DrainReply()
