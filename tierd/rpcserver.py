"""The gRPC server: services, guard, health and reflection on one local socket.

Invariants:
  health says SERVING exactly from `start` to `stop`
  `stop` refuses new calls, ends streams, and gives calls under way their grace
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from tierd.adoption import Offers
from tierd.errors import ConfigError
from tierd.interceptors import CallDone, Guard, Tokens
from tierd.mover import Mover
from tierd.rpc import wire
from tierd.rpc.aio import collect_aio
from tierd.rpc.errors import MESSAGE_BYTES_MAX
from tierd.rpc.v1 import tierd_pb2 as pb
from tierd.rpc.v1 import tierd_pb2_grpc as pb_grpc
from tierd.service import (
    AdminService,
    HintsService,
    PlacementService,
    SessionsService,
    StatsService,
)
from tierd.store import Store

_OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.so_reuseport", 0),
    # Clients with streams ask every 10 s whether we live (tierd/aioclient.py).
    ("grpc.http2.min_ping_interval_without_data_ms", 5000),
    ("grpc.keepalive_permit_without_calls", 1),
)
_UNIX = "unix:"


class RpcServer:
    """Serves one store on `target` ("unix:PATH" or "unix-abstract:NAME")."""

    def __init__(
        self,
        *,
        store: Store,
        mover: Mover,
        boot_id: str,
        target: str,
        in_flight_calls_max: int,
        cold_device: Callable[[], str],
        offers: Callable[[int], Offers],
        drain: Callable[[], None],
        call_done: CallDone,
    ) -> None:
        self.tokens = Tokens(in_flight_calls_max)
        self._store = store
        self._target = target
        self._cold_device = cold_device
        self._started_seconds = time.monotonic()
        self._guard = Guard(self.tokens, boot_id, call_done)
        self._health = health_aio.HealthServicer()
        self._hints = HintsService(store, mover)
        self._server: Any = grpc.aio.server(interceptors=[self._guard], options=_OPTIONS)
        add: Any = pb_grpc
        add.add_SessionsServicer_to_server(SessionsService(store, mover, offers), self._server)
        add.add_PlacementServicer_to_server(PlacementService(store, mover), self._server)
        add.add_HintsServicer_to_server(self._hints, self._server)
        self._stats = StatsService(self.snapshot)
        add.add_StatsServicer_to_server(self._stats, self._server)
        add.add_AdminServicer_to_server(AdminService(drain), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._names = [service.full_name for service in pb.DESCRIPTOR.services_by_name.values()]
        reflection.enable_server_reflection(
            (*self._names, "grpc.health.v1.Health", reflection.SERVICE_NAME), self._server
        )

    async def start(self) -> None:
        """Listen. Raises ConfigError naming the field if the socket cannot be had."""
        try:
            self._server.add_insecure_port(self._target)
        except RuntimeError as error:
            raise ConfigError(f"service.socket: cannot listen at {self._target}") from error
        await self._server.start()
        with contextlib.suppress(FileNotFoundError):  # an abstract socket has no file
            os.chmod(self._target.removeprefix(_UNIX), 0o600)
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)

    async def stop(self, grace_seconds: float) -> None:
        """Refuse new calls, let those under way end within the grace, and close. Idempotent."""
        self._guard.draining = True
        self._stats.end_streams()
        self._hints.end_streams()
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        if self._server is None:
            return
        server, self._server = self._server, None
        await server.stop(grace_seconds)
        del server
        await collect_aio()
        if self._target.startswith(_UNIX):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._target.removeprefix(_UNIX))

    async def _set_health(self, status: Any) -> None:
        for name in ("", *self._names):
            await self._health.set(name, status)

    def snapshot(self) -> Any:
        """Return the figures as they stand, as a message."""
        return wire.snapshot_to_wire(
            self._store.stats(),
            device=self._cold_device(),
            uptime_seconds=time.monotonic() - self._started_seconds,
            clients=len(self.tokens),
        )
