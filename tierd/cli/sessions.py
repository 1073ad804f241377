"""`tierd sessions`: the sessions that a running daemon keeps."""

from __future__ import annotations

from typing import Any

from tierd.cli import options
from tierd.cli.connection import connected
from tierd.cli.streams import writing
from tierd.cli.terminal import figure, print_json, print_table, versioned

# What people need to tell sessions apart, and the unit of a figure; --json has all of it.
COLUMNS = {
    "id": "", "state": "", "engine": "", "codec": "", "layers": "", "block_tokens": "",
    "tokens": "", "warm_pages": "", "cold_pages": "", "unused_seconds": " s",
}  # fmt: skip


def sessions(daemon: options.Daemon = None, as_json: options.AsJson = False) -> None:
    """List a daemon's sessions."""
    with connected(daemon) as client:
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


def _shown(value: object, unit: str) -> str:
    if isinstance(value, int | float):
        return figure(value, ",d" if isinstance(value, int) else ",.1f", unit)
    return "-" if value is None else str(value)
