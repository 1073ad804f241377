"""`tierd config show`: the settings in force, and where each came from."""

from __future__ import annotations

from typing import Annotated

import typer

from tierd.cli import options
from tierd.cli.terminal import print_json, print_table, versioned

app = typer.Typer(no_args_is_help=True, help="Show settings.")

Origin = Annotated[bool, typer.Option("--origin", help="Say where each value came from.")]


@app.callback()
def _config() -> None:
    """Show settings."""


@app.command()
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
        ([row.name, row.shown, *([row.origin] if origin else [])] for row in rows),
        text_columns=3,
    )
