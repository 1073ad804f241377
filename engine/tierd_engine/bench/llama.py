"""llama.cpp's decode speed, in a process of its own: it imports no torch and shares no threads.

    python llama.py GGUF KV THREADS CONTEXT ROOM [--whole | --at POSITION]

KV: f16 or q8_0. Fills the cache to CONTEXT tokens, prints one JSON object that says what
stands in it, then decodes as many tokens as each line of stdin names and answers with
their seconds; it ends with stdin. ROOM: how many tokens it may be asked for. Flash
attention is on, as quantised values need it.

An ordinary prefill (`--whole`) of 128k tokens takes hours on two cores. So one chunk of
tokens is computed, in a small cache of its own, and put into the large one again and
again, each time moved to its positions and joined to the sequence before it. Positions are
rotations, so a chunk that is moved is the chunk that would be computed there: the same
values, the keys rotated (`--at` puts one there, to compare). A token decoded after it
attends over every cell, as after an ordinary prefill; only what the cells hold differs,
and no time depends on that. `scripts/bench peers` shows all this.

A separate file of the standard library and llama-cpp-python, so that any environment that
has the latter can run it.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import json
import sys
import time
from pathlib import Path
from typing import Any

_KINDS = {"f16": 1, "q8_0": 8}  # ggml's numbers of these types
CHUNK_TOKENS = 1024
_BATCH_TOKENS = 512
_TOKEN = 17
_JOINED, _ARRIVING = 0, 1  # sequences of the large cache


def _token(position: int) -> int:
    return 17 + position % CHUNK_TOKENS * 41 % 40000


def _peak_rss_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("/proc/self/status has no VmHWM")


class Context:
    """A llama.cpp context: its cache holds `tokens`, of one sequence or of two in one buffer."""

    def __init__(
        self, model: Any, kind: str, threads: int, tokens: int, sequences: int = 1
    ) -> None:
        import llama_cpp

        self._api = llama_cpp
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = tokens
        parameters.n_batch = parameters.n_ubatch = _BATCH_TOKENS
        parameters.n_threads = parameters.n_threads_batch = threads
        parameters.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        parameters.type_k = parameters.type_v = _KINDS[kind]
        parameters.n_seq_max, parameters.kv_unified = sequences, True
        self._context = llama_cpp.llama_init_from_model(model, parameters)
        if not self._context:
            raise SystemExit(f"llama.cpp makes no context of {tokens} tokens of {kind}")
        self._memory = llama_cpp.llama_get_memory(self._context)

    def prefill(self, first: int, end: int) -> None:
        """Run the tokens of positions [first, end)."""
        api = self._api
        batch = api.llama_batch_init(_BATCH_TOKENS, 0, 1)
        for start in range(first, end, _BATCH_TOKENS):
            batch.n_tokens = min(_BATCH_TOKENS, end - start)
            for i in range(batch.n_tokens):
                batch.token[i], batch.pos[i] = _token(start + i), start + i
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, _JOINED
                batch.logits[i] = i == batch.n_tokens - 1
            self._must(api.llama_decode(self._context, batch) == 0, "decode a batch")
        api.llama_batch_free(batch)

    def step(self) -> float:
        """Decode one more token; return the seconds."""
        api = self._api
        token = (api.llama_token * 1)(_TOKEN)
        start = time.perf_counter()
        code = api.llama_decode(self._context, api.llama_batch_get_one(token, 1))
        api.llama_synchronize(self._context)
        seconds = time.perf_counter() - start
        self._must(code == 0, "decode a token")
        return seconds

    def logits(self) -> list[float]:
        """Return the logits after the last token."""
        api = self._api
        vocabulary = api.llama_model_get_vocab(api.llama_get_model(self._context))
        count = api.llama_vocab_n_tokens(vocabulary)
        return list(api.llama_get_logits_ith(self._context, -1)[:count])

    def state(self) -> Any:
        """Return the serialised sequence."""
        size = self.state_bytes()
        data = (ctypes.c_uint8 * size)()
        done = self._api.llama_state_seq_get_data(self._context, data, size, _JOINED)
        self._must(done == size, "give a sequence's state")
        return data

    def join(self, state: Any, shift: int) -> None:
        """Put a sequence's cells, `shift` positions on, into the same sequence as those here."""
        api, size = self._api, len(state)
        done = api.llama_state_seq_set_data(self._context, state, size, _ARRIVING)
        self._must(done == size, "take a sequence's state")
        if shift:
            api.llama_memory_seq_add(self._memory, _ARRIVING, -1, -1, shift)
        api.llama_memory_seq_cp(self._memory, _ARRIVING, _JOINED, -1, -1)
        self._must(bool(api.llama_memory_seq_rm(self._memory, _ARRIVING, -1, -1)), "join")

    def positions(self) -> tuple[int, int]:
        """Return the first and the last position of the sequence."""
        api = self._api
        return (
            api.llama_memory_seq_pos_min(self._memory, _JOINED),
            api.llama_memory_seq_pos_max(self._memory, _JOINED),
        )

    def state_bytes(self) -> int:
        """Return the size of the sequence's state: so much a cell, and a little that is fixed."""
        size: int = self._api.llama_state_seq_get_size(self._context, _JOINED)
        return size

    @staticmethod
    def _must(holds: bool, what: str) -> None:
        if not holds:
            raise SystemExit(f"llama.cpp did not {what}")


@functools.cache
def _silence() -> Any:
    import llama_cpp

    return llama_cpp.llama_log_callback(lambda *_: None)  # cached: llama.cpp keeps its address


def load_model(gguf: str) -> Any:
    """Return llama.cpp's model; from here on llama.cpp logs nothing."""
    import llama_cpp

    llama_cpp.llama_log_set(_silence(), None)
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(
        gguf.encode(), llama_cpp.llama_model_default_params()
    )
    if not model:
        raise SystemExit(f"llama.cpp cannot load {gguf}")
    return model


def computed_chunk(model: Any, options: argparse.Namespace, first: int) -> Any:
    """Return the state of a chunk at positions from `first` on."""
    small = Context(model, options.kv, options.threads, CHUNK_TOKENS)
    small.prefill(first, first + CHUNK_TOKENS)
    return small.state()


def filled(model: Any, options: argparse.Namespace) -> tuple[Context, dict[str, int]]:
    """Return a context that holds the tokens, and what stands in it: positions and cells."""
    large = Context(model, options.kv, options.threads, options.context + options.room, 2)
    sizes: list[int] = []
    done = 0
    chunk = None if options.whole else computed_chunk(model, options, 0)
    while chunk is not None and done + CHUNK_TOKENS <= options.context:
        large.join(chunk, done)
        done += CHUNK_TOKENS
        if len(sizes) < 2:
            sizes.append(large.state_bytes())
    if done < options.context:
        large.prefill(done, options.context)
    first, last = large.positions()
    stands = {"first_position": first, "last_position": last}
    if len(sizes) == 2:
        cell_bytes = (sizes[1] - sizes[0]) // CHUNK_TOKENS
        stands["cells"] = CHUNK_TOKENS + (large.state_bytes() - sizes[0]) // cell_bytes
    return large, stands


def serve(options: argparse.Namespace) -> None:
    """Fill, say what stands in the cache, then decode on command until stdin ends."""
    from llama_cpp import __version__

    model = load_model(options.gguf)
    before = _peak_rss_bytes()
    context, stands = filled(model, options)
    _say({"version": f"llama-cpp-python {__version__}", **stands})
    for line in sys.stdin:
        seconds = [context.step() for _ in range(int(line))]
        _say({"seconds": seconds, "peak_rss_bytes": _peak_rss_bytes() - before})


def compare(options: argparse.Namespace) -> None:
    """Print how far a token after a chunk that was moved differs from one computed there.

    The difference of logits, root of mean squares, ÷ that of the logits themselves.
    """
    model = load_model(options.gguf)
    found = []
    for first in (0, options.at):
        large = Context(model, options.kv, options.threads, CHUNK_TOKENS + 8, 2)
        large.join(computed_chunk(model, options, first), options.at - first)
        large.step()
        found.append(large.logits())
    moved, there = found
    power = sum(x * x for x in there)
    _say(
        {
            "difference": (sum((x - y) ** 2 for x, y in zip(moved, there, strict=True)) / power)
            ** 0.5
        }
    )


def _say(what: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def main(arguments: list[str]) -> None:
    """Serve, or compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gguf")
    parser.add_argument("kv", choices=tuple(_KINDS))
    for name in ("threads", "context", "room"):
        parser.add_argument(name, type=int)
    parser.add_argument("--whole", action="store_true", help="an ordinary prefill")
    parser.add_argument("--at", type=int, help="only compare a chunk moved there")
    options = parser.parse_args(arguments)
    if options.at is None:
        serve(options)
    else:
        compare(options)


if __name__ == "__main__":
    main(sys.argv[1:])
