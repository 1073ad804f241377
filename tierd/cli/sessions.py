"""`tierd sessions`: the sessions that a running daemon keeps, and the end of one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tierd.cli import checks, options
from tierd.cli.connection import connected
from tierd.cli.streams import writing
from tierd.cli.terminal import figure, print_json, print_table, versioned
from tierd.errors import InvalidArgument
from tierd.types import SessionState

if TYPE_CHECKING:
    from tierd.client import Client

# What people need to tell sessions apart, and the unit of a figure; --json has all of it.
COLUMNS = {
    "id": "", "state": "", "engine": "", "codec": "", "layers": "", "block_tokens": "",
    "tokens": "", "warm_pages": "", "cold_pages": "", "unused_seconds": " s",
}  # fmt: skip


Drop = Annotated[
    str | None,
    typer.Option("--drop", metavar="SESSION", help="End this suspended session: it is gone."),
]
Yes = Annotated[bool, typer.Option("--yes", help="With --drop: yes, for good.")]


def sessions(
    daemon: options.Daemon = None,
    as_json: options.AsJson = False,
    drop: Drop = None,
    yes: Yes = False,
) -> None:
    """List a daemon's sessions, or drop one that it keeps."""
    checks.named("--drop", drop)
    if yes and drop is None:
        raise InvalidArgument("--yes goes with --drop SESSION")
    with connected(daemon) as client:
        if drop is not None:
            _drop(client, drop, yes)
        found: list[dict[str, Any]] = client.sessions()
    if as_json:
        print_json(versioned(sessions=found))
        return
    if not found:
        with writing() as out:
            print("no sessions", file=out)
        return
    rows = ([_shown(row.get(name), unit) for name, unit in COLUMNS.items()] for row in found)
    titles = [name.removesuffix("_seconds").replace("_", " ") for name in COLUMNS]
    print_table("Sessions", titles, rows, text_columns=2)


def _drop(client: Client, session: str, yes: bool) -> None:
    row = client.session(session)
    if row["state"] != SessionState.SUSPENDED:
        raise InvalidArgument(f"session {session} is {row['state']}: end its job first")
    if not yes:
        raise InvalidArgument(
            f"session {session} ({row['tokens']:,d} tokens) would be gone for good; add --yes"
        )
    client.close_session(session)


def _shown(value: object, unit: str) -> str:
    if isinstance(value, int | float):
        return figure(value, ",d" if isinstance(value, int) else ",.1f", unit)
    return "-" if value is None else str(value)
