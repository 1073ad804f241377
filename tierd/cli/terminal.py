"""What a person sees: tables and text on stdout, progress and notes on stderr.

No colour, bar or spinner where the stream is not a terminal. rich is imported only when
something is drawn, so that a verb that prints JSON starts fast.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TextIO

from tierd.cli import interrupts
from tierd.cli.streams import warn, writing
from tierd.units import format_size

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

# Columns of a table where no terminal says how wide it is: no path is folded for a reader
# that is a file or a program. Linux' paths have at most 4,096 bytes.
PLAIN_WIDTH = 10_000
PROGRESS_SECONDS = 10.0  # between lines of progress where there is no bar
TICK_SECONDS = 1.0
_KEPT_CONTROLS = frozenset("\n\t")


def print_json(value: Mapping[str, Any]) -> None:
    """Write one JSON object to stdout, on one line."""
    with writing() as out:
        # Elsewhere than in UTF-8 a character may be one that the stream cannot encode.
        plain = (out.encoding or "").lower().replace("-", "") != "utf8"
        print(json.dumps(value, ensure_ascii=plain, default=str), file=out)


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
    with writing() as out:
        screen = console(out)
        with screen.capture() as drawn:
            screen.print(table)
        out.writelines(f"{line.rstrip()}\n" for line in drawn.get().splitlines())


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
    Use it as a context manager: leaving it takes the progress bar away. While it is
    entered, a thread says every PROGRESS_SECONDS what is going on, if nothing else does.
    """

    def __init__(self, *, stream_text: bool, quiet: bool) -> None:
        self._stream_text = stream_text
        self._quiet = quiet
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._total_tokens = self._held_tokens = self._done_tokens = 0
        self._started = self._last_line = time.monotonic()
        self._what = ""  # what goes on in silence; "" while the answer streams
        self._prefilling = False
        self._ended_with_newline = True
        self._lock = threading.Lock()  # of what the two threads share: what, and the last line
        self._left = threading.Event()
        self._ticker = threading.Thread(target=self._tick_on, name="tierd-ticker", daemon=True)

    def __enter__(self) -> Self:
        if not self._quiet:
            self._ticker.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._left.set()
        if self._ticker.is_alive():
            self._ticker.join(TICK_SECONDS)
        self._stop_bar()
        self._end_line()

    def working(self, what: str) -> None:
        """Say so if it lasts."""
        interrupts.check()
        with self._lock:
            self._what = what
            self._started = self._last_line = time.monotonic()

    def prefill_started(self, total_tokens: int, held_tokens: int = 0) -> None:
        """Show a bar on a terminal; elsewhere a line now and then."""
        self.working("prefill")
        self._total_tokens = total_tokens
        self._held_tokens = self._done_tokens = held_tokens
        self._prefilling = True
        if not self._quiet and sys.stderr.isatty():
            self._bar = _prefill_bar()
            self._task = self._bar.add_task(
                "prefill", total=total_tokens, completed=held_tokens, rate=""
            )
            self._bar.start()

    def prefill_advanced(self, done_tokens: int) -> None:
        """Advance the bar to `done_tokens`; may go back, when lost pages are recomputed."""
        interrupts.check()
        self._done_tokens = done_tokens
        if self._bar is not None and self._task is not None:
            rate = f"{self._rate():,.0f} tokens/s"
            self._bar.update(self._task, completed=done_tokens, rate=rate)
        else:
            self.tick()

    def tick(self) -> None:
        """Say what goes on, if it goes on in silence for PROGRESS_SECONDS."""
        with self._lock:
            now = time.monotonic()
            is_silent = now - self._last_line >= PROGRESS_SECONDS
            if self._quiet or self._bar is not None or not self._what or not is_silent:
                return
            self._last_line = now
            warn(self._progress(now - self._started))

    def _progress(self, seconds: float) -> str:
        if not self._prefilling:
            return f"{self._what}: {seconds:,.0f} s so far"
        done = f"{self._done_tokens:,} of {self._total_tokens:,} tokens"
        return f"prefill: {done}, {self._rate():,.0f} tokens/s"

    def _tick_on(self) -> None:
        while not self._left.wait(TICK_SECONDS):
            self.tick()

    def token(self, text: str) -> None:
        """Write more of the answer."""
        interrupts.check()
        if self._prefilling:
            self._finish_prefill()
        if self._stream_text and text:
            self._ended_with_newline = True  # should this fail, there is no line to end
            with writing() as out:
                out.write(printable(text) if out.isatty() else text)
            self._ended_with_newline = text.endswith("\n")

    def note(self, text: str) -> None:
        """Write one line to stderr."""
        if self._quiet:
            return
        if self._bar is not None:
            self._bar.console.print(f"tierd: {text}", markup=False)
            return
        if sys.stdout.isatty():  # else the answer is a file's or a program's: nothing gets into it
            self._end_line()
        warn(text)

    def _finish_prefill(self) -> None:
        self._prefilling = False
        with self._lock:
            self._what = "" if self._stream_text else "generating"
        self._stop_bar()
        if not self._quiet:
            tokens = self._done_tokens - self._held_tokens
            held = f", {self._held_tokens:,} were held" if self._held_tokens else ""
            warn(f"prefill: {tokens:,} tokens{held}, {self._rate():,.0f} tokens/s")

    def _rate(self) -> float:
        tokens = self._done_tokens - self._held_tokens
        return tokens / max(time.monotonic() - self._started, 1e-9)

    def _stop_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _end_line(self) -> None:
        if not self._ended_with_newline:
            self._ended_with_newline = True
            with writing() as out:
                out.write("\n")


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
