"""`tierd stats`: what stands in each tier of a running daemon, and what has moved."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Annotated, Any

import typer

from tierd.cli import checks, options
from tierd.cli.connection import connected
from tierd.cli.terminal import figure, print_json, print_table, printable, size, versioned

Watch = Annotated[
    float | None,
    typer.Option(
        "--watch",
        min=0.1,
        max=checks.DAY_SECONDS,
        metavar="SECONDS",
        help="Again, every so often.",
    ),
]


def stats(
    daemon: options.Daemon = None, watch: Watch = None, as_json: options.AsJson = False
) -> None:
    """Show a daemon's tiers, moves and hints."""
    with connected(daemon) as client:
        while True:
            _show(client.stats(), as_json)
            if watch is None:
                return
            time.sleep(watch)


def _show(snapshot: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(versioned(**snapshot))
        return
    tiers = snapshot.get("tiers", {})
    print_table(
        "Tiers",
        ["tier", "pages", "bytes", "used", "capacity", "peak"],
        chain.from_iterable(_tier_rows(name, tier) for name, tier in tiers.items()),
    )
    print_table("Counts", ["", "count"], _counts("", snapshot))
    troubles = snapshot.get("troubles", {})
    if troubles:
        rows = ([what, printable(why)] for what, why in sorted(troubles.items()))
        print_table("Troubles", ["", "why"], rows, text_columns=2)


def _tier_rows(name: str, tier: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield a tier's row; what it holds beside its own pages has one of its own."""
    copied, copies_bytes = tier.get("backup_pages", 0), tier.get("backup_bytes", 0)
    own = {**tier, "bytes": tier["bytes"] - copies_bytes} if copied else tier
    sizes = (size(own.get(key)) for key in ("bytes", "used_bytes", "capacity_bytes", "peak_bytes"))
    yield [name, figure(own.get("pages")), *sizes]
    if copied:
        yield [f"{name}, copies of warm", figure(copied), size(copies_bytes), "", "", ""]


def _counts(prefix: str, section: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield every number of a snapshot but the tiers', under its name."""
    for name, value in section.items():
        if name == "tiers":
            continue
        words = f"{prefix}{name.replace('_', ' ')}"
        if isinstance(value, Mapping):
            yield from _counts(f"{words}: ", value)
        elif isinstance(value, int | float):
            yield words, figure(value, ",d" if isinstance(value, int) else ",.3f")
