"""The command's door: signals are heard and the standard streams hold before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence

from tierd.cli import exits, interrupts, streams


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    with interrupts.watched():
        with interrupts.at_once():
            streams.mend()
            from tierd.cli.app import run

        try:
            return streams.flushed(run(argv))
        except KeyboardInterrupt:  # in the last moment: everything is done but the flush
            streams.warn("interrupted")
            return interrupts.exit_code() or exits.INTERRUPTED
