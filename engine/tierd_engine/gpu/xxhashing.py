"""xxh3-128 on the GPU: the digest that a slot's header, the index and the journal know a page by.

    block_sums    a program a page and SUM_BLOCKS blocks of 1 KiB; loads every byte once
    chain         a program a page: its blocks one after the other, then the two halves

xxh3 looks serial, because it scrambles its eight numbers after each block of 1 KiB. But what a
block adds to them does not depend on them: it is a sum over the block's sixteen stripes of 64
bytes. So all blocks of all pages are summed at once, and only their sums, a sixteenth of the
bytes, go through the chain. A step of it is a load that depends on nothing and a shift, two xors
and a product: 536 steps for 549 KB (a page of int8, 8 heads of 128, 256 tokens), for all pages of
a round together. At 600 cycles a step, were no load ahead of its use, that is 0.2 ms at 1.7 GHz;
a disk of 6 GB/s takes 2.8 ms for 16 MiB. So it is by arithmetic: `scripts/gpu-check` measures it.

Source: the xxHash specification, "XXH3 algorithm overview" (doc/xxhash_spec.md of
github.com/Cyan4973/xxHash), its part on inputs of more than 240 bytes, with its default secret.
All arithmetic is modulo 2^64.
"""

from __future__ import annotations

import struct

import torch
import triton
import triton.language as tl

from tierd.errors import InvalidArgument
from tierd_engine.gpu.elements import EXACT, page_start

STRIPE_BYTES, BLOCK_BYTES = 64, 1024
SIZE_BYTES_MIN = 256  # from 241 on; payloads are multiples of 64
SUM_BLOCKS = tl.constexpr(4)  # of one program: 4 KiB, so that one page fills many programs
LANES = tl.constexpr(8)
_STRIPES = tl.constexpr(16)
PRIME32_1 = tl.constexpr(0x9E3779B1)
PRIME64_1 = tl.constexpr(0x9E3779B185EBCA87)
PRIME64_2 = tl.constexpr(0xC2B2AE3D27D4EB4F)
AVALANCHE = tl.constexpr(0x165667919E3779F9)
LOW = tl.constexpr(0xFFFFFFFF)
ALL_BITS = tl.constexpr(2**64 - 1)  # `~` of uint64 is not in every interpreter
CHAIN = {**EXACT, "num_warps": 1}  # eight numbers

# The specification's default secret, 192 bytes.
SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_START = (
    0xC2B2AE3D, 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9,
    0x85EBCA77C2B2AE63, 0x85EBCA77, 0x27D4EB2F165667C5, 0x9E3779B1,
)  # fmt: skip


def _words(offset: int, count: int) -> tuple[int, ...]:
    return struct.unpack_from(f"<{count}Q", SECRET, offset)


KEYS = tl.constexpr(_words(0, 24))  # stripe n of a block takes words n to n + 7; a scramble, 16 on
LAST_KEYS = tl.constexpr(_words(192 - 64 - 7, 8))
LOW_KEYS = tl.constexpr(_words(11, 8))
HIGH_KEYS = tl.constexpr(_words(192 - 64 - 11, 8))
START = tl.constexpr(_START)


@triton.jit
def _table(at: tl.tensor, WORDS: tl.constexpr, COUNT: tl.constexpr) -> tl.tensor:
    """Return WORDS at these indices, uint64: no table has to be brought into VRAM first."""
    found = tl.zeros(at.shape, tl.uint64)
    for k in tl.static_range(COUNT):
        found = tl.where(at == k, tl.full(at.shape, WORDS[k], tl.uint64), found)
    return found


@triton.jit
def _product(words: tl.tensor, keys: tl.tensor) -> tl.tensor:
    keyed = words ^ keys
    return (keyed & LOW) * (keyed >> 32)


@triton.jit
def sums_kernel(addresses: tl.tensor, sums: tl.tensor, size: tl.tensor, blocks: tl.tensor) -> None:
    """One program: SUM_BLOCKS blocks of one page; the last block has the last stripe too.

    sums: int64 [pages, blocks, LANES], what each block adds to the eight numbers.
    """
    page = tl.program_id(0)
    block = (tl.program_id(1) * SUM_BLOCKS + tl.arange(0, SUM_BLOCKS))[:, None, None]
    stripe = tl.arange(0, _STRIPES)[None, :, None]
    lane = tl.arange(0, LANES)[None, None, :]
    start = page_start(addresses, page).to(tl.pointer_type(tl.uint64))
    words = size // 8
    at = block * (_STRIPES * LANES) + stripe * LANES
    # Whole stripes before the last byte: where the size is a multiple of 64, all but the last.
    there = (at + LANES < words) & (block < blocks)
    own = tl.load(start + at + lane, mask=there, other=0)
    other = tl.load(start + at + (lane ^ 1), mask=there, other=0)
    keys = _table(stripe + lane, KEYS, 24)
    added = tl.where(there, _product(own, keys) + other, 0)
    total = tl.sum(added, axis=1)  # [SUM_BLOCKS, LANES]
    row = tl.program_id(1) * SUM_BLOCKS + tl.arange(0, SUM_BLOCKS)[:, None]
    column = tl.arange(0, LANES)[None, :]
    is_last = row == blocks - 1
    last = start + (words - LANES) + row * 0
    own = tl.load(last + column, mask=is_last, other=0)
    other = tl.load(last + (column ^ 1), mask=is_last, other=0)
    ending = _product(own, _table(column, LAST_KEYS, 8)) + other
    total += tl.where(is_last, ending, 0)
    target = sums + (page.to(tl.int64) * blocks + row) * LANES + column
    tl.store(target, total.to(tl.int64, bitcast=True), mask=row < blocks)


@triton.jit
def _folded(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """Return the two halves of a 128-bit product, xored; by products of 32 bits."""
    low, high = (a & LOW) * (b & LOW), (a >> 32) * (b >> 32)
    cross = (a >> 32) * (b & LOW) + (low >> 32)
    middle = (a & LOW) * (b >> 32) + (cross & LOW)
    return ((middle << 32) | (low & LOW)) ^ (high + (cross >> 32) + (middle >> 32))


@triton.jit
def _half(numbers: tl.tensor, start: tl.tensor, WORDS: tl.constexpr) -> tl.tensor:
    """Return one half of the digest from the eight numbers [LANES]."""
    lane = tl.arange(0, LANES)
    keyed = numbers ^ _table(lane, WORDS, 8)
    found = start
    for i in tl.static_range(4):
        a = tl.sum(tl.where(lane == 2 * i, keyed, 0), axis=0)
        b = tl.sum(tl.where(lane == 2 * i + 1, keyed, 0), axis=0)
        found += _folded(a, b)
    found = (found ^ (found >> 37)) * AVALANCHE
    return found ^ (found >> 32)


@triton.jit
def chain_kernel(sums: tl.tensor, out: tl.tensor, size: tl.tensor, blocks: tl.tensor) -> None:
    """One program: the blocks of one page in order. out: int64 [pages, 2], high half first."""
    page = tl.program_id(0)
    lane = tl.arange(0, LANES)
    keys = _table(lane + 16, KEYS, 24)
    numbers = _table(lane, START, 8)
    row = sums + page.to(tl.int64) * blocks * LANES + lane
    ahead = tl.load(row).to(tl.uint64, bitcast=True)
    for block in range(blocks - 1):
        added = ahead
        ahead = tl.load(row + (block + 1) * LANES).to(tl.uint64, bitcast=True)
        numbers += added
        numbers = (numbers ^ (numbers >> 47) ^ keys) * PRIME32_1
    numbers += ahead
    length = size.to(tl.uint64)
    low = _half(numbers, length * PRIME64_1, LOW_KEYS)
    high = _half(numbers, length * PRIME64_2 ^ ALL_BITS, HIGH_KEYS)
    tl.store(out + 2 * page, high.to(tl.int64, bitcast=True))
    tl.store(out + 2 * page + 1, low.to(tl.int64, bitcast=True))


def xxh3_pages(addresses: torch.Tensor, size_bytes: int, out: torch.Tensor) -> None:
    """Write xxh3-128 digests of payloads of `size_bytes` to out, int64 [pages, 2], high half first.

    addresses: int64 [pages] on the device, 64-byte aligned, valid until the stream has passed;
    nothing here waits for the device. In big-endian order the halves are the digest's 16 bytes.
    Zero pages is allowed. Raises InvalidArgument for a size that is no multiple of 64, below 256
    or over 2 GiB.
    """
    if size_bytes % STRIPE_BYTES or not SIZE_BYTES_MIN <= size_bytes < 2**31:
        raise InvalidArgument(f"xxh3: {size_bytes} bytes are not stripes of 64, from 256 to 2 GiB")
    assert addresses.dtype == out.dtype == torch.int64 and out.is_contiguous()
    pages = len(addresses)
    blocks = -(-size_bytes // BLOCK_BYTES)  # the last one whole or not: it is not scrambled
    sums = torch.empty((pages, blocks, LANES.value), dtype=torch.int64, device=addresses.device)
    if pages:
        runs = triton.cdiv(blocks, SUM_BLOCKS.value)
        sums_kernel[pages, runs](addresses, sums, size_bytes, blocks, **EXACT)
        chain_kernel[(pages,)](sums, out, size_bytes, blocks, **CHAIN)
