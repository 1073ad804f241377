"""A schedule's units: begun ahead, waited for and given back, in compiled code.

Threads of the cold pool bring them (attention/reading.py). Who takes them is the reader's thread,
or a job of the team while that thread stands still: never both.

A table says what is read, its rows int64:
    pages    offset of the slot in its chunk, payload bytes, address of two header starts
    runs     fd, offset in the file, offset in the chunk, bytes, first page, end of its pages
    shares   first run, end of its runs
    units    their first shares, and the end of the last one's: one number more than there are

A schedule is the units in their order, again and again, each into the next chunk likewise:
number n is unit n modulo their count, in chunk n modulo theirs.

Pool words, int64 at `pool`: see the numbers below.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tierd.codec.intrinsics import as_array
from tierd_engine.attention.atomics import (
    TOKEN_BYTES,
    add_word,
    load_word,
    now_ns,
    sleep_while,
    store_word,
    write_bytes,
)
from tierd_engine.attention.compiling import step

# Words of a pool. STOP: threads end. SKIP: shares count as done, unread. NEXT, TAIL: of the queue's
# entries the next to be taken, and the next to be made. WORK, TOKENS: a pipe's ends; a token more
# than there are entries wakes a thread for nothing. ZEROS: address of TOKENS_MAX tokens. PAGES,
# RUNS, SHARES: addresses of the table. CHUNKS: of the chunks' words; ADDRESSES: of where the
# chunks are. Of a schedule's numbers ISSUED are begun and RELEASED given back, AHEAD apart at
# most, and as many as REFILL together. SLEEPERS: who waits for chunks. LIMIT_NS: how long a job
# does; WAITED_NS: how long it did. FAILED: it was too long, or what came was not sound.
(
    STOP, SKIP, NEXT, TAIL, WORK, TOKENS, ZEROS, PAGES, RUNS, SHARES, UNITS, UNIT_COUNT, QUEUE,
    QUEUE_MASK, CHUNKS, ADDRESSES, CHUNK_COUNT, ISSUED, RELEASED, AHEAD, REFILL, SLEEPERS, LIMIT_NS,
    WAITED_NS, FAILED,
) = range(25)  # fmt: skip
WORDS = 25
TOKENS_MAX = 512  # given in one write
PAGE_WORDS, RUN_WORDS, SHARE_WORDS = 3, 6, 2
ENTRY_WORDS = 3  # of the queue: share, address of its chunk, its number
CHUNK_WORDS = 2  # shares not yet done, whether one of them failed


@step
def _offer(pool: Any, first: Any, end: Any) -> Any:
    """Let threads take the shares of a schedule's numbers `first` to `end`; return how many.

    -1, with nothing begun, if one of the chunks is being read into.
    """
    units, unit_count = load_word(pool + 8 * UNITS), load_word(pool + 8 * UNIT_COUNT)
    chunks, chunk_count = load_word(pool + 8 * CHUNKS), load_word(pool + 8 * CHUNK_COUNT)
    addresses, queue = load_word(pool + 8 * ADDRESSES), load_word(pool + 8 * QUEUE)
    for number in range(first, end):
        if load_word(chunks + number % chunk_count * 8 * CHUNK_WORDS):
            return -1
    begun = load_word(pool + 8 * TAIL)
    tail = begun
    for number in range(first, end):
        chunk = number % chunk_count
        bounds = as_array(units + number % unit_count * 8, 2, np.int64)
        for share in range(bounds[0], bounds[1]):
            at = queue + (tail & load_word(pool + 8 * QUEUE_MASK)) * 8 * ENTRY_WORDS
            entry = as_array(at, ENTRY_WORDS, np.int64)
            entry[0], entry[2] = share, chunk
            entry[1] = load_word(addresses + 8 * chunk)
            tail += 1
        words = chunks + chunk * 8 * CHUNK_WORDS
        store_word(words + 8, 0)
        store_word(words, bounds[1] - bounds[0])
    store_word(pool + 8 * TAIL, tail)  # what was stored before is seen by who takes one
    return tail - begun


@step
def _wake(pool: Any, tokens: Any) -> None:
    """Wake as many threads, if there are so many. The pipe does not block: full, it has enough."""
    for done in range(0, tokens, TOKENS_MAX):
        size = TOKEN_BYTES * min(tokens - done, TOKENS_MAX)
        write_bytes(load_word(pool + 8 * TOKENS), load_word(pool + 8 * ZEROS), size)


def fill(pool: Any) -> Any:
    """Begin to read as far ahead as may be; return whether the chunks for it were free."""
    first, end = load_word(pool + 8 * ISSUED), load_word(pool + 8 * RELEASED)
    end += load_word(pool + 8 * AHEAD)
    if first >= end:
        return True
    shares = _offer(pool, first, end)
    if shares < 0:
        return False
    store_word(pool + 8 * ISSUED, end)
    _wake(pool, shares)
    return True


_fill = step(fill)


def release(pool: Any) -> Any:
    """Let the chunk of the oldest unit that is taken be filled again, now or with the next.

    Returns what `fill` does.
    """
    released = add_word(pool + 8 * RELEASED, 1) + 1
    ahead = load_word(pool + 8 * ISSUED) - released
    if ahead > load_word(pool + 8 * AHEAD) - load_word(pool + 8 * REFILL):
        return True
    return _fill(pool)


def wait(pool: Any, number: Any, limit_ns: Any) -> Any:
    """Return whether a number's unit is in its chunk: 1, -1 if it is not as it should be, or 0 if
    shares of it are not done after so long. What they wrote is seen once it is not 0."""
    chunk = number % load_word(pool + 8 * CHUNK_COUNT) * 8 * CHUNK_WORDS
    words = load_word(pool + 8 * CHUNKS) + chunk
    left = load_word(words)
    if left and limit_ns:
        until_ns = now_ns() + limit_ns
        while left and now_ns() < until_ns:
            left = sleep_while(words, left, pool + 8 * SLEEPERS, until_ns)
    if left:
        return 0
    return -1 if load_word(words + 8) else 1


_release, _wait = step(release), step(wait)


@step
def arrives(pool: Any, number: Any, index: Any) -> Any:
    """Return whether a unit that worker `index` of a job waits for comes, in time and sound.

    FAILED then says so to all.
    """
    if load_word(pool + 8 * FAILED):
        return False
    found = _wait(pool, number, 0)
    if not found:
        start_ns = now_ns()
        found = _wait(pool, number, load_word(pool + 8 * LIMIT_NS))
        if index == 0:
            add_word(pool + 8 * WAITED_NS, now_ns() - start_ns)
    if found <= 0:
        store_word(pool + 8 * FAILED, 1)
    return found > 0


@step
def gives_back(pool: Any) -> None:
    """Release a unit in a job's name, unless the job has failed."""
    if not load_word(pool + 8 * FAILED) and not _release(pool):
        store_word(pool + 8 * FAILED, 1)
