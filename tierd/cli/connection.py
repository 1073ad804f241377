"""A verb's connection to a running daemon."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tierd.client import Client


@contextlib.contextmanager
def connected(socket: str | None) -> Iterator[Client]:
    """Yield a client of the daemon at `socket`, or at the configured one for None.

    Raises DaemonUnavailable, naming the socket.
    """
    from tierd.client import Client

    client = Client.connect(socket if socket is not None else _usual_socket(), kind="tool")
    try:
        yield client
    finally:
        client.close()


def _usual_socket() -> str:
    from tierd.config import load_config

    return load_config().service.socket
