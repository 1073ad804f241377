"""Explicit SIMD for Numba: a float32 vector type and the few operations attention needs.

Numba's loop vectoriser keeps no tile of accumulators in registers; these do.
A `Vector(lanes)` is an LLVM vector: LLVM splits it into the machine's registers
(64 lanes are four AVX-512 registers, eight AVX2 ones, sixteen NEON ones). Every
function is callable only from compiled code; `kind` and `lanes` are constants
at compile time. Addresses are absolute, in bytes, and need no alignment.

Results are the same bit for bit on each call; sums over lanes are pairwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, models, register_model

from tierd.codec.compiling import Const as Const
from tierd.codec.compiling import ConstType as ConstType
from tierd.units import CACHE_LINE_BYTES
from tierd_engine.attention.compiling import inlined, step

UINT8, FLOAT32, BFLOAT16, FLOAT16, E4M3, INT8 = range(6)  # kinds of elements in memory
NARROW = 16  # lanes for what a wide tile does not divide

_FLOAT = ir.FloatType()
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_ELEMENTS = {
    UINT8: ir.IntType(8),
    FLOAT32: _FLOAT,
    BFLOAT16: ir.IntType(16),
    FLOAT16: ir.HalfType(),
    E4M3: ir.IntType(8),
    INT8: ir.IntType(8),
}
_SUFFIXES = {UINT8: "i8", FLOAT32: "f32", BFLOAT16: "i16", FLOAT16: "f16", E4M3: "i8", INT8: "i8"}
_BYTES = {UINT8: 1, FLOAT32: 4, BFLOAT16: 2, FLOAT16: 2, E4M3: 1, INT8: 1}
E4M3_UNIT = 256.0  # a loaded e4m3 element is its number / 256: the factor belongs to its scale

# 2**f on [-0.5, 0.5], degree 6 at Chebyshev nodes: relative error below 2e-8.
_NODES = np.cos((np.arange(7) + 0.5) * np.pi / 7) * 0.5
_EXP2 = [float(c) for c in np.polyfit(_NODES, np.exp2(_NODES), 6)]
_ROUND = 12582912.0  # 1.5 * 2**23: adding it leaves the nearest integer in the low bits
_EXP2_MIN = -126.0  # below, the result would be subnormal: it is 0


class Vector(types.Type):  # type: ignore[misc]  # Numba is untyped
    """`lanes` float32 side by side."""

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        self.llvm = ir.VectorType(_FLOAT, lanes)
        super().__init__(name=f"float32x{lanes}")


def constant_value(constant: Any) -> int:
    """The number of a Const's type or of a literal int's."""
    is_const = isinstance(constant, ConstType)
    return int(constant.value if is_const else constant.literal_value)


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, vector: Vector) -> None:
        super().__init__(manager, vector, vector.llvm)


def emit_splat(builder: Any, scalar: Any, lanes: int) -> Any:
    vector = ir.VectorType(scalar.type, lanes)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(_I32, 0))
    mask = ir.Constant(ir.VectorType(_I32, lanes), [0] * lanes)
    return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), mask)


def emit_filled(number: float, lanes: int) -> Any:
    return ir.Constant(ir.VectorType(_FLOAT, lanes), [number] * lanes)


def emit_call(
    builder: Any, name: str, result: Any, args: list[Any], flags: tuple[str, ...] = ()
) -> Any:
    signature = ir.FunctionType(result, [arg.type for arg in args])
    function = builder.module.globals.get(name)
    if function is None:
        function = ir.Function(builder.module, signature, name=name)
    return builder.call(function, args, fastmath=flags)


def emit_fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return emit_call(builder, f"llvm.fmuladd.v{a.type.count}f32", a.type, [a, b, c])


def emit_sum(builder: Any, vector: Any) -> Any:
    name = f"llvm.vector.reduce.fadd.v{vector.type.count}f32"
    return emit_call(builder, name, _FLOAT, [ir.Constant(_FLOAT, -0.0), vector], ("reassoc",))


def _lanes_below(builder: Any, count: Any, lanes: int) -> Any:
    index = ir.Constant(ir.VectorType(_I32, lanes), list(range(lanes)))
    return builder.icmp_signed("<", index, emit_splat(builder, builder.trunc(count, _I32), lanes))


def _as_float32(builder: Any, kind: int, raw: Any) -> Any:
    lanes = raw.type.count
    floats = ir.VectorType(_FLOAT, lanes)
    wide = ir.VectorType(_I32, lanes)
    if kind == UINT8:
        return builder.sitofp(builder.zext(raw, wide), floats)
    if kind == INT8:
        return builder.sitofp(builder.sext(raw, wide), floats)
    if kind == BFLOAT16:
        shift = ir.Constant(wide, [16] * lanes)
        return builder.bitcast(builder.shl(builder.zext(raw, wide), shift), floats)
    if kind == E4M3:  # exponent and mantissa, put where float16 has them
        half = ir.VectorType(ir.IntType(16), lanes)
        moved = builder.shl(builder.sext(raw, half), ir.Constant(half, [7] * lanes))
        bits = builder.and_(moved, ir.Constant(half, [0xBFFF] * lanes))
        raw = builder.bitcast(bits, ir.VectorType(ir.HalfType(), lanes))
    return raw if kind == FLOAT32 else builder.fpext(raw, floats)


def pointer_to(builder: Any, address: Any, pointee: Any) -> Any:
    return builder.inttoptr(address, pointee.as_pointer())


def _binary(emit: Callable[[Any, Any, Any], Any]) -> Any:
    @intrinsic
    def operation(typingctx: Any, a: Any, b: Any) -> Any:
        return a(a, a), lambda context, builder, signature, args: emit(builder, *args)

    return operation


def _load_one(numba_type: Any, emit: Callable[[Any, Any], Any]) -> Any:
    @intrinsic
    def operation(typingctx: Any, address: Any) -> Any:
        signature = numba_type(types.int64)
        return signature, lambda context, builder, signature, args: emit(builder, *args)

    return operation


def _greater(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _read(builder: Any, address: Any, element: Any) -> Any:
    return builder.load(pointer_to(builder, address, element), align=4)


add = _binary(lambda builder, a, b: builder.fadd(a, b))
subtract = _binary(lambda builder, a, b: builder.fsub(a, b))
multiply = _binary(lambda builder, a, b: builder.fmul(a, b))
divide = _binary(lambda builder, a, b: builder.fdiv(a, b))
maximum = _binary(_greater)  # b where either is NaN

load_scalar = _load_one(types.float32, lambda builder, at: _read(builder, at, _FLOAT))
load_int64 = _load_one(types.int64, lambda builder, at: _read(builder, at, _I64))
load_int32 = _load_one(
    types.int64, lambda builder, at: builder.sext(_read(builder, at, _I32), _I64)
)


@intrinsic
def number(typingctx: Any, constant: Any) -> Any:
    """The number of a `Const`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(_I64, constant_value(constant))

    return types.int64(constant), codegen


@intrinsic
def element_bytes(typingctx: Any, kind: Any) -> Any:
    """Bytes of one element of `kind` in memory."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(_I64, _BYTES[constant_value(kind)])

    return types.int64(kind), codegen


@intrinsic(prefer_literal=True)
def zeros(typingctx: Any, lanes: Any) -> Any:
    """A vector of zeros."""
    vector = Vector(constant_value(lanes))

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit_filled(0.0, vector.lanes)

    return vector(lanes), codegen


@intrinsic(prefer_literal=True)
def splat(typingctx: Any, lanes: Any, scalar: Any) -> Any:
    """A vector whose every lane is the float32 `scalar`."""
    vector = Vector(constant_value(lanes))

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit_splat(builder, args[1], vector.lanes)

    return vector(lanes, types.float32), codegen


@intrinsic(prefer_literal=True)
def load(typingctx: Any, kind: Any, lanes: Any, address: Any) -> Any:
    """`lanes` elements of `kind` at `address`, as float32."""
    element, vector = constant_value(kind), Vector(constant_value(lanes))

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        memory = ir.VectorType(_ELEMENTS[element], vector.lanes)
        raw = builder.load(pointer_to(builder, args[2], memory), align=1)
        return _as_float32(builder, element, raw)

    return vector(kind, lanes, types.int64), codegen


@intrinsic
def load_element(typingctx: Any, kind: Any, address: Any) -> Any:
    """One element of `kind` at `address`, as float32."""
    element = constant_value(kind)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        raw = _read(builder, args[1], ir.VectorType(_ELEMENTS[element], 1))
        return builder.extract_element(_as_float32(builder, element, raw), ir.Constant(_I32, 0))

    return types.float32(kind, types.int64), codegen


@intrinsic(prefer_literal=True)
def load_first(typingctx: Any, kind: Any, lanes: Any, address: Any, count: Any) -> Any:
    """As `load`, but only the first `count` elements are read; the other lanes are 0."""
    element, vector = constant_value(kind), Vector(constant_value(lanes))

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        memory = ir.VectorType(_ELEMENTS[element], vector.lanes)
        mask = _lanes_below(builder, args[3], vector.lanes)
        pointer = pointer_to(builder, args[2], memory)
        raw = emit_call(
            builder, f"llvm.masked.load.v{vector.lanes}{_SUFFIXES[element]}.p0", memory,
            [pointer, ir.Constant(_I32, 1), mask, ir.Constant(memory, None)],
        )  # fmt: skip
        return _as_float32(builder, element, raw)

    return vector(kind, lanes, types.int64, types.int64), codegen


@intrinsic
def store(typingctx: Any, value: Any, address: Any) -> Any:
    """Write every lane to `address` as float32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[0], pointer_to(builder, args[1], args[0].type), align=1)
        return context.get_dummy_value()

    return types.void(value, types.int64), codegen


@intrinsic
def store_first(typingctx: Any, value: Any, address: Any, count: Any) -> Any:
    """As `store`, but only the first `count` lanes are written."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        mask = _lanes_below(builder, args[2], value.lanes)
        pointer = pointer_to(builder, args[1], value.llvm)
        name = f"llvm.masked.store.v{value.lanes}f32.p0"
        emit_call(builder, name, ir.VoidType(), [args[0], pointer, ir.Constant(_I32, 4), mask])
        return context.get_dummy_value()

    return types.void(value, types.int64, types.int64), codegen


def _store_one(numba_type: Any, element: Any, align: int) -> Any:
    @intrinsic
    def operation(typingctx: Any, value: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            builder.store(args[0], pointer_to(builder, args[1], element), align=align)
            return context.get_dummy_value()

        return types.void(numba_type, types.int64), codegen

    return operation


store_int64 = _store_one(types.int64, _I64, align=8)
store_scalar = _store_one(types.float32, _FLOAT, align=1)


def _prefetch(locality: int, doc: str) -> Any:
    def prefetch(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointer = pointer_to(builder, args[0], ir.IntType(8))
            read, keep, data = (ir.Constant(_I32, number) for number in (0, locality, 1))
            emit_call(builder, "llvm.prefetch.p0", ir.VoidType(), [pointer, read, keep, data])
            return context.get_dummy_value()

        return types.void(types.int64), codegen

    prefetch.__doc__ = doc
    return intrinsic(prefetch)


prefetch = _prefetch(3, "Ask for the cache line at `address` into every cache level.")
prefetch_near = _prefetch(2, "Ask for the cache line at `address` into all levels but the first.")


@inlined
def prefetch_lines(start: Any, end: Any) -> None:
    """Prefetch every cache line from `start` on, before `end`."""
    for line in range(start, end, CACHE_LINE_BYTES):
        prefetch(line)


@inlined
def fetch_ahead(at: Any, ahead_bytes: Any, part_end: Any, next_part: Any, size: Any) -> None:
    """Prefetch what is read soon after `at`: what follows it, or the next part's start."""
    target = at + ahead_bytes
    if target >= part_end:
        target += next_part - part_end
    prefetch_lines(target, target + size)


@intrinsic
def fetch_add(typingctx: Any, address: Any, step: Any) -> Any:
    """Add `step` to the int64 at `address`, atomically; return what was there."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = pointer_to(builder, args[0], _I64)
        return builder.atomic_rmw("add", pointer, args[1], "monotonic")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def fma(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, lane by lane."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit_fma(builder, *args)

    return c(c, c, c), codegen


@intrinsic(prefer_literal=True)
def keep_first(typingctx: Any, vector: Any, count: Any, fill: Any) -> Any:
    """The first `count` lanes; `fill` in the others. `count` may be negative or large."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        mask = _lanes_below(builder, args[1], vector.lanes)
        return builder.select(mask, args[0], emit_splat(builder, args[2], vector.lanes))

    return vector(vector, types.int64, types.float32), codegen


@intrinsic
def sum_lanes(typingctx: Any, vector: Any) -> Any:
    """The sum of all lanes."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit_sum(builder, args[0])

    return types.float32(vector), codegen


@intrinsic
def max_lanes(typingctx: Any, vector: Any) -> Any:
    """The greatest lane; none may be NaN."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        name = f"llvm.vector.reduce.fmax.v{vector.lanes}f32"
        return emit_call(builder, name, _FLOAT, [args[0]], ("nnan",))

    return types.float32(vector), codegen


@intrinsic
def exp2(typingctx: Any, vector: Any) -> Any:
    """2**x for x <= 0, relative error below 2e-7; 0 for x below -126; NaN stays NaN."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        (x,), lanes = args, vector.lanes
        shifted = builder.fadd(x, emit_filled(_ROUND, lanes))
        fraction = builder.fsub(x, builder.fsub(shifted, emit_filled(_ROUND, lanes)))
        power = emit_filled(_EXP2[0], lanes)
        for coefficient in _EXP2[1:]:
            power = emit_fma(builder, power, fraction, emit_filled(coefficient, lanes))
        wide = ir.VectorType(_I32, lanes)
        exponent = builder.shl(builder.bitcast(shifted, wide), ir.Constant(wide, [23] * lanes))
        scaled = builder.add(builder.bitcast(power, wide), exponent)
        is_tiny = builder.fcmp_ordered("<", x, emit_filled(_EXP2_MIN, lanes))
        return builder.select(
            is_tiny, emit_filled(0.0, lanes), builder.bitcast(scaled, vector.llvm)
        )

    return vector(vector), codegen


def _bfloat16_bits(builder: Any, value: Any) -> Any:
    """A float32 rounded to nearest even, as the 32 bits whose upper 16 are it; NaN stays NaN."""
    word = ir.IntType(32)
    bits = builder.bitcast(value, word)
    upper = builder.lshr(bits, ir.Constant(word, 16))
    odd = builder.and_(upper, ir.Constant(word, 1))
    rounded_up = builder.add(bits, builder.add(odd, ir.Constant(word, 0x7FFF)))
    quiet = builder.or_(bits, ir.Constant(word, 0x400000))
    is_nan = builder.fcmp_unordered("uno", value, value)
    return builder.select(is_nan, quiet, rounded_up)


@intrinsic
def _store_bfloat16(typingctx: Any, value: Any, address: Any) -> Any:
    """Write a float32, rounded to nearest even, as bfloat16; NaN stays NaN."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        half = ir.IntType(16)
        upper = builder.lshr(_bfloat16_bits(builder, args[0]), ir.Constant(_I32, 16))
        builder.store(builder.trunc(upper, half), pointer_to(builder, args[1], half), align=2)
        return context.get_dummy_value()

    return types.void(types.float32, types.int64), codegen


@intrinsic
def _as_bfloat16(typingctx: Any, value: Any) -> Any:
    """A float32 rounded to nearest even to what bfloat16 holds; NaN stays NaN."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        upper = builder.and_(
            _bfloat16_bits(builder, args[0]), ir.Constant(_I32, 0xFFFF0000)
        )  # fmt: skip
        return builder.bitcast(upper, _FLOAT)

    return types.float32(types.float32), codegen


@step
def rounded(kind: Any, value: Any) -> Any:
    """A float32 as an element of `kind` would keep it: BFLOAT16 or FLOAT32."""
    return _as_bfloat16(value) if number(kind) == BFLOAT16 else value


@step
def store_rounded(kind: Any, value: Any, address: Any) -> None:
    """Write a float32 as an element of `kind`: BFLOAT16 or FLOAT32."""
    if number(kind) == BFLOAT16:
        _store_bfloat16(value, address)
    else:
        store_scalar(value, address)


@step
def load_narrow(kind: Any, address: Any, count: Any) -> Any:
    """NARROW elements at `address`; only the first `count` if there are fewer, then zeros."""
    if count >= NARROW:
        return load(kind, NARROW, address)
    return load_first(kind, NARROW, address, count)


@step
def store_narrow(value: Any, address: Any, count: Any) -> None:
    """Write NARROW lanes, or only the first `count` if that is fewer."""
    if count >= NARROW:
        store(value, address)
    else:
        store_first(value, address, count)
