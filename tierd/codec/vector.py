"""Sixteen float32 lanes as one value in Numba-compiled code.

Loops left to LLVM's auto-vectoriser pay for alias checks, and a float
reduction stays scalar because its order may not change. Here lanes and order
are written down: a kernel is as fast as it reads, and its bytes are the same
on every machine. LLVM splits a vector where registers are narrower.

Addresses are int64 and need no alignment. Every operation is one IEEE
operation, never fused or reordered. Importing this imports Numba.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import datamodel
from numba.extending import intrinsic, models

LANES = 16

_FLOAT, _I32 = ir.FloatType(), ir.IntType(32)
_F32S, _F16S = ir.VectorType(_FLOAT, LANES), ir.VectorType(ir.HalfType(), LANES)
_I8S, _I16S, _I32S = (ir.VectorType(ir.IntType(bits), LANES) for bits in (8, 16, 32))


class Float32x16(types.Type):  # type: ignore[misc]
    """Numba's type of sixteen float32 lanes; it never leaves compiled code."""

    def __init__(self) -> None:
        super().__init__(name="Float32x16")


class _Float32x16Model(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, fe_type: Any) -> None:
        super().__init__(manager, fe_type, _F32S)


datamodel.register_default(Float32x16)(_Float32x16Model)
_V = Float32x16()


def _all(vector: Any, number: Any) -> Any:
    return ir.Constant(vector, [number] * LANES)


def _shuffle(builder: Any, a: Any, b: Any, lanes: list[int]) -> Any:
    mask = ir.Constant(ir.VectorType(_I32, len(lanes)), lanes)
    return builder.shuffle_vector(a, b, mask)


def _read(builder: Any, address: Any, vector: Any) -> Any:
    return builder.load(builder.inttoptr(address, vector.as_pointer()), align=1)


def _write(builder: Any, address: Any, value: Any) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=1)


def _unary(emit: Callable[[Any, Any], Any]) -> Any:
    @intrinsic
    def operation(typingctx: Any, a: Any) -> Any:
        return _V(_V), lambda context, builder, signature, args: emit(builder, *args)

    return operation


def _binary(emit: Callable[[Any, Any, Any], Any]) -> Any:
    @intrinsic
    def operation(typingctx: Any, a: Any, b: Any) -> Any:
        return _V(_V, _V), lambda context, builder, signature, args: emit(builder, *args)

    return operation


def _load(emit: Callable[[Any, Any], Any]) -> Any:
    @intrinsic
    def operation(typingctx: Any, address: Any) -> Any:
        return _V(types.int64), lambda context, builder, signature, args: emit(builder, *args)

    return operation


def _store(narrow: Callable[[Any, Any], Any]) -> Any:
    @intrinsic
    def operation(typingctx: Any, address: Any, a: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _write(builder, args[0], narrow(builder, args[1]))
            return context.get_dummy_value()

        return types.void(types.int64, _V), codegen

    return operation


def _prefetch(for_write: int) -> Any:
    """Begin to load the cache line at an address, which need not be mapped."""

    @intrinsic
    def operation(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointer = ir.IntType(8).as_pointer()
            kind = ir.FunctionType(ir.VoidType(), [pointer, _I32, _I32, _I32])
            fetch = builder.module.declare_intrinsic("llvm.prefetch.p0", (), kind)
            nearest, data = _I32(3), _I32(1)
            builder.call(
                fetch, [builder.inttoptr(args[0], pointer), _I32(for_write), nearest, data]
            )
            return context.get_dummy_value()

        return types.void(types.int64), codegen

    return operation


def _fold(combine: Callable[[Any, Any, Any], Any]) -> Any:
    """Combine lanes i and i + 8, then 4, 2, 1: a fixed order."""

    @intrinsic
    def operation(typingctx: Any, a: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            value, width = args[0], LANES
            while width > 1:
                width //= 2
                low = _shuffle(builder, value, value, list(range(width)))
                high = _shuffle(builder, value, value, list(range(width, 2 * width)))
                value = combine(builder, low, high)
            return builder.extract_element(value, ir.Constant(_I32, 0))

        return types.float32(_V), codegen

    return operation


def _fold_rows(combine: Callable[[Any, Any, Any], Any]) -> Any:
    """Lane i: the lanes of the i-th of 16 vectors at an address, combined in any order."""

    @intrinsic
    def operation(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            step = [ir.Constant(args[0].type, 4 * LANES * i) for i in range(LANES)]
            rows = [_read(builder, builder.add(args[0], offset), _F32S) for offset in step]
            width = LANES
            while len(rows) > 1:  # each row: chunks of `width` lanes, one for each vector in it
                width //= 2
                low = [i for i in range(2 * LANES) if i // width % 2 == 0]
                high = [i + width for i in low]
                pairs = zip(rows[::2], rows[1::2], strict=True)
                rows = [
                    combine(builder, *(_shuffle(builder, a, b, lanes) for lanes in (low, high)))
                    for a, b in pairs
                ]
            return rows[0]

        return _V(types.int64), codegen

    return operation


def _lesser(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered("<", a, b), a, b)


def _greater(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _widen_bf16(builder: Any, address: Any) -> Any:
    bits = builder.zext(_read(builder, address, _I16S), _I32S)
    return builder.bitcast(builder.shl(bits, _all(_I32S, 16)), _F32S)


def _narrow_bf16(builder: Any, a: Any) -> Any:
    bits = builder.bitcast(a, _I32S)
    high = builder.lshr(bits, _all(_I32S, 16))
    even = builder.and_(high, _all(_I32S, 1))
    rounded = builder.add(bits, builder.add(even, _all(_I32S, 0x7FFF)))
    return builder.trunc(builder.lshr(rounded, _all(_I32S, 16)), _I16S)


def _half_toward(comparison: str, when_positive: int) -> Callable[[Any, Any], Any]:
    """Nearest float16, moved one step where it lies on the wrong side of the value."""

    def emit(builder: Any, a: Any) -> Any:
        half = builder.fptrunc(a, _F16S)
        bits = builder.bitcast(half, _I16S)
        negative = builder.icmp_signed("<", bits, _all(_I16S, 0))
        step = builder.select(negative, _all(_I16S, -when_positive), _all(_I16S, when_positive))
        wrong = builder.fcmp_ordered(comparison, builder.fpext(half, _F32S), a)
        moved = builder.select(wrong, builder.add(bits, step), bits)
        return builder.fpext(builder.bitcast(moved, _F16S), _F32S)

    return emit


def _sqrt(builder: Any, a: Any) -> Any:
    kind = ir.FunctionType(_F32S, [_F32S])
    return builder.call(builder.module.declare_intrinsic("llvm.sqrt.v16f32", (), kind), [a])


def _low_bytes(builder: Any, a: Any) -> Any:
    return builder.trunc(builder.bitcast(a, _I32S), _I8S)


def _push(builder: Any, words: Any, shifted: Any) -> Any:
    kept = builder.lshr(builder.bitcast(words, _I32S), _all(_I32S, 4))
    pushed = builder.shl(builder.bitcast(shifted, _I32S), _all(_I32S, 28))
    return builder.bitcast(builder.or_(kept, pushed), _F32S)


def _e4m3(builder: Any, y: Any) -> Any:
    """e4m3 bytes nearest to lanes of at most 464, ties to even: `reference` has the format."""
    bits = builder.bitcast(y, _I32S)
    size = builder.and_(bits, _all(_I32S, 0x7FFFFFFF))
    even = builder.and_(builder.lshr(size, _all(_I32S, 20)), _all(_I32S, 1))
    rounded = builder.add(size, builder.add(even, _all(_I32S, 0x7FFFF)))
    normal = builder.sub(builder.lshr(rounded, _all(_I32S, 20)), _all(_I32S, (127 - 7) << 3))
    # Below 2^-6 a byte counts steps of 2^-9: the last place of a float32 near 2^14.
    counted = builder.fadd(builder.bitcast(size, _F32S), _all(_F32S, 2.0**14))
    few = builder.and_(builder.bitcast(counted, _I32S), _all(_I32S, 0xF))
    is_small = builder.icmp_unsigned("<", size, _all(_I32S, (127 - 6) << 23))
    sign = builder.and_(builder.lshr(bits, _all(_I32S, 24)), _all(_I32S, 0x80))
    return builder.trunc(builder.or_(builder.select(is_small, few, normal), sign), _I8S)


def _widen_e4m3(builder: Any, address: Any) -> Any:
    """Exponent and mantissa of a byte, put where float16 has them, are the number / 256."""
    bits = builder.sext(_read(builder, address, _I8S), _I16S)
    half = builder.and_(builder.shl(bits, _all(_I16S, 7)), _all(_I16S, 0xBFFF))
    wide = builder.fpext(builder.bitcast(half, _F16S), _F32S)
    return builder.fmul(wide, _all(_F32S, 256.0))


load_f32 = _load(lambda builder, address: _read(builder, address, _F32S))
load_bf16 = _load(_widen_bf16)
load_f16 = _load(lambda builder, address: builder.fpext(_read(builder, address, _F16S), _F32S))
load_u8 = _load(lambda builder, address: builder.uitofp(_read(builder, address, _I8S), _F32S))
load_byte_bits = _load(
    lambda builder, address: builder.bitcast(
        builder.zext(_read(builder, address, _I8S), _I32S), _F32S
    )
)
load_e4m3 = _load(_widen_e4m3)

store_f32 = _store(lambda builder, a: a)
store_bf16 = _store(_narrow_bf16)  # to nearest even; for finite lanes
store_f16 = _store(lambda builder, a: builder.fptrunc(a, _F16S))  # to nearest even
store_low_bytes = _store(_low_bytes)  # the low byte of each lane's float32 bits
store_e4m3 = _store(_e4m3)

prefetch_read, prefetch_write = _prefetch(0), _prefetch(1)

add = _binary(lambda builder, a, b: builder.fadd(a, b))
sub = _binary(lambda builder, a, b: builder.fsub(a, b))
mul = _binary(lambda builder, a, b: builder.fmul(a, b))
div = _binary(lambda builder, a, b: builder.fdiv(a, b))
lesser = _binary(_lesser)  # b where either is NaN
greater = _binary(_greater)
push_nibble = _binary(_push)  # a's words, shifted by 4 bits, with b's low 4 bits above
sqrt = _unary(_sqrt)
half_down = _unary(_half_toward(">", -1))  # largest float16 <= a, as float32
half_up = _unary(_half_toward("<", 1))  # smallest float16 >= a, as float32

fold_min = _fold(_lesser)
fold_max = _fold(_greater)
fold_sum = _fold(lambda builder, a, b: builder.fadd(a, b))

fold_rows_min, fold_rows_max = _fold_rows(_lesser), _fold_rows(_greater)


@intrinsic
def nibble(typingctx: Any, words: Any, k: Any) -> Any:
    """Bits 4k to 4k + 3 of each lane's word, as float32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        places = builder.trunc(builder.shl(args[1], ir.Constant(args[1].type, 2)), _I32)
        one = builder.insert_element(ir.Constant(_I32S, ir.Undefined), places, _I32(0))
        shifts = _shuffle(builder, one, one, [0] * LANES)
        moved = builder.lshr(builder.bitcast(args[0], _I32S), shifts)
        return builder.sitofp(builder.and_(moved, _all(_I32S, 15)), _F32S)

    return _V(_V, types.int64), codegen


@intrinsic
def splat(typingctx: Any, value: Any) -> Any:
    """float32 -> all lanes."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        one = builder.insert_element(ir.Constant(_F32S, ir.Undefined), args[0], _I32(0))
        return _shuffle(builder, one, one, [0] * LANES)

    return _V(types.float32), codegen


@intrinsic
def where_less(typingctx: Any, a: Any, b: Any, then: Any, other: Any) -> Any:
    """Each lane: then where a < b, other elsewhere (also where a or b is NaN)."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered("<", args[0], args[1]), args[2], args[3])

    return _V(_V, _V, _V, _V), codegen


@intrinsic
def read_f32(typingctx: Any, address: Any) -> Any:
    """The float32 at an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(builder.inttoptr(args[0], _FLOAT.as_pointer()), align=1)

    return types.float32(types.int64), codegen


@intrinsic
def write_f32(typingctx: Any, address: Any, value: Any) -> Any:
    """Store one float32 at an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _write(builder, args[0], args[1])
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), codegen


@intrinsic
def transpose_16x16(
    typingctx: Any, source: Any, source_stride: Any, target: Any, target_stride: Any
) -> Any:
    """Transpose 16 rows of 16 bytes: four rounds of interleaving row i with row i + 8."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, source_stride, target, target_stride = args

        def row(base: Any, stride: Any, i: int) -> Any:
            return builder.add(base, builder.mul(stride, ir.Constant(stride.type, i)))

        rows = [_read(builder, row(source, source_stride, i), _I8S) for i in range(LANES)]
        low = [lane for i in range(8) for lane in (i, i + 16)]
        high = [lane + 8 for lane in low]
        for _ in range(4):
            pairs = [(rows[i], rows[i + 8]) for i in range(8)]
            rows = [_shuffle(builder, a, b, half) for a, b in pairs for half in (low, high)]
        for i, value in enumerate(rows):
            _write(builder, row(target, target_stride, i), value)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen


@intrinsic
def copy_bytes(typingctx: Any, target: Any, source: Any, size_bytes: Any) -> Any:
    """memcpy; the regions do not overlap. Zero bytes is allowed."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = ir.IntType(8).as_pointer()
        copy = builder.module.declare_intrinsic("llvm.memcpy", [pointer, pointer, args[2].type])
        target, source = (builder.inttoptr(a, pointer) for a in args[:2])
        builder.call(copy, [target, source, args[2], ir.Constant(ir.IntType(1), 0)])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen


@intrinsic
def zero_bytes(typingctx: Any, target: Any, size_bytes: Any) -> Any:
    """memset to 0. Zero bytes is allowed."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = ir.IntType(8).as_pointer()
        fill = builder.module.declare_intrinsic("llvm.memset", [pointer, args[1].type])
        target = builder.inttoptr(args[0], pointer)
        zero = ir.Constant(ir.IntType(8), 0)
        builder.call(fill, [target, zero, args[1], ir.Constant(ir.IntType(1), 0)])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 2), codegen
