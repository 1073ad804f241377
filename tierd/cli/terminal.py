"""What a person sees: tables and text on stdout, progress and notes on stderr.

No colour, bar or spinner where the stream is not a terminal. rich is imported only when
something is drawn, so that a verb that prints JSON starts fast.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TextIO

from tierd.units import format_size

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

PLAIN_WIDTH = 160  # columns of a table where no terminal says how wide it is
PROGRESS_SECONDS = 10.0  # between lines of progress where there is no bar
_KEPT_CONTROLS = frozenset("\n\t")


def warn(message: str) -> None:
    """Write one line to stderr, after the command's name."""
    print(f"tierd: {message}", file=sys.stderr, flush=True)


def print_json(value: Mapping[str, Any]) -> None:
    """Write one JSON object to stdout, on one line."""
    print(json.dumps(value, ensure_ascii=False, default=str), flush=True)


def versioned(**sections: Any) -> dict[str, Any]:
    """Return a JSON object of a read command, with its shape's version first."""
    return {"version": 1, **sections}


def print_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], *, text_columns: int = 1
) -> None:
    """Draw a table on stdout. The first `text_columns` columns are text, the rest figures."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=title or None,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_header=any(columns),
    )
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < text_columns else "right")
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    console(sys.stdout).print(table)


def hush_libraries(*, quiet: bool) -> None:
    """Keep the engine's libraries' own progress bars away where there is no terminal, or no wish.

    To be called before they are imported: tqdm reads its environment then.
    """
    if quiet or not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")


def console(stream: TextIO) -> Console:
    """Return a rich console on `stream`."""
    from rich.console import Console

    width = None if stream.isatty() else PLAIN_WIDTH
    return Console(file=stream, width=width, highlight=False, soft_wrap=False)


def size(value: object) -> str:
    """Return a size for people, or "-" where a report has none."""
    return format_size(value) if isinstance(value, int | float) else "-"


def figure(value: object, form: str = ",.0f", unit: str = "") -> str:
    """Return a number for people, or "-" where a report has none."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return "-"
    return f"{value:{form}}{unit}"


def printable(text: str) -> str:
    """Return text without control characters: a document must not steer the terminal."""
    return "".join("\ufffd" if _steers(char) else char for char in text)


def _steers(char: str) -> bool:
    return (char < " " and char not in _KEPT_CONTROLS) or "\x7f" <= char <= "\x9f"


class JobDisplay:
    """A job's events on the terminal: prefill on stderr, the answer's text on stdout.

    `stream_text`: write the answer as it comes. `quiet`: no progress, no notes.
    Use it as a context manager: leaving it takes the progress bar away.
    """

    def __init__(self, *, stream_text: bool, quiet: bool) -> None:
        self._stream_text = stream_text
        self._quiet = quiet
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._total_tokens = 0
        self._done_tokens = 0
        self._started = self._last_line = time.monotonic()
        self._prefilling = False
        self._ended_with_newline = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop_bar()
        self._end_line()

    def prefill_started(self, total_tokens: int) -> None:
        """Show a bar on a terminal; elsewhere a line now and then."""
        self._total_tokens = total_tokens
        self._started = self._last_line = time.monotonic()
        self._prefilling = True
        if not self._quiet and sys.stderr.isatty():
            self._bar = _prefill_bar()
            self._task = self._bar.add_task("prefill", total=total_tokens, rate="")
            self._bar.start()

    def prefill_advanced(self, done_tokens: int) -> None:
        """Advance the bar to `done_tokens`; may go back, when lost pages are recomputed."""
        self._done_tokens = done_tokens
        rate = self._rate()
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done_tokens, rate=f"{rate:,.0f} tokens/s")
        elif not self._quiet and time.monotonic() - self._last_line >= PROGRESS_SECONDS:
            self._last_line = time.monotonic()
            warn(f"prefill: {done_tokens:,} of {self._total_tokens:,} tokens, {rate:,.0f} tokens/s")

    def token(self, text: str) -> None:
        """Write more of the answer."""
        if self._prefilling:
            self._finish_prefill()
        if self._stream_text and text:
            sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
            sys.stdout.flush()
            self._ended_with_newline = text.endswith("\n")

    def note(self, text: str) -> None:
        """Write one line to stderr."""
        if self._quiet:
            return
        if self._bar is not None:
            self._bar.console.print(f"tierd: {text}", markup=False)
            return
        self._end_line()
        warn(text)

    def _finish_prefill(self) -> None:
        self._prefilling = False
        self._stop_bar()
        if not self._quiet:
            warn(f"prefill: {self._done_tokens:,} tokens, {self._rate():,.0f} tokens/s")

    def _rate(self) -> float:
        return self._done_tokens / max(time.monotonic() - self._started, 1e-9)

    def _stop_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _end_line(self) -> None:
        if not self._ended_with_newline:
            sys.stdout.write("\n")
            sys.stdout.flush()
            self._ended_with_newline = True


def _prefill_bar() -> Progress:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        console=console(sys.stderr),
        transient=True,
    )
