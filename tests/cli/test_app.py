"""The command's door: help is fast, and every foreseeable failure is one line and a code."""

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tierd import __version__, errors
from tierd.cli import app


def run_in_a_process(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tierd.cli", *arguments],
        capture_output=True, text=True, timeout=60, **options,
    )  # fmt: skip


def test_version_is_printed(tierd: Any) -> None:
    assert tierd("--version").out == f"tierd {__version__}\n"


def test_help_lists_every_verb_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; from tierd.cli import main; main(['--help']);"
        "heavy = {'torch', 'numba', 'numpy', 'grpc', 'transformers', 'tierd_engine'};"
        "print('loaded:', sorted(heavy.intersection(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    verbs = ["demo", "generate", "serve", "stats", "sessions", "hint", "doctor", "config"]
    assert all(verb in done.stdout for verb in verbs)
    assert "loaded: []" in done.stdout


@pytest.mark.parametrize("verb", [[], ["config"]])
def test_without_a_verb_the_help_is_printed_and_nothing_else(tierd: Any, verb: list[str]) -> None:
    helped, bare = tierd(*verb, "--help"), tierd(*verb)
    assert (helped.code, bare.code) == (0, 2)  # what a script did not mean to say is no success
    assert bare.out == helped.out and "Usage: tierd" in bare.out
    assert bare.err == helped.err == ""


@pytest.mark.parametrize(
    "arguments", [["nonsense"], ["generate", "--model", "m"], ["demo", "--codec", "int3"]]
)
def test_a_usage_error_is_one_line_and_exits_2(tierd: Any, arguments: list[str]) -> None:
    outcome = tierd(*arguments)
    assert outcome.code == 2
    assert outcome.out == ""
    assert outcome.err.startswith("tierd: error: ")
    assert outcome.err.count("\n") == 1
    assert "--help" in outcome.err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.InvalidArgument("bad"), 2),
        (errors.BudgetTooSmall("small", smallest_bytes=7), 2),
        (errors.DaemonUnavailable("gone"), 3),
        (errors.DeadlineExceeded("late"), 3),
        (errors.NotFound("no session"), 5),
        (errors.TierFull("full"), 1),
        (errors.StorageFull("no space"), 1),
        (OSError(28, "No space left on device"), 1),
        (MemoryError("1 TiB"), 1),
        (RuntimeError("can't start new thread"), 1),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes\nat alloc.cpp"), 1),
        (ImportError("dlopen: lib.so: Too many open files"), 1),
        (KeyboardInterrupt(), 130),
        (ModuleNotFoundError("No module named 'torch'", name="torch"), 1),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else str(value),
)
def test_a_failure_is_one_line_with_its_exit_code(
    tierd: Any, world: Any, error: BaseException, code: int
) -> None:
    def fail(events: object) -> None:
        raise error

    world.during_job = fail
    outcome = tierd("demo", "--quiet")
    assert outcome.code == code
    assert outcome.err.count("\n") == 1
    assert outcome.err.startswith("tierd: ")
    assert "Traceback" not in outcome.err


@pytest.mark.parametrize(
    ("limit", "cause", "says"),
    [
        (resource.RLIMIT_NOFILE, OSError(24, "Too many open files"), "4000 files: raise ulimit -n"),
        (resource.RLIMIT_AS, OSError(12, "Cannot allocate memory"), "3.9 KiB: raise ulimit -v"),
        (resource.RLIMIT_AS, MemoryError(), "3.9 KiB: raise ulimit -v"),
        (resource.RLIMIT_AS, RuntimeError("can't start new thread"), "3.9 KiB: raise ulimit -v"),
        (resource.RLIMIT_AS, ImportError("x: failed to map segment"), "3.9 KiB: raise ulimit -v"),
    ],
)
def test_what_a_limit_of_the_process_may_have_done_names_the_limit(
    tierd: Any, world: Any, monkeypatch: Any, limit: int, cause: Exception, says: str
) -> None:
    real = resource.getrlimit
    monkeypatch.setattr(
        resource, "getrlimit", lambda which: (4000, 4000) if which == limit else real(which)
    )

    def fail(events: object) -> None:
        raise errors.StorageError("memfd tierd-slab-17: no") from cause

    world.during_job = fail
    assert says in tierd("demo", "--quiet").err

    def fail_bare(events: object) -> None:
        raise cause

    world.during_job = fail_bare
    err = tierd("demo", "--quiet").err
    assert says in err and ":;" not in err and ": ;" not in err


def test_a_value_that_is_none_of_a_few_is_named_with_them(tierd: Any) -> None:
    err = tierd("demo", "--codec", "int3").err
    assert "Invalid value for '--codec': 'int3' is not one of 'raw', 'int8'" in err


def test_a_message_of_several_lines_becomes_one(tierd: Any, world: Any) -> None:
    def fail(events: object) -> None:
        raise errors.TierdError("first\n  second\n")

    world.during_job = fail
    assert tierd("demo", "--quiet").err == "tierd: error: first second\n"


def test_a_bug_keeps_its_traceback(tierd: Any, world: Any) -> None:
    def fail(events: object) -> None:
        raise ZeroDivisionError

    world.during_job = fail
    with pytest.raises(ZeroDivisionError):
        tierd("demo", "--quiet")


def test_a_missing_extra_is_named(tierd: Any, world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tierd_engine.runner", None)
    absent = ModuleNotFoundError("No module named 'torch'", name="torch")

    def refuse() -> Callable[..., int]:
        raise absent

    monkeypatch.setattr(app, "build_app", refuse)
    assert "pip install 'tierd[engine]'" in tierd("demo").err


def test_a_reader_that_left_causes_no_traceback() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "w") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "tierd.cli", "--version"],
            stdout=closed, stderr=subprocess.PIPE, text=True, timeout=60,
        )  # fmt: skip
    assert done.stderr == ""


def test_output_that_is_no_terminal_has_no_colour() -> None:
    done = run_in_a_process("doctor", "--daemon", "/tmp/x.sock")
    assert "\x1b" not in done.stdout + done.stderr
