"""The first door, over real sockets: hello, junk, limits, sockets of the dead and the living."""

import asyncio
import os
import socket
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack
import pytest

from tests.wirerig import eventually
from tierd.bootstrap import BootstrapServer, Peer, Reply, make_private_folder
from tierd.errors import ConfigError, DaemonUnavailable, DeadlineExceeded, NotFound, TierFull
from tierd.memory.fds import receive_message, send_message
from tierd.rpc.handshake import BootstrapClient


class FakeHost:
    """Keeps who came and went; passes the fd of an empty file for any slab but 404."""

    def __init__(self) -> None:
        self.present: list[Peer] = []
        self.departed: list[Peer] = []
        self.file = os.memfd_create("fake", os.MFD_CLOEXEC)

    def admit(self, peer: Peer) -> Reply:
        self.present.append(peer)
        fields = {"token": peer.token, "boot_id": "b", "rpc": "unix:/none",
                  "client_id": peer.client_id, "store_uuid": b"u" * 16}  # fmt: skip
        return Reply(fields)

    def answer(self, peer: Peer, request: dict[str, Any], fds: Sequence[int]) -> Reply:
        if request.get("slab") == 404:
            raise NotFound("no slab 404")
        fields = {"tier": 3, "slot_bytes": 4096, "slots": 1, "direct": False}
        return Reply(fields, (self.file,))

    def depart(self, peer: Peer) -> None:
        self.present.remove(peer)
        self.departed.append(peer)


class Door:
    """A served door; `push` may be called from the test's thread."""

    loop: asyncio.AbstractEventLoop
    server: BootstrapServer

    def push(self, client_id: int, message: Reply) -> None:
        self.loop.call_soon_threadsafe(self.server.push, client_id, message)


@contextmanager
def door(path: str, host: FakeHost, connections_max: int = 4) -> Iterator[Door]:
    """Serve the first door at `path` in a loop of its own thread."""
    import threading

    ready, end = threading.Event(), threading.Event()
    errors: list[BaseException] = []
    opened = Door()

    async def serve() -> None:
        try:
            opened.loop = asyncio.get_running_loop()
            opened.server = server = BootstrapServer(path, host, connections_max=connections_max)
        except ConfigError as error:
            errors.append(error)
            ready.set()
            return
        server.serve()
        ready.set()
        while not end.is_set():
            server.check_integrity()
            await asyncio.sleep(0.005)
        server.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert ready.wait(5.0)
        if errors:
            raise errors[0]
        yield opened
    finally:
        end.set()
        thread.join(timeout=5.0)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "run" / "tierd.sock")


def raw(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(5.0)
    sock.connect(path)
    return sock


def test_hello_gives_each_client_its_own_number_and_token(path: str) -> None:
    host = FakeHost()
    with door(path, host):
        first, second = BootstrapClient.connect(path), BootstrapClient.connect(path, "tool")
        assert first.engine_id != second.engine_id and first.token != second.token
        assert len(first.token) == 64
        assert [peer.pid for peer in host.present] == [os.getpid()] * 2
        assert [peer.kind for peer in host.present] == ["engine", "tool"]
        for client in (first, second):
            client.close()
        eventually(lambda: not host.present)
    assert len(host.departed) == 2


def test_fds_are_passed_and_errors_are_typed(path: str) -> None:
    with door(path, FakeHost()):
        client = BootstrapClient.connect(path)
        grant = client.slab(7)
        assert (grant.slot_bytes, grant.slots) == (4096, 1)
        assert not os.get_inheritable(grant.fd)
        os.close(grant.fd)
        with pytest.raises(NotFound, match="404"):
            client.slab(404)
        os.close(client.slab(8).fd)  # an error does not end the connection
        client.close()


@pytest.mark.parametrize(
    "request_",
    [
        {"op": "hello", "kind": "engine", "v": 2},
        {"op": "hello", "kind": "root", "v": 1},
        {"op": "slab", "slab": 1},
        {},
    ],
)
def test_without_a_right_hello_nothing_is_answered(path: str, request_: dict[str, Any]) -> None:
    host = FakeHost()
    with door(path, host), raw(path) as sock:
        send_message(sock, request_)
        received = receive_message(sock)
        assert received is not None and received[0]["error"] == "INVALID_ARGUMENT"
        assert not host.present


@pytest.mark.parametrize("junk", [b"\xc1", b"hello", msgpack.packb([1]), msgpack.packb("x" * 5000)])
def test_junk_ends_its_connection_and_no_other(path: str, junk: bytes) -> None:
    with door(path, FakeHost()):
        client = BootstrapClient.connect(path)
        with raw(path) as sock:
            sock.send(junk)
            assert sock.recv(100) == b""
        os.close(client.slab(1).fd)
        client.close()


def test_a_client_that_reads_nothing_is_pushed_little_and_still_answered(path: str) -> None:
    host = FakeHost()
    with door(path, host) as opened:
        client = BootstrapClient.connect(path)
        (peer,) = host.present
        fields = {"op": "slab", "tier": 2, "slot_bytes": 4096, "slots": 1, "direct": False}
        for number in range(200):
            opened.push(peer.client_id, Reply({**fields, "slab": number}, (host.file,)))
        os.close(client.slab(7000).fd)
        found = [client.pushed_slab(number) for number in range(200)]
        grants = [grant for grant in found if grant is not None]
        assert 0 < len(grants) < 200 and found[0] is not None
        for grant in grants:
            os.close(grant.fd)
        opened.push(peer.client_id, Reply({**fields, "slab": 500}, (host.file,)))
        eventually(lambda: taken(client, 500))
        client.close()


def taken(client: BootstrapClient, number: int) -> bool:
    grant = client.pushed_slab(number)
    if grant is not None:
        os.close(grant.fd)
    return grant is not None


def test_too_many_clients_are_turned_away(path: str) -> None:
    with door(path, FakeHost(), connections_max=2):
        clients = [BootstrapClient.connect(path) for _ in range(2)]
        with pytest.raises(TierFull, match="2 clients"):
            BootstrapClient.connect(path)
        clients.pop().close()
        eventually(lambda: admitted(path))
        clients.pop().close()


def admitted(path: str) -> bool:
    try:
        BootstrapClient.connect(path).close()
    except TierFull:
        return False
    return True


def test_folder_and_socket_are_private(path: str) -> None:
    with door(path, FakeHost()):
        assert stat.S_IMODE(os.stat(os.path.dirname(path)).st_mode) == 0o700
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert not os.path.exists(path)


def test_a_folder_that_others_may_write_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match=r"service\.socket"):
        make_private_folder(str(folder))


def test_a_folder_is_made_for_a_socket_where_its_parent_is_there(tmp_path: Path) -> None:
    make_private_folder(str(tmp_path / "one"))
    make_private_folder(str(tmp_path / "one"))
    with pytest.raises(ConfigError, match=r"service\.socket: folder .*two/three: No such file"):
        make_private_folder(str(tmp_path / "two" / "three"))
    assert not (tmp_path / "two").exists()


def test_a_dead_daemons_socket_is_replaced(path: str) -> None:
    os.mkdir(os.path.dirname(path), 0o700)
    dead = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    dead.bind(path)
    dead.close()
    with door(path, FakeHost()):
        BootstrapClient.connect(path).close()


def test_a_living_daemons_socket_is_refused(path: str) -> None:
    with door(path, FakeHost()):
        with pytest.raises(ConfigError, match="another daemon"), door(path, FakeHost()):
            pass
        BootstrapClient.connect(path).close()


def test_a_file_that_is_no_socket_is_left_alone(path: str) -> None:
    os.mkdir(os.path.dirname(path), 0o700)
    Path(path).write_text("precious")
    with pytest.raises((ConfigError, OSError)), door(path, FakeHost()):
        pass
    assert Path(path).read_text() == "precious"


def listener(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.bind(path)
    sock.listen(1)
    return sock


@pytest.mark.parametrize("fill", [0, 3])
def test_a_daemon_that_does_not_answer_hello_is_a_deadline(tmp_path: Path, fill: int) -> None:
    path = str(tmp_path / "silent.sock")
    waiting: list[socket.socket] = []
    with listener(path):
        for _ in range(fill):  # its backlog is full as well
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            sock.setblocking(False)
            waiting.append(sock)
            try:
                sock.connect(path)
            except BlockingIOError:
                break
        expected: type[Exception] = DaemonUnavailable if fill else DeadlineExceeded
        with pytest.raises(expected):
            BootstrapClient.connect(path, deadline_seconds=0.2)
    for sock in waiting:
        sock.close()


def test_a_late_answer_is_not_taken_for_the_next_ones(tmp_path: Path) -> None:
    path = str(tmp_path / "late.sock")
    with listener(path) as server:
        client = connect_in_background(path)
        connection, _ = server.accept()
        receive_message(connection)
        fields = {"token": "t", "boot_id": "b", "rpc": "r", "client_id": 1, "store_uuid": b""}
        send_message(connection, fields)
        late = client()
        with pytest.raises(DeadlineExceeded):
            late.slab(1)
        for number in (1, 2):  # the late answer, and the one to the next request
            slab = {"tier": 2, "slot_bytes": number, "slots": 1, "direct": False, "n": number}
            send_message(connection, slab, [connection.fileno()])
        grant = late.slab(2)
        assert grant.slot_bytes == 2
        os.close(grant.fd)
        late.close()
        connection.close()


def connect_in_background(path: str) -> Callable[[], BootstrapClient]:
    from concurrent.futures import ThreadPoolExecutor

    pool = ThreadPoolExecutor(1)
    future = pool.submit(BootstrapClient.connect, path, "engine", 0.3)

    def result() -> BootstrapClient:
        pool.shutdown(wait=False)
        return future.result(timeout=5.0)

    return result
