"""Cold pool: threads that read and check shares of cold units without the interpreter.

    the reader's thread                       the pool's threads, in compiled code
    fill:   entries into the queue, ──work──▶ take one: read its runs, check its pages
            a token for each
    wait:   until a chunk has none ◀────────  the last of a chunk wakes who sleeps on its word
            left

A job of the team (attention/layercall.py) waits and gives back as the reader's thread does, in
compiled code; then that thread stands still.

Invariants:
  a chunk is submitted only after it was waited for, or skipped, to the end
  what a thread may still use, the table and the ring, lives as long as that thread
  every wait ends at a deadline
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types

from tierd.codec import xxh3
from tierd.codec.compiling import Compiled, compile_cached
from tierd.disk import header
from tierd.disk.header import SlotCheck
from tierd.errors import TierdError
from tierd_engine.attention import arriving, reading
from tierd_engine.attention.atomics import TOKEN_BYTES
from tierd_engine.attention.compiling import KERNEL_SOURCES
from tierd_engine.workthreads import start_threads

IntArray = npt.NDArray[np.int64]
_SOURCES = (*KERNEL_SOURCES, *(Path(str(module.__file__)) for module in (xxh3, reading, header)))


_WAIT_SECONDS = 0.1  # between two looks at the clock, and at what Python has to do meanwhile
_NS_PER_SECOND = 10**9


@functools.cache
def _compiled() -> tuple[Compiled, Compiled, Compiled, Compiled]:
    word = types.int64
    return (
        compile_cached(reading.serve, (word, word), _SOURCES, nogil=True),
        compile_cached(arriving.fill, (word,), _SOURCES),
        compile_cached(arriving.release, (word,), _SOURCES),
        compile_cached(arriving.wait, (word, word, word), _SOURCES, nogil=True),
    )


def warm_up() -> None:
    """Compile what a pool runs, where it can run."""
    if xxh3.is_there():
        _compiled()


class Run:
    """Neighbours on disk that are neighbours in the chunk too: one read.

    `pages`: (offset of the slot in the chunk, payload bytes, check), in that order.
    """

    __slots__ = ("chunk_offset", "fd", "file_offset", "pages", "size_bytes")

    def __init__(self, fd: int, file_offset: int, chunk_offset: int) -> None:
        self.fd, self.file_offset, self.chunk_offset = fd, file_offset, chunk_offset
        self.size_bytes = 0
        self.pages: list[tuple[int, int, SlotCheck]] = []

    def add(self, offset: int, slot_bytes: int, check: SlotCheck) -> None:
        """Append the next page, whose slot is at `offset` in the chunk."""
        assert offset == self.chunk_offset + self.size_bytes, "no neighbour"
        self.pages.append((offset, check.stored_bytes, check))
        self.size_bytes += slot_bytes


class ColdPool:
    """`threads` threads that fill up to `chunks_max` chunks of memory. Used by one thread.

    `memory`: what the chunks are in; kept as long as a thread may write there.
    """

    def __init__(self, threads: int, chunks_max: int, memory: object) -> None:
        serve, fill, release, wait = _compiled()
        self._fill: Callable[[int], bool] = fill.call
        self._release: Callable[[int], bool] = release.call
        self._wait: Callable[[int, int, int], int] = wait.call
        self._chunk_count = 0
        self._words = np.zeros(arriving.WORDS, np.int64)
        self._chunks = np.zeros((chunks_max, arriving.CHUNK_WORDS), np.int64)
        self._pid = os.getpid()
        # A pipe wakes one of those who wait for a token.
        self._work_fd, self._tokens_fd = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._tokens_fd, False)
        self._words[[arriving.WORK, arriving.TOKENS]] = self._work_fd, self._tokens_fd
        self._zeros = np.zeros(arriving.TOKENS_MAX * TOKEN_BYTES, np.uint8)
        self._words[arriving.ZEROS] = self._zeros.ctypes.data
        self._words[arriving.CHUNKS] = self._chunks.ctypes.data
        self.address = int(self._words.ctypes.data)
        self._table: list[IntArray] = []
        # Each thread holds all that it may touch, should it outlive the pool in a dead disk.
        held = (self._words, self._chunks, self._table, self._zeros, memory)
        try:
            self._threads = (
                start_threads(lambda: _serve(serve, self._words, held), threads, "tierd-cold")
                if threads
                else []
            )
        except TierdError:
            self._close_fds()
            raise

    def set_table(
        self,
        units: Sequence[Sequence[Sequence[Run]]],
        addresses: Sequence[int],
        ahead: int,
        refill: int,
        limit_seconds: float,
    ) -> None:
        """Set a schedule: what its units consist of, shares of runs, and where the chunks are.

        At least one unit and chunk. Nothing may be under way. Up to `ahead` numbers are begun
        before they are given back, `refill` together. A job waits for a unit for `limit_seconds`.
        """
        self._chunk_count = len(addresses)
        assert not self._chunks[:, 0].any(), "shares of the last table are under way"
        pages: list[tuple[int, int, int]] = []
        runs: list[tuple[int, ...]] = []
        shares: list[tuple[int, int]] = []
        starts: list[bytes] = []
        first_shares = [0]
        for unit in units:
            for share in unit:
                first_run = len(runs)
                for run in share:
                    first = len(pages)
                    for offset, stored_bytes, check in run.pages:
                        pages.append((offset, stored_bytes, len(starts)))
                        starts.append(b"".join(check.starts))
                    runs.append((run.fd, run.file_offset, run.chunk_offset, run.size_bytes,
                                 first, len(pages)))  # fmt: skip
                shares.append((first_run, len(runs)))
            first_shares.append(len(shares))
        # Tables are made anew for each schedule, long before one is used.
        start_words = np.frombuffer(b"".join(starts), np.int64).reshape(len(pages), -1).copy()
        page_words = np.array(pages, np.int64).reshape(-1, arriving.PAGE_WORDS)
        page_words[:, 2] = start_words.ctypes.data + page_words[:, 2] * start_words.strides[0]
        run_words = np.array(runs, np.int64).reshape(-1, arriving.RUN_WORDS)
        share_words = np.array(shares, np.int64).reshape(-1, arriving.SHARE_WORDS)
        unit_words, address_words = np.array(first_shares, np.int64), np.array(addresses, np.int64)
        most = int(np.diff(unit_words).max()) * len(addresses)
        queue = np.zeros((1 << max(0, most - 1).bit_length(), arriving.ENTRY_WORDS), np.int64)
        tables = {
            arriving.PAGES: page_words, arriving.RUNS: run_words, arriving.SHARES: share_words,
            arriving.UNITS: unit_words, arriving.ADDRESSES: address_words, arriving.QUEUE: queue,
        }  # fmt: skip
        self._table[:] = start_words, *tables.values()
        self._words[list(tables)] = [table.ctypes.data for table in tables.values()]
        self._words[arriving.UNIT_COUNT], self._words[arriving.CHUNK_COUNT] = (
            len(units), len(addresses)
        )  # fmt: skip
        self._words[arriving.QUEUE_MASK] = len(queue) - 1
        self._words[[arriving.AHEAD, arriving.REFILL]] = ahead, refill
        self._words[[arriving.ISSUED, arriving.RELEASED, arriving.FAILED]] = 0
        self._words[arriving.LIMIT_NS] = int(limit_seconds * _NS_PER_SECOND)

    @property
    def issued(self) -> int:
        """How many of the schedule's numbers were begun."""
        return int(self._words[arriving.ISSUED])

    @property
    def stop_address(self) -> int:
        """The address of a word that is not 0 once `has_failed`."""
        return self.address + 8 * arriving.FAILED

    @property
    def has_failed(self) -> bool:
        """Whether a job found a unit unsound or late; a new schedule forgets it."""
        return bool(self._words[arriving.FAILED])

    def waited_seconds(self) -> float:
        """Return how long jobs waited for units since this was last asked."""
        seconds = int(self._words[arriving.WAITED_NS]) / _NS_PER_SECOND
        self._words[arriving.WAITED_NS] = 0
        return seconds

    def fill(self) -> None:
        """Begin to read the schedule's units, as far ahead as there are chunks."""
        is_begun = self._fill(self.address)
        assert is_begun, "the chunk is being read into"

    def release(self) -> None:
        """Let the chunk of the oldest taken unit be filled again, now or with the next."""
        is_begun = self._release(self.address)
        assert is_begun, "the chunk is being read into"

    def has_read(self, number: int) -> bool:
        """Return whether a number's unit is there, and right, without waiting for it."""
        return self._wait(self.address, number, 0) > 0

    def wait(self, number: int, seconds_left: Callable[[], float]) -> bool:
        """Return whether a number's unit has been read and all its pages are right.

        Raises TimeoutError when `seconds_left` comes to 0.
        """
        found = self._wait(self.address, number, 0)
        while not found:
            left = seconds_left()
            if left <= 0:
                raise TimeoutError
            limit_ns = int(min(left, _WAIT_SECONDS) * _NS_PER_SECOND)
            found = self._wait(self.address, number, limit_ns)
        return found > 0

    def skip(self, seconds_left: Callable[[], float]) -> None:
        """Read nothing more of what was submitted, and wait for what is under way."""
        self._words[arriving.SKIP] = 1
        # An interrupt may have come between entries and their tokens: more tokens do no harm.
        untaken = self._words[arriving.TAIL] - self._words[arriving.NEXT]
        self._wake(1 + int(untaken))
        for chunk in range(self._chunk_count):
            self.wait(chunk, seconds_left)  # a number below the chunks' count is one's own
        self._words[arriving.SKIP] = 0

    def close(self) -> None:
        """Let each thread end after its share. Idempotent. One that is stuck ends by itself.

        In a child of a fork it does nothing: the threads are the parent's.
        """
        if self._words[arriving.STOP] or os.getpid() != self._pid:
            return
        self._words[arriving.STOP] = 1
        self._wake(len(self._threads))
        give_up_at = time.monotonic() + _JOIN_SECONDS
        for thread in self._threads:
            thread.join(timeout=max(0.0, give_up_at - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):
            self._close_fds()

    def _wake(self, threads: int) -> None:
        try:
            os.write(self._tokens_fd, bytes(TOKEN_BYTES * threads))
        except BlockingIOError:
            return  # a full pipe has thousands of tokens, far more than there can be shares

    def _close_fds(self) -> None:
        for fd in (self._work_fd, self._tokens_fd):
            os.close(fd)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the queue's counts add up."""
        # In this order: a share that is done meanwhile is one less in all that is read later.
        left, taken = int(self._chunks[:, 0].sum()), int(self._words[arriving.NEXT])
        tail = int(self._words[arriving.TAIL])
        assert taken <= tail, f"{taken=} {tail=}"
        assert tail - taken <= left, f"{taken=} {tail=} {left=}"


_JOIN_SECONDS = 1.0  # what hangs longer is left to its thread, and its two fds with it


def _serve(serve: Compiled, words: IntArray, held: Any) -> None:
    token = np.zeros(1, np.int64)
    serve.call(words.ctypes.data, token.ctypes.data)
    del held  # alive until here
