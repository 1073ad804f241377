"""The client's side of the bootstrap socket: hello, a token, and file descriptors.

Invariants:
  one request is under way at a time, and each has a deadline
  an answer carries its request's number: one that came late is never the next one's
  each fd that came is the caller's, kept among `_pushed`, or closed
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tierd.errors import (
    DaemonUnavailable,
    DeadlineExceeded,
    InvalidArgument,
    PermissionDenied,
    error_for_reason,
)
from tierd.memory.fds import peer_credentials, receive_message, send_message

PROTOCOL_VERSION = 1
ENGINE, TOOL = "engine", "tool"
_CONNECT_AGAIN_SECONDS = 0.01  # the daemon's backlog is full: it accepts 64 in far less


def socket_address(path: str) -> str:
    """Return what bind and connect take: "@name" is an abstract socket, which has no file."""
    return f"\0{path[1:]}" if path.startswith("@") else path


@dataclass(frozen=True, slots=True)
class SlabGrant:
    """A slab as passed by the daemon. `fd` is the receiver's to close."""

    tier: int
    slot_bytes: int
    slots: int
    direct: bool
    fd: int


class BootstrapClient:
    """A client's connection to the first door. Thread-safe; every wait has a deadline."""

    def __init__(self, sock: socket.socket, path: str, hello: dict[str, Any], fds: list[int]):
        self._sock = sock
        self._path = path
        self._lock = threading.Lock()
        self._asked = 0
        self._pushed: dict[int, SlabGrant] = {}
        self.token: str = hello["token"]
        self.boot_id: str = hello["boot_id"]
        self.rpc_target: str = hello["rpc"]
        self.engine_id: int = hello["client_id"]
        self.store_uuid: bytes = hello["store_uuid"]
        # Until then a daemon that was started again holds slots for engines that may still come.
        self.claims_end_seconds = time.monotonic() + float(hello.get("claims_seconds", 0.0))
        self.epoch_fd: int | None = fds[0] if fds else None

    @classmethod
    def connect(
        cls, path: str, kind: str = ENGINE, deadline_seconds: float = 5.0
    ) -> BootstrapClient:
        """Connect and say hello.

        Raises DaemonUnavailable naming the socket, PermissionDenied (another
        user's daemon), or what the daemon answers.
        """
        sock = _connected(path, deadline_seconds)
        try:
            request = {"v": PROTOCOL_VERSION, "op": "hello", "kind": kind}
            hello, fds = _exchange(sock, path, {**request, "n": 0}, {})
        except BaseException:
            sock.close()
            raise
        return cls(sock, path, hello, fds)

    def session_fds(self, session_number: int) -> int:
        """Return the page table's fd of a session of this engine; the caller owns it."""
        _, fds = self._ask({"op": "session_fds", "session": session_number})
        if len(fds) != 1:
            raise InvalidArgument(f"the daemon at {self._path} passed {len(fds)} fds, not 1")
        return fds[0]

    def slab(self, slab_id: int) -> SlabGrant:
        """Ask for a slab of this engine's namespaces; the caller owns its fd."""
        fields, fds = self._ask({"op": "slab", "slab": slab_id})
        return _grant(fields, fds)

    def pushed_slab(self, slab_id: int) -> SlabGrant | None:
        """Return a slab that the daemon has sent unasked, or None; the caller owns its fd.

        A new slab is sent before a page in it can be found. Never waits for the daemon.
        """
        with self._lock:
            poll = select.poll()
            poll.register(self._sock, select.POLLIN)
            while slab_id not in self._pushed and poll.poll(0):
                try:
                    received = receive_message(self._sock)
                except OSError:
                    received = None
                if received is None:
                    break  # the daemon has gone: whoever asks it is told so
                _keep(received, self._pushed)
            return self._pushed.pop(slab_id, None)

    @property
    def lost(self) -> bool:
        """Whether the daemon's end is closed. Never waits."""
        if self._sock.fileno() < 0:
            return True
        poll = select.poll()
        poll.register(self._sock, select.POLLRDHUP)
        return bool(poll.poll(0))

    def offer_slab(
        self, slab_id: int, namespace: bytes, slot_bytes: int, slots: int, fd: int
    ) -> None:
        """Pass a warm slab of a dead daemon; the fd stays the caller's."""
        request = {
            "op": "offer_slab", "slab": slab_id, "namespace": namespace,
            "slot_bytes": slot_bytes, "slots": slots,
        }  # fmt: skip
        self._ask(request, (fd,))

    def offer_table(self, session_number: int, fd: int) -> None:
        """Pass a session's page table of a dead daemon; the fd stays the caller's."""
        self._ask({"op": "offer_table", "session": session_number}, (fd,))

    def _ask(
        self, request: dict[str, Any], fds: Sequence[int] = ()
    ) -> tuple[dict[str, Any], list[int]]:
        with self._lock:
            self._asked += 1
            numbered = {**request, "n": self._asked}
            return _exchange(self._sock, self._path, numbered, self._pushed, fds)

    def close(self) -> None:
        """Close the connection: the daemon frees all that this client held. Idempotent."""
        self._sock.close()
        while self._pushed:
            _, grant = self._pushed.popitem()
            os.close(grant.fd)


def _grant(fields: dict[str, Any], fds: list[int]) -> SlabGrant:
    return SlabGrant(
        fields["tier"], fields["slot_bytes"], fields["slots"], fields["direct"],
        fds[0] if fds else -1,
    )  # fmt: skip


def _keep(received: tuple[dict[str, Any], list[int]], pushed: dict[int, SlabGrant]) -> None:
    """Take in what is not the answer: a slab that was pushed, or an answer nobody waits for."""
    fields, fds = received
    slab = fields.get("slab")
    if fields.get("op") == "slab" and isinstance(slab, int) and len(fds) == 1:
        pushed[slab] = _grant(fields, fds)
        return
    for fd in fds:
        os.close(fd)


def _answers(fields: dict[str, Any], request: dict[str, Any]) -> bool:
    """Say whether a message answers the request; one without a number is a refusal at the door."""
    return "op" not in fields and fields.get("n", -1) in (request["n"], -1)


def _connected(path: str, deadline_seconds: float) -> socket.socket:
    give_up_at = time.monotonic() + deadline_seconds
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        sock.settimeout(deadline_seconds)
        while True:
            try:
                sock.connect(socket_address(path))
                break
            except BlockingIOError:
                if time.monotonic() >= give_up_at:
                    raise
                time.sleep(_CONNECT_AGAIN_SECONDS)
        _, uid, _ = peer_credentials(sock)
        if uid not in (os.getuid(), 0):
            raise PermissionDenied(f"the daemon at {path} is another user's (uid {uid})")
    except OSError as error:
        sock.close()
        raise DaemonUnavailable(f"no daemon answers at {path}: {error.strerror or error}") from None
    except PermissionDenied:
        sock.close()
        raise
    return sock


def _exchange(
    sock: socket.socket,
    path: str,
    request: dict[str, Any],
    pushed: dict[int, SlabGrant],
    fds: Sequence[int] = (),
) -> tuple[dict[str, Any], list[int]]:
    try:
        try:
            send_message(sock, request, fds)
        except DaemonUnavailable:
            received = receive_message(sock)  # it may have said why before it closed
        else:
            received = receive_message(sock)
            while received is not None and not _answers(received[0], request):
                _keep(received, pushed)
                received = receive_message(sock)
    except TimeoutError:
        raise DeadlineExceeded(f"the daemon at {path} does not answer") from None
    except OSError as error:
        raise DaemonUnavailable(f"the daemon at {path} is gone: {error.strerror}") from None
    if received is None:
        raise DaemonUnavailable(f"the daemon at {path} has closed the connection")
    fields, passed = received
    if "error" in fields:
        for fd in passed:
            os.close(fd)
        raise error_for_reason(str(fields["error"]), str(fields.get("message", "")))
    return fields, passed
