"""What is read next is asked for while this is worked on: a little by every step that takes time.

Memory answers so many requests at a time, and waits while a step asks for nothing; a step that
asks for more than memory gives waits itself. So each asks for some lines as it goes on, and the
order in which they are asked for is not the order in which it works.

Invariants:
  a cursor is one worker's: the address of the next line, then where what is read next ends
  every line is asked for: `fetch_rest` leaves none. A few behind the end may be too
"""

from __future__ import annotations

from typing import Any

from tierd.units import CACHE_LINE_BYTES
from tierd_engine.attention.compiling import inlined, step
from tierd_engine.attention.simd import load_int64, prefetch_near, store_int64


@step
def start_fetching(start: Any, end: Any, cursor: Any) -> None:
    """Let what is read next be all from `start`, a line's first byte, up to `end`."""
    store_int64(start, cursor)
    store_int64(end, cursor + 8)


@inlined
def fetch_more(cursor: Any, lines: Any) -> None:
    """Ask for the next `lines` of what is read next; for nothing once that is all.

    Into the second cache: a task's data is larger than the first, and a request into the first
    holds one of the few buffers through which what is there now is loaded from the second.
    """
    at = load_int64(cursor)
    if at < load_int64(cursor + 8):
        for line in range(lines):
            prefetch_near(at + CACHE_LINE_BYTES * line)
        store_int64(at + CACHE_LINE_BYTES * lines, cursor)


@step
def fetch_rest(cursor: Any) -> None:
    """Ask for all that no step has asked for."""
    while load_int64(cursor) < load_int64(cursor + 8):
        fetch_more(cursor, 1)
