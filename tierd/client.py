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
from collections.abc import Callable
from types import TracebackType
from typing import Any

import grpc
import numpy as np

from tierd.errors import DaemonUnavailable, TierdError
from tierd.handle import SUSPEND_SECONDS, Demotion, SessionHandle
from tierd.memory.epochs import EpochWriter
from tierd.memory.memfd import Mapping
from tierd.memory.pagetable import PageTableReader
from tierd.openfiles import CLIENT_FILES, require_files
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
from tierd.rpc.handshake import ENGINE, BootstrapClient
from tierd.rpc.v1 import tierd_pb2 as pb
from tierd.rpc.v1 import tierd_pb2_grpc as pb_grpc
from tierd.types import Namespace, Tier

ROOM_SECONDS = 10.0  # a spill of the mover's takes 1/16 s on the slowest disk
READ_TRIES = 3
_BACKOFF_SECONDS = 0.02  # times 0.5 to 1.5, doubled at each try


class MappedSlab:
    """A slab in this process. Warm: mapped, `address` of its first byte. Cold: `fd` to read.

    A warm slab's `fd` is kept for the next daemon; `address` is 0 for a cold one. `direct`:
    `fd` is O_DIRECT, so offsets, lengths and addresses must be multiples of 4 KiB.
    """

    def __init__(self, tier: Tier, slot_bytes: int, slots: int, direct: bool, fd: int) -> None:
        self.tier, self.slot_bytes, self.slots, self.direct = tier, slot_bytes, slots, direct
        self.fd, self.address = fd, 0
        self._mapping: Mapping | None = None
        if tier is Tier.WARM:
            try:
                self._mapping = Mapping(fd, slot_bytes * slots, writable=True)
            except TierdError:
                os.close(fd)
                raise
            self.address = self._mapping.address

    def close(self) -> None:
        """Unmap or close. Idempotent."""
        if self._mapping is not None:
            self._mapping.close()
            self._mapping, self.address = None, 0
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Client:
    """A connection to one daemon. Thread-safe; use as a context, or `close` it.

    kind "engine": may own sessions, has `epochs`; what it holds ends with the
    connection; when its daemon is gone, `reconnect`, or open a new one. kind "tool": reads,
    hints and drains; it joins the daemon that answers by then by itself (its hints ended with
    the last one). `rpc_count` counts gRPC calls and requests for fds.
    """

    def __init__(self, bootstrap: BootstrapClient, socket: str, kind: str = "engine") -> None:
        self.socket = socket
        self.rpc_count = 0
        self._kind = kind
        self._lock = threading.Lock()
        self._slabs_lock = threading.Lock()  # held while a slab is asked for; calls go on
        self._slabs: dict[int, MappedSlab] = {}
        self.unmapping: list[Callable[[], None]] = []  # called before slabs are unmapped
        self._closed = False
        self._renewing = threading.Lock()  # held while a tool connects, which has a deadline
        self._attach(bootstrap)

    def _attach(self, bootstrap: BootstrapClient) -> None:
        self._bootstrap = bootstrap
        self.boot_id = bootstrap.boot_id
        self.engine_id = bootstrap.engine_id
        self.store_uuid = bootstrap.store_uuid
        self.epochs: EpochWriter | None = None
        if bootstrap.epoch_fd is not None:
            self.epochs = EpochWriter(bootstrap.epoch_fd)
            os.close(bootstrap.epoch_fd)
        self._metadata = call_metadata(bootstrap)
        self._channel = grpc.insecure_channel(bootstrap.rpc_target, options=CHANNEL_OPTIONS)
        stubs: Any = pb_grpc  # generated without types
        self.sessions_stub = stubs.SessionsStub(self._channel)
        self.placement = stubs.PlacementStub(self._channel)
        self._hints = stubs.HintsStub(self._channel)
        self._stats = stubs.StatsStub(self._channel)
        self._admin = stubs.AdminStub(self._channel)

    @classmethod
    def connect(cls, socket: str, *, kind: str = "engine", deadline_seconds: float = 5.0) -> Client:
        """Connect to the daemon at `socket`.

        Raises DaemonUnavailable naming the socket, PermissionDenied (another
        user's), TierFull (too many clients), StorageError (too few files may be open).
        """
        require_files(CLIENT_FILES, "a client of a daemon")
        return cls(BootstrapClient.connect(socket, kind, deadline_seconds), socket, kind)

    # -- another daemon -----------------------------------------------------------
    @property
    def lost(self) -> bool:
        """Whether the daemon is gone: it has closed, or its process has ended. Never waits."""
        return self._bootstrap.lost

    @property
    def room_seconds(self) -> float:
        """How long a demotion may wait for room: longer just after the daemon was started again."""
        held_seconds = self._bootstrap.claims_end_seconds - time.monotonic()
        return ROOM_SECONDS + max(0.0, held_seconds)

    def reconnect(self, *, deadline_seconds: float = 5.0) -> None:
        """Connect to the daemon that answers at `socket` now, after the last one was lost.

        No step may be running, and no other thread use this client. Slabs stay mapped if
        the store is the same; each session is then handed back (`SessionHandle.hand_back`).
        Raises DaemonUnavailable: nothing is changed.
        """
        bootstrap = BootstrapClient.connect(self.socket, self._kind, deadline_seconds)
        old_uuid = self.store_uuid
        self._channel.close()
        self._bootstrap.close()
        if self.epochs is not None:
            self.epochs.close()
        self._attach(bootstrap)
        if self.store_uuid != old_uuid:
            self._drop_slabs()

    def offer(
        self, table_fd: int, session_number: int, table: PageTableReader, namespace: bytes
    ) -> None:
        """Pass a session's page table, and the warm slabs it names, to a new daemon."""
        view, _ = table.read_left(table.max_blocks)
        for slab_id in np.unique(view.slab[view.tier == Tier.WARM]).tolist():
            slab = self._slabs.get(slab_id)
            if slab is not None and slab.tier is Tier.WARM:
                self._bootstrap.offer_slab(slab_id, namespace, slab.slot_bytes, slab.slots, slab.fd)
        self._bootstrap.offer_table(session_number, table_fd)

    def table_fd(self, session_number: int) -> int:
        """Return the fd of a session's page table; it is the caller's."""
        self._count()
        return self._bootstrap.session_fds(session_number)

    # -- sessions ---------------------------------------------------------------
    def open_session(self, namespace: Namespace, max_tokens: int) -> SessionHandle:
        """Open a session of at most `max_tokens` tokens. Raises InvalidArgument, TierFull."""
        return self._handle(self.open_number(namespace, max_tokens), namespace, b"", 0)

    def open_number(self, namespace: Namespace, max_tokens: int) -> int:
        """Open a session and return its number alone."""
        request = wire.request(
            pb.OpenRequest, namespace=wire.namespace_to_wire(namespace), max_tokens=max_tokens
        )
        number: int = self.call(self.sessions_stub.Open, request).session
        return number

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
        reply = self.call(self.sessions_stub.Resume, request, SUSPEND_SECONDS)
        return self._handle(number, namespace, reply.token_ids, reply.sealed_blocks)

    def _handle(
        self, number: int, namespace: Namespace, token_ids: bytes, sealed_blocks: int
    ) -> SessionHandle:
        ids = wire.token_ids_from_wire(token_ids)
        try:
            fd = self.table_fd(number)
            try:
                return SessionHandle(self, number, namespace, fd, ids, sealed_blocks)
            except BaseException:
                os.close(fd)
                raise
        except (TierdError, OSError):
            with contextlib.suppress(TierdError):  # what made the handle fail is what is heard
                self.call(self.sessions_stub.Close, pb.CloseRequest(session=number, owned=True))
            raise

    def sessions(self) -> list[dict[str, Any]]:
        """Return a row for each session the daemon keeps, oldest first."""
        reply = self._read(lambda: self.sessions_stub.List, pb.ListRequest())
        return [wire.session_info_to_dict(info) for info in reply.sessions]

    def session(self, session_id: str) -> dict[str, Any]:
        """Return one session's row. Raises NotFound."""
        request = pb.GetRequest(session=wire.session_number(session_id))
        return wire.session_info_to_dict(self._read(lambda: self.sessions_stub.Get, request))

    def close_session(self, session_id: str) -> None:
        """Drop a session and all it holds, an operator's way. Raises NotFound."""
        request = pb.CloseRequest(session=wire.session_number(session_id))
        self._renew()
        self.call(self.sessions_stub.Close, request)

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

        Returns hint_id, pages (that are cold), moving and left_cold, about: those that
        come up, and those which find no room in warm, with why ("" if none);
        estimated_seconds, None if nothing moves. The hint ends with this client.
        Raises NotFound, InvalidArgument, TierFull (throttled).
        """
        request = hint_request(
            session_id, deadline_seconds, first_token, last_token, confidence, priority
        )
        self._renew()
        return ticket_to_dict(self.call(self._hints.Hint, request))

    def cancel_hint(self, hint_id: int) -> None:
        """Cancel a hint of this client. Raises NotFound if it is settled or unknown."""
        self._renew()
        self.call(self._hints.Cancel, wire.request(pb.CancelHintRequest, hint_id=hint_id))

    def stats(self) -> dict[str, Any]:
        """Return tiers, counts, hints: tierd/census.py has the shape; tiers have `device` too."""
        return wire.snapshot_to_dict(self._read(lambda: self._stats.Snapshot, pb.SnapshotRequest()))

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
            raise self._error(failure) from None
        except ValueError:  # grpc's way to say that the channel is closed
            raise DaemonUnavailable(f"this client of {self.socket} is closed") from None
        check_boot_id(call.trailing_metadata(), self.boot_id, self.socket)
        return reply

    def _error(self, failure: grpc.RpcError) -> TierdError:
        error = typed_error(failure, self.boot_id, self.socket)
        is_lost = self._kind == ENGINE and error.grpc_code == "UNAVAILABLE" and self.lost
        if not is_lost:
            return error
        return DaemonUnavailable(
            f"the daemon at {self.socket} that this client joined is gone, or restarted; the next "
            "is joined by a new Client, or by Client.reconnect"
        )

    def _renew(self) -> None:
        """Let a tool join the daemon that answers now, if its last one is gone.

        Raises DaemonUnavailable: nothing is changed. An engine has sessions to hand back first.
        """
        if self._kind == ENGINE or self._closed or not self.lost:
            return
        with self._renewing:
            if self.lost:  # still: no other thread has
                self.reconnect(deadline_seconds=CALL_SECONDS)

    def _read(self, method: Callable[[], Any], request: Any) -> Any:
        """Make a call that changes nothing, so that it may be tried again, on the next daemon too.

        `method` gives its stub, once connected.
        """
        for attempt in range(1, READ_TRIES):
            try:
                self._renew()
                return self.call(method(), request)
            except DaemonUnavailable as error:
                if error.grpc_code != "UNAVAILABLE":
                    raise  # a deadline has passed already
                time.sleep(_BACKOFF_SECONDS * 2**attempt * random.uniform(0.5, 1.5))
        self._renew()
        return self.call(method(), request)

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
        self._drop_slabs()
        if self.epochs is not None:
            self.epochs.close()

    def _drop_slabs(self) -> None:
        with self._slabs_lock:
            slabs, self._slabs = self._slabs, {}
        for told in self.unmapping:
            told()
        for slab in slabs.values():
            slab.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


__all__ = ["Client", "Demotion", "MappedSlab", "SessionHandle"]
