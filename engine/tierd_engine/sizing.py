"""Sizes of a job: what its KV needs in each tier, before anything is allocated.

Percentages are of the job's KV: `hot` of its bytes in the model's dtype, `warm`
of its pages (each as large as the codec makes it). The rest goes to disk.
"""

from __future__ import annotations

from dataclasses import dataclass

from tierd.codec.layout import page_layout
from tierd.errors import BudgetTooSmall, InvalidArgument
from tierd.types import BLOCK_TOKENS_DEFAULT, BLOCK_TOKENS_MIN, CodecId, DType, Geometry
from tierd.units import MIB, format_size, parse_share
from tierd_engine.arena import hot_block_bytes
from tierd_engine.hf import ModelShape

HOT_BLOCKS_MIN = 2  # block 0 (attention sinks) and the open block
# The cold tier's last slab is whole, and a slab file is at most 256 MiB or the need itself.
_COLD_SLACK_BYTES = 1 * MIB


@dataclass(frozen=True, slots=True)
class JobSizes:
    """Bytes and tokens of one job. `kv_bytes` is the whole KV in the model's dtype."""

    context_tokens: int
    total_tokens: int
    block_tokens: int
    kv_bytes: int
    hot_budget_bytes: int
    warm_budget_bytes: int
    cold_needed_bytes: int


def size_tiers(
    shape: ModelShape,
    dtype: DType,
    codec: CodecId,
    *,
    context_tokens: int,
    max_new_tokens: int,
    hot: str,
    warm: str,
    block_tokens: int | None,
) -> JobSizes:
    """Return the job's sizes. Raises BudgetTooSmall naming the smallest that works."""
    total = context_tokens + max_new_tokens
    geometry = _choose_geometry(shape, dtype, total, hot, block_tokens)
    kv_bytes = geometry.token_bytes * total
    hot_budget = parse_share(hot, kv_bytes)
    blocks = geometry.blocks_for(total)
    hot_blocks = min(blocks, hot_budget // hot_block_bytes(geometry))
    block_slots = geometry.layers * page_layout(geometry, codec).slot_bytes
    warm_budget = parse_share(warm, blocks * block_slots)
    if hot_blocks < blocks and warm_budget < block_slots:
        raise BudgetTooSmall(
            f"the warm budget {warm} is {warm_budget} bytes; the smallest that works is "
            f"{block_slots} bytes ({format_size(block_slots)}), one block of "
            f"{geometry.block_tokens} tokens",
            smallest_bytes=block_slots,
        )
    cold_blocks = max(0, blocks - hot_blocks - warm_budget // block_slots)
    # Pages pass through warm on their way down, so a full warm tier spills one block early.
    cold_needed = (cold_blocks + 1) * block_slots + _COLD_SLACK_BYTES if cold_blocks else 0
    return JobSizes(
        context_tokens=context_tokens,
        total_tokens=total,
        block_tokens=geometry.block_tokens,
        kv_bytes=kv_bytes,
        hot_budget_bytes=hot_budget,
        warm_budget_bytes=warm_budget,
        cold_needed_bytes=cold_needed,
    )


def _choose_geometry(
    shape: ModelShape, dtype: DType, total: int, hot: str, block_tokens: int | None
) -> Geometry:
    """Return the geometry with the largest block of which the hot budget holds two."""
    tokens = block_tokens or BLOCK_TOKENS_DEFAULT
    while True:
        geometry = shape.geometry(dtype, tokens)
        need = min(HOT_BLOCKS_MIN, geometry.blocks_for(total))
        smallest = need * hot_block_bytes(geometry)
        budget = parse_share(hot, geometry.token_bytes * total)
        if budget >= smallest:
            return geometry
        if block_tokens is not None or tokens == BLOCK_TOKENS_MIN:
            break
        tokens //= 2
    raise BudgetTooSmall(
        f"the hot budget {hot} is {budget} bytes; the smallest that works is {smallest} bytes "
        f"({format_size(smallest)}), {need} block{'s' * (need > 1)} of {tokens} tokens",
        smallest_bytes=smallest,
    )


def check_length(shape: ModelShape, context_tokens: int, max_new_tokens: int) -> None:
    """Raise InvalidArgument if the job runs past the length the model was trained for."""
    total = context_tokens + max_new_tokens
    if shape.trained_tokens and total > shape.trained_tokens:
        raise InvalidArgument(
            f"{context_tokens} tokens of context and {max_new_tokens} new ones are more than "
            f"the {shape.trained_tokens} the model was trained for; "
            "shorten them or give --rope-scaling linear:FACTOR or yarn:FACTOR"
        )
