"""Decode throughput over tiers beside transformers' caches and llama.cpp, alternating rounds.

KV is synthetic (random), the weights are SmolLM2's: right for throughput, no
claim about quality. Each tiered row runs against transformers' own bf16 cache
in alternating rounds of its own; the ratio is of their medians. The limit of
a row is the longer of two: its cold bytes ÷ the disk's O_DIRECT bandwidth, which
is measured in its rounds too, by a loop over huge pages (fio.py), and its bytes
in RAM ÷ the memory's read bandwidth plus a step with almost no context (of the
same weights and threads). llama.cpp alternates with it too, if asked for
(peers.py).
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tierd.types import CodecId
from tierd.units import RUN_BYTES, format_size
from tierd_engine.bench.fio import Limit
from tierd_engine.bench.machine import (
    MemoryBandwidth,
    describe_machine,
    load_average,
    measure_memory,
)
from tierd_engine.bench.ours import OursShare
from tierd_engine.bench.peers import KINDS, Peer, PeerFigure, keep_figures, open_peers
from tierd_engine.bench.runners import BenchModel, Runner, TierShares, own_runner, tier_runner
from tierd_engine.runner import use_all_cores
from tierd_engine.weightonly import Weights, apply_weights

CONTEXTS = (4096, 16384, 32768, 65536, 131072)
MAIN = TierShares(CodecId.INT8, hot=0.25)
SHARES = (
    MAIN,
    TierShares(CodecId.INT8, hot=0.05),
    TierShares(CodecId.INT8, hot=0.10, warm=0.20),
    TierShares(CodecId.RAW, hot=0.25),
)
OWN = "transformers own cache bf16"
# Of the row MAIN: x transformers' bf16, x llama.cpp q8_0, x llama.cpp f16.
BARS = {16384: (6.0, 1.3, 1.0), 32768: (6.0, 1.8, 1.4), 131072: (6.0, 2.5, 2.0)}
COLD_BAR = 0.85
_WARM_UP_STEPS = 3
_ROUNDS = 3
_EMPTY_STEPS = 20
_DISK_BYTES = 256 << 20
_DISK_DEPTH = 4  # at a time: as many as the cold reader's ring has chunks


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """One line of the table. Ratios: this row's tokens/s over the other's; None if not measured.

    `limit`: memory or disk. `ours_of_step`: our share of a step outside the attention kernels.
    `load`: the machine's when the row ended. `origin`: "now", or of a kept figure.
    """

    name: str
    context_tokens: int
    tokens_per_second: float
    limit_tokens_per_second: float = 0.0
    achieved_of_limit: float = 0.0
    limit: str = ""
    memory_bytes_per_token: int = 0
    cold_bytes_per_token: int = 0
    peak_rss_bytes: int = 0
    hot_peak_bytes: int = 0
    hot_budget_bytes: int = 0
    rpc_per_step: float = 0.0
    ours_of_step: float = 0.0
    load: float = 0.0
    origin: str = "now"
    ratio_to_transformers: float | None = None
    ratio_to_llama_cpp_f16: float | None = None
    ratio_to_llama_cpp_q8_0: float | None = None


@dataclass(frozen=True, slots=True)
class DecodeBench:
    """What rows are measured with. `disk`: of the folder of the cold tier, its file written.

    `with_quantised`: transformers' quantised cache too, which takes seconds a step.
    """

    model: BenchModel
    weights: Weights
    memory: MemoryBandwidth
    disk: Limit
    own_empty_seconds: float
    empty_seconds: float
    steps: int
    cold_folder: str
    with_quantised: bool = True


def bench_decode(
    contexts: Sequence[int],
    rows: Sequence[TierShares],
    kept: Sequence[PeerFigure],
    *,
    weights: Weights = Weights.AUTO,
    steps: int = 6,
    cold_folder: str = "/var/tmp",
    peers_python: str | None = None,
    keep: bool = False,
    brief: bool = False,
) -> list[DecodeRow]:
    """Measure every row at every context; progress on stderr. `brief`: less of what is slow.

    `peers_python`: runs llama.cpp beside us, and with `keep` its figures are kept; else `kept`
    figures stand beside ours.
    """
    use_all_cores()
    done = []
    with _prepared(weights, steps, cold_folder) as prepared:
        bench = replace(prepared, with_quantised=not brief)
        for context in contexts:
            if peers_python is None:
                done += _at_context(bench, context, rows, [], kept)
                continue
            room = max(1, len(rows)) * (_ROUNDS + 1) * steps
            with open_peers(peers_python, context, room) as peers:
                found = _at_context(bench, context, rows, peers, [])
            rates = {row.name: row.tokens_per_second for row in found}
            if keep:
                keep_figures([(peer, rates[_peer_name(peer.kv)]) for peer in peers])
            done += found
    return done


@contextlib.contextmanager
def _prepared(weights: Weights, steps: int, cold_folder: str) -> Iterator[DecodeBench]:
    with tempfile.TemporaryDirectory(prefix="tierd-bench-", dir=cold_folder) as made:
        disk = Limit(Path(made), RUN_BYTES, _DISK_DEPTH, _DISK_BYTES)
        disk.write()
        yield _prepare(weights, steps, cold_folder, disk)


def _prepare(weights: Weights, steps: int, cold_folder: str, disk: Limit) -> DecodeBench:
    model = BenchModel.load()
    own_empty = _fastest(own_runner(model, 1))
    empty = DecodeBench(model, weights, measure_memory(), disk, own_empty, 0, steps, cold_folder)
    with _chosen(empty) as chosen, tier_runner(chosen, MAIN, 1, 64, cold_folder) as runner:
        return replace(empty, empty_seconds=_fastest(runner))


@contextlib.contextmanager
def _chosen(bench: DecodeBench) -> Iterator[BenchModel]:
    """Yield the model as a job runs it, with the user's choice of weights, for tierd's rows.

    Transformers' own rows run the other one, as it was loaded.
    """
    model = BenchModel.load()
    apply_weights(model.model, bench.weights)
    yield model


def _at_context(
    bench: DecodeBench,
    context: int,
    rows: Sequence[TierShares],
    peers: Sequence[Peer],
    kept: Sequence[PeerFigure],
) -> list[DecodeRow]:
    total = context + 64 + (_ROUNDS + 2) * bench.steps
    own = own_runner(bench.model, context)
    # A step of the own cache may take seconds: it needs fewer of them.
    beside: list[Callable[[], list[float]]] = [partial(_times, own, max(1, bench.steps // 3))]
    beside += [partial(peer.seconds, bench.steps) for peer in peers]
    done, taken = [], []
    with _chosen(bench) as model:
        for shares in rows:
            with tier_runner(model, shares, context, total, bench.cold_folder) as runner:
                disk = [lambda: [1 / bench.disk.read(plain=True)]] if runner.cold_bytes else []
                seconds, *others = _alternate(runner, [*beside, *disk], bench.steps)
                disk_seconds = others.pop() if disk else 0.0
                taken.append(others)
                row = _row(bench, runner, context, seconds, bench.empty_seconds, disk_seconds)
                done.append(_with_ratios(row, others, peers))
            _progress(done[-1])
    if not taken:
        taken.append([statistics.median(other() + other()) for other in beside])
    own_seconds, *peer_seconds = [statistics.median(column) for column in zip(*taken, strict=True)]
    done.append(_row(bench, own, context, own_seconds, bench.own_empty_seconds))
    del own, beside
    gc.collect()
    if bench.with_quantised:
        quantised = own_runner(bench.model, context, quantised=True)
        seconds = _seconds(quantised, 2)
        done.append(_row(bench, quantised, context, seconds, bench.own_empty_seconds))
        _progress(done[-1])
    figures = [
        PeerFigure(peer.kv, context, 1 / seconds, peer.peak_rss_bytes, "now")
        for peer, seconds in zip(peers, peer_seconds, strict=True)
    ]
    done += [
        DecodeRow(_peer_name(peer.kv), context, peer.tokens_per_second,
                  peak_rss_bytes=peer.peak_rss_bytes, load=load_average(), origin=peer.origin)
        for peer in (*figures, *kept) if peer.context_tokens == context
    ]  # fmt: skip
    return [with_peer_ratios(row, done) for row in done]


def _peer_name(kv: str) -> str:
    return f"llama.cpp {kv}"


def _with_ratios(row: DecodeRow, others: Sequence[float], peers: Sequence[Peer]) -> DecodeRow:
    """Return a tierd row with its ratios to what it alternated with: seconds a token of each."""
    names = ["transformers", *(f"llama_cpp_{peer.kv}" for peer in peers)]
    ratios = {
        f"ratio_to_{name}": seconds * row.tokens_per_second
        for name, seconds in zip(names, others, strict=True)
    }
    return replace(row, **ratios)  # type: ignore[arg-type]


def with_peer_ratios(row: DecodeRow, rows: Sequence[DecodeRow]) -> DecodeRow:
    """Return a tierd row with those ratios to llama.cpp's rows that were not measured with it."""
    if not row.name.startswith("tierd"):
        return row
    rates = {
        other.name: other.tokens_per_second
        for other in rows
        if other.context_tokens == row.context_tokens
    }
    ratios = {
        f"ratio_to_llama_cpp_{kind}": row.tokens_per_second / rates[_peer_name(kind)]
        for kind in KINDS
        if _peer_name(kind) in rates and getattr(row, f"ratio_to_llama_cpp_{kind}") is None
    }
    return replace(row, **ratios)  # type: ignore[arg-type]


def _seconds(runner: Runner, steps: int) -> float:
    runner.step()
    return statistics.median(_timed(runner) for _ in range(steps))


def _fastest(runner: Runner) -> float:
    """Return the fastest of some steps: part of a limit, so other programs have no share in it."""
    for _ in range(_WARM_UP_STEPS):
        runner.step()
    return min(_timed(runner) for _ in range(_EMPTY_STEPS))


def _timed(runner: Runner) -> float:
    start = time.perf_counter()
    runner.step()
    return time.perf_counter() - start


def _times(runner: Runner, steps: int) -> list[float]:
    return [_timed(runner) for _ in range(steps)]


def _alternate(
    ours: Runner, beside: Sequence[Callable[[], list[float]]], steps: int
) -> list[float]:
    """Return medians of seconds a step, ours first, taken in alternating rounds."""
    for _ in range(_WARM_UP_STEPS):
        ours.step()
    for other in beside:
        other()
    assert ours.kv is not None
    ours.kv.start_counting()
    times: list[list[float]] = [[] for _ in range(1 + len(beside))]
    for _ in range(_ROUNDS):
        times[0].extend(_times(ours, steps))
        for taken, other in zip(times[1:], beside, strict=True):
            taken.extend(other())
    return [statistics.median(taken) for taken in times]


def _row(
    bench: DecodeBench,
    runner: Runner,
    context: int,
    seconds: float,
    empty_seconds: float,
    disk_seconds_per_byte: float = 0.0,
) -> DecodeRow:
    in_memory = runner.memory_bytes / bench.memory.read_bytes_per_second + empty_seconds
    on_disk = runner.cold_bytes * disk_seconds_per_byte
    limit = max(in_memory, on_disk)
    kv = runner.kv
    row = DecodeRow(
        name=runner.name,
        context_tokens=context,
        tokens_per_second=1 / seconds,
        limit_tokens_per_second=1 / limit,
        achieved_of_limit=limit / seconds,
        limit="disk" if on_disk > in_memory else "memory",
        memory_bytes_per_token=runner.memory_bytes,
        cold_bytes_per_token=runner.cold_bytes,
        peak_rss_bytes=runner.peak_rss_bytes(),
        load=load_average(),
    )
    if kv is None:
        return row
    rpcs = kv.counts.step_rpcs / max(kv.counts.steps, 1)
    return replace(
        row,
        hot_peak_bytes=kv.arena.peak_bytes,
        hot_budget_bytes=kv.arena.budget_bytes,
        rpc_per_step=rpcs,
        ours_of_step=OursShare(kv).measure(runner.step, bench.steps),
    )


def _progress(row: DecodeRow) -> None:
    ratios = {
        "transformers": row.ratio_to_transformers,
        "llama.cpp f16": row.ratio_to_llama_cpp_f16,
        "llama.cpp q8_0": row.ratio_to_llama_cpp_q8_0,
    }
    shown = "".join(f", {ratio:.2f} x {name}" for name, ratio in ratios.items() if ratio)
    print(
        f"{row.name} at {row.context_tokens}: {row.tokens_per_second:.2f} tokens/s{shown}",
        file=sys.stderr,
        flush=True,
    )


@dataclass(frozen=True, slots=True)
class CostFit:
    """seconds a step = `empty_seconds` + context x `seconds_per_context_token`, least squares.

    `worst`: largest deviation of a measured point, relative. `exponent`: of tokens/s against
    context between the two longest contexts; attention-bound is -1.
    """

    name: str
    empty_seconds: float
    seconds_per_context_token: float
    worst: float
    exponent: float


def fit_costs(rows: Sequence[DecodeRow]) -> list[CostFit]:
    """Return how each row's cost grows with the context; needs two contexts."""
    fits = []
    for name in dict.fromkeys(row.name for row in rows):
        points = sorted((r.context_tokens, r.tokens_per_second) for r in rows if r.name == name)
        if len(points) < 2:
            continue
        x, rate = np.array(points, dtype=np.float64).T
        y = 1 / rate
        # Weighted so that each point's relative deviation counts alike.
        slope, base = np.polyfit(x, y, 1, w=rate)
        worst = float(np.max(np.abs((base + slope * x) / y - 1)))
        exponent = float(np.log(rate[-1] / rate[-2]) / np.log(x[-1] / x[-2]))
        fits.append(CostFit(name, float(base), float(slope), worst, exponent))
    return fits


def missed_bars(rows: Sequence[DecodeRow]) -> list[str]:
    """Return one line for each bar of the design that a measured row misses."""
    missed = []
    for row in rows:
        if row.name == MAIN.name and row.context_tokens in BARS:
            names = ("ratio_to_transformers", "ratio_to_llama_cpp_q8_0", "ratio_to_llama_cpp_f16")
            for name, bar in zip(names, BARS[row.context_tokens], strict=True):
                value = getattr(row, name)
                if value is not None and value < bar:
                    missed.append(f"{row.context_tokens}: {name} {value:.2f}, bar {bar}")
        if row.limit == "disk" and row.achieved_of_limit < COLD_BAR:
            missed.append(
                f"{row.context_tokens}: {row.name} {row.achieved_of_limit:.2f} of the disk, "
                f"bar {COLD_BAR}"
            )
    return missed


def print_decode(rows: Sequence[DecodeRow], weights: Weights) -> None:
    """Print the rows, the fits and the bars on stdout."""
    print(
        f"decode, SmolLM2-135M bf16, weights {weights}, batch 1, synthetic KV (throughput only, "
        f"no claim about quality); {describe_machine()}"
    )
    print(
        f"{'':34}{'context':>8}{'tok/s':>8}{'limit':>8}{'of limit':>9} {'by':6}{'x own':>7}"
        f"{'x f16':>7}{'x q8_0':>7}{'peak RSS':>11}{'hot':>11}{'ours':>6}{'load':>6}"
    )
    for row in rows:
        ratios = (
            row.ratio_to_transformers, row.ratio_to_llama_cpp_f16, row.ratio_to_llama_cpp_q8_0
        )  # fmt: skip
        shown = "".join(f"{ratio:7.2f}" if ratio else f"{'-':>7}" for ratio in ratios)
        head = f"{row.name:34}{row.context_tokens:8d}{row.tokens_per_second:8.2f}"
        if row.origin != "now":
            print(f"{head}  {row.origin}")
            continue
        print(
            f"{head}{row.limit_tokens_per_second:8.2f}{row.achieved_of_limit:9.2f} {row.limit:6}"
            f"{shown}{format_size(row.peak_rss_bytes):>11}{format_size(row.hot_peak_bytes):>11}"
            f"{row.ours_of_step:6.1%}{row.load:6.1f}"
        )
    for fit in fit_costs(rows):
        print(
            f"{fit.name}: a step is {fit.empty_seconds * 1e3:.1f} ms + context x "
            f"{fit.seconds_per_context_token * 1e6:.2f} us, worst {fit.worst:.0%}; tokens/s goes "
            f"with context^{fit.exponent:.2f} between the longest two (attention-bound: -1)"
        )
    for line in missed_bars(rows):
        print(f"MISSED {line}")


def decode_to_dict(rows: Sequence[DecodeRow], weights: Weights) -> dict[str, Any]:
    """Return the versioned JSON object."""
    return {
        "version": 2,
        "benchmark": "decode",
        "weights": str(weights),
        "synthetic_kv": True,
        "rows": [asdict(row) for row in rows],
        "fits": [asdict(fit) for fit in fit_costs(rows)],
        "missed": missed_bars(rows),
    }
