"""`scripts/bench`: one verb per benchmark; data on stdout, progress on stderr."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tierd.errors import InvalidArgument, TierdError
from tierd.units import MIB, format_size, parse_size
from tierd_engine.cores import share_cores

TOKENS_MAX = 2**31 - 1
SIZE_BYTES_MIN = 64 * MIB  # less is over before a clock says anything

_DISK_PARTS = ("speed", "keep", "restart")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one benchmark; return the exit code."""
    options = _parser().parse_args(arguments)
    share_cores()
    try:
        return int(options.run(options))
    except TierdError as error:
        print(f"bench: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def _count(text: str) -> int:
    """Return a whole number of at least 1."""
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= TOKENS_MAX):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 to {TOKENS_MAX}")
    return int(text)


def _share(text: str) -> float:
    """Return a share, above 0 and at most 1."""
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0.0 < share <= 1.0:
        raise argparse.ArgumentTypeError(f"{text!r} is no share: above 0 and at most 1")
    return share


def _size(text: str) -> str:
    """Return a size as it is written, if it is one of at least a slab of pages."""
    try:
        size_bytes = parse_size(text)
    except InvalidArgument as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if size_bytes < SIZE_BYTES_MIN:
        raise argparse.ArgumentTypeError(f"{text} is less than {format_size(SIZE_BYTES_MIN)}")
    return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    decode = verbs.add_parser("decode", help="decode tokens/s beside transformers and llama.cpp")
    decode.add_argument("--context", type=_count, nargs="+", help="tokens; default: 4k to 128k")
    decode.add_argument("--weights", default="auto", help="of tierd's rows: auto or int8")
    decode.add_argument("--steps", type=_count, default=6, help="steps a round (default 6)")
    decode.add_argument("--folder", default="/var/tmp", help="of cold pages (default /var/tmp)")
    decode.add_argument(
        "--rows", type=int, nargs="+", help="of tierd's rows only these, from 0 (default: all)"
    )
    decode.add_argument(
        "--peers", nargs="?", const="", metavar="PYTHON",
        help="measure llama.cpp now, with this or that interpreter's llama-cpp-python",
    )  # fmt: skip
    decode.add_argument("--keep-peers", action="store_true", help="and keep its figures")
    decode.add_argument("--brief", action="store_true", help="no quantised cache of transformers")
    decode.set_defaults(run=_decode)
    peers = verbs.add_parser("peers", help="show that llama.cpp's cache is filled fairly")
    peers.add_argument("--context", type=_count, nargs="+", help="tokens (default 4096)")
    peers.add_argument("--python", metavar="PYTHON", help="an interpreter with llama-cpp-python")
    peers.set_defaults(run=_peers)
    exact = verbs.add_parser("exact", help="raw tokens against the own cache, every cell")
    exact.add_argument("--context", type=_count, nargs="*", help="tokens; default: all lengths")
    exact.set_defaults(run=_exact)
    fidelity = _add_fidelity(verbs)
    prefill = verbs.add_parser("prefill", help="prefill tokens/s beside the model's own")
    prefill.add_argument("--context", type=_count, nargs="+", help="tokens (default 4096 16384)")
    prefill.add_argument("--rounds", type=_count, default=3, help="default 3")
    prefill.add_argument("--codec", default="int8", help="as --codec of a job (default int8)")
    prefill.add_argument("--dtype", default="float32", help="default float32")
    prefill.add_argument("--hot", default="25%", help="hot share (default 25%%)")
    prefill.set_defaults(run=_prefill)
    weights = verbs.add_parser("weights", help="a step outside attention; int8 weights' loss")
    weights.add_argument(
        "--tokens", type=_count, default=1024, help="teacher-forced (default 1024)"
    )
    weights.set_defaults(run=_weights)
    memory = verbs.add_parser("memory", help="peak memory of a long job beside its KV")
    memory.add_argument("--context", type=_count, default=131072, help="tokens (default 131072)")
    memory.add_argument("--hot", type=_share, default=0.05, help="share hot (default 0.05)")
    memory.set_defaults(run=_memory)
    kernels = verbs.add_parser("kernels", help="codec and attention kernels against memory")
    kernels.set_defaults(run=_kernels)
    disk = verbs.add_parser(
        "disk", help="spill and cold read beside fio; a session kept; a restart"
    )
    disk.add_argument("--folder", type=Path, help="where (default: the system's temporary folder)")
    disk.add_argument(
        "--model", nargs="*", choices=("8b", "135m"), help="whose pages (default: both)"
    )
    disk.add_argument("--size", type=_size, default="1GiB", help="bytes a round (default 1GiB)")
    disk.add_argument("--rounds", type=_count, default=8, help="default 8")
    disk.add_argument("--part", nargs="*", choices=_DISK_PARTS, help="default: all")
    disk.add_argument(
        "--pages", type=_count, default=1_000_000, help="of the restart; default 10^6"
    )
    disk.set_defaults(run=_disk)
    for verb in (decode, exact, fidelity, prefill, weights, memory, disk):
        verb.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return parser


def _add_fidelity(verbs: Any) -> argparse.ArgumentParser:
    from tierd_engine.bench.texts import TEXT_NAMES, WHOLE

    verb: argparse.ArgumentParser = verbs.add_parser(
        "fidelity", help="KL, perplexity and top-1 of each codec on real texts, two protocols"
    )
    verb.add_argument(
        "--codec", nargs="+", metavar="LAYOUT",
        help="as a job's --codec, with the quality guard as in int4+guard (protocol tiers only), "
        "and q8_0, the reference; default: all codecs and q8_0",
    )  # fmt: skip
    verb.add_argument("--context", type=_count, nargs="+", help="tokens (default 2048 4096 8192)")
    verb.add_argument(
        "--text", nargs="+", choices=(*TEXT_NAMES, WHOLE),
        help=f"default: all but {WHOLE}, which is the others but source together",
    )  # fmt: skip
    verb.add_argument(
        "--plan",
        nargs="+",
        metavar="PLAN[:HOT[:BLOCK]]",
        help="such as stream:25%%:128 (default near:smallest)",
    )
    verb.add_argument("--protocol", nargs="+", choices=("tiers", "prefix"), help="default: both")
    verb.add_argument("--tokens", type=_count, help="teacher-forced after a context (default 448)")
    verb.add_argument("--seed", type=int, help="of the bootstrap (default 0)")
    verb.add_argument("--output", type=Path, metavar="FOLDER", help="write fidelity.md and a plot")
    verb.set_defaults(run=_fidelity)
    return verb


def _decode(options: argparse.Namespace) -> int:
    from tierd_engine.bench import decode, peers
    from tierd_engine.weightonly import Weights

    weights = Weights.parse(options.weights)
    contexts = options.context or decode.CONTEXTS
    if any(not 0 <= row < len(decode.SHARES) for row in options.rows or ()):
        raise InvalidArgument(f"--rows are from 0 to {len(decode.SHARES) - 1}")
    rows = [decode.SHARES[i] for i in options.rows or range(len(decode.SHARES))]
    kept, python = peers.kept_figures(), None
    if options.peers is not None:
        python = peers.find_python(options.peers or None)
        if python is None:
            print("llama.cpp is skipped: pip install llama-cpp-python", file=sys.stderr)
    elif not any(peer.context_tokens in contexts for peer in kept):
        print("no figures of llama.cpp are kept for these; --peers measures it", file=sys.stderr)
    done = decode.bench_decode(
        contexts, rows, kept, weights=weights, steps=options.steps, cold_folder=options.folder,
        peers_python=python, keep=options.keep_peers, brief=options.brief,
    )  # fmt: skip
    if options.json:
        print(json.dumps(decode.decode_to_dict(done, weights)))
    else:
        decode.print_decode(done, weights)
    return 1 if decode.missed_bars(done) else 0


def _peers(options: argparse.Namespace) -> int:
    from tierd_engine.bench import peers

    python = peers.find_python(options.python)
    if python is None:
        print("bench: error: pip install llama-cpp-python", file=sys.stderr)
        return 1
    for context in options.context or (4096,):
        peers.print_filling(peers.bench_filling(python, context))
    return 0


def _exact(options: argparse.Namespace) -> int:
    from tierd_engine.bench.exact import CONTEXTS, bench_exact, exact_to_dict, print_exact
    from tierd_engine.bench.texts import python_reference

    cells = bench_exact(options.context or CONTEXTS, python_reference())
    if options.json:
        print(json.dumps(exact_to_dict(cells)))
    else:
        print_exact(cells)
    return 0 if all(cell.holds for cell in cells) else 1


def _fidelity(options: argparse.Namespace) -> int:
    from tierd_engine.bench.fidelity import (
        FidelityPlan,
        FidelityResult,
        bench_fidelity,
        fidelity_to_dict,
    )
    from tierd_engine.bench.fidelity_report import print_fidelity, write_report, write_table
    from tierd_engine.bench.forced import Protocol

    chosen = {
        "layouts": options.codec,
        "contexts": options.context and sorted(options.context),
        "texts": options.text,
        "settings": options.plan,
        "protocols": options.protocol and [Protocol(name) for name in options.protocol],
        "tokens": options.tokens,
        "seed": options.seed,
    }
    plan = FidelityPlan(**{name: value for name, value in chosen.items() if value is not None})

    def keep(part: FidelityPlan, done: FidelityResult) -> None:
        if options.output is not None:
            write_table(options.output, part, done)

    result = bench_fidelity(plan, partial(print, file=sys.stderr, flush=True), keep)
    printed = fidelity_to_dict(plan, result)
    if options.output is not None:
        for path in write_report(options.output, plan, result):
            print(f"bench: written: {path}", file=sys.stderr)
    if options.json:
        print(json.dumps(printed))
    else:
        print_fidelity(plan, result)
    return 0 if printed["holds"] else 1


def _prefill(options: argparse.Namespace) -> int:
    from tierd.codec import parse_codec
    from tierd.types import DType
    from tierd_engine.bench.prefill import bench_prefill, prefill_to_dict, print_prefill

    codec, dtype = parse_codec(options.codec), DType(options.dtype)
    rows = [
        bench_prefill(context, codec, dtype, options.hot, options.rounds)
        for context in options.context or (4096, 16384)
    ]
    if options.json:
        print(json.dumps(prefill_to_dict(rows)))
    else:
        print_prefill(rows)
    return 0 if all(row.holds for row in rows) else 1


def _weights(options: argparse.Namespace) -> int:
    from tierd_engine.bench.weights import bench_loss, bench_step, print_weights, weights_to_dict

    steps, losses = bench_step(), bench_loss(options.tokens)
    if options.json:
        print(json.dumps(weights_to_dict(steps, losses)))
    else:
        print_weights(steps, losses)
    return 0


def _memory(options: argparse.Namespace) -> int:
    from tierd_engine.bench.memory import bench_memory, memory_to_dict, print_memory

    row = bench_memory(options.context, options.hot)
    if options.json:
        print(json.dumps(memory_to_dict(row)))
    else:
        print_memory(row)
    return 0 if row.holds else 1


def _disk(options: argparse.Namespace) -> int:
    from tierd_engine.bench.ceiling import print_ceiling
    from tierd_engine.bench.disk import bench_disk, disk_to_dict, print_disk
    from tierd_engine.bench.diskrig import GEOMETRIES
    from tierd_engine.bench.keep import bench_keep, keep_to_dict, print_keep
    from tierd_engine.bench.restart import bench_restart, print_restart, restart_to_dict

    parts = options.part or _DISK_PARTS
    printed: dict[str, object] = {}
    holds = []
    if "speed" in parts:
        models = options.model or list(GEOMETRIES)
        size_bytes = parse_size(options.size)
        rows, ceilings = bench_disk(options.folder, models, size_bytes, options.rounds)
        printed |= disk_to_dict(rows, ceilings)
        holds += [row.holds for row in rows]
        if not options.json:
            print_disk(rows)
            print_ceiling(ceilings)
    if "keep" in parts:
        keeping = bench_keep(options.folder)
        printed |= keep_to_dict(keeping)
        holds.append(keeping.holds)
        if not options.json:
            print_keep(keeping)
    if "restart" in parts:
        restart = bench_restart(options.folder, options.pages, options.rounds)
        printed |= restart_to_dict(restart)
        holds.append(restart.holds)
        if not options.json:
            print_restart(restart)
    if options.json:
        print(json.dumps(printed))
    return 0 if all(holds) else 1


def _kernels(options: argparse.Namespace) -> int:
    from tierd_engine.bench_codec import benchmark_codec
    from tierd_engine.bench_kernels import benchmark_attention

    benchmark_codec()
    benchmark_attention()
    return 0


if __name__ == "__main__":
    sys.exit(main())
