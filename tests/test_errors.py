"""The tree of errors: as drawn, one reason each, and the same again at the other end of a wire."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from typing import Any

import pytest

from tests.processes import ROOT
from tierd import errors
from tierd.errors import (
    BudgetTooSmall,
    PageDamaged,
    PageMiss,
    TierdError,
    TierFull,
    error_for_reason,
)


def kinds() -> list[type[TierdError]]:
    """Return every class of the module, the base first."""
    found = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    return [kind for kind in found if issubclass(kind, TierdError)]


def made(kind: type[TierdError]) -> TierdError:
    return kind("why", layer=1, block=2) if issubclass(kind, PageMiss) else kind("why")


@pytest.mark.parametrize("kind", kinds())
def test_each_has_a_code_of_grpc_a_reason_and_an_exit_code(kind: type[TierdError]) -> None:
    grpc = pytest.importorskip("grpc")
    assert kind.grpc_code in grpc.StatusCode.__members__
    assert kind.grpc_code not in ("OK", "UNKNOWN", "CANCELLED")
    assert re.fullmatch(r"[A-Z][A-Z_]{1,61}[A-Z]", kind.reason)  # google.rpc.ErrorInfo's form
    assert kind.exit_code in (1, 2, 3, 5)
    assert kind.__doc__


def test_no_two_have_the_same_reason() -> None:
    reasons = [kind.reason for kind in kinds()]
    assert sorted(set(reasons)) == sorted(reasons)


@pytest.mark.parametrize("kind", kinds())
def test_a_reason_comes_back_as_its_error_with_its_message(kind: type[TierdError]) -> None:
    back = error_for_reason(kind.reason, "why")
    assert type(back) is kind
    assert str(back) == str(made(kind)) == "why"


@pytest.mark.parametrize("reason", ["", "NEW_IN_A_LATER_VERSION", "tier_full"])
def test_an_unknown_reason_is_the_base_and_keeps_its_message(reason: str) -> None:
    back = error_for_reason(reason, "why")
    assert type(back) is TierdError and str(back) == "why"


def test_fields_that_did_not_travel_are_neutral() -> None:
    damaged: Any = error_for_reason("PAGE_DAMAGED", "why")
    assert (damaged.layer, damaged.block) == (-1, -1)
    small: Any = error_for_reason("BUDGET_TOO_SMALL", "why")
    assert small.smallest_bytes == 0


def test_facts_stand_in_fields() -> None:
    assert BudgetTooSmall("why", smallest_bytes=5).smallest_bytes == 5
    assert TierFull("why", retry_after_seconds=1.5).retry_after_seconds == 1.5
    assert TierFull("why").retry_after_seconds > 0
    damaged = PageDamaged("why", layer=3, block=4)
    assert (damaged.layer, damaged.block) == (3, 4)


def drawn() -> dict[str, tuple[str, str | None, str | None]]:
    """Return (base, code, exit code) of each class as the module's docstring draws it."""
    lines = re.findall(r"^    ([│├└─ ]*)([A-Z]\w+)(.*)$", errors.__doc__ or "", re.MULTILINE)
    above: dict[int, str] = {-1: "Exception"}
    tree = {}
    for branches, name, rest in lines:
        depth = len(branches) // 4
        above[depth] = name
        code, number = re.search(r" ([A-Z_]{6,}) ", rest), re.search(r"exit (\d)", rest)
        tree[name] = (above[depth - 1], code and code[1], number and number[1])
    return tree


def test_the_tree_is_as_drawn() -> None:
    tree = drawn()
    assert set(tree) == {kind.__name__ for kind in kinds()}
    for kind in kinds():
        base, code, number = tree[kind.__name__]
        assert [one.__name__ for one in kind.__bases__] == [base], kind
        assert code in (None, kind.grpc_code), kind
        assert number in (None, str(kind.exit_code)), kind


def test_errors_need_no_grpc() -> None:
    code = "import sys, tierd.errors; sys.exit(any(m in sys.modules for m in ('grpc', 'numpy')))"
    assert importlib.util.find_spec("grpc") is not None
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=30).returncode == 0
