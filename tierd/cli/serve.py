"""`tierd serve`: the daemon by itself, until SIGTERM or Ctrl-C."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer

from tierd.cli import options
from tierd.units import parse_size

Socket = Annotated[
    str | None, typer.Option("--socket", metavar="PATH", help="Where clients connect.")
]
WarmBudget = Annotated[
    str | None, typer.Option("--warm", metavar="SIZE", help="Warm tier in all, e.g. 4GiB.")
]
ColdDir = Annotated[
    Path | None, typer.Option("--cold-dir", metavar="DIR", help="Folder of the cold tier.")
]
ColdCap = Annotated[
    str | None, typer.Option("--cold-cap", metavar="SIZE", help="Cold tier at most, e.g. 100GiB.")
]


def serve(
    socket: Socket = None,
    warm: WarmBudget = None,
    cold_dir: ColdDir = None,
    cold_cap: ColdCap = None,
    config: options.ConfigFile = None,
) -> None:
    """Run the daemon that keeps the warm and cold tiers for jobs on this machine."""
    from tierd.config import load_config
    from tierd.daemon import Daemon

    settings: dict[str, Any] = {
        "service.socket": socket,
        "warm.budget_bytes": None if warm is None else parse_size(warm),
        "cold.folder": None if cold_dir is None else str(cold_dir),
        "cold.cap_bytes": None if cold_cap is None else parse_size(cold_cap),
    }
    given = {name: value for name, value in settings.items() if value is not None}
    asyncio.run(_serve(Daemon(load_config(config, overrides=given))))


async def _serve(daemon: Any) -> None:
    async with daemon:
        await daemon.serve_forever()
