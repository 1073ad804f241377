"""Messages with fds: what is sent arrives, and no packet of a stranger does harm or leaks."""

import array
import os
import resource
import socket

import msgpack
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tierd.errors import DaemonUnavailable, DeadlineExceeded, InvalidArgument, StorageError
from tierd.memory.fds import (
    FDS_MAX,
    MESSAGE_BYTES_MAX,
    peer_credentials,
    receive_message,
    send_message,
)


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(5.0)
    theirs.settimeout(5.0)
    yield ours, theirs
    ours.close()
    theirs.close()


@pytest.fixture
def fds():
    made = [os.memfd_create("test", os.MFD_CLOEXEC) for _ in range(FDS_MAX + 1)]
    yield made
    for fd in made:
        os.close(fd)


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def send_raw(sock: socket.socket, data: bytes, fds: list[int] = []) -> None:  # noqa: B006
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
    sock.sendmsg([data], [rights] if fds else [])


def refused(pair, data: bytes, fds: list[int]) -> None:
    ours, theirs = pair
    before = open_fds()
    send_raw(theirs, data, fds)
    with pytest.raises(InvalidArgument):
        receive_message(ours)
    assert open_fds() == before


def test_a_message_arrives_with_its_fds_in_order_and_close_on_exec(pair, fds) -> None:
    ours, theirs = pair
    send_message(theirs, {"op": "slab", "slab": 7}, fds[:3])
    received = receive_message(ours)
    assert received is not None
    message, arrived = received
    assert message == {"op": "slab", "slab": 7}
    assert [os.fstat(fd).st_ino for fd in arrived] == [os.fstat(fd).st_ino for fd in fds[:3]]
    assert not any(os.get_inheritable(fd) for fd in arrived)
    for fd in arrived:
        os.close(fd)


def test_messages_keep_their_bounds(pair) -> None:
    ours, theirs = pair
    for number in range(3):
        send_message(theirs, {"number": number})
    assert [receive_message(ours) for _ in range(3)] == [({"number": n}, []) for n in range(3)]


def test_the_largest_message_passes_and_one_byte_more_is_refused_by_the_sender(pair) -> None:
    ours, theirs = pair
    spare = MESSAGE_BYTES_MAX - len(msgpack.packb({"x": bytes(2**15 * 2 - 100)}))
    largest = {"x": bytes(2**15 * 2 - 100 + spare)}
    send_message(theirs, largest)
    assert receive_message(ours) == (largest, [])
    with pytest.raises(InvalidArgument):
        send_message(theirs, {"x": largest["x"] + b"1"})


def test_too_many_fds_are_refused_by_the_sender(pair, fds) -> None:
    with pytest.raises(InvalidArgument):
        send_message(pair[1], {}, fds)


def test_a_packet_that_is_too_large_is_refused_and_its_fds_closed(pair, fds) -> None:
    refused(pair, msgpack.packb({"x": bytes(MESSAGE_BYTES_MAX)}), fds[:1])


def test_a_packet_with_too_many_fds_is_refused_and_its_fds_closed(pair, fds) -> None:
    refused(pair, msgpack.packb({}), fds)


@pytest.mark.parametrize(
    "data",
    [
        b"\xc1",
        b"{}",
        msgpack.packb([1, 2]),
        msgpack.packb({b"op": 1}),
        msgpack.packb({1: 1}, use_bin_type=True),
        msgpack.packb({}) + b"\x00",
        msgpack.packb({"x": msgpack.ExtType(1, b"code")}),
        msgpack.packb({"x": msgpack.Timestamp(1)}),
        b"\x81\xa1x" * 2000 + b"\xc0",
        b"\x81\xa1x\xdd\xff\xff\xff\xff",
        b"\x81\xa2\xff\xfe\xc0",
    ],
    ids=[
        "not msgpack", "json", "a list", "a bytes key", "a number key", "bytes after it",
        "an extension", "a timestamp", "nested too deep", "a huge length", "not utf-8",
    ],
)  # fmt: skip
def test_a_packet_that_is_no_message_is_refused_and_its_fds_closed(pair, fds, data) -> None:
    refused(pair, data, fds[:2])


@given(st.binary(min_size=1, max_size=300))
@example(b"\x80")
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_a_message_or_refused(pair, data: bytes) -> None:
    ours, theirs = pair
    send_raw(theirs, data)
    try:
        received = receive_message(ours)
    except InvalidArgument:
        return
    assert received is not None
    assert isinstance(received[0], dict)


def test_a_closed_peer_is_the_end_and_not_an_error(pair) -> None:
    ours, theirs = pair
    theirs.close()
    assert receive_message(ours) is None
    with pytest.raises(DaemonUnavailable):
        send_message(ours, {})


def test_a_peer_that_closes_with_our_message_unread_is_the_end_too(pair) -> None:
    ours, theirs = pair
    send_message(ours, {"op": "hello"})
    theirs.close()
    assert receive_message(ours) is None


def test_receiving_does_not_wait_beyond_the_sockets_patience(pair) -> None:
    ours, _ = pair
    ours.settimeout(0.001)
    with pytest.raises(TimeoutError):
        receive_message(ours)
    ours.setblocking(False)
    with pytest.raises(BlockingIOError):
        receive_message(ours)


@pytest.mark.parametrize(
    ("patience_seconds", "kind"), [(0.0, DaemonUnavailable), (0.001, DeadlineExceeded)]
)
def test_sending_to_a_peer_that_does_not_read_ends(pair, patience_seconds, kind) -> None:
    ours, _ = pair
    ours.settimeout(patience_seconds)
    with pytest.raises(kind):
        for _ in range(10_000):
            send_message(ours, {"x": bytes(1000)})


def test_peer_credentials_are_the_peers(pair) -> None:
    assert peer_credentials(pair[0]) == (os.getpid(), os.getuid(), os.getgid())


def test_who_may_open_no_more_files_is_told_so(pair, fds) -> None:
    ours, theirs = pair
    send_message(ours, {"a": 1}, fds[:4])
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    first_free = os.dup(0)
    os.close(first_free)
    before = open_fds()
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (first_free + 2, usual[1]))
        says = f"process {os.getpid()} may open {first_free + 2}; raise its ulimit -n"
        with pytest.raises(StorageError, match=says):
            receive_message(theirs)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, usual)
    assert open_fds() == before
