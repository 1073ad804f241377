"""The first door under attack and in need: strangers, silence, no fds, mistakes, odd places."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.processes import open_fds, until
from tests.rig import in_loop
from tierd import bootstrap
from tierd.bootstrap import BootstrapServer, Peer, Reply, make_private_folder
from tierd.errors import ConfigError, DaemonUnavailable, PermissionDenied, StorageError, TierFull
from tierd.memory.fds import send_message
from tierd.openfiles import why_not_opened
from tierd.rpc import handshake
from tierd.rpc.handshake import BootstrapClient, socket_address

CLIENTS_MAX = 4
NOTICED_SECONDS = 2.0  # the promise: so soon is a dead engine's memory free
NO_FDS = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
THE_DAEMONS = f"the daemon, process {os.getpid()}, may open"
HELLO = msgpack.packb({"v": 1, "op": "hello", "kind": "engine"})


class FakeHost:
    """Admits all, answers with a file of its own, and remembers who came and went."""

    def __init__(self) -> None:
        self.peers: list[Peer] = []
        self.departed: list[int] = []
        self.error: Exception | None = None
        self.fd = os.memfd_create("fake", os.MFD_CLOEXEC)

    def admit(self, peer: Peer) -> Reply:
        if self.error is not None:
            raise self.error
        self.peers.append(peer)
        fields = {
            "token": peer.token, "boot_id": "boot", "rpc": "unix:/nowhere",
            "client_id": peer.client_id, "store_uuid": bytes(16),
        }  # fmt: skip
        return Reply(fields, (self.fd,))

    def answer(self, peer: Peer, request: dict[str, Any], fds: Sequence[int]) -> Reply:
        if self.error is not None:
            raise self.error
        fields = {"tier": 2, "slot_bytes": 4096, "slots": 1, "direct": False}
        return Reply(fields, (self.fd,))

    def depart(self, peer: Peer) -> None:
        self.departed.append(peer.client_id)

    def all_gone(self) -> bool:
        return sorted(self.departed) == sorted(peer.client_id for peer in self.peers)


@contextlib.contextmanager
def serving(path: str) -> Iterator[tuple[BootstrapServer, FakeHost]]:
    """Serve in the running loop; at the end no fd is left and each client has departed once."""
    gc.collect()
    before = open_fds()
    host = FakeHost()
    server = BootstrapServer(path, host, connections_max=CLIENTS_MAX)
    server.serve()
    try:
        yield server, host
        server.check_integrity()
    finally:
        server.close()
        server.close()
        os.close(host.fd)
    gc.collect()
    assert open_fds() == before
    assert host.all_gone()


def connect(path: str, kind: str = "engine", seconds: float = 5.0) -> Awaitable[BootstrapClient]:
    return asyncio.to_thread(BootstrapClient.connect, path, kind, seconds)


async def ask(client: BootstrapClient) -> None:
    """Ask for a slab, and close it."""
    os.close((await asyncio.to_thread(client.slab, 1)).fd)


def leave(client: BootstrapClient) -> None:
    client.close()
    if client.epoch_fd is not None:
        os.close(client.epoch_fd)


@contextlib.contextmanager
def stranger(path: str) -> Iterator[socket.socket]:
    """A connection that says what it likes."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(5.0)
        sock.connect(socket_address(path))
        yield sock


async def answer(sock: socket.socket) -> dict[str, Any]:
    """Return the next answer; {} if the connection was closed instead."""
    try:
        data = await asyncio.to_thread(sock.recv, 65536)
    except ConnectionResetError:
        return {}
    return dict(msgpack.unpackb(data)) if data else {}


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "door" / "tierd.sock")


# -- strangers ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "packet",
    [b"", HELLO[:-1], HELLO + b"\x00", msgpack.packb({1: 2}), b"\x81\xa2op\xd4\x05\x00",
     bytes(66_000), b"\x91" * 5_000, b"\xdf\xff\xff\xff\xff"],
    ids=["empty", "cut", "trailing", "int keys", "extension", "too large", "deep", "endless"],
)  # fmt: skip
@in_loop
async def test_a_packet_that_is_no_message_ends_its_connection_alone(
    path: str, packet: bytes
) -> None:
    with serving(path) as (_, host):
        client = await connect(path)
        with stranger(path) as sock:
            sock.send(packet)
            assert await answer(sock) == {}
        await ask(client)
        assert host.departed == []
        leave(client)


@pytest.mark.parametrize("length", [4_000, 30_000, 48_000])
@in_loop
async def test_what_a_client_sends_never_makes_an_answer_too_large_to_send(
    path: str, length: int
) -> None:
    with serving(path) as (_, host), stranger(path) as sock:
        send_message(sock, {"op": b"x" * length, "n": b"y" * (length // 3)})
        await answer(sock)
        leave(await connect(path))
        await until(host.all_gone, NOTICED_SECONDS)


@settings(max_examples=25)
@given(packets=st.lists(st.binary(min_size=1, max_size=60), min_size=1, max_size=8))
def test_no_packet_stops_the_door(packets: list[bytes]) -> None:
    async def attack() -> None:
        path = f"@tierd-fuzz-{os.getpid()}"
        with serving(path):
            for packet in packets:
                with stranger(path) as sock:
                    sock.send(packet)
                    await answer(sock)
            leave(await connect(path))

    asyncio.run(asyncio.wait_for(attack(), 10.0))


@in_loop
async def test_a_fd_that_a_client_sends_is_nowhere_afterwards(path: str) -> None:
    with serving(path), stranger(path) as sock:
        read_end, write_end = os.pipe()
        send_message(sock, {"op": "hello", "v": 1, "kind": "tool"}, [write_end])
        os.close(write_end)
        assert (await answer(sock))["client_id"] == 1
        assert os.read(read_end, 1) == b""  # nobody has the other end
        os.close(read_end)


@in_loop
async def test_another_user_is_told_so(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "peer_credentials", lambda _: (1, 4321, 4321))
    with serving(path) as (_, host):
        with pytest.raises(PermissionDenied, match="user 4321"):
            await connect(path)
        assert host.peers == []


@in_loop
async def test_a_client_does_not_trust_another_users_daemon(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "peer_credentials", lambda _: (1, 4321, 4321))
    with serving(path) as (_, host):
        with pytest.raises(PermissionDenied, match="uid 4321"):
            await connect(path)
        assert host.peers == []


@pytest.mark.parametrize("hello", ["before", "meanwhile", "after"])
@in_loop
async def test_one_client_too_many_is_told_so_whenever_it_says_hello(
    path: str, hello: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(path) as (server, host), contextlib.ExitStack() as stack:
        clients = [await connect(path) for _ in range(CLIENTS_MAX)]
        sock = stack.enter_context(stranger(path))

        def meanwhile(to: socket.socket, *message: Any) -> None:
            send_message(to, *message)
            sock.send(HELLO)

        if hello == "before":
            sock.send(HELLO)
        if hello == "meanwhile":
            monkeypatch.setattr(bootstrap, "send_message", meanwhile)
        await asyncio.sleep(0.02)  # the door has answered and closed
        monkeypatch.undo()
        if hello == "after":
            with pytest.raises(BrokenPipeError):
                sock.send(HELLO)
        assert (await answer(sock))["error"] == TierFull.reason
        server.check_integrity()
        leave(clients.pop())
        await until(lambda: host.departed != [], NOTICED_SECONDS)
        clients.append(await connect(path))
        for client in clients:
            leave(client)


@in_loop
async def test_a_client_hears_a_refusal_that_came_before_its_hello(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = asyncio.Event()
    loop, connected, refuse = asyncio.get_running_loop(), handshake._connected, bootstrap._refuse

    def waiting(*arguments: Any) -> socket.socket:
        sock = connected(*arguments)
        asyncio.run_coroutine_threadsafe(refused.wait(), loop).result(5.0)
        return sock

    def telling(*arguments: Any) -> None:
        refuse(*arguments)
        refused.set()

    with serving(path):
        clients = [await connect(path) for _ in range(CLIENTS_MAX)]
        monkeypatch.setattr(handshake, "_connected", waiting)
        monkeypatch.setattr(bootstrap, "_refuse", telling)
        with pytest.raises(TierFull, match="4 clients"):
            await connect(path)
        for client in clients:
            leave(client)


# -- need ---------------------------------------------------------------------------


@in_loop
async def test_who_connects_and_says_nothing_is_sent_away(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap, "_HELLO_SECONDS", 0.02)
    with serving(path) as (_, host):
        client = await connect(path)
        with stranger(path) as sock:
            assert await answer(sock) == {}
        assert host.departed == []
        await ask(client)
        leave(client)


@in_loop
async def test_without_fds_the_door_waits_and_does_not_spin(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Exhausted:
        """A listener whose process has no fd left for some time."""

        def __init__(self, listener: socket.socket) -> None:
            self.listener, self.tries = listener, 0

        def accept(self) -> Any:
            self.tries += 1
            if self.tries <= 2:
                raise OSError(errno.EMFILE, "Too many open files")
            return self.listener.accept()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.listener, name)

    monkeypatch.setattr(bootstrap, "_ACCEPT_AGAIN_SECONDS", 0.02)
    with serving(path) as (server, _):
        listener = Exhausted(server._listener)
        monkeypatch.setattr(server, "_listener", listener)
        leave(await connect(path))
        assert listener.tries == 3


@in_loop
async def test_who_waits_at_a_door_without_fds_is_told_whose_limit_it_is(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Exhausted:
        """A listener whose process has no fd left but the one that it spares."""

        def __init__(self, server: BootstrapServer) -> None:
            self.server, self.listener = server, server._listener

        def accept(self) -> Any:
            if os.path.exists(f"/proc/self/fd/{self.server._spare_fd}"):
                raise OSError(errno.EMFILE, "Too many open files")
            return self.listener.accept()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.listener, name)

    monkeypatch.setattr(bootstrap, "_ACCEPT_AGAIN_SECONDS", 0.01)
    with serving(path) as (server, host):
        listener = server._listener
        with monkeypatch.context() as patch:
            patch.setattr(server, "_listener", Exhausted(server))
            with pytest.raises(StorageError, match=THE_DAEMONS):
                await connect(path)
        assert server._listener is listener
        leave(await connect(path))
        assert len(host.peers) == 1


@in_loop
async def test_a_host_that_turns_a_client_away_is_heard(path: str) -> None:
    with serving(path) as (_, host):
        host.error = StorageError("no memory for an epoch page")
        with pytest.raises(StorageError, match="epoch page"):
            await connect(path)


@in_loop
async def test_a_daemon_without_fds_says_that_the_limit_is_its_own(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(*_: object) -> Any:
        raise NO_FDS

    with serving(path) as (_, host):
        client = await connect(path)
        host.error = NO_FDS
        with pytest.raises(StorageError, match=THE_DAEMONS):
            await asyncio.to_thread(client.slab, 13)
        host.error = None
        with monkeypatch.context() as patch:
            patch.setattr(bootstrap, "_pidfd_of", none_left)
            with pytest.raises(StorageError, match=THE_DAEMONS):
                await connect(path)
        os.close((await asyncio.to_thread(client.slab, 13)).fd)
        leave(client)


@in_loop
async def test_a_daemon_that_has_no_fd_for_what_it_is_handed_answers_so(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(sock: object) -> Any:
        for fd in real(sock)[1]:
            os.close(fd)
        raise StorageError(f"what is handed over is lost: {why_not_opened(NO_FDS)}")

    real = bootstrap.receive_message
    with serving(path):
        client = await connect(path, seconds=30.0)
        with monkeypatch.context() as patch:
            patch.setattr(bootstrap, "receive_message", lost)
            with pytest.raises(StorageError, match=THE_DAEMONS):
                await asyncio.to_thread(client.offer_table, 7, 0)
        leave(client)


@in_loop
async def test_a_mistake_in_the_host_ends_the_connection_at_once(path: str) -> None:
    mistakes: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, said: mistakes.append(type(said["exception"]).__name__))
    with serving(path) as (_, host):
        client = await connect(path, seconds=30.0)
        host.error = RuntimeError("a mistake in the daemon")
        with pytest.raises(DaemonUnavailable, match="closed the connection"):
            await asyncio.to_thread(client.slab, 13)
        assert host.all_gone()
        leave(client)
    assert mistakes == ["RuntimeError"]


@in_loop
async def test_closing_ends_every_client_and_removes_the_socket(path: str) -> None:
    with serving(path) as (server, host):
        client = await connect(path)
        server.close()
        assert host.all_gone()
        assert not os.path.lexists(path)
        for _ in range(2):  # and it stays so
            with pytest.raises(DaemonUnavailable, match=path):
                await asyncio.to_thread(client.slab, 1)
        leave(client)


@in_loop
async def test_two_hundred_clients_leave_nothing_behind(path: str) -> None:
    with serving(path) as (_, host):
        leave(await connect(path))
        await until(host.all_gone, NOTICED_SECONDS)
        before = open_fds()
        for _ in range(200):
            leave(await connect(path))
            await until(host.all_gone, NOTICED_SECONDS)
        assert len(host.peers) == 201
        assert open_fds() == before


# -- places -------------------------------------------------------------------------


def test_a_daemon_that_is_not_there_is_unavailable_and_named(path: str) -> None:
    before = open_fds()
    for missing in (path, f"@tierd-nobody-{os.getpid()}", "/" + "x" * 200):
        with pytest.raises(DaemonUnavailable) as raised:
            BootstrapClient.connect(missing)
        assert missing in str(raised.value) and "None" not in str(raised.value)
    assert open_fds() == before


@in_loop
async def test_an_abstract_socket_serves_one_daemon_and_leaves_no_file() -> None:
    path = f"@tierd-test-{os.getpid()}"
    with serving(path) as (_, host):
        with pytest.raises(ConfigError, match=r"service\.socket.*in use"):
            BootstrapServer(path, host, connections_max=1)
        client = await connect(path)
        await ask(client)
        leave(client)
        assert not os.path.lexists(path)


@pytest.mark.parametrize("thing", ["file", "folder", "dangling link"])
@in_loop
async def test_what_is_not_a_socket_is_left_alone(path: str, thing: str) -> None:
    os.makedirs(os.path.dirname(path), mode=0o700)
    make: dict[str, Callable[[], Any]] = {
        "file": lambda: Path(path).write_text("the only copy"),
        "folder": lambda: os.mkdir(path),
        "dangling link": lambda: os.symlink("nowhere", path),
    }
    make[thing]()
    host = FakeHost()
    with pytest.raises(ConfigError, match=r"service\.socket.*is not a socket"):
        BootstrapServer(path, host, connections_max=1)
    assert os.path.lexists(path)
    os.close(host.fd)


@pytest.mark.parametrize("place", ["file", "abstract"])
@in_loop
async def test_a_path_too_long_names_the_field_and_says_why(tmp_path: Path, place: str) -> None:
    path = str(tmp_path / ("x" * 108)) if place == "file" else "@" + "x" * 108
    host = FakeHost()
    before = open_fds()
    with pytest.raises(ConfigError, match=r"service\.socket.*too long"):
        BootstrapServer(path, host, connections_max=1)
    assert open_fds() == before
    os.close(host.fd)


def test_a_folder_that_others_could_have_made_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, link, file = tmp_path / "shared", tmp_path / "link", tmp_path / "file"
    shared.mkdir()
    shared.chmod(0o777)
    link.symlink_to(tmp_path)
    file.write_text("")
    for folder in (shared, link, file, file / "below"):
        with pytest.raises(ConfigError, match=r"service\.socket"):
            make_private_folder(str(folder))
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(ConfigError, match="not a folder of this user"):
        make_private_folder(str(tmp_path))
