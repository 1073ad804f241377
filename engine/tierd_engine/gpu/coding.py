"""Steps of encoding on the GPU, each one IEEE operation at a time: tierd.codec.reference's.

A group's ends give zero and scale, an element its code; two codes of 4 bits make a byte.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tierd_engine.gpu.elements import HALF_TINY, NORMAL_MIN, ROUND, half_down, half_up

E4M3_MAX = tl.constexpr(448.0)
E4M3_SMALL_BITS = tl.constexpr((127 - 6) << 23)  # of 2^-6, the least e4m3 number with an exponent
E4M3_STEPS = tl.constexpr(2.0**14)  # below 2^-6 a byte counts steps of 2^-9: float32's near 2^14


@triton.jit
def _scale_of(span: tl.tensor, codes_max: tl.constexpr) -> tl.tensor:
    step = tl.maximum(tl.div_rn(span, codes_max), HALF_TINY)
    return half_up(tl.where(span > 0, step, 0.0))


@triton.jit
def _flushed(end: tl.tensor) -> tl.tensor:
    return tl.where(tl.abs(end) < NORMAL_MIN, 0.0, end)


@triton.jit
def zero_and_scale(
    low: tl.tensor, high: tl.tensor, codes_max: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return zero and scale, float16, of groups with these ends, coded in equal steps."""
    zero = half_down(_flushed(low))
    return zero, _scale_of(_flushed(high) - zero.to(tl.float32), codes_max)


@triton.jit
def e4m3_scale(low: tl.tensor, high: tl.tensor) -> tl.tensor:
    """Return the scale, float16, of groups with these ends, coded as e4m3."""
    return _scale_of(tl.maximum(-_flushed(low), _flushed(high)), E4M3_MAX)


@triton.jit
def _inverse(scale: tl.tensor) -> tl.tensor:
    is_flat = scale == 0
    return tl.where(is_flat, 0.0, tl.div_rn(1.0, tl.where(is_flat, 1.0, scale)))


@triton.jit
def shifted_codes(x: tl.tensor, zero: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """Return 2^23 + code: the code is in the low byte, and the float less 2^23."""
    return (x - zero) * _inverse(scale) + ROUND


@triton.jit
def low_byte(shifted: tl.tensor) -> tl.tensor:
    """Return the codes, uint8."""
    return (shifted.to(tl.int32, bitcast=True) & 0xFF).to(tl.uint8)


@triton.jit
def e4m3_codes(x: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """Return the bytes whose numbers are nearest to x / scale, ties to even; |x / scale| <= 464."""
    bits = (x * _inverse(scale)).to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    rounded = size + 0x7FFFF + ((size >> 20) & 1)
    normal = (rounded >> 20) - ((127 - 7) << 3)
    counted = size.to(tl.float32, bitcast=True) + E4M3_STEPS
    few = counted.to(tl.int32, bitcast=True) & 0xF
    code = tl.where(size < E4M3_SMALL_BITS, few, normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def paired(codes: tl.tensor, AXIS: tl.constexpr) -> tl.tensor:
    """Return bytes: along an axis of two, the first code's 4 bits and above them the second's."""
    first: tl.constexpr = 2 if AXIS == 0 else 1
    second: tl.constexpr = 2 if AXIS == 1 else 1
    third: tl.constexpr = 2 if AXIS == 2 else 1
    place = tl.reshape(4 * tl.arange(0, 2), [first, second, third])
    return tl.sum((codes.to(tl.int32) & 15) << place, axis=AXIS).to(tl.uint8)


@triton.jit
def folded(lanes: tl.tensor, TOKENS: tl.constexpr) -> tl.tensor:
    """Return the sums of [TOKENS, 16], lanes folded 8, 4, 2, 1: the order is the reference's."""
    lanes = tl.sum(tl.reshape(lanes, [TOKENS, 2, 8]), axis=1)
    lanes = tl.sum(tl.reshape(lanes, [TOKENS, 2, 4]), axis=1)
    lanes = tl.sum(tl.reshape(lanes, [TOKENS, 2, 2]), axis=1)
    return tl.sum(lanes, axis=1)
