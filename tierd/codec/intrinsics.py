"""Numba intrinsics shared by the codec and attention kernels: float bits and raw addresses.

Every function here is callable only from code that Numba compiles. Importing
this module imports Numba: only kernel modules do, never the lobby of a package.

Rounding is to nearest, ties to even. NaN stays NaN, infinities stay, subnormals
are kept. Each conversion is one LLVM instruction or plain integer arithmetic,
so that loops over it vectorise (F16C / AVX-512 on x86-64, native on AArch64).
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import carray, njit, types  # type: ignore[attr-defined]
from numba.extending import intrinsic

_HALF = ir.HalfType()
_FLOAT = ir.FloatType()
_I16 = ir.IntType(16)
_I32 = ir.IntType(32)


@intrinsic
def float32_from_f16_bits(typingctx: Any, bits: Any) -> Any:
    """uint16 bits of a float16 -> float32, exact."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fpext(builder.bitcast(args[0], _HALF), _FLOAT)

    return types.float32(types.uint16), codegen


@intrinsic
def f16_bits_from_float32(typingctx: Any, value: Any) -> Any:
    """float32 -> uint16 bits of the nearest float16; beyond 65519.99 becomes infinity."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.fptrunc(args[0], _HALF), _I16)

    return types.uint16(types.float32), codegen


@intrinsic
def float32_from_bits(typingctx: Any, bits: Any) -> Any:
    """uint32 bits -> float32 of the same bits."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _FLOAT)

    return types.float32(types.uint32), codegen


@intrinsic
def bits_from_float32(typingctx: Any, value: Any) -> Any:
    """float32 -> uint32 of the same bits."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _I32)

    return types.uint32(types.float32), codegen


@intrinsic
def float32_from_bf16_bits(typingctx: Any, bits: Any) -> Any:
    """uint16 bits of a bfloat16 -> float32, exact."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        wide = builder.shl(builder.zext(args[0], _I32), ir.Constant(_I32, 16))
        return builder.bitcast(wide, _FLOAT)

    return types.float32(types.uint16), codegen


@intrinsic
def bf16_bits_from_float32(typingctx: Any, value: Any) -> Any:
    """float32 -> uint16 bits of the nearest bfloat16; a NaN becomes a quiet NaN."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def constant(number: int) -> Any:
            return ir.Constant(_I32, number)

        bits = builder.bitcast(args[0], _I32)
        high = builder.lshr(bits, constant(16))
        even = builder.and_(high, constant(1))
        rounded = builder.add(bits, builder.add(even, constant(0x7FFF)))
        quiet = builder.or_(high, constant(0x40))
        is_nan = builder.fcmp_unordered("uno", args[0], args[0])
        chosen = builder.select(is_nan, quiet, builder.lshr(rounded, constant(16)))
        return builder.trunc(chosen, _I16)

    return types.uint16(types.float32), codegen


@intrinsic
def pointer_from_address(typingctx: Any, address: Any) -> Any:
    """An absolute address (int64) -> void pointer, for `carray`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), codegen


@njit(inline="always")
def as_array(address: Any, shape: Any, dtype: Any) -> Any:
    """Return a C-contiguous array view of memory at `address`; it owns nothing.

    `shape`: int or tuple of ints; `dtype`: a NumPy scalar class such as
    `np.uint8`, known at compile time. The caller keeps the memory mapped.
    """
    return carray(pointer_from_address(address), shape, dtype)  # type: ignore[call-arg]
