"""Errors cross the wire: every class of the tree, its fields, and what gRPC says itself."""

from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from tierd import errors
from tierd.errors import BudgetTooSmall, PageDamaged, PageMiss, TierdError, TierFull
from tierd.rpc.errors import STATUS_KEY, code_of, error_of, status_of


class Failure:
    """A failed call as grpc shows it."""

    def __init__(self, code: grpc.StatusCode, details: str, status: Any = None) -> None:
        self._code, self._details = code, details
        self._trailing = ((STATUS_KEY, status.SerializeToString()),) if status else ()

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> Any:
        return self._trailing


def across(error: TierdError) -> TierdError:
    """Send an error over the wire and return what comes out."""
    return error_of(Failure(code_of(error), str(error), status_of(error)), "/a.sock")


def tree(kind: type[TierdError] = TierdError) -> Iterator[type[TierdError]]:
    yield kind
    for child in kind.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from tree(child)


@pytest.mark.parametrize("kind", list(tree()), ids=lambda kind: kind.__name__)
def test_every_error_arrives_as_it_was_raised(kind: type[TierdError]) -> None:
    error = kind("a message", layer=3, block=7) if issubclass(kind, PageMiss) else kind("a message")
    arrived = across(error)
    assert type(arrived) is kind
    assert str(arrived) == "a message"


def test_fields_travel() -> None:
    damaged = across(PageDamaged("bad", layer=3, block=7))
    assert isinstance(damaged, PageDamaged) and (damaged.layer, damaged.block) == (3, 7)
    small = across(BudgetTooSmall("small", smallest_bytes=1 << 40))
    assert isinstance(small, BudgetTooSmall) and small.smallest_bytes == 1 << 40
    full = across(TierFull("full", retry_after_seconds=1.25))
    assert isinstance(full, TierFull) and full.retry_after_seconds == 1.25


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, errors.DaemonUnavailable),
        (grpc.StatusCode.CANCELLED, errors.DaemonUnavailable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.DeadlineExceeded),
        (grpc.StatusCode.UNKNOWN, TierdError),
    ],
)
def test_what_grpc_itself_says_is_typed_and_names_the_socket(
    code: grpc.StatusCode, kind: type[TierdError]
) -> None:
    error = error_of(Failure(code, "Socket closed"), "/run/tierd.sock")
    assert type(error) is kind
    assert "/run/tierd.sock" in str(error)


def test_two_reasons_are_never_the_same() -> None:
    reasons = [kind.reason for kind in tree() if kind is not TierdError]
    assert len(reasons) == len(set(reasons))
