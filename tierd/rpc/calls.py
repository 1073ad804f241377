"""What both clients share about calls: channel, metadata, deadlines, errors, hints."""

from __future__ import annotations

from typing import Any

from tierd.errors import DaemonUnavailable, TierdError
from tierd.rpc import wire
from tierd.rpc.errors import BOOT_ID_KEY, CLIENT_KEY, MESSAGE_BYTES_MAX, TOKEN_KEY, error_of
from tierd.rpc.handshake import BootstrapClient
from tierd.rpc.v1 import tierd_pb2 as pb

CALL_SECONDS = 5.0
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.max_reconnect_backoff_ms", 1000),
)


def call_metadata(bootstrap: BootstrapClient) -> tuple[tuple[str, str], ...]:
    """Return the metadata of every call."""
    return ((CLIENT_KEY, str(bootstrap.engine_id)), (TOKEN_KEY, bootstrap.token))


def check_boot_id(metadata: Any, boot_id: str, socket: str) -> None:
    """Raise DaemonUnavailable if another daemon than the one we greeted has answered."""
    for key, value in metadata or ():
        if key == BOOT_ID_KEY and value != boot_id:
            raise DaemonUnavailable(f"the daemon at {socket} was restarted; connect anew")


def typed_error(failure: Any, boot_id: str, socket: str) -> TierdError:
    """Return the error of tierd.errors for a failed call (grpc.RpcError)."""
    try:
        check_boot_id(failure.trailing_metadata(), boot_id, socket)
    except DaemonUnavailable as restarted:
        return restarted
    return error_of(failure, socket)


def hint_request(
    session_id: str,
    deadline_seconds: float,
    first_token: int,
    last_token: int | None,
    confidence: float,
    priority: int,
) -> Any:
    """Return a hint as a message. Raises InvalidArgument."""
    return wire.request(
        pb.HintRequest,
        session=wire.session_number(session_id),
        first_token=first_token,
        last_token=last_token,
        deadline_seconds=deadline_seconds,
        confidence=confidence,
        priority=priority,
    )


def ticket_to_dict(ticket: Any) -> dict[str, Any]:
    """Return a hint's ticket as plain values; of a hint that moves nothing there is no estimate."""
    moving = max(0, ticket.pages - ticket.left_cold)
    return {
        "hint_id": ticket.hint_id,
        "pages": ticket.pages,
        "moving": moving,
        "estimated_seconds": ticket.estimated_seconds if moving else None,
        "left_cold": ticket.left_cold,
        "why": ticket.why,
    }
