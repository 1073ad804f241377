"""Errors on the wire: the tree of tierd/errors.py as rich gRPC statuses, and back again.

An ErrorInfo carries the reason and the fields, a RetryInfo when a retry helps; so a
client raises what the daemon raised.
"""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

from tierd.errors import (
    BudgetTooSmall,
    DaemonUnavailable,
    DeadlineExceeded,
    PageMiss,
    TierdError,
    TierFull,
    error_for_reason,
)

DOMAIN = "tierd"
STATUS_KEY = "grpc-status-details-bin"
BOOT_ID_KEY = "tierd-boot-id"
CLIENT_KEY = "tierd-client"
TOKEN_KEY = "tierd-token"
# The largest message is a suspension's token ids: 4M tokens of 4 bytes are 16 MiB.
MESSAGE_BYTES_MAX = 32 << 20


def code_of(error: TierdError) -> grpc.StatusCode:
    """Return the gRPC code of an error of the tree."""
    code: grpc.StatusCode = grpc.StatusCode[error.grpc_code]
    return code


def status_of(error: TierdError) -> Status:
    """Return the rich status of an error of the tree."""
    info = ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=_facts(error))
    details = [_packed(info)]
    if isinstance(error, TierFull):
        wait = Duration()
        wait.FromNanoseconds(int(error.retry_after_seconds * 1e9))
        details.append(_packed(RetryInfo(retry_delay=wait)))
    return Status(code=code_of(error).value[0], message=str(error), details=details)


def _packed(message: Any) -> AnyMessage:
    packed = AnyMessage()
    packed.Pack(message)
    return packed


def _facts(error: TierdError) -> dict[str, str]:
    if isinstance(error, PageMiss):
        return {"layer": str(error.layer), "block": str(error.block)}
    if isinstance(error, BudgetTooSmall):
        return {"smallest_bytes": str(error.smallest_bytes)}
    return {}


def error_of(failure: Any, where: str) -> TierdError:
    """Return the typed error for a failed call (grpc.RpcError); `where` names the daemon."""
    status = rpc_status.from_call(failure)
    code = failure.code()
    if status is None:
        return _transport_error(code, str(failure.details() or code.name), where)
    info, retry = ErrorInfo(), RetryInfo()
    for detail in status.details:
        _ = detail.Unpack(info) or detail.Unpack(retry)
    error = error_for_reason(info.reason, status.message)
    if isinstance(error, TierFull):
        error.retry_after_seconds = retry.retry_delay.ToNanoseconds() / 1e9
    for name, text in info.metadata.items():
        if hasattr(error, name):
            setattr(error, name, int(text))
    return error


def _transport_error(code: grpc.StatusCode, details: str, where: str) -> TierdError:
    if code is grpc.StatusCode.UNAVAILABLE:
        return DaemonUnavailable(f"the daemon at {where} is gone or does not answer")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded(f"the daemon at {where} did not answer within the deadline")
    if code is grpc.StatusCode.CANCELLED:
        return DaemonUnavailable(f"the daemon at {where} ended the call")
    return TierdError(f"the daemon at {where} failed: {code.name.lower()}: {details}")
