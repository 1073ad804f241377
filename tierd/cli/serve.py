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
from tierd.cli.shortage import SERVE_ADDRESS_BYTES, require_address_space
from tierd.config import COLD_CAP_BYTES_MIN
from tierd.errors import StorageError
from tierd.units import KIB

# Less than this holds hardly a block of the smallest model.
WARM_BYTES_MIN = 64 * KIB


def _warm_bytes(option: str, value: str) -> int:
    return checks.size(option, value, smallest_bytes=WARM_BYTES_MIN)


def _cap_bytes(option: str, value: str) -> int:
    more = ", and more where the folder holds pages"
    return checks.size(option, value, smallest_bytes=COLD_CAP_BYTES_MIN, where=more)


Socket = Annotated[
    str | None,
    typer.Option(
        "--socket",
        metavar="PATH",
        callback=options.checked("--socket", checks.named),
        help="Where clients connect.",
    ),
]
WarmBudget = Annotated[
    str | None,
    typer.Option(
        "--warm",
        metavar="SIZE",
        callback=options.checked("--warm", _warm_bytes),
        help="Warm tier in all, e.g. 4GiB.",
    ),
]
ColdDir = Annotated[
    str | None,
    typer.Option(
        "--cold-dir",
        metavar="DIR",
        callback=options.checked("--cold-dir", checks.named),
        help="Folder of the cold tier; made if its parent is there.",
    ),
]
ColdCap = Annotated[
    str | None,
    typer.Option(
        "--cold-cap",
        metavar="SIZE",
        callback=options.checked("--cold-cap", _cap_bytes),
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
    folder = checks.folder("--cold-dir", cold_dir)
    settings: dict[str, Any] = {
        "service.socket": socket,
        "warm.budget_bytes": None if warm is None else _warm_bytes("--warm", warm),
        "cold.folder": None if folder is None else str(folder),
        "cold.cap_bytes": None if cold_cap is None else _cap_bytes("--cold-cap", cold_cap),
    }
    given = {name: value for name, value in settings.items() if value is not None}
    from tierd.bootstrap import require_free_socket
    from tierd.config import load_config

    loaded = load_config(config, overrides=given)
    require_address_space(SERVE_ADDRESS_BYTES + loaded.warm.budget_bytes, "the daemon")
    require_free_socket(loaded.service.socket)  # a daemon that is not to be makes no folder
    if folder is not None:
        checks.usable_folder(folder)
    elif config is None:
        _make_usual_folder()
    from tierd.daemon import Daemon

    asyncio.run(_serve(Daemon(loaded)))


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
