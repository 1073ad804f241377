"""Every error tierd raises for a foreseeable cause. One gRPC code and one reason each.

    TierdError
    ├── InvalidArgument        INVALID_ARGUMENT     exit 2
    │   ├── ConfigError                             exit 2
    │   ├── UnsupportedModel                        exit 2
    │   └── DeviceUnavailable                       exit 2
    ├── BudgetTooSmall         INVALID_ARGUMENT     exit 2   names the smallest that works
    ├── NotFound               NOT_FOUND            exit 5
    ├── TierFull               RESOURCE_EXHAUSTED   exit 1   with retry_after_seconds
    ├── HotBudgetExceeded      RESOURCE_EXHAUSTED   exit 1
    ├── StaleGeneration        FAILED_PRECONDITION  exit 1
    ├── LayoutMismatch         FAILED_PRECONDITION  exit 1
    ├── PageMiss               (a result; in the engine an exception)  exit 1
    │   └── PageDamaged        DATA_LOSS            exit 1
    ├── CodecError             INVALID_ARGUMENT     exit 1
    ├── DaemonUnavailable      UNAVAILABLE          exit 3
    │   └── DeadlineExceeded   DEADLINE_EXCEEDED    exit 3
    ├── DeviceFailed           INTERNAL             exit 1   a GPU, or its driver
    ├── PermissionDenied       PERMISSION_DENIED    exit 1
    └── StorageError           INTERNAL             exit 1   cold folder or disk
        └── StorageFull        RESOURCE_EXHAUSTED   exit 1

A message is one line, for the person who must act on it. Facts that code may
need stand in fields. Nothing here imports grpc: the code is its name.
"""

from __future__ import annotations


class TierdError(Exception):
    """Base of the tree. `grpc_code` names a grpc.StatusCode; `exit_code` is the CLI's."""

    grpc_code = "INTERNAL"
    reason = "INTERNAL"
    exit_code = 1


class InvalidArgument(TierdError):
    """A client's or user's input is wrong."""

    grpc_code = "INVALID_ARGUMENT"
    reason = "INVALID_ARGUMENT"
    exit_code = 2


class ConfigError(InvalidArgument):
    """A setting is wrong; the message names the field."""

    reason = "CONFIG"


class UnsupportedModel(InvalidArgument):
    """The model's attention is one that tiers do not support yet; named in the message."""

    reason = "UNSUPPORTED_MODEL"


class DeviceUnavailable(InvalidArgument):
    """A device was asked for that is not there, or lacks what drives it."""

    reason = "DEVICE_UNAVAILABLE"


class BudgetTooSmall(TierdError):
    """A tier's budget cannot hold the least that the job needs at once."""

    grpc_code = "INVALID_ARGUMENT"
    reason = "BUDGET_TOO_SMALL"
    exit_code = 2

    def __init__(self, message: str, *, smallest_bytes: int = 0) -> None:
        super().__init__(message)
        self.smallest_bytes = smallest_bytes


class NotFound(TierdError):
    """No such session, slab, reservation or hint."""

    grpc_code = "NOT_FOUND"
    reason = "NOT_FOUND"
    exit_code = 5


class TierFull(TierdError):
    """No slot could be freed within the deadline; trying later may help."""

    grpc_code = "RESOURCE_EXHAUSTED"
    reason = "TIER_FULL"

    def __init__(self, message: str, *, retry_after_seconds: float = 0.05) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class HotBudgetExceeded(TierdError):
    """An allocation would take the hot tier beyond its budget."""

    grpc_code = "RESOURCE_EXHAUSTED"
    reason = "HOT_BUDGET"


class StaleGeneration(TierdError):
    """A reservation, generation or epoch that is no longer current."""

    grpc_code = "FAILED_PRECONDITION"
    reason = "STALE"


class LayoutMismatch(TierdError):
    """KV of another namespace, geometry or format version."""

    grpc_code = "FAILED_PRECONDITION"
    reason = "LAYOUT_MISMATCH"


class PageMiss(TierdError):
    """A page that was asked for is not there; the session must recompute from its block."""

    grpc_code = "NOT_FOUND"
    reason = "PAGE_MISS"

    def __init__(self, message: str, *, layer: int, block: int) -> None:
        super().__init__(message)
        self.layer = layer
        self.block = block


class PageDamaged(PageMiss):
    """A page's bytes do not match its digest, or its header is another page's."""

    grpc_code = "DATA_LOSS"
    reason = "PAGE_DAMAGED"


class CodecError(TierdError):
    """A page cannot be encoded: NaN, infinity, or out of the codec's range."""

    grpc_code = "INVALID_ARGUMENT"
    reason = "CODEC"


class DaemonUnavailable(TierdError):
    """The daemon cannot be reached, is draining, or has died."""

    grpc_code = "UNAVAILABLE"
    reason = "DAEMON_UNAVAILABLE"
    exit_code = 3


class DeadlineExceeded(DaemonUnavailable):
    """The daemon or the disk did not answer within the deadline."""

    grpc_code = "DEADLINE_EXCEEDED"
    reason = "DEADLINE"


class DeviceFailed(TierdError):
    """A device or its driver failed, refused, or did not do its work in time."""

    reason = "DEVICE_FAILED"


class PermissionDenied(TierdError):
    """Another user's socket, or a wrong token."""

    grpc_code = "PERMISSION_DENIED"
    reason = "PERMISSION_DENIED"


class StorageError(TierdError):
    """The cold folder or its disk failed."""

    reason = "STORAGE"


class StorageFull(StorageError):
    """No space on the device, or the cold tier's byte cap is reached."""

    grpc_code = "RESOURCE_EXHAUSTED"
    reason = "STORAGE_FULL"


def error_for_reason(reason: str, message: str) -> TierdError:
    """Return the error of this tree that has `reason`: what a peer said, as it was raised there.

    Fields that did not travel have their neutral values (layer and block are -1).
    """
    kinds: list[type[TierdError]] = [TierdError]
    for kind in kinds:
        kinds.extend(kind.__subclasses__())
        if kind.reason == reason:
            if issubclass(kind, PageMiss):
                return kind(message, layer=-1, block=-1)
            return kind(message)
    return TierdError(message)
