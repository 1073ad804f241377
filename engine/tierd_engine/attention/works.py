"""Which compiled worker attends over which pages."""

from __future__ import annotations

from tierd.codec.layout import TILE_LANES, PageLayout
from tierd.types import CodecId, DType
from tierd_engine.attention import bytedot, kernel
from tierd_engine.attention.simd import BFLOAT16, E4M3, FLOAT16, FLOAT32, NARROW, UINT8

_RAW_KINDS = {DType.FLOAT32: FLOAT32, DType.BFLOAT16: BFLOAT16, DType.FLOAT16: FLOAT16}
_KINDS = {
    CodecId.INT8: UINT8,
    CodecId.K8V4: kernel.K8V4,
    CodecId.INT4: kernel.INT4,
    CodecId.FP8: E4M3,
}


def _rows_at_once(share: int, n: int) -> int:
    """Query rows a kernel takes at a time, for `share` query heads a KV head.

    At most two answers a model, so at most two compilations: one query, several.
    """
    if n == 1 and share <= kernel.ROWS_MAX:
        return share
    return 3 if -(-share // 3) * 3 < -(-share // 4) * 4 else 4


def kind_of(layout: PageLayout) -> int:
    """Return the kind of a layout's pages on this processor: what their kernel is made for."""
    kind = _KINDS.get(layout.codec, _RAW_KINDS[layout.dtype])
    if bytedot.is_built_for() and layout.group_tokens == bytedot.COLUMNS:
        if kind == UINT8 and layout.head_dim >= bytedot.COLUMNS:
            return kernel.UINT8_DOT
        if kind == kernel.K8V4:
            return kernel.K8V4_DOT
    return kind


def work_of(layout: PageLayout, heads: int, n: int) -> int:
    """Return the address of the compiled worker for pages of a layout and n queries."""
    kind = kind_of(layout)
    lanes = kernel.WIDE if layout.block_tokens >= kernel.WIDE else NARROW
    if layout.codec is CodecId.INT4:
        lanes = min(TILE_LANES, layout.block_tokens)  # those of a tile of keys
    return kernel.work_address(kind, _rows_at_once(heads // layout.kv_heads, n), lanes)
