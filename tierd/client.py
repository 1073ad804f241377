"""The client: sessions, placement, hints and stats of a daemon, over its two sockets.

Needs grpc, msgpack and numpy, no more. Control goes by gRPC; page tables, slabs and
the epoch word are mapped, from fds that the bootstrap connection passes.

Invariants:
  every call has a deadline; a dead daemon is DaemonUnavailable, never a hang
  only reads are tried again
  what is mapped stays mapped until `close`; the daemon's side frees its bytes by itself
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt

from tierd.errors import DaemonUnavailable, InvalidArgument, NotFound, TierdError
from tierd.memory.epochs import EpochWriter
from tierd.memory.memfd import Mapping
from tierd.memory.pagetable import PageTableReader
from tierd.rpc import wire
from tierd.rpc.calls import (
    CALL_SECONDS,
    CHANNEL_OPTIONS,
    call_metadata,
    check_boot_id,
    hint_request,
    ticket_to_dict,
    typed_error,
)
from tierd.rpc.handshake import BootstrapClient
from tierd.rpc.v1 import tierd_pb2 as pb
from tierd.rpc.v1 import tierd_pb2_grpc as pb_grpc
from tierd.types import CodecId, Namespace, Tier

# 64 MiB/s is the slowest memory we promise for: 16 MiB of token ids and 64 MiB of headers.
SUSPEND_SECONDS = 10.0
SLOWEST_BYTES_PER_SECOND = 64 << 20  # the slowest disk that the daemon promises for
SUSPEND_SECONDS_MAX = 600.0
READ_TRIES = 3
_BACKOFF_SECONDS = 0.02  # times 0.5 to 1.5, doubled at each try


class MappedSlab:
    """A slab in this process. Warm: mapped, `address` of its first byte. Cold: `fd` to read.

    `fd` is -1 for a warm slab, `address` 0 for a cold one. `direct`: `fd` is
    O_DIRECT, so offsets, lengths and addresses must be multiples of 4 KiB.
    """

    def __init__(self, tier: Tier, slot_bytes: int, slots: int, direct: bool, fd: int) -> None:
        self.tier, self.slot_bytes, self.slots, self.direct = tier, slot_bytes, slots, direct
        self.fd, self.address = fd, 0
        self._mapping: Mapping | None = None
        if tier is Tier.WARM:
            try:
                self._mapping = Mapping(fd, slot_bytes * slots, writable=True)
            finally:
                os.close(fd)
                self.fd = -1
            self.address = self._mapping.address

    def close(self) -> None:
        """Unmap or close. Idempotent."""
        if self._mapping is not None:
            self._mapping.close()
            self._mapping, self.address = None, 0
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


@dataclass(frozen=True, slots=True, eq=False)
class Demotion:
    """Warm slots lent for `blocks`. Arrays: codec uint8 [blocks], the rest uint32 [blocks, layers].

    Ends in `SessionHandle.commit` or `.abort`.
    """

    reservation: int
    blocks: list[int]
    codec: npt.NDArray[np.uint8]
    slab: npt.NDArray[np.uint32]
    slot: npt.NDArray[np.uint32]
    generation: npt.NDArray[np.uint32]


class Client:
    """A connection to one daemon. Thread-safe; use as a context, or `close` it.

    kind "engine": may own sessions, has `epochs`; what it holds ends with the
    connection. kind "tool": reads, hints and drains. `rpc_count` counts gRPC
    calls and requests for fds.
    """

    def __init__(self, bootstrap: BootstrapClient, socket: str) -> None:
        self.socket = socket
        self.boot_id = bootstrap.boot_id
        self.engine_id = bootstrap.engine_id
        self.store_uuid = bootstrap.store_uuid
        self.epochs: EpochWriter | None = None
        self.rpc_count = 0
        self._bootstrap = bootstrap
        self._lock = threading.Lock()
        self._slabs_lock = threading.Lock()  # held while a slab is asked for; calls go on
        self._slabs: dict[int, MappedSlab] = {}
        self._closed = False
        if bootstrap.epoch_fd is not None:
            self.epochs = EpochWriter(bootstrap.epoch_fd)
            os.close(bootstrap.epoch_fd)
        self._metadata = call_metadata(bootstrap)
        self._channel = grpc.insecure_channel(bootstrap.rpc_target, options=CHANNEL_OPTIONS)
        stubs: Any = pb_grpc  # generated without types
        self._sessions = stubs.SessionsStub(self._channel)
        self._placement = stubs.PlacementStub(self._channel)
        self._hints = stubs.HintsStub(self._channel)
        self._stats = stubs.StatsStub(self._channel)
        self._admin = stubs.AdminStub(self._channel)

    @classmethod
    def connect(cls, socket: str, *, kind: str = "engine", deadline_seconds: float = 5.0) -> Client:
        """Connect to the daemon at `socket`.

        Raises DaemonUnavailable naming the socket, PermissionDenied (another
        user's), TierFull (too many clients).
        """
        return cls(BootstrapClient.connect(socket, kind, deadline_seconds), socket)

    # -- sessions ---------------------------------------------------------------
    def open_session(self, namespace: Namespace, max_tokens: int) -> SessionHandle:
        """Open a session of at most `max_tokens` tokens. Raises InvalidArgument, TierFull."""
        request = wire.request(
            pb.OpenRequest, namespace=wire.namespace_to_wire(namespace), max_tokens=max_tokens
        )
        reply = self.call(self._sessions.Open, request)
        return self._handle(reply.session, namespace, b"", 0)

    def resume(self, session_id: str, namespace: Namespace, max_tokens: int) -> SessionHandle:
        """Take over a suspended session.

        The handle's `token_ids` and `sealed_blocks` say what it holds. Raises
        NotFound, LayoutMismatch (other namespace), StaleGeneration (not suspended).
        """
        number = wire.session_number(session_id)
        request = wire.request(
            pb.ResumeRequest,
            session=number,
            namespace=wire.namespace_to_wire(namespace),
            max_tokens=max_tokens,
        )
        reply = self.call(self._sessions.Resume, request, SUSPEND_SECONDS)
        return self._handle(number, namespace, reply.token_ids, reply.sealed_blocks)

    def _handle(
        self, number: int, namespace: Namespace, token_ids: bytes, sealed_blocks: int
    ) -> SessionHandle:
        self._count()
        try:
            fd = self._bootstrap.session_fds(number)
            try:
                table = PageTableReader(fd)
            finally:
                os.close(fd)
        except (TierdError, OSError):
            with contextlib.suppress(TierdError):  # what made the handle fail is what is heard
                self.call(self._sessions.Close, pb.CloseRequest(session=number, owned=True))
            raise
        ids = wire.token_ids_from_wire(token_ids)
        return SessionHandle(self, number, namespace, table, ids, sealed_blocks)

    def sessions(self) -> list[dict[str, Any]]:
        """Return a row for each session the daemon keeps, oldest first."""
        reply = self._read(self._sessions.List, pb.ListRequest())
        return [wire.session_info_to_dict(info) for info in reply.sessions]

    def session(self, session_id: str) -> dict[str, Any]:
        """Return one session's row. Raises NotFound."""
        request = pb.GetRequest(session=wire.session_number(session_id))
        return wire.session_info_to_dict(self._read(self._sessions.Get, request))

    def close_session(self, session_id: str) -> None:
        """Drop a session and all it holds, an operator's way. Raises NotFound."""
        request = pb.CloseRequest(session=wire.session_number(session_id))
        self.call(self._sessions.Close, request)

    # -- hints, stats, admin ------------------------------------------------------
    def hint(
        self,
        session_id: str,
        *,
        deadline_seconds: float,
        first_token: int = 0,
        last_token: int | None = None,
        confidence: float = 1.0,
        priority: int = 0,
    ) -> dict[str, Any]:
        """Ask for a suspended or idle session's cold pages by a deadline from now.

        Returns hint_id, pages (to be moved) and estimated_seconds. The hint
        ends with this client. Raises NotFound, InvalidArgument, TierFull (throttled).
        """
        request = hint_request(
            session_id, deadline_seconds, first_token, last_token, confidence, priority
        )
        return ticket_to_dict(self.call(self._hints.Hint, request))

    def cancel_hint(self, hint_id: int) -> None:
        """Cancel a hint of this client. Raises NotFound if it is settled or unknown."""
        self.call(self._hints.Cancel, wire.request(pb.CancelHintRequest, hint_id=hint_id))

    def stats(self) -> dict[str, Any]:
        """Return tiers, counts, hints: tierd/census.py has the shape; tiers have `device` too."""
        return wire.snapshot_to_dict(self._read(self._stats.Snapshot, pb.SnapshotRequest()))

    def drain(self) -> None:
        """Ask the daemon to take no more work and to end."""
        self.call(self._admin.Drain, pb.DrainRequest())

    # -- memory -------------------------------------------------------------------
    def slab(self, slab_id: int) -> MappedSlab:
        """Return a slab of a namespace in which this client has a session; cached.

        New slabs have been sent by the daemon before a page in them is found, so
        this seldom asks for one (which counts as a call). Raises NotFound, DaemonUnavailable.
        """
        with self._slabs_lock:
            slab = self._slabs.get(slab_id)
            if slab is None:
                grant = self._bootstrap.pushed_slab(slab_id)
                if grant is None:
                    self._count()
                    grant = self._bootstrap.slab(slab_id)
                slab = MappedSlab(
                    Tier(grant.tier), grant.slot_bytes, grant.slots, grant.direct, grant.fd
                )
                self._slabs[slab_id] = slab
            return slab

    # -- calls --------------------------------------------------------------------
    def call(self, method: Any, request: Any, deadline_seconds: float = CALL_SECONDS) -> Any:
        """Make one call; its error is one of tierd.errors."""
        self._count()
        try:
            reply, call = method.with_call(
                request, timeout=deadline_seconds, metadata=self._metadata
            )
        except grpc.RpcError as failure:
            raise typed_error(failure, self.boot_id, self.socket) from None
        except ValueError:  # grpc's way to say that the channel is closed
            raise DaemonUnavailable(f"this client of {self.socket} is closed") from None
        check_boot_id(call.trailing_metadata(), self.boot_id, self.socket)
        return reply

    def _read(self, method: Any, request: Any) -> Any:
        """Make a call that changes nothing, so that it may be tried again."""
        for attempt in range(1, READ_TRIES):
            try:
                return self.call(method, request)
            except DaemonUnavailable as error:
                if error.grpc_code != "UNAVAILABLE":
                    raise  # a deadline has passed already
                time.sleep(_BACKOFF_SECONDS * 2**attempt * random.uniform(0.5, 1.5))
        return self.call(method, request)

    def _count(self) -> None:
        with self._lock:
            self.rpc_count += 1

    def close(self) -> None:
        """Leave: the daemon frees all that this client held. Idempotent.

        Nothing of a slab, table or epoch may be in use any more.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._channel.close()
        self._bootstrap.close()
        with self._slabs_lock:
            slabs, self._slabs = self._slabs, {}
        for slab in slabs.values():
            slab.close()
        if self.epochs is not None:
            self.epochs.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class SessionHandle:
    """A session that this client owns. Used by one thread at a time.

    `id`: 16 hex digits; `number`: the same as an int, as in headers and page keys.
    `token_ids`, `sealed_blocks`: of the last suspension; empty for a new session.
    """

    def __init__(
        self,
        client: Client,
        number: int,
        namespace: Namespace,
        table: PageTableReader,
        token_ids: npt.NDArray[np.uint32],
        sealed_blocks: int,
    ) -> None:
        self._client = client
        self._placement = client._placement
        self._sessions = client._sessions
        self.number = number
        self.id = wire.session_id(number)
        self.namespace = namespace
        self.store_uuid = client.store_uuid
        self.table = table
        self.token_ids = token_ids
        self.sealed_blocks = sealed_blocks
        self._open = True

    def plan_demotion(
        self,
        hot_blocks: Sequence[int],
        need_blocks: int,
        *,
        codec: CodecId | None = None,
        include_first: bool = False,
        deadline_seconds: float = 10.0,
    ) -> Demotion:
        """Borrow warm slots for up to `need_blocks` of `hot_blocks`, at least one block.

        Call it outside a step. `codec` RAW: for pages that the namespace's
        cannot encode. Raises TierFull when no room came by the deadline,
        BudgetTooSmall when none ever can, InvalidArgument, DaemonUnavailable.
        """
        request = wire.request(
            pb.PlanDemotionRequest,
            session=self.number,
            hot_blocks=hot_blocks,
            need_blocks=need_blocks,
            codec=wire.codec_to_wire(codec),
            include_first=include_first,
        )
        reply = self._client.call(self._placement.PlanDemotion, request, deadline_seconds)
        blocks = list(reply.blocks)
        return Demotion(
            reservation=reply.reservation,
            blocks=blocks,
            codec=np.frombuffer(reply.codecs, dtype=np.uint8),
            slab=wire.u32_column(reply.slabs, len(blocks)),
            slot=wire.u32_column(reply.slots, len(blocks)),
            generation=wire.u32_column(reply.generations, len(blocks)),
        )

    def commit(self, demotion: Demotion, digests: npt.NDArray[np.uint8]) -> None:
        """Publish a demotion's pages; digests uint8 [blocks, layers, 16] of their payloads.

        Raises StaleGeneration if it was revoked: the pages are not kept.
        """
        expected = (*demotion.slab.shape, 16)
        if digests.shape != expected or digests.dtype != np.uint8:
            raise InvalidArgument(f"digests: uint8 {expected} expected, not {digests.shape}")
        request = pb.CommitRequest(reservation=demotion.reservation, digests=digests.tobytes())
        self._client.call(self._placement.Commit, request)

    def abort(self, demotion: Demotion) -> None:
        """Give a demotion's slots back; they are written no more. Raises StaleGeneration."""
        request = pb.AbortRequest(reservation=demotion.reservation)
        self._client.call(self._placement.Abort, request)

    def promote(self, blocks: Sequence[int], *, deadline_seconds: float = 10.0) -> int:
        """Bring these blocks' cold pages to warm; return how many of their pages are warm then.

        Fewer than all is a result: there was no room, or no time.
        """
        request = wire.request(pb.PromoteRequest, session=self.number, blocks=blocks)
        reply = self._client.call(self._placement.Promote, request, deadline_seconds)
        return int(reply.warm_pages)

    def truncate(self, first_block: int, *, damaged_layer: int | None = None) -> None:
        """Drop every page of blocks >= first_block.

        `damaged_layer`: that layer's page of `first_block` was found damaged.
        """
        request = wire.request(
            pb.TruncateRequest,
            session=self.number,
            first_block=first_block,
            damaged_layer=damaged_layer,
        )
        self._client.call(self._sessions.Truncate, request)

    def suspend(self, token_ids: npt.NDArray[np.uint32], sealed_blocks: int) -> None:
        """Leave the session to the daemon: token ids uint32 [tokens], and its sealed blocks.

        Every page of these blocks must be committed: PageMiss names one that
        is not. Where the daemon's cold tier outlives it, this returns when all of
        it is on disk; TierFull and StorageError leave the session with this client.
        The handle is closed after this.
        """
        size_bytes = sealed_blocks * self.namespace.geometry.block_bytes
        seconds = min(SUSPEND_SECONDS + size_bytes / SLOWEST_BYTES_PER_SECOND, SUSPEND_SECONDS_MAX)
        request = wire.request(
            pb.SuspendRequest,
            session=self.number,
            token_ids=wire.token_ids_to_wire(token_ids),
            sealed_blocks=sealed_blocks,
        )
        self._client.call(self._sessions.Suspend, request, seconds)
        self._end()

    def close(self, *, discard: bool = False) -> None:
        """End the session, if this client still owns it. Idempotent.

        It is dropped with all it holds; one that was resumed stays as it was last
        suspended, unless `discard`. A daemon that is gone, or has closed the session
        already, is no error: there is nothing left to free.
        """
        if not self._open:
            return
        try:
            request = pb.CloseRequest(session=self.number, owned=True, discard=discard)
            self._client.call(self._sessions.Close, request)
        except (DaemonUnavailable, NotFound):
            pass
        finally:
            self._end()

    def _end(self) -> None:
        self._open = False
        self.table.close()
