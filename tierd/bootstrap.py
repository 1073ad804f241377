"""Bootstrap: the first door. Checks who comes, gives a token, and passes file descriptors.

Invariants:
  one connection is one client; what it was given ends when the connection or its process does
  an engine gets the fds of its own sessions and namespaces, no others
  the end of a client is told exactly once

A unix SOCK_SEQPACKET socket in a private folder. The connection stays open for
the client's life: its close, or the client's pidfd, tells of its death at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import secrets
import socket
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tierd.errors import (
    ConfigError,
    InvalidArgument,
    PermissionDenied,
    StorageError,
    TierdError,
    TierFull,
)
from tierd.memory.fds import peer_credentials, receive_message, send_message
from tierd.openfiles import daemon_cannot_open, said_by_daemon
from tierd.rpc.handshake import ENGINE, PROTOCOL_VERSION, TOOL, socket_address

_BACKLOG = 64
# A client says hello at once; one that does not, stopped in between, takes another's place.
_HELLO_SECONDS = 10.0
# Without a free fd the listener stays readable: look again later, or the loop does nothing else.
_NO_FDS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_ACCEPT_AGAIN_SECONDS = 0.1
# 2 s of the 5 that a client waits for its hello: then it hears what is wrong.
_ACCEPT_TRIES_MAX = 20
# Linux 6.5's socket option for a race-free pidfd of the peer; Python 3.11 has no name for it.
_SO_PEERPIDFD = 77
# A client reads what was pushed when it needs a slab, or asks for something. Until then it
# waits in the socket's buffer, which must keep room for an answer: 64 packets are 50 KiB of 200.
_PUSHED_MAX = 64


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the other end. `token` opens the gRPC service for this client alone."""

    client_id: int
    kind: str
    pid: int
    token: str


@dataclass(frozen=True, slots=True)
class Reply:
    """A message and the fds that go with it. The fds stay the sender's."""

    fields: dict[str, Any]
    fds: tuple[int, ...] = ()


class Host(Protocol):
    """What the daemon does for the clients of its first door."""

    def admit(self, peer: Peer) -> Reply:
        """Take a client in. Raises TierdError to turn it away."""

    def answer(self, peer: Peer, request: dict[str, Any], fds: Sequence[int]) -> Reply:
        """Answer one request; `fds` are closed after it. Raises TierdError."""

    def depart(self, peer: Peer) -> None:
        """A client is gone: free all it held."""


@dataclass(slots=True, eq=False)
class _Connection:
    sock: socket.socket
    pid: int
    pidfd: int
    peer: Peer | None = None
    pushed: int = 0
    watched: list[int] = field(default_factory=list)


class BootstrapServer:
    """Has `path` from the start; answers from `serve` on. For the event loop's thread alone."""

    def __init__(self, path: str, host: Host, *, connections_max: int) -> None:
        self.path = path
        self._host = host
        self._connections_max = connections_max
        self._connections: set[_Connection] = set()
        self._next_client = 1
        self._tries = 0  # to accept, one after the other, in vain
        self._loop = asyncio.get_running_loop()
        self._listener = _listen(path)
        self._spare_fd = _spare_fd()  # gives way to the socket of who is told that none is left

    def serve(self) -> None:
        """Let clients in; who came before has waited in the backlog."""
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:  # else the peer gave up between poll and accept
            if error.errno in _NO_FDS:
                self._wait_for_fds(error)
            return
        self._tries = 0
        sock.setblocking(False)
        try:
            pid, uid, _ = peer_credentials(sock)
            if uid not in (os.getuid(), 0):
                raise PermissionDenied(f"user {uid} may not use this daemon")
            if len(self._connections) >= self._connections_max:
                raise TierFull(f"{self._connections_max} clients are connected already")
            with said_by_daemon():
                connection = _Connection(sock, pid, _pidfd_of(sock, pid))
        except (TierdError, OSError) as error:
            _refuse(sock, error)
            return
        self._connections.add(connection)
        self._watch(connection, sock.fileno(), self._receive)
        self._watch(connection, connection.pidfd, self._end)
        self._loop.call_later(_HELLO_SECONDS, self._end_if_silent, connection)

    def _wait_for_fds(self, error: OSError) -> None:
        """Look again later; after some tries in vain, refuse who has waited longest."""
        self._loop.remove_reader(self._listener.fileno())
        self._loop.call_later(_ACCEPT_AGAIN_SECONDS, self.serve)
        self._tries += 1
        if self._tries < _ACCEPT_TRIES_MAX:
            return
        if self._spare_fd >= 0:
            os.close(self._spare_fd)
        with contextlib.suppress(OSError):  # the spare fd was none, or another thread has it
            sock, _ = self._listener.accept()
            _refuse(sock, daemon_cannot_open(error))
        self._spare_fd = _spare_fd()

    def push(self, client_id: int, message: Reply) -> None:
        """Send a client what it did not ask for; dropped if it reads nothing: it may still ask."""
        for connection in self._connections:
            if connection.peer is None or connection.peer.client_id != client_id:
                continue
            if connection.pushed < _PUSHED_MAX:
                connection.pushed += 1
                with contextlib.suppress(TierdError):  # its end is noticed elsewhere
                    send_message(connection.sock, message.fields, message.fds)

    def _watch(
        self, connection: _Connection, fd: int, action: Callable[[_Connection], None]
    ) -> None:
        connection.watched.append(fd)
        self._loop.add_reader(fd, action, connection)

    def _receive(self, connection: _Connection) -> None:
        try:
            with said_by_daemon():
                received = receive_message(connection.sock)
        except BlockingIOError:
            return
        except StorageError as error:  # its fds found no room here, and it is not known what it is
            self._answer(connection, Reply(_said(error)))
            return
        except (OSError, InvalidArgument):
            received = None
        if received is None:
            self._end(connection)
            return
        request, fds = received
        connection.pushed = 0  # who asks reads all that came before the answer
        try:
            with said_by_daemon():
                reply = self._reply(connection, request, fds)
        except TierdError as error:
            reply = Reply(_said(error))
        except BaseException:
            self._end(connection)  # a mistake of ours: let the client know now, not in 5 s
            raise
        finally:
            for fd in fds:  # who wants one has copied it
                os.close(fd)
        self._answer(connection, reply, request.get("n", -1))

    def _answer(self, connection: _Connection, reply: Reply, number: int = -1) -> None:
        try:
            send_message(connection.sock, {**reply.fields, "n": number}, reply.fds)
        except TierdError:
            self._end(connection)

    def _reply(self, connection: _Connection, request: dict[str, Any], fds: Sequence[int]) -> Reply:
        if connection.peer is not None:
            return self._host.answer(connection.peer, request, fds)
        if request.get("op") != "hello" or request.get("kind") not in (ENGINE, TOOL):
            raise InvalidArgument("a client says hello first, as engine or tool")
        if request.get("v") != PROTOCOL_VERSION:
            raise InvalidArgument(f"the daemon speaks bootstrap version {PROTOCOL_VERSION}")
        peer = Peer(self._next_client, request["kind"], connection.pid, secrets.token_hex(32))
        reply = self._host.admit(peer)
        self._next_client += 1
        connection.peer = peer
        return reply

    def _end_if_silent(self, connection: _Connection) -> None:
        if connection.peer is None:
            self._end(connection)

    def _end(self, connection: _Connection) -> None:
        if connection not in self._connections:
            return
        self._connections.remove(connection)
        for fd in connection.watched:
            self._loop.remove_reader(fd)
        connection.sock.close()
        os.close(connection.pidfd)
        if connection.peer is not None:
            self._host.depart(connection.peer)

    def close(self) -> None:
        """End every connection and remove the socket. Idempotent."""
        if self._listener.fileno() < 0:
            return
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        if self._spare_fd >= 0:
            os.close(self._spare_fd)
        for connection in list(self._connections):
            self._end(connection)
        if not self.path.startswith("@"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)

    def check_integrity(self) -> None:
        """Raise AssertionError unless clients are distinct and within the limit."""
        peers = [c.peer.client_id for c in self._connections if c.peer is not None]
        assert len(peers) == len(set(peers)), f"{peers=}"
        assert len(self._connections) <= self._connections_max, f"{len(self._connections)=}"


def _spare_fd() -> int:
    """Return an fd that stands for another; -1 where there is none."""
    try:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1


def _said(error: Exception) -> dict[str, str]:
    reason = error.reason if isinstance(error, TierdError) else "INTERNAL"
    return {"error": reason, "message": str(error)}


def _refuse(sock: socket.socket, error: Exception) -> None:
    with contextlib.suppress(TierdError):
        send_message(sock, _said(error))
    # A hello that is left unread would make the kernel drop our answer with the connection.
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)  # no more can arrive from here on
        while sock.recv(1):
            pass
    sock.close()


def _pidfd_of(sock: socket.socket, pid: int) -> int:
    try:
        fd = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
        os.set_inheritable(fd, False)
        return fd
    except OSError:  # before Linux 6.5: the pid could be another process's by now, if barely
        return os.pidfd_open(pid)


def make_private_folder(folder: str) -> None:
    """Make a folder for sockets, 0700 and ours. Raises ConfigError if it is not."""
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, mode=0o700)
        status = os.stat(folder, follow_symlinks=False)
    except OSError as error:
        raise ConfigError(f"service.socket: folder {folder}: {error.strerror}") from None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise ConfigError(f"service.socket: {folder} is not a folder of this user")
    if status.st_mode & 0o022:
        raise ConfigError(f"service.socket: others may write to {folder}; choose a private folder")


def remove_stale_socket(path: str) -> None:
    """Remove a dead daemon's socket. Raises ConfigError if one lives, or it is another file."""
    if not os.path.lexists(path):
        return
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise ConfigError(f"service.socket: {path} is there and is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            return
        except OSError as error:
            raise ConfigError(f"service.socket: {path}: {error.strerror or error}") from None
    raise ConfigError(f"service.socket: another daemon serves {path}")


def require_free_socket(path: str) -> None:
    """Make the socket's folder; raise ConfigError if a daemon answers there already.

    For who has long work to do before `BootstrapServer`, which asks again.
    """
    if not path.startswith("@"):
        make_private_folder(os.path.dirname(path) or ".")
        remove_stale_socket(path)


def _listen(path: str) -> socket.socket:
    is_file = not path.startswith("@")
    require_free_socket(path)
    listener = socket.socket(
        socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
    )
    try:
        listener.bind(socket_address(path))
        if is_file:
            os.chmod(path, 0o600)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"service.socket: {path}: {error.strerror or error}") from None
    return listener
