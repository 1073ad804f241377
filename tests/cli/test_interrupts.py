"""Ctrl-C, SIGTERM and SIGHUP: the same line and 128 + n, whenever they come."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.wirerig import eventually
from tierd.cli import interrupts, streams
from tierd.errors import DaemonUnavailable

ROOT = Path(__file__).parent.parent.parent
# An import stands still here, as torch's seems to, and swallows what is raised in it.
SLOW_IMPORT = """
import os, sys, types
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "SLOW":
            print("importing", file=sys.stderr, flush=True)
            while True:
                try:
                    sys.stdin.read()
                except BaseException:
                    pass
sys.meta_path.insert(0, Slow())
check = types.ModuleType("tierd_engine.jobcheck")
check.check_request = lambda model, request: None
check.Request = dict
sys.modules["tierd_engine.jobcheck"] = check
from tierd.cli import main
sys.exit(main(["demo", "--quiet"]))
"""


@pytest.mark.parametrize("module", ["tierd.cli.app", "tierd_engine.runner"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_something_is_imported_ends_at_once(number: int, module: str) -> None:
    job = subprocess.Popen(
        [sys.executable, "-c", SLOW_IMPORT.replace("SLOW", module)], cwd=ROOT, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert job.stderr is not None and job.stderr.readline() == "importing\n"
        job.send_signal(number)
        out, err = job.communicate(timeout=10.0)
    finally:
        job.kill()
    assert (job.returncode, out, err) == (128 + number, "", "tierd: interrupted\n")


ENDING = """
import atexit, sys, time
atexit.register(time.sleep, 30)
atexit.register(print, "ending", flush=True)
from tierd.cli import main
sys.argv = ["tierd", "--version"]
sys.exit(main())
"""


def test_a_signal_while_the_process_ends_says_nothing_more() -> None:
    job = subprocess.Popen(
        [sys.executable, "-c", ENDING], cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert job.stdout is not None
        while job.stdout.readline() != "ending\n":
            pass
        job.send_signal(signal.SIGINT)
        out, err = job.communicate(timeout=10.0)
    finally:
        job.kill()
    assert (job.returncode, out, err) == (-signal.SIGINT, "", "")


def test_a_signal_that_a_library_swallowed_is_raised_at_the_next_event(
    tierd: Any, world: Any
) -> None:
    def swallow(events: Any) -> None:
        with contextlib.suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        events.token("more")
        raise AssertionError("the job went on")

    world.during_job = swallow
    assert tierd("demo", "--quiet").code == 128 + signal.SIGTERM


@pytest.mark.parametrize("made_of_it", [ImportError("a half import"), DaemonUnavailable("gone")])
def test_a_signal_that_a_library_made_an_error_of_is_an_interrupt(
    tierd: Any, world: Any, made_of_it: Exception
) -> None:
    def convert(events: Any) -> None:
        try:
            os.kill(os.getpid(), signal.SIGHUP)
        except KeyboardInterrupt:
            raise made_of_it from None

    world.during_job = convert
    outcome = tierd("demo", "--quiet")
    assert (outcome.code, outcome.err) == (129, "tierd: interrupted\n")


def test_a_signal_while_the_last_of_the_output_is_flushed_is_an_interrupt(
    tierd: Any, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted_flush(code: int) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("it was not heard")

    monkeypatch.setattr(streams, "flushed", interrupted_flush)
    outcome = tierd("demo", "--quiet")
    assert (outcome.code, outcome.err) == (143, "tierd: interrupted\n")


def test_an_ignored_signal_stays_ignored(tierd: Any, world: Any) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        world.during_job = lambda events: os.kill(os.getpid(), signal.SIGHUP)
        assert tierd("demo", "--quiet").code == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_outside_of_the_main_thread_nothing_is_watched() -> None:
    def enter() -> None:
        with interrupts.watched():
            assert signal.getsignal(signal.SIGTERM) is before

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join(10.0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_daemon_that_still_starts_ends_cleanly(
    tierd: Any, world: Any, monkeypatch: pytest.MonkeyPatch, number: int, tmp_path: Path
) -> None:
    ended = []

    class Starting:
        def __init__(self, config: object) -> None:
            self.drain = ended.append

        async def __aenter__(self) -> None:
            os.kill(os.getpid(), number)
            try:
                await asyncio.sleep(60.0)
            finally:
                ended.append("what was made is taken down")

        async def __aexit__(self, *error: object) -> None:
            raise AssertionError("it never started")

    monkeypatch.setattr(sys.modules["tierd.daemon"], "Daemon", Starting, raising=False)
    outcome = tierd("serve", "--cold-dir", str(tmp_path))
    assert (outcome.code, outcome.err) == (0, "")
    assert ended == ["what was made is taken down"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_daemon_ends_cleanly_on_each_of_them(tmp_path: Path, number: int) -> None:
    socket = tmp_path / "run" / "t.sock"
    (tmp_path / "cold").mkdir()
    daemon = subprocess.Popen(
        [sys.executable, "-m", "tierd.cli", "serve", "--socket", str(socket), "--warm", "16MiB",
         "--cold-dir", str(tmp_path / "cold"), "--cold-cap", "64MiB"],
        cwd=ROOT, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        eventually(socket.exists, 20.0)
        daemon.send_signal(number)
        _, err = daemon.communicate(timeout=10.0)
    finally:
        daemon.kill()
    assert daemon.returncode == 0
    assert "Traceback" not in err and not socket.exists()
