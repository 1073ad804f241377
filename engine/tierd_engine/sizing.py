"""Sizes of a job: what its KV needs in each tier, before anything is allocated.

Percentages are of the job's KV: `hot` of its bytes in the model's dtype, `warm`
of its pages (each as large as the codec makes it). The rest goes to disk. A
budget that is not given is a quarter, or the smallest that works where that is more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tierd.codec.layout import page_layout
from tierd.errors import BudgetTooSmall, TierFull
from tierd.layercodecs import CodecChoice
from tierd.memory.slabs import smallest_budget
from tierd.types import BLOCK_TOKENS_DEFAULT, BLOCK_TOKENS_MIN, CodecId, DType, Geometry
from tierd.units import MIB, format_size, parse_share
from tierd_engine.arena import hot_block_bytes
from tierd_engine.hf import ModelShape

SHARE_DEFAULT = "25%"
HOT_BLOCKS_MIN = 2  # block 0 (attention sinks) and the open block
# And the newest full one: else an open block's first tokens have no exact ones just before them.
# Smaller blocks in the same hot bytes then halve the mean KL of k8v4 (docs/fidelity.md).
HOT_BLOCKS_WANTED = 3
# The cold tier's last slab is whole, and a slab file is at most 256 MiB or the need itself.
_COLD_SLACK_BYTES = 1 * MIB


@dataclass(frozen=True, slots=True)
class JobSizes:
    """Bytes and tokens of one job. `kv_bytes` is the whole KV in the model's dtype.

    `hot_bytes`: what the hot tier allocates, at most its budget. `below_bytes`: what must
    find room below it at once, in warm and cold together; `block_slot_bytes` is the smallest
    warm tier that holds a block. `cold_unguarded_bytes`: what cold needs without a guard.
    """

    context_tokens: int
    total_tokens: int
    block_tokens: int
    kv_bytes: int
    hot_budget_bytes: int
    hot_bytes: int
    warm_budget_bytes: int
    cold_needed_bytes: int
    cold_unguarded_bytes: int
    below_bytes: int
    block_slot_bytes: int


def size_tiers(
    shape: ModelShape,
    dtype: DType,
    codec: CodecId,
    *,
    context_tokens: int,
    max_new_tokens: int,
    hot: str | None,
    warm: str | None,
    block_tokens: int | None,
    kept: bool = False,
    codec_layers: str = "",
    guarded: bool = False,
) -> JobSizes:
    """Return the job's sizes. `hot`, `warm` None: the default. `kept`: all goes below at the end.

    `guarded`: layers may get a better codec than was asked for, so that pages take more: the
    disk's share is sized for raw ones, the most that can be. Warm is sized for the codecs
    asked for, but holds a raw block where it is not given.
    Raises BudgetTooSmall naming the option and the smallest value that works.
    """
    total = context_tokens + max_new_tokens
    geometry, hot_budget = _choose_geometry(shape, dtype, total, hot, block_tokens)
    blocks = geometry.blocks_for(total)
    hot_blocks = min(blocks, hot_budget // hot_block_bytes(geometry))
    block_slots, smallest_warm = _block_bytes(geometry, CodecChoice(codec, codec_layers))
    raw_block_slots = geometry.layers * page_layout(geometry, CodecId.RAW).slot_bytes
    warm_budget = parse_share(warm or SHARE_DEFAULT, blocks * block_slots)
    if warm is None:
        # A block that the codec cannot encode goes down raw.
        warm_budget = max(warm_budget, raw_block_slots, smallest_warm)
    if hot_blocks < blocks and warm_budget < smallest_warm:
        raise BudgetTooSmall(
            f"--warm {warm} is {warm_budget} bytes; the smallest that works is "
            f"{smallest_warm} bytes ({format_size(smallest_warm)}), one block of "
            f"{geometry.block_tokens} tokens",
            smallest_bytes=smallest_warm,
        )
    unguarded = _cold_bytes(blocks - hot_blocks, warm_budget, block_slots)
    guarded_bytes = _cold_bytes(blocks - hot_blocks, warm_budget, raw_block_slots)
    below = (blocks - hot_blocks) * block_slots
    if kept:
        # Sealed blocks alone are kept, and the first of them as it is in hot.
        sealed = total // geometry.block_tokens
        below = max(below, max(0, sealed - 1) * block_slots + min(sealed, 1) * raw_block_slots)
    return JobSizes(
        context_tokens=context_tokens,
        total_tokens=total,
        block_tokens=geometry.block_tokens,
        kv_bytes=geometry.token_bytes * total,
        hot_budget_bytes=hot_budget,
        hot_bytes=hot_blocks * hot_block_bytes(geometry),
        warm_budget_bytes=warm_budget,
        cold_needed_bytes=guarded_bytes if guarded else unguarded,
        cold_unguarded_bytes=unguarded,
        below_bytes=below,
        block_slot_bytes=smallest_warm,
    )


def _cold_bytes(blocks: int, warm_bytes: int, block_slots: int) -> int:
    """Return what cold needs of a disk for the blocks below hot that warm does not hold."""
    cold_blocks = max(0, blocks - warm_bytes // block_slots)
    # Pages pass through warm on their way down, so a full warm tier spills one block early.
    return (cold_blocks + 1) * block_slots + _COLD_SLACK_BYTES if cold_blocks else 0


def _block_bytes(geometry: Geometry, choice: CodecChoice) -> tuple[int, int]:
    """Return the bytes of a block's slots, and the smallest warm tier that holds them."""
    counts = Counter(choice.per_layer(geometry.layers))
    sizes = {codec: page_layout(geometry, codec).slot_bytes for codec in counts}
    block_bytes = sum(sizes[codec] * pages for codec, pages in counts.items())
    return block_bytes, smallest_budget(block_bytes, len(set(sizes.values())))


def _choose_geometry(
    shape: ModelShape, dtype: DType, total: int, hot: str | None, block_tokens: int | None
) -> tuple[Geometry, int]:
    """Return the geometry with the largest block of which the hot budget holds three, and that.

    Of the smallest block, or of `block_tokens` if given, two are enough.
    """
    tokens = BLOCK_TOKENS_DEFAULT if block_tokens is None else block_tokens
    while True:
        geometry = shape.geometry(dtype, tokens)
        is_last = block_tokens is not None or tokens == BLOCK_TOKENS_MIN
        wanted = HOT_BLOCKS_MIN if is_last else HOT_BLOCKS_WANTED
        need = min(wanted, geometry.blocks_for(total))
        smallest = need * hot_block_bytes(geometry)
        budget = _hot_budget(hot, geometry, total)
        if budget >= smallest:
            return geometry, budget
        if is_last:
            break
        tokens //= 2
    if hot is None:
        return geometry, smallest
    raise BudgetTooSmall(
        f"--hot {hot} is {budget} bytes; the smallest that works is {smallest} bytes "
        f"({format_size(smallest)}), {need} block{'s' * (need > 1)} of {tokens} tokens",
        smallest_bytes=smallest,
    )


def _hot_budget(hot: str | None, geometry: Geometry, total: int) -> int:
    share = hot or SHARE_DEFAULT
    budget = parse_share(share, geometry.token_bytes * total)
    if share.strip().endswith("%") and budget == geometry.token_bytes * total:
        # All of it: the last block too, which is as large as the others.
        return geometry.blocks_for(total) * hot_block_bytes(geometry)
    return budget


def check_daemon_room(sizes: JobSizes, stats: Mapping[str, Any], *, resumed: bool) -> None:
    """Raise BudgetTooSmall, with the numbers, if a running daemon's tiers can never hold the job.

    TierFull if they cannot now, because other jobs' sessions are there. `stats`: Client.stats().
    """
    tiers = stats["tiers"]
    warm, cold = (int(tiers[name]["capacity_bytes"]) for name in ("warm", "cold"))
    below = sizes.below_bytes
    if below == 0:
        return
    if warm < sizes.block_slot_bytes:
        raise BudgetTooSmall(
            f"the daemon's warm tier is {warm} bytes; one block of {sizes.block_tokens} tokens "
            f"takes {sizes.block_slot_bytes}: start it with a larger --warm, "
            "or give a smaller --block-tokens",
            smallest_bytes=sizes.block_slot_bytes,
        )
    has = f"warm {format_size(warm)} and cold {format_size(cold)}"
    need = f"the job needs {format_size(below)} below its hot tier"
    if below > warm + cold:
        raise BudgetTooSmall(
            f"{need}; the daemon has {format_size(warm + cold)} ({has}): start it with a larger "
            "--cold-cap or --warm, or give a larger --hot",
            smallest_bytes=below,
        )
    held = sum(int(tiers[name]["bytes"]) for name in ("warm", "cold"))
    # A suspended session gives way, and a resumed one is counted in both figures.
    if below > warm + cold - held and not resumed and not stats["sessions"]["suspended"]:
        raise TierFull(
            f"{need}; of the daemon's {format_size(warm + cold)} ({has}) other jobs hold "
            f"{format_size(held)}: try again when they are done",
            retry_after_seconds=1.0,
        )
