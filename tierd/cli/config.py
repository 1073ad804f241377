"""`tierd config show`: the settings in force, and where each came from."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer.core import TyperCommand

from tierd.cli import options
from tierd.cli.terminal import print_json, print_table, versioned
from tierd.units import format_size

if TYPE_CHECKING:
    from tierd.config import SettingRow

Origin = Annotated[bool, typer.Option("--origin", help="Say where each value came from.")]


def build_app(command: type[TyperCommand]) -> typer.Typer:
    """Return the verb with its own verbs, each a `command`."""
    app = typer.Typer(no_args_is_help=True, help="Show settings.")
    app.callback()(_config)
    app.command("show", cls=command)(show)
    return app


def _config() -> None:
    """Show settings."""


def show(
    config: options.ConfigFile = None, origin: Origin = False, as_json: options.AsJson = False
) -> None:
    """Show every setting: default < TOML file < TIERD_SECTION__KEY."""
    from tierd.config import load_config, settings_of

    rows = settings_of(load_config(config))
    if as_json:
        print_json(
            versioned(
                settings={row.name: {"value": row.value, "origin": row.origin} for row in rows}
            )
        )
        return
    columns = ["setting", "value", *(["origin"] if origin else [])]
    print_table(
        "",
        columns,
        ([row.name, _shown(row, rows), *([row.origin] if origin else [])] for row in rows),
        text_columns=3,
    )


def _shown(row: SettingRow, rows: Sequence[SettingRow]) -> str:
    """Return a value for people; a cap of 0 is none, so that what is free is what counts."""
    if row.name != "cold.cap_bytes" or row.value:
        return row.shown
    folder = Path(next(other.value for other in rows if other.name == "cold.folder"))
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent  # it is made when the daemon starts
    try:
        return f"unlimited (90% of {format_size(shutil.disk_usage(folder).free)} free)"
    except OSError:
        return "unlimited"
