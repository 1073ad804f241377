"""`tierd hint`: tell a daemon that a session's pages will be needed, and by when."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from tierd.cli import checks, options
from tierd.cli.connection import connected
from tierd.cli.streams import warn
from tierd.cli.terminal import print_json, print_table, versioned
from tierd.errors import InvalidArgument
from tierd.types import SessionState

DEADLINE_SECONDS_MAX = 3600.0  # as the daemon's
PRIORITY_MAX = 2**31 - 1  # what the wire holds


def _deadline_seconds(option: str, deadline: str) -> float:
    seconds = checks.duration(option, deadline, longest_seconds=math.inf)
    if not 0.0 < seconds <= DEADLINE_SECONDS_MAX:
        raise InvalidArgument(
            f"{option} {deadline} must be more than 0 s and at most {DEADLINE_SECONDS_MAX:g} s"
        )
    return seconds


Session = Annotated[
    str,
    typer.Argument(
        metavar="SESSION",
        callback=options.checked("SESSION", checks.session),
        help="An id from `tierd sessions`.",
    ),
]
Deadline = Annotated[
    str,
    typer.Option(
        "--deadline",
        metavar="DURATION",
        callback=options.checked("--deadline", _deadline_seconds),
        help="Needed within: 2s, 250ms.",
    ),
]
First = Annotated[
    int,
    typer.Option(
        "--first-token", min=0, max=options.TOKENS_MAX, metavar="N", help="From this token."
    ),
]
Last = Annotated[
    int | None,
    typer.Option(
        "--last-token",
        min=0,
        max=options.TOKENS_MAX,
        metavar="N",
        help="To this one.  \\[default: all]",
    ),
]
Confidence = Annotated[
    float, typer.Option("--confidence", min=0.0, max=1.0, metavar="P", help="How surely.")
]
Priority = Annotated[
    int,
    typer.Option(
        "--priority",
        min=-PRIORITY_MAX,
        max=PRIORITY_MAX,
        metavar="N",
        help="Higher goes first.",
    ),
]


def hint(
    session: Session,
    deadline: Deadline,
    first_token: First = 0,
    last_token: Last = None,
    confidence: Confidence = 1.0,
    priority: Priority = 0,
    daemon: options.Daemon = None,
    as_json: options.AsJson = False,
) -> None:
    """Have a suspended or idle session's cold pages moved to warm before they are needed.

    The hint lives as long as this command: it runs until the deadline. Ctrl-C cancels the hint.
    """
    seconds = _deadline_seconds("--deadline", deadline)
    if last_token is not None and last_token < first_token:
        raise InvalidArgument(f"--last-token {last_token} comes before --first-token {first_token}")
    with connected(daemon) as client:
        _check_range(client.session(session), first_token)
        ticket = client.hint(
            session,
            deadline_seconds=seconds,
            first_token=first_token,
            last_token=last_token,
            confidence=confidence,
            priority=priority,
        )
        _show(ticket, as_json)
        # A hint dies with its owner's connection; past its deadline it has nothing left to say.
        time.sleep(seconds)


def _check_range(row: Mapping[str, Any], first_token: int) -> None:
    # A session that an engine has may grow; the daemon knows the length of a suspended one.
    if row["state"] == SessionState.SUSPENDED and first_token >= row["tokens"]:
        raise InvalidArgument(
            f"--first-token {first_token} is past the end: session {row['id']} has "
            f"{row['tokens']} tokens, 0 to {row['tokens'] - 1}"
        )


def _show(ticket: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(versioned(**ticket))
        return
    shown = {name: value for name, value in ticket.items() if name != "why"}
    if not ticket["moving"]:
        shown["estimated_seconds"] = _unmoved(ticket)
    rows = [
        (name.replace("_", " "), f"{value:.2f}" if isinstance(value, float) else str(value))
        for name, value in shown.items()
    ]
    print_table("Hint", ["", ""], rows, text_columns=2)
    if ticket.get("left_cold"):
        warn(f"about {ticket['left_cold']:,d} pages will not come up: {ticket['why']}")


def _unmoved(ticket: Mapping[str, Any]) -> str:
    if ticket["pages"]:
        return "none: nothing will move, there is no room in warm"
    return "none: nothing has to move, no page is cold"
