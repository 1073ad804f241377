"""`tierd sessions`: the sessions that a running daemon keeps, and the end of one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tierd.cli import checks, options
from tierd.cli.connection import connected
from tierd.cli.streams import warn, writing
from tierd.cli.terminal import figure, print_json, print_table, versioned
from tierd.errors import InvalidArgument
from tierd.layercodecs import parse_codec_choice
from tierd.types import SessionState, digest8

if TYPE_CHECKING:
    from tierd.client import Client

# What people need to tell sessions apart, and the unit of a figure; --json has all of it.
COLUMNS = {
    "id": "", "state": "", "kept": "", "codec": "", "engine": "", "layers": "", "block_tokens": "",
    "tokens": "", "warm_pages": "", "cold_pages": "", "unused_seconds": " s",
}  # fmt: skip


Drop = Annotated[
    str | None,
    typer.Option(
        "--drop",
        metavar="SESSION",
        callback=options.checked("--drop", checks.session),
        help="End this suspended session: it is gone.",
    ),
]
Yes = Annotated[bool, typer.Option("--yes", help="With --drop: yes, for good.")]


def sessions(
    daemon: options.Daemon = None,
    as_json: options.AsJson = False,
    drop: Drop = None,
    yes: Yes = False,
) -> None:
    """List a daemon's sessions, or drop one that it keeps."""
    if yes and drop is None:
        raise InvalidArgument("--yes goes with --drop SESSION")
    with connected(daemon) as client:
        if drop is not None:
            _drop(client, drop, yes)
        found: list[dict[str, Any]] = client.sessions()
        troubles: dict[str, str] = client.stats().get("troubles", {})
    for what, why in troubles.items():
        less = "" if what == "folder" else "; a restart may find less than is said here"
        warn(f"the daemon's {what} fails: {why}{less}")
    if as_json:
        print_json(versioned(sessions=[{**row, **_told(row)} for row in found]))
        return
    if not found:
        with writing() as out:
            print("no sessions", file=out)
        return
    folder_fails = "folder" in troubles
    shown = [{**row, "kept": _kept(row, folder_fails), "codec": _codec(row)} for row in found]
    rows = ([_shown(row.get(name), unit) for name, unit in COLUMNS.items()] for row in shown)
    titles = [name.removesuffix("_seconds").replace("_", " ") for name in COLUMNS]
    print_table("Sessions", titles, rows, text_columns=4)


def _drop(client: Client, session: str, yes: bool) -> None:
    row = client.session(session)
    if row["state"] != SessionState.SUSPENDED:
        raise InvalidArgument(f"session {session} is {row['state']}: end its job first")
    if not yes:
        raise InvalidArgument(
            f"session {session} ({row['tokens']:,d} tokens) would be gone for good; add --yes"
        )
    client.close_session(session)


def _kept(row: Mapping[str, Any], folder_fails: bool) -> str | None:
    """Say whether a session outlives its daemon, and what of it does not; None: nobody asked.

    `folder_fails`: what the daemon says of its folder was shown, and is not said here again.
    """
    if row["state"] != SessionState.SUSPENDED or "kept" not in row:
        return None
    if row["ram_only_blocks"]:
        return f"not kept: {_counted(row['ram_only_blocks'], 'block')} only in RAM"
    if not row["kept"]:
        return (
            "not for sure: its folder fails" if folder_fails else "not kept: ends with the daemon"
        )
    if row["removed_blocks"]:
        return f"in part: all but {_counted(row['removed_blocks'], 'block')}, whose files are gone"
    lost = _lost_blocks(row)
    return "yes" if lost == 0 else f"in part: {_counted(lost, 'block')} to be computed anew"


def _lost_blocks(row: Mapping[str, Any]) -> int:
    """Return how many blocks a resume of a suspended session computes anew."""
    # The last token was never fed: the block that it would fill is not sealed.
    return max(0, int((row["tokens"] - 1) // row["block_tokens"] - row["sealed_blocks"]))


def _told(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what --json says of a session beside what the daemon does."""
    told: dict[str, Any] = {"log_id": digest8(row["id"])}
    if row["state"] == SessionState.SUSPENDED and "sealed_blocks" in row:
        told["lost_blocks"] = _lost_blocks(row)
    return told


def _codec(row: Mapping[str, Any]) -> str | None:
    """Return the codec that was asked for, and how many layers have a better one."""
    asked, found = row.get("codec"), row.get("page_codecs")
    if asked is None or not found:
        return asked
    least = parse_codec_choice(asked).per_layer(len(found))
    higher = sum(codec != own.name.lower() for codec, own in zip(found, least, strict=True))
    return f"{asked} ({_counted(higher, 'layer')} higher)" if higher else asked


def _counted(count: int, what: str) -> str:
    return f"{count:,d} {what}{'s' * (count != 1)}"


def _shown(value: object, unit: str) -> str:
    if isinstance(value, int | float):
        return figure(value, ",d" if isinstance(value, int) else ",.1f", unit)
    return "-" if value is None else str(value)
