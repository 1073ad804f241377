"""Reads slots from disk and checks them, in compiled code: what a thread of the cold pool does.

Nothing here needs the interpreter: its lock stays with the thread that attends. What is not as
expected is only noted; finding out why is left to Python (tierd_engine/coldread.py).

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
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from tierd.codec.intrinsics import as_array
from tierd.codec.xxh3 import xxh3_64, xxh3_128_at
from tierd.disk.header import CHECKSUM_OFFSET, DIGEST_OFFSET, HEADER_BYTES
from tierd_engine.attention.atomics import (
    add_word,
    give_token,
    load_word,
    replace_word,
    store_word,
    take_token,
)
from tierd_engine.attention.compiling import step

# Words of a pool. STOP: threads end. SKIP: shares count as done, unread. NEXT, TAIL: of the queue's
# entries the next to be taken, and the next to be made. WORK, DONE: a pipe's end, an eventfd; a
# token of WORK more than there are entries wakes a thread for nothing. PAGES, RUNS, SHARES:
# addresses of the table. CHUNKS: of the chunks' words; ADDRESSES: of where the chunks are.
(
    STOP, SKIP, NEXT, TAIL, WORK, DONE, ONE, PAGES, RUNS, SHARES, UNITS, UNIT_COUNT, QUEUE,
    QUEUE_MASK, CHUNKS, ADDRESSES, CHUNK_COUNT,
) = range(17)  # fmt: skip
WORDS = 17
PAGE_WORDS, RUN_WORDS, SHARE_WORDS = 3, 6, 2
ENTRY_WORDS = 3  # of the queue: share, address of its chunk, its number
CHUNK_WORDS = 2  # shares not yet done, whether one of them failed
STARTS = 2  # a page's header may begin with either
_START_WORDS = DIGEST_OFFSET // 8
_I64, _BYTES = ir.IntType(64), ir.IntType(8).as_pointer()


@intrinsic
def _pread(typingctx: Any, fd: Any, address: Any, size_bytes: Any, offset: Any) -> Any:
    """The C library's pread."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function = builder.module.globals.get("pread")
        if function is None:
            kind = ir.FunctionType(_I64, [ir.IntType(32), _BYTES, _I64, _I64])
            function = ir.Function(builder.module, kind, name="pread")
        fd = builder.trunc(args[0], ir.IntType(32))
        return builder.call(function, [fd, builder.inttoptr(args[1], _BYTES), *args[2:]])

    return types.int64(types.int64, types.int64, types.int64, types.int64), codegen


@step
def is_sound(slot: Any, stored_bytes: Any, starts: Any) -> Any:
    """Whether a slot at address `slot` has a header that begins as one of two may, right
    checksums, and the payload that its header names (tierd.disk.header.SlotCheck)."""
    header = as_array(slot, HEADER_BYTES // 8, np.int64)
    expected = as_array(starts, (STARTS, _START_WORDS), np.int64)
    begins = False
    for i in range(STARTS):
        same = True
        for word in range(_START_WORDS):
            same &= header[word] == expected[i, word]
        begins |= same
    if not begins:
        return False
    checksum = as_array(slot + CHECKSUM_OFFSET, 1, np.uint64)
    if xxh3_64(slot, CHECKSUM_OFFSET) != checksum[0]:
        return False
    return xxh3_128_at(slot + HEADER_BYTES, stored_bytes, slot + DIGEST_OFFSET)


@step
def _read_share(pool: Any, share: Any, chunk: Any) -> Any:
    """Read a share's runs, then check their pages; whether all is as it should be."""
    bounds = as_array(load_word(pool + 8 * SHARES) + share * 8 * SHARE_WORDS, SHARE_WORDS, np.int64)
    runs = load_word(pool + 8 * RUNS)
    for number in range(bounds[0], bounds[1]):
        run = as_array(runs + number * 8 * RUN_WORDS, RUN_WORDS, np.int64)
        if _pread(run[0], chunk + run[2], run[3], run[1]) != run[3]:
            return False
    for number in range(bounds[0], bounds[1]):
        run = as_array(runs + number * 8 * RUN_WORDS, RUN_WORDS, np.int64)
        for index in range(run[4], run[5]):
            row = load_word(pool + 8 * PAGES) + index * 8 * PAGE_WORDS
            page = as_array(row, PAGE_WORDS, np.int64)
            if not is_sound(chunk + page[0], page[1], page[2]):
                return False
    return True


@step
def _take_place(pool: Any) -> Any:
    """Return the place of an entry that is now the caller's, or -1 where none is left."""
    while True:
        ticket = load_word(pool + 8 * NEXT)
        if ticket >= load_word(pool + 8 * TAIL):
            return -1
        if replace_word(pool + 8 * NEXT, ticket, ticket + 1):
            return ticket & load_word(pool + 8 * QUEUE_MASK)


def serve(pool: Any, token: Any) -> None:
    """Take shares from the queue and read them until the pool stops. `token`: 8 bytes to use."""
    while True:
        take_token(load_word(pool + 8 * WORK), token)
        if load_word(pool + 8 * STOP):
            return
        place = _take_place(pool)
        if place < 0:
            continue
        entry = as_array(
            load_word(pool + 8 * QUEUE) + place * 8 * ENTRY_WORDS, ENTRY_WORDS, np.int64
        )
        chunk = load_word(pool + 8 * CHUNKS) + entry[2] * 8 * CHUNK_WORDS
        if not load_word(pool + 8 * SKIP) and not _read_share(pool, entry[0], entry[1]):
            store_word(chunk + 8, 1)
        if add_word(chunk, -1) == 1:
            give_token(load_word(pool + 8 * DONE), pool + 8 * ONE)


def offer(pool: Any, first: Any, end: Any) -> Any:
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


def is_read(pool: Any, number: Any) -> Any:
    """Return whether a number's unit is in its chunk: 1, -1 if it is not as it should be, or 0
    while shares of it are not done. What they wrote is seen once it is not 0."""
    chunk = number % load_word(pool + 8 * CHUNK_COUNT) * 8 * CHUNK_WORDS
    words = load_word(pool + 8 * CHUNKS) + chunk
    if load_word(words):
        return 0
    return -1 if load_word(words + 8) else 1
