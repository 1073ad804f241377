"""`tierd serve`: the daemon by itself, until SIGTERM or Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from typing import Annotated, Any

import typer

from tierd.cli import checks, interrupts, options
from tierd.errors import StorageError
from tierd.units import KIB

# Less than this holds hardly a block of the smallest model.
BUDGET_BYTES_MIN = 64 * KIB

Socket = Annotated[
    str | None, typer.Option("--socket", metavar="PATH", help="Where clients connect.")
]
WarmBudget = Annotated[
    str | None, typer.Option("--warm", metavar="SIZE", help="Warm tier in all, e.g. 4GiB.")
]
ColdDir = Annotated[
    str | None,
    typer.Option(
        "--cold-dir",
        metavar="DIR",
        help="Folder of the cold tier; made if its parent is there.",
    ),
]
ColdCap = Annotated[
    str | None,
    typer.Option(
        "--cold-cap",
        metavar="SIZE",
        help="Cold tier at most, e.g. 100GiB.  \\[default: 90% of what is free]",
    ),
]


def serve(
    socket: Socket = None,
    warm: WarmBudget = None,
    cold_dir: ColdDir = None,
    cold_cap: ColdCap = None,
    config: options.ConfigFile = None,
) -> None:
    """Run the daemon that keeps the warm and cold tiers for jobs on this machine.

    It ends on SIGTERM, SIGHUP or Ctrl-C.
    """
    folder = checks.cold_folder("--cold-dir", cold_dir)
    settings: dict[str, Any] = {
        "service.socket": checks.named("--socket", socket),
        "warm.budget_bytes": checks.size("--warm", warm, smallest_bytes=BUDGET_BYTES_MIN),
        "cold.folder": None if folder is None else str(folder),
        "cold.cap_bytes": checks.size("--cold-cap", cold_cap, smallest_bytes=BUDGET_BYTES_MIN),
    }
    if folder is None and config is None:
        _make_usual_folder()
    given = {name: value for name, value in settings.items() if value is not None}
    checks.named("--config", config)
    from tierd.config import load_config
    from tierd.daemon import Daemon

    asyncio.run(_serve(Daemon(load_config(config, overrides=given))))


def _make_usual_folder() -> None:
    """Make the cold folder that is used where none is named. Raises StorageError: what to do."""
    from tierd.config import load_config

    folder = load_config().cold.folder
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"cold folder {folder} cannot be made: {error.strerror}; name another with --cold-dir"
        ) from None


async def _serve(daemon: Any) -> None:
    """Run a daemon until it is told to end: that is how it ends, also while it starts.

    Nothing is raised amid the loop's own work: a signal cancels the start, then drains.
    """
    starting = asyncio.current_task()
    assert starting is not None, "a coroutine runs in a task"
    _on_signals(starting.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        async with daemon:
            _on_signals(daemon.drain)
            await daemon.serve_forever()


def _on_signals(end: Callable[[], object]) -> None:
    loop = asyncio.get_running_loop()
    for number in interrupts.SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, end)
