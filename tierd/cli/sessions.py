"""`tierd sessions`: the sessions that a running daemon keeps."""

from __future__ import annotations

from typing import Any

from tierd.cli import options
from tierd.cli.connection import connected
from tierd.cli.terminal import print_json, print_table, versioned


def sessions(daemon: options.Daemon = None, as_json: options.AsJson = False) -> None:
    """List a daemon's sessions."""
    with connected(daemon) as client:
        found: list[dict[str, Any]] = client.sessions()
    if as_json:
        print_json(versioned(sessions=found))
        return
    columns = list(found[0]) if found else ["id", "state"]
    rows = ([row.get(column, "-") for column in columns] for row in found)
    print_table("Sessions", [column.replace("_", " ") for column in columns], rows, text_columns=2)
