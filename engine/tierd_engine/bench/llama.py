"""llama.cpp's decode speed, in a process of its own: it imports no torch and shares no threads.

    python llama.py GGUF CONTEXT KV THREADS STEPS

KV: f16 or q8_0. Prints one JSON object: tokens/s of decode at that context (median
of the steps) and of prefill, and how much the process grew. Flash attention is on,
as quantised values need it. A separate file of the standard library and
llama-cpp-python, so that any environment that has the latter can run it.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

_KINDS = {"f16": 1, "q8_0": 8}  # ggml's numbers of these types
_BATCH_TOKENS = 512
_WARM_UP_STEPS = 3


def _peak_rss_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("/proc/self/status has no VmHWM")


def measure(gguf: str, context: int, kind: str, threads: int, steps: int) -> dict[str, Any]:
    """Prefill `context` tokens, decode, and return the figures."""
    from llama_cpp import Llama, __version__

    llama = Llama(
        gguf, n_ctx=context + _WARM_UP_STEPS + steps + 8, n_batch=_BATCH_TOKENS, n_threads=threads,
        n_threads_batch=threads, flash_attn=True, type_k=_KINDS[kind], type_v=_KINDS[kind],
        verbose=False,
    )  # fmt: skip
    before = _peak_rss_bytes()
    start = time.perf_counter()
    llama.eval([17 + i % 4096 for i in range(context)])
    prefill_seconds = time.perf_counter() - start
    seconds = []
    for _ in range(_WARM_UP_STEPS + steps):
        start = time.perf_counter()
        llama.eval([17])
        seconds.append(time.perf_counter() - start)
    return {
        "kv": kind,
        "context_tokens": context,
        "tokens_per_second": 1 / statistics.median(seconds[_WARM_UP_STEPS:]),
        "prefill_tokens_per_second": context / prefill_seconds,
        "peak_rss_bytes": _peak_rss_bytes() - before,
        "version": f"llama-cpp-python {__version__}",
    }


def main(arguments: list[str]) -> None:
    """Measure once and print."""
    gguf, context, kind, threads, steps = arguments
    sys.stdout.write(json.dumps(measure(gguf, int(context), kind, int(threads), int(steps))) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
