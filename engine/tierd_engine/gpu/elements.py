"""Steps that kernels share: page addresses, elements of the model's dtype, rounding to float16.

Where a step must give the CPU's bits it is one IEEE operation at a time, as in
tierd.codec.reference; its kernel is compiled without fused multiply-add (`EXACT`).
bfloat16 is made of integer operations: hardware and interpreter then agree.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Launch options: of a kernel whose bytes are compared, and of one that is only as exact as float32.
EXACT = {"enable_fp_fusion": False}
FUSED = {"enable_fp_fusion": True}

HALF_MAX = tl.constexpr(65504.0)
HALF_TINY = tl.constexpr(2.0**-24)
NORMAL_MIN = tl.constexpr(2.0**-126)
ROUND = tl.constexpr(2.0**23)  # x + 2^23 is x rounded half to even, its integer in the low bits
HALF_MAX_BITS = tl.constexpr(0x477FE000)  # of float32; larger ones are out of range
INFINITY_BITS = tl.constexpr(0x7F800000)
OUT_OF_RANGE = tl.constexpr(1)  # severities: the worst of a page is what counts
NOT_FINITE = tl.constexpr(2)
RUN = tl.constexpr(1024)  # elements of a copy at a time: 8 a thread


@triton.jit
def page_start(addresses: tl.tensor, page: tl.tensor) -> tl.tensor:
    """Return the page's address as a byte pointer; payloads are 64-byte aligned."""
    address = tl.load(addresses + page)
    return tl.multiple_of(address.to(tl.pointer_type(tl.uint8)), 64)


@triton.jit
def typed(start: tl.tensor, offset: tl.constexpr, KIND: tl.constexpr) -> tl.tensor:
    """Return a pointer to elements of KIND, `offset` bytes after `start`."""
    return (start + offset).to(tl.pointer_type(KIND))


@triton.jit
def load_wide(
    start: tl.tensor, offset: tl.constexpr, at: tl.tensor, mask: tl.tensor, DTYPE: tl.constexpr
) -> tl.tensor:
    """Return elements `at` of a part in the model's dtype as float32, exact; 0 where masked."""
    if DTYPE == "float32":
        return tl.load(typed(start, offset, tl.float32) + at, mask=mask, other=0.0)
    elif DTYPE == "float16":
        half = tl.load(typed(start, offset, tl.float16) + at, mask=mask, other=0.0)
        return half.to(tl.float32)
    else:
        bits = tl.load(typed(start, offset, tl.uint16) + at, mask=mask, other=0)
        return (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def store_narrow(
    start: tl.tensor, at: tl.tensor, x: tl.tensor, mask: tl.tensor, DTYPE: tl.constexpr
) -> None:
    """Store finite float32 x in DTYPE, to nearest even; beyond float16's ends becomes the end."""
    if DTYPE == "float32":
        tl.store(start.to(tl.pointer_type(tl.float32)) + at, x, mask=mask)
    elif DTYPE == "float16":
        half = tl.minimum(tl.maximum(x, -HALF_MAX), HALF_MAX).to(tl.float16)
        tl.store(start.to(tl.pointer_type(tl.float16)) + at, half, mask=mask)
    else:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.uint16)
        tl.store(start.to(tl.pointer_type(tl.uint16)) + at, rounded, mask=mask)


@triton.jit
def copy_elements(
    source: tl.tensor, target: tl.tensor, first: tl.tensor, count: tl.constexpr,
    DTYPE: tl.constexpr,
) -> None:  # fmt: skip
    """Copy `count` elements of a dtype from `first` on, bit for bit."""
    BITS: tl.constexpr = tl.uint32 if DTYPE == "float32" else tl.uint16
    for start in range(0, count, RUN):
        at = start + tl.arange(0, RUN)
        bits = tl.load(typed(source, 0, BITS) + first + at, mask=at < count, other=0)
        tl.store(typed(target, 0, BITS) + first + at, bits, mask=at < count)


@triton.jit
def widen_elements(
    source: tl.tensor, target: tl.tensor, first: tl.tensor, count: tl.constexpr,
    DTYPE: tl.constexpr,
) -> None:  # fmt: skip
    """Copy `count` elements from `first` on, from a dtype to float32, exact."""
    for start in range(0, count, RUN):
        at = start + tl.arange(0, RUN)
        x = load_wide(source, 0, first + at, at < count, DTYPE)
        tl.store(typed(target, 0, tl.float32) + first + at, x, mask=at < count)


@triton.jit
def half_down(x: tl.tensor) -> tl.tensor:
    """Return the largest float16 that is not above x; |x| <= 65504."""
    half = x.to(tl.float16)
    bits = half.to(tl.int16, bitcast=True).to(tl.int32)
    # Patterns of negative halves fall, as int16, towards 0; +0 and -0 step to 0x8001.
    stepped = tl.where(bits > 0, bits - 1, tl.where(bits == 0, -0x7FFF, bits + 1))
    below = stepped.to(tl.int16).to(tl.float16, bitcast=True)
    return tl.where(half.to(tl.float32) > x, below, half)


@triton.jit
def half_up(x: tl.tensor) -> tl.tensor:
    """Return the smallest float16 that is not below x; 0 <= x <= 65504."""
    half = x.to(tl.float16)
    bits = half.to(tl.int16, bitcast=True)
    above = (bits.to(tl.int32) + 1).to(tl.int16).to(tl.float16, bitcast=True)
    return tl.where(half.to(tl.float32) < x, above, half)


@triton.jit
def magnitude_bits(x: tl.tensor) -> tl.tensor:
    """Return |x|'s pattern: it rises with |x|, and infinity and NaN are above all numbers."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def severity_of(bits: tl.tensor) -> tl.tensor:
    """Return the severity of the largest magnitude's pattern; 0 where it can be encoded."""
    is_out = (bits > HALF_MAX_BITS).to(tl.int32)
    return tl.where(bits >= INFINITY_BITS, NOT_FINITE, is_out * OUT_OF_RANGE)
