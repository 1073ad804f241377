"""The device digest on the GPU: tierd/codec/devicedigest.py's 64 bits, of many pages at once.

A program sums a run of blocks of one page; sums of integers may be added in any order, so
programs add to two numbers a page by atomics. Keys are made where they are used: no table has
to be brought into VRAM first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tierd.codec import devicedigest
from tierd.errors import InvalidArgument
from tierd_engine.gpu.elements import EXACT, page_start

BLOCK_WORDS = tl.constexpr(devicedigest.BLOCK_WORDS)
RUN_BLOCKS = tl.constexpr(8)  # of one program: 16 KiB, so that one page fills many programs
SEED = tl.constexpr(devicedigest.SEED)
GAMMA = tl.constexpr(devicedigest.GAMMA)
MIX_1 = tl.constexpr(devicedigest.MIX_1)
MIX_2 = tl.constexpr(devicedigest.MIX_2)
LOW_WORD = 2**32 - 1


@triton.jit
def _keys(STREAM: tl.constexpr, index: tl.tensor) -> tl.tensor:
    """Return keys of a stream, uint64."""
    start: tl.constexpr = (SEED.value + (2**32 * STREAM + 1) * GAMMA.value) % 2**64
    z = index.to(tl.uint64) * GAMMA + start
    z = (z ^ (z >> 30)) * MIX_1
    z = (z ^ (z >> 27)) * MIX_2
    return z ^ (z >> 31)


@triton.jit
def _block_sums(words: tl.tensor, LANE: tl.constexpr) -> tl.tensor:
    """Return a lane's upper 32 bits, uint64 [RUN_BLOCKS], of blocks [RUN_BLOCKS, BLOCK_WORDS]."""
    zeroth = tl.zeros([RUN_BLOCKS], tl.uint64)
    keys = _keys(LANE, 1 + tl.arange(0, BLOCK_WORDS))
    return (tl.sum(words * keys[None, :], axis=1) + _keys(LANE, zeroth)) >> 32


@triton.jit
def _page_sum(
    block: tl.tensor, u_0: tl.tensor, u_1: tl.tensor, words: tl.tensor, LANE: tl.constexpr
) -> tl.tensor:
    """Return what these blocks add to a lane of their page; the first, its size too."""
    added = _keys(2 + LANE, 2 + 2 * block) * u_0 + _keys(2 + LANE, 3 + 2 * block) * u_1
    size = words.to(tl.uint64) * 4
    head = _keys(2 + LANE, block * 0) + _keys(2 + LANE, block * 0 + 1) * size
    added = tl.where(block * BLOCK_WORDS < words, added, 0)
    return tl.sum(added + tl.where(block == 0, head, 0), axis=0)


@triton.jit
def digest_kernel(addresses: tl.tensor, sums: tl.tensor, words: tl.tensor) -> None:
    """One program: RUN_BLOCKS blocks of one page. sums: int64 [pages, 2], added to."""
    page = tl.program_id(0)
    block = tl.program_id(1) * RUN_BLOCKS + tl.arange(0, RUN_BLOCKS)
    at = block[:, None] * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)[None, :]
    payload = page_start(addresses, page).to(tl.pointer_type(tl.uint32))
    found = tl.load(payload + at, mask=at < words, other=0).to(tl.uint64)
    u_0, u_1 = _block_sums(found, 0), _block_sums(found, 1)
    h_0 = _page_sum(block, u_0, u_1, words, 0).to(tl.int64, bitcast=True)
    h_1 = _page_sum(block, u_0, u_1, words, 1).to(tl.int64, bitcast=True)
    tl.atomic_add(sums + 2 * page, h_0, sem="relaxed")
    tl.atomic_add(sums + 2 * page + 1, h_1, sem="relaxed")


def digest_pages(addresses: torch.Tensor, size_bytes: int) -> torch.Tensor:
    """Return device digests, int64 [pages] with uint64's bits, of payloads of `size_bytes`.

    addresses: int64 [pages] on the device, 64-byte aligned, valid until the stream has passed.
    Compare with `expected`, int64 as well, by `==`: nothing here waits for the device. Zero
    pages is allowed. Raises InvalidArgument for a size that is no multiple of 4 or over 2 GiB.
    """
    if size_bytes % 4 or not 0 <= size_bytes < 2**31:
        raise InvalidArgument(f"device digest: {size_bytes} bytes are not 32-bit words up to 2 GiB")
    assert addresses.dtype == torch.int64
    sums = torch.zeros((len(addresses), 2), dtype=torch.int64, device=addresses.device)
    if len(addresses):
        words = size_bytes // 4
        # An empty page has a first block too: its size, 0, is in the digest.
        runs = max(1, triton.cdiv(words, devicedigest.BLOCK_WORDS * RUN_BLOCKS.value))
        digest_kernel[len(addresses), runs](addresses, sums, words, **EXACT)
    return (sums[:, 0] & ~LOW_WORD) | ((sums[:, 1] >> 32) & LOW_WORD)
