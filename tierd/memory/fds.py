"""Messages with file descriptors over a unix SOCK_SEQPACKET socket.

A message is one packet: a msgpack map of at most 64 KiB with text keys, and at
most 16 fds. Received fds are close-on-exec; those of a refused message are closed.
"""

from __future__ import annotations

import array
import errno
import os
import socket
import struct
from collections.abc import Sequence
from typing import Any

import msgpack

from tierd.errors import DaemonUnavailable, DeadlineExceeded, InvalidArgument, StorageError
from tierd.openfiles import why_not_opened

MESSAGE_BYTES_MAX = 64 * 1024
FDS_MAX = 16
_INT_BYTES = array.array("i").itemsize
_CREDENTIALS = struct.Struct("3i")


def send_message(sock: socket.socket, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
    """Send one packet.

    Raises InvalidArgument (too large), DeadlineExceeded (the socket's timeout),
    DaemonUnavailable (the peer is gone, or leaves a non-blocking socket full).
    """
    packed = msgpack.packb(message)
    if len(packed) > MESSAGE_BYTES_MAX or len(fds) > FDS_MAX:
        raise InvalidArgument(f"message of {len(packed)} bytes and {len(fds)} fds is too large")
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    try:
        sock.sendmsg([packed], ancillary)
    except TimeoutError:
        raise DeadlineExceeded("the peer does not read its messages") from None
    except BlockingIOError:
        raise DaemonUnavailable("the peer does not read its messages") from None
    except OSError as error:
        raise DaemonUnavailable(f"the peer is gone: {error.strerror}") from error


def receive_message(sock: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Return one packet's map and fds, now the caller's; None when the peer has closed.

    Raises StorageError where this process may open no more files, InvalidArgument for a
    packet that is not of this form, BlockingIOError on a non-blocking socket without one,
    TimeoutError at the socket's timeout.
    """
    try:
        data, ancillary, flags, _ = sock.recvmsg(
            MESSAGE_BYTES_MAX, socket.CMSG_SPACE(FDS_MAX * _INT_BYTES), socket.MSG_CMSG_CLOEXEC
        )
    except ConnectionError:
        return None
    fds = _fds_of(ancillary)
    try:
        if not data and not fds:
            return None
        if flags & socket.MSG_CTRUNC and len(fds) < FDS_MAX:
            full = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            raise StorageError(f"what is handed over is lost: {why_not_opened(full)}")
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise InvalidArgument("a message is larger than allowed")
        return _unpack(data), fds
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise


def _fds_of(ancillary: Sequence[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % _INT_BYTES])
    return fds.tolist()


def _unpack(data: bytes) -> dict[str, Any]:
    try:
        message = msgpack.unpackb(
            data, max_map_len=64, max_array_len=64, max_str_len=4096, max_bin_len=MESSAGE_BYTES_MAX,
            max_ext_len=0, strict_map_key=True,
        )  # fmt: skip
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise InvalidArgument("a message is not valid msgpack") from error
    if not isinstance(message, dict) or not all(isinstance(key, str) for key in message):
        raise InvalidArgument("a message is not a map with text keys")
    return message


def peer_credentials(sock: socket.socket) -> tuple[int, int, int]:
    """Return (pid, uid, gid) of the process at the other end of a unix socket."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(data)
    return pid, uid, gid
