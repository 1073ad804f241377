"""Real processes and their fds, for tests: children that die on demand, waits that end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
POLL_SECONDS = 0.005


def open_fds() -> dict[str, str]:
    """Return what each fd of this process is open on."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            found[name] = os.readlink(f"/proc/self/fd/{name}")
    return found


async def until(condition: Callable[[], bool], seconds: float) -> None:
    """Let the loop turn until `condition` holds, `seconds` at most."""
    give_up_at = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up_at, f"not within {seconds} s"
        await asyncio.sleep(POLL_SECONDS)


@contextlib.contextmanager
def child(code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run Python code that prints "ready" and then waits on stdin; it is killed at the end."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdin and process.stdout
    try:
        line = process.stdout.readline()
        assert line == "ready\n", f"the child said {line!r}"
        yield process
    finally:
        process.kill()
        process.wait(timeout=10)
        process.stdin.close()
        process.stdout.close()
