"""The command's door: signals are heard and the standard streams hold before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence

from tierd.cli import interrupts, streams


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    with interrupts.watched():
        with interrupts.at_once():
            streams.mend()
            from tierd.cli.app import run

        return streams.flushed(run(argv))
