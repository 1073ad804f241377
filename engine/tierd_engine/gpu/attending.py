"""Attention of a few queries over pages on the GPU: hot ones, and encoded ones as they lie.

Each program takes a run of pages for one KV head and leaves a partial (o, lse); a merge joins
them. Encoded pages are never decoded: with k = zero + scale * code per channel,
q·k = q·zero + (q * scale)·code, and with v = zero + scale * code per token,
sum p v = sum p zero + sum (p * scale) code. So tensor cores multiply by the codes themselves,
which float16 holds exactly; the float32 factor is cut into two terms that sum to it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tierd.codec.layout import PageLayout
from tierd_engine.arena import TORCH_DTYPES
from tierd_engine.gpu.codes import key_codes, value_codes, value_halves
from tierd_engine.gpu.elements import FUSED, HALF_MAX, NORMAL_MIN, page_start, typed
from tierd_engine.gpu.shapes import call_shape, constants, page_shape, warps_of

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _dot(a: tl.tensor, b: tl.tensor, total: tl.tensor, C: tl.constexpr) -> tl.tensor:
    """Return total + a @ b in float32; the interpreter multiplies no bfloat16, so widens it."""
    if C.is_interpreted and b.dtype == tl.bfloat16:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total)
    else:
        return tl.dot(a, b, total, input_precision="tf32x3")


@triton.jit
def _dot_shares(p: tl.tensor, b: tl.tensor, total: tl.tensor, C: tl.constexpr) -> tl.tensor:
    """Return total + p @ b for p from 0 to 1, cut into terms of b's dtype: 8 or 11 bits each."""
    if b.dtype == tl.float32:
        return _dot(p, b, total, C)
    terms: tl.constexpr = 3 if b.dtype == tl.bfloat16 else 2
    for _ in tl.static_range(terms):
        head = p.to(b.dtype)
        total = _dot(head, b, total, C)
        p -= head.to(tl.float32)
    return total


@triton.jit
def _dot_codes(a: tl.tensor, codes: tl.tensor, C: tl.constexpr) -> tl.tensor:
    """Return a @ codes for any float32 a: each row, brought to at most 1, as two float16 terms.

    They are within 2^-24 of it: what float32 itself resolves of the row's largest factor.
    """
    size = tl.max(tl.abs(a), axis=1)
    is_zero = size < NORMAL_MIN
    inverse = tl.where(is_zero, 0.0, 1.0 / tl.where(is_zero, 1.0, size))
    a = a * inverse[:, None]
    head = a.to(tl.float16)
    zeros = tl.zeros([a.shape[0], codes.shape[1]], tl.float32)
    result = _dot(head, codes, zeros, C)
    return _dot((a - head.to(tl.float32)).to(tl.float16), codes, result, C) * size[:, None]


@triton.jit
def _half_row(start: tl.tensor, at: tl.tensor, mask: tl.tensor) -> tl.tensor:
    half = tl.load(start.to(tl.pointer_type(tl.float16)) + at, mask=mask, other=0.0)
    return half.to(tl.float32)[None, :]


@triton.jit
def _scores(
    q: tl.tensor, head: tl.tensor, tile: tl.tensor, valid: tl.tensor, S: tl.constexpr,
    C: tl.constexpr, KIND: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return q·k, [rows, tile], for the tile-th tile of a head's tokens."""
    token = tile * C.tile + tl.arange(0, C.tile)
    channel = tl.arange(0, S.padded)
    inside = channel < S.d
    if S.codec == "raw":
        at = token[None, :] * S.d + channel[:, None]
        mask = inside[:, None] & valid[None, :]
        keys = tl.load(typed(head, S.key_part, KIND) + at, mask=mask, other=0.0)
        zeros = tl.zeros([C.rows, C.tile], tl.float32)
        return _dot(q.to(KIND), keys, zeros, C)  # exact: q came in this dtype
    else:
        row = tile * C.tile // S.tile * S.d + channel
        scaled = q * _half_row(head + S.key_scale, row, inside)
        score = _dot_codes(scaled, key_codes(head, token, S), C)
        if S.key_zero >= 0:
            zero = _half_row(head + S.key_zero, row, inside)
            score += tl.sum(q * zero, axis=1)[:, None]
        return score


@triton.jit
def _mixed(
    total: tl.tensor, p: tl.tensor, head: tl.tensor, tile: tl.tensor, valid: tl.tensor,
    S: tl.constexpr, C: tl.constexpr, KIND: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return total + p @ v, [rows, padded], for the tile-th tile of a head's tokens."""
    token = tile * C.tile + tl.arange(0, C.tile)
    channel = tl.arange(0, S.padded)
    at = token[:, None] * S.d + channel[None, :]
    mask = (channel < S.d)[None, :] & valid[:, None]
    if S.codec == "raw":
        values = tl.load(typed(head, S.value_part, KIND) + at, mask=mask, other=0.0)
        return _dot_shares(p, values, total, C)
    elif S.codec == "k8v4" or S.codec == "int4":
        # A token's scale changes with the channel: its values are made first, as two terms.
        scale = value_halves(head + S.value_scale, token, valid, S)
        zero = value_halves(head + S.value_zero, token, valid, S)
        values = zero + scale * value_codes(head, token, valid, S).to(tl.float32)
        near = tl.minimum(values, HALF_MAX).to(tl.float16)
        total = _dot_shares(p, near, total, C)
        return _dot_shares(p, (values - near.to(tl.float32)).to(tl.float16), total, C)
    else:
        # Scales of tokens that are not valid read as 0: what stands there may be anything.
        scaled = p * _half_row(head + S.value_scale, token, valid)
        total += _dot_codes(scaled, value_codes(head, token, valid, S), C)
        if S.value_zero >= 0:
            zero = _half_row(head + S.value_zero, token, valid)
            total += tl.sum(p * zero, axis=1)[:, None]
        return total


# Counts change from step to step: 1, or a multiple of 16, is no reason for another build.
@triton.jit(do_not_specialize=["pages", "pages_each", "n"])
def attend_kernel(
    q: tl.tensor, addresses: tl.tensor, tokens: tl.tensor, firsts: tl.tensor,
    positions: tl.tensor, o: tl.tensor, lse: tl.tensor, scale: tl.tensor, pages: tl.tensor,
    pages_each: tl.tensor, n: tl.tensor, S: tl.constexpr, C: tl.constexpr,
) -> None:  # fmt: skip
    """One program: a run of pages, one KV head, `rows` rows of (query, head of its share)."""
    part = tl.program_id(0)
    kv_head = tl.program_id(1)
    row = tl.program_id(2) * C.rows + tl.arange(0, C.rows)
    query = row // C.share
    is_row = query < n
    q_row = query * C.heads + kv_head * C.share + row % C.share
    channel = tl.arange(0, S.padded)
    inside = is_row[:, None] & (channel < S.d)[None, :]
    at = q_row[:, None] * S.d + channel[None, :]
    x = tl.load(q + at, mask=inside, other=0.0).to(tl.float32)
    if C.is_causal:
        position = tl.load(positions + query, mask=is_row, other=-1)
    top = tl.full([C.rows], float("-inf"), tl.float32)
    total = tl.zeros([C.rows], tl.float32)
    mixed = tl.zeros([C.rows, S.padded], tl.float32)
    tiles: tl.constexpr = S.tokens // C.tile
    last = tl.minimum((part + 1) * pages_each, pages)
    for step in range(part * pages_each * tiles, last * tiles):
        page, tile = step // tiles, step % tiles
        head = page_start(addresses, page) + kv_head.to(tl.int64) * S.head_bytes
        token = tile * C.tile + tl.arange(0, C.tile)
        valid = token < tl.load(tokens + page)
        seen = is_row[:, None] & valid[None, :]
        if C.is_causal:
            seen = seen & (tl.load(firsts + page) + token[None, :] <= position[:, None])
        score = _scores(x, head, tile, valid, S, C, q.dtype.element_ty) * (scale * LOG2_E)
        score = tl.where(seen, score, float("-inf"))
        next_top = tl.maximum(top, tl.max(score, axis=1))
        safe_top = tl.where(next_top == float("-inf"), 0.0, next_top)
        p = tl.exp2(score - safe_top[:, None])
        decay = tl.exp2(top - safe_top)
        total = total * decay + tl.sum(p, axis=1)
        mixed = mixed * decay[:, None]
        mixed = _mixed(mixed, p, head, tile, valid, S, C, q.dtype.element_ty)
        top = next_top
    is_empty = total == 0
    safe = tl.where(is_empty, 1.0, total)
    out_row = part.to(tl.int64) * n * C.heads + q_row
    tl.store(o + out_row[:, None] * S.d + channel[None, :], mixed / safe[:, None], mask=inside)
    log = tl.where(is_empty, float("-inf"), (top + tl.log2(safe)) * LN_2)
    tl.store(lse + out_row, log, mask=is_row)


def attend_pages(
    q: torch.Tensor,
    addresses: torch.Tensor,
    tokens: torch.Tensor,
    layout: PageLayout,
    scale: float,
    o: torch.Tensor,
    lse: torch.Tensor,
    first_position: torch.Tensor | None = None,
    query_positions: torch.Tensor | None = None,
    *,
    pages_each: int = 1,
) -> None:
    """Write a partial for every run of `pages_each` pages to o and lse. Zero pages is allowed.

    q: [n, heads, head_dim] in the model's dtype; addresses: int64 [pages] of hot pages (layout
    raw) or payloads of any codec, 64-byte aligned; tokens: int32 [pages] valid tokens of each; o:
    float32 [parts, n, heads, head_dim], normalised per part; lse: float32 [parts, n, heads],
    natural logarithm; parts = ceil(pages / pages_each). All contiguous, on one device. With
    positions (int64 [pages], [n]), query i sees token j of page p iff first_position[p] + j <=
    query_positions[i]; without, all valid tokens. A part of which a query sees no token gives
    o = 0, lse = -inf. Runs on the current stream and waits for nothing.
    """
    n, heads, head_dim = q.shape
    pages = len(addresses)
    parts = -(-pages // pages_each)
    assert head_dim == layout.head_dim and heads % layout.kv_heads == 0
    assert q.dtype == TORCH_DTYPES[layout.dtype] and q.is_contiguous()
    assert addresses.dtype == torch.int64 and tokens.dtype == torch.int32
    assert tokens.shape == addresses.shape == (pages,)
    assert o.shape == (parts, n, heads, head_dim) and lse.shape == (parts, n, heads)
    assert o.dtype == lse.dtype == torch.float32 and o.is_contiguous() and lse.is_contiguous()
    if pages * n == 0:
        return
    is_causal = first_position is not None
    if first_position is not None and query_positions is not None:
        assert first_position.dtype == query_positions.dtype == torch.int64
        assert first_position.shape == (pages,) and query_positions.shape == (n,)
    else:
        assert first_position is query_positions is None
        first_position = query_positions = addresses  # not read
    call = call_shape(
        layout, heads, n, is_causal=is_causal,
        is_interpreted=bool(triton.knobs.runtime.interpret),
    )  # fmt: skip
    page = page_shape(layout)
    grid = (parts, layout.kv_heads, triton.cdiv(n * call.share, call.rows))
    attend_kernel[grid](
        q, addresses, tokens, first_position, query_positions, o, lse, scale, pages, pages_each,
        n, constants(page), constants(call), num_warps=warps_of(page, call), **FUSED,
    )  # fmt: skip
