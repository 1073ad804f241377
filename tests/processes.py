"""What tests of real fds share: which are open, and waits that end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent
POLL_SECONDS = 0.005


# gRPC's core and event loops of earlier tests open and close these when they like.
_OTHERS = ("anon_inode:[eventpoll]", "anon_inode:[eventfd]")


def open_fds() -> dict[str, str]:
    """Return what each fd of this process is open on, pollers' own left out."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            target = os.readlink(f"/proc/self/fd/{name}")
            if target not in _OTHERS:
                found[name] = target
    return found


async def until(condition: Callable[[], bool], seconds: float) -> None:
    """Let the loop turn until `condition` holds, `seconds` at most."""
    give_up_at = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up_at, f"not within {seconds} s"
        await asyncio.sleep(POLL_SECONDS)
