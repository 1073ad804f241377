"""Tiles of accumulators: a few vectors in registers, one for each query row.

A tile is a tuple of vectors. For 4-bit codes, whose scales change within a row
of a matrix, each query row has as many vectors as there are scales: `halves` of
at most 32 lanes, row by row. Every function is callable only from compiled code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from tierd_engine.attention.simd import (
    NARROW,
    Vector,
    constant_value,
    emit_filled,
    emit_fma,
    emit_splat,
    emit_sum,
    pointer_to,
)

_FLOAT, _I32 = ir.FloatType(), ir.IntType(32)
_WORDS = ir.VectorType(_I32, NARROW)
_HALF_LANES = 32  # tokens of an int4 key group, channels of a 4-bit value group
LINE_BYTES = 64
NIBBLE_UNIT = 16.0  # a loaded code c is 1 + c / 16: unit and offset belong to scale and zero


@intrinsic(prefer_literal=True)
def zero_rows(typingctx: Any, rows: Any, lanes: Any) -> Any:
    """A tile of accumulators: a tuple of `rows` vectors of zeros."""
    tile = types.UniTuple(Vector(constant_value(lanes)), constant_value(rows))

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        zero = emit_filled(0.0, constant_value(lanes))
        return context.make_tuple(builder, tile, [zero] * tile.count)

    return tile(rows, lanes), codegen


@intrinsic(prefer_literal=True)
def splat_rows(typingctx: Any, rows: Any, lanes: Any, address: Any) -> Any:
    """A tile whose row r holds the r-th float32 at `address` in every lane."""
    tile = types.UniTuple(Vector(constant_value(lanes)), constant_value(rows))

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        first = pointer_to(builder, args[2], _FLOAT)
        scalars = [
            builder.load(builder.gep(first, [ir.Constant(_I32, r)]), align=4)
            for r in range(tile.count)
        ]
        vectors = [emit_splat(builder, scalar, constant_value(lanes)) for scalar in scalars]
        return context.make_tuple(builder, tile, vectors)

    return tile(rows, lanes, types.int64), codegen


@intrinsic
def store_rows(typingctx: Any, tile: Any, address: Any, stride: Any) -> Any:
    """Write row r of the tile as float32 to `address + r * stride`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows, address, step = args
        for r in range(tile.count):
            at = builder.add(address, builder.mul(step, ir.Constant(step.type, r)))
            row = builder.extract_value(rows, r)
            builder.store(row, pointer_to(builder, at, row.type), align=4)
        return context.get_dummy_value()

    return types.void(tile, types.int64, types.int64), codegen


@intrinsic
def store_sums(typingctx: Any, tile: Any, address: Any, stride: Any) -> Any:
    """Write the sum of the lanes of row r to `address + r * stride`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows, address, step = args
        for r in range(tile.count):
            at = builder.add(address, builder.mul(step, ir.Constant(step.type, r)))
            total = emit_sum(builder, builder.extract_value(rows, r))
            builder.store(total, pointer_to(builder, at, _FLOAT), align=4)
        return context.get_dummy_value()

    return types.void(tile, types.int64, types.int64), codegen


@intrinsic
def add_outer(typingctx: Any, tile: Any, weights: Any, stride: Any, vector: Any) -> Any:
    """tile[r] + w[r] * vector, where w[r] is the float32 at `weights + r * stride`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows, address, step, matrix_row = args
        sums = []
        for r in range(tile.count):
            at = builder.add(address, builder.mul(step, ir.Constant(step.type, r)))
            weight = builder.load(pointer_to(builder, at, _FLOAT), align=4)
            scaled = emit_splat(builder, weight, vector.lanes)
            sums.append(emit_fma(builder, scaled, matrix_row, builder.extract_value(rows, r)))
        return context.make_tuple(builder, tile, sums)

    return tile(tile, types.int64, types.int64, vector), codegen


@intrinsic
def add_products(typingctx: Any, tile: Any, rows: Any, stride: Any, vector: Any) -> Any:
    """tile[r] + x[r] * vector, lane by lane; x[r] are the floats at `rows + r * stride`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        sums, address, step, factor = args
        result = []
        for r in range(tile.count):
            at = builder.add(address, builder.mul(step, ir.Constant(step.type, r)))
            x = builder.load(pointer_to(builder, at, vector.llvm), align=4)
            result.append(emit_fma(builder, x, factor, builder.extract_value(sums, r)))
        return context.make_tuple(builder, tile, result)

    return tile(tile, types.int64, types.int64, vector), codegen


@intrinsic(prefer_literal=True)
def zero_fours(typingctx: Any, rows: Any, lanes: Any) -> Any:
    """A tile of zeros with four vectors a row: of four tokens."""
    tile = types.UniTuple(Vector(constant_value(lanes)), 4 * constant_value(rows))

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        zero = emit_filled(0.0, constant_value(lanes))
        return context.make_tuple(builder, tile, [zero] * tile.count)

    return tile(rows, lanes), codegen


@intrinsic
def add_fours(
    typingctx: Any, tile: Any, rows: Any, stride: Any, a: Any, b: Any, c: Any, d: Any
) -> Any:
    """tile[4 r + t] + x[r] * vector t of four; x[r] are the floats at `rows + r * stride`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        sums, address, step, *vectors = args
        result = []
        for i in range(tile.count):
            if i % 4 == 0:
                at = builder.add(address, builder.mul(step, ir.Constant(step.type, i // 4)))
                x = builder.load(pointer_to(builder, at, a.llvm), align=4)
            total = builder.extract_value(sums, i)
            result.append(emit_fma(builder, x, vectors[i % 4], total))
        return context.make_tuple(builder, tile, result)

    return tile(tile, types.int64, types.int64, a, b, c, d), codegen


@intrinsic
def store_fours(typingctx: Any, tile: Any, address: Any, stride: Any) -> Any:
    """Write the sums of the lanes of row r's four vectors to `address + r * stride`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vectors, address, step = args
        for r in range(tile.count // 4):
            at = builder.add(address, builder.mul(step, ir.Constant(step.type, r)))
            four = [builder.extract_value(vectors, 4 * r + t) for t in range(4)]
            sums = emit_gathered(builder, four, builder.fadd)
            builder.store(sums, pointer_to(builder, at, sums.type), align=4)
        return context.get_dummy_value()

    return types.void(tile, types.int64, types.int64), codegen


def emit_gathered(builder: Any, vectors: list[Any], join: Callable[[Any, Any], Any]) -> Any:
    """Join all 16 lanes of each of four vectors: those of vector r in lane r."""

    def halve(x: Any, y: Any, *halves: tuple[int, ...]) -> Any:
        quads = range(0, NARROW, 4)
        return join(*(
            emit_shuffle(builder, x, y, [quad + place for quad in quads for place in half])
            for half in halves
        ))  # fmt: skip

    a, b, c, d = vectors
    pairs = [halve(*two, (0, 16, 1, 17), (2, 18, 3, 19)) for two in ((a, b), (c, d))]
    found = halve(*pairs, (0, 1, 16, 17), (2, 3, 18, 19))
    for size in (8, 4):
        lower, upper = list(range(size)), list(range(size, 2 * size))
        found = join(*(emit_shuffle(builder, found, found, part) for part in (lower, upper)))
    return found


def emit_shuffle(builder: Any, a: Any, b: Any, places: list[int]) -> Any:
    """Take elements of two vectors, one after the other, by their numbers."""
    mask = ir.Constant(ir.VectorType(_I32, len(places)), places)
    return builder.shuffle_vector(a, b, mask)


@intrinsic
def halves(typingctx: Any, lanes: Any) -> Any:
    """How many vectors a row of `lanes` 4-bit codes takes: one for each scale."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(ir.IntType(64), _halves(lanes))

    return types.int64(lanes), codegen


def _halves(lanes: Any) -> int:
    return max(1, constant_value(lanes) // _HALF_LANES)


@intrinsic
def splat_halves(typingctx: Any, rows: Any, lanes: Any, address: Any) -> Any:
    """A tile whose vector i holds the i-th float32 at `address` in every lane."""
    count, half = constant_value(rows) * _halves(lanes), constant_value(lanes) // _halves(lanes)
    tile = types.UniTuple(Vector(half), count)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        first = pointer_to(builder, args[2], _FLOAT)
        places = [builder.gep(first, [ir.Constant(_I32, i)]) for i in range(count)]
        scalars = [builder.load(place, align=4) for place in places]
        vectors = [emit_splat(builder, scalar, half) for scalar in scalars]
        return context.make_tuple(builder, tile, vectors)

    return tile(rows, lanes, types.int64), codegen


@intrinsic
def store_halves(typingctx: Any, lanes: Any, tile: Any, address: Any, stride: Any) -> Any:
    """Write the halves of row r side by side as float32 to `address + r * stride`."""
    count = _halves(lanes)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, vectors, address, step = args
        for i in range(tile.count):
            row, half = divmod(i, count)
            at = builder.add(address, builder.mul(step, ir.Constant(step.type, row)))
            at = builder.add(at, ir.Constant(at.type, 4 * half * tile.dtype.lanes))
            vector = builder.extract_value(vectors, i)
            builder.store(vector, pointer_to(builder, at, vector.type), align=4)
        return context.get_dummy_value()

    return types.void(lanes, tile, types.int64, types.int64), codegen


def _run(builder: Any, words: Any, k: int) -> Any:
    """Run k of a line, each code c as the float32 1 + c / 16: its bits, below an exponent."""
    up = 19 - 4 * k
    amount = ir.Constant(_WORDS, [abs(up)] * NARROW)
    moved = builder.shl(words, amount) if up > 0 else builder.lshr(words, amount)
    code = builder.and_(moved, ir.Constant(_WORDS, [0xF << 19] * NARROW))
    bits = builder.or_(code, ir.Constant(_WORDS, [0x3F800000] * NARROW))
    return builder.bitcast(bits, ir.VectorType(_FLOAT, NARROW))


@intrinsic
def add_line(typingctx: Any, lanes: Any, tile: Any, weights: Any, stride: Any, line: Any) -> Any:
    """tile[i] + sum over the matrix rows of a line of w[i][row] * half (i mod halves) of it.

    A line of 128 codes at address `line` is 128 / `lanes` rows of a matrix of that many
    columns; w[i] are the float32 at `weights + i * stride`, one a row.
    """
    count, half = _halves(lanes), tile.dtype.lanes
    runs = half // NARROW

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, vectors, weights, step, address = args
        words = builder.load(pointer_to(builder, address, _WORDS), align=4)
        sums = [builder.extract_value(vectors, i) for i in range(tile.count)]
        for part in range(128 // half):  # half by half, row by row
            vector = _run(builder, words, part * runs)
            if runs == 2:
                mask = ir.Constant(ir.VectorType(_I32, half), list(range(half)))
                vector = builder.shuffle_vector(vector, _run(builder, words, 2 * part + 1), mask)
            row, first = divmod(part, count)
            for i in range(first, tile.count, count):
                at = builder.add(weights, builder.mul(step, ir.Constant(step.type, i)))
                at = builder.add(at, ir.Constant(at.type, 4 * row))
                weight = builder.load(pointer_to(builder, at, _FLOAT), align=4)
                sums[i] = emit_fma(builder, emit_splat(builder, weight, half), vector, sums[i])
        return context.make_tuple(builder, tile, sums)

    return tile(lanes, tile, types.int64, types.int64, types.int64), codegen
