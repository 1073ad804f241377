"""llama.cpp's decode speed, in a process of its own: it imports no torch and shares no threads.

    python llama.py serve|fill GGUF KV THREADS CONTEXT ROOM FOLDER [--whole]

KV: f16 or q8_0. `serve` fills the cache to CONTEXT tokens, prints one JSON object that
says what stands in it, then decodes as many tokens as each line of stdin names and
answers with their seconds; it ends with stdin. ROOM: how many tokens it may be asked for.
`fill` only makes the files of FOLDER.

An ordinary prefill (`--whole`) of 128k tokens takes hours on two cores. So KV is computed
chunk by chunk, each chunk at its own positions but in a small cache of its own, kept in
FOLDER as llama.cpp's state of a sequence, and put into the large cache, where the chunks
are joined into one sequence. A token decoded after it attends over every cell, as after an
ordinary prefill; only the values in the cells are others, and no time depends on those.
`scripts/bench peers` shows it. Flash attention is on, as quantised values need it.

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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_KINDS = {"f16": 1, "q8_0": 8}  # ggml's numbers of these types
CHUNK_TOKENS = 1024
_BATCH_TOKENS = 512
_FILL_THREADS = 1  # it may take long, beside other jobs: threads that spin for each other starve
_TOKEN = 17
_JOINED, _ARRIVING = 0, 1  # sequences of the large cache


def _token(position: int) -> int:
    return 17 + position % 4096


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

    def clear(self) -> None:
        """Forget every token."""
        self._api.llama_memory_clear(self._memory, True)

    def save(self, path: Path) -> None:
        """Write the sequence to a file, whole or not at all."""
        api = self._api
        size = api.llama_state_seq_get_size(self._context, _JOINED)
        data = (ctypes.c_uint8 * size)()
        done = api.llama_state_seq_get_data(self._context, data, size, _JOINED)
        self._must(done == size, "give a sequence's state")
        partial = path.with_suffix(".partial")
        partial.write_bytes(data)
        partial.rename(path)

    def join(self, path: Path) -> None:
        """Put a file's cells behind those that are there, into the same sequence."""
        api, data = self._api, path.read_bytes()
        source = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
        done = api.llama_state_seq_set_data(self._context, source, len(data), _ARRIVING)
        self._must(done == len(data), f"take {path}")
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


def chunk_files(model: Any, options: argparse.Namespace) -> Iterator[Path]:
    """Yield the file of each whole chunk of the context; make those that are missing."""
    small: Context | None = None
    for first in range(0, options.context - CHUNK_TOKENS + 1, CHUNK_TOKENS):
        path = Path(options.folder) / f"{options.kv}-{first:08d}.state"
        if not path.exists():
            small = small or Context(model, options.kv, _FILL_THREADS, CHUNK_TOKENS)
            small.clear()
            small.prefill(first, first + CHUNK_TOKENS)
            small.save(path)
        yield path


def filled(model: Any, options: argparse.Namespace) -> tuple[Context, dict[str, int]]:
    """Return a context that holds the tokens, and what stands in it: positions and cells."""
    large = Context(model, options.kv, options.threads, options.context + options.room, 2)
    sizes: list[int] = []
    done = 0
    for path in () if options.whole else chunk_files(model, options):
        large.join(path)
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


def _say(what: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def main(arguments: list[str]) -> None:
    """Run one of the two verbs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("verb", choices=("serve", "fill"))
    parser.add_argument("gguf")
    parser.add_argument("kv", choices=tuple(_KINDS))
    for name in ("threads", "context", "room"):
        parser.add_argument(name, type=int)
    parser.add_argument("folder")
    parser.add_argument("--whole", action="store_true", help="an ordinary prefill")
    options = parser.parse_args(arguments)
    if options.verb == "serve":
        serve(options)
        return
    for _ in chunk_files(load_model(options.gguf), options):
        pass


if __name__ == "__main__":
    main(sys.argv[1:])
