"""Reads slots from disk and checks them, in compiled code: what a thread of the cold pool does.

Nothing here needs the interpreter: its lock stays with the thread that attends. What is not as
expected is only noted; finding out why is left to Python (tierd_engine/coldread.py). What is read,
and a pool's words: attention/arriving.py.
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
from tierd_engine.attention.arriving import (
    CHUNK_WORDS,
    CHUNKS,
    ENTRY_WORDS,
    NEXT,
    PAGE_WORDS,
    PAGES,
    QUEUE,
    QUEUE_MASK,
    RUN_WORDS,
    RUNS,
    SHARE_WORDS,
    SHARES,
    SKIP,
    SLEEPERS,
    STOP,
    TAIL,
    WORK,
)
from tierd_engine.attention.atomics import (
    add_word,
    load_word,
    replace_word,
    store_word,
    take_token,
    wake_sleepers,
)
from tierd_engine.attention.compiling import step

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
        if add_word(chunk, -1) == 1 and load_word(pool + 8 * SLEEPERS):
            wake_sleepers(chunk)
