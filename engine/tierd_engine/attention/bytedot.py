"""Steps of the kernel over 8-bit codes, as integers: sums of bytes, four products a lane.

A matrix of codes is [channels, tokens] for keys and [tokens, channels] for values. Row r of the
result is initial_r + sum_i f_ri code_i, where f are float32 factors: q times the keys' scales, or
weights times the values'. A row of factors becomes integers of three signed bytes, its digits:

    f_i = unit (d0 + 256 d1 + 65536 d2)   unit: the power of two for which the largest takes
                                          23 bits and a sign; so the rest is below unit / 2
    sum = unit (S0 + 256 S1 + 65536 S2)   S_k = sum_i d_ki code_i, exact

So a sum is about as accurate as one of float32, whose own rounding it does without; less so where
one factor is far larger than all others, for each is rounded to 2**-23 of the largest. A sum of n
codes is then off by 255 n 2**-23 of that factor at most: below a hundredth of its codec's own step,
half of which it may be off anyway, up to n = 300.

Codes of four rows of a matrix are interleaved, so that a lane of 32 bits holds one column's four
codes: `vpdpbusd` multiplies them by four digits and adds the products to the lane. Unpacking works
within 128 bits: of 64 columns, quarter q is those whose number, mod 16, is 4q to 4q + 3.

Invariants:
  |S| < 2**31: at most 65536 rows (head_dim is below that, block_tokens too), 255 * 128 each
  a factor that is infinite or NaN makes its row's unit NaN, and so all of the row's result
  rows of a matrix are read up to a multiple of 4, with digits that are 0: a page lies there
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.registry import cpu_target
from numba.extending import intrinsic, models, register_model

from tierd.units import CACHE_LINE_BYTES
from tierd_engine.attention.compiling import step
from tierd_engine.attention.fetching import fetch_more
from tierd_engine.attention.simd import (
    FLOAT16,
    NARROW,
    Const,
    Vector,
    constant_value,
    emit_call,
    emit_fma,
    emit_splat,
    load_narrow,
    number,
    pointer_to,
)
from tierd_engine.attention.tile import (
    add_products,
    emit_gathered,
    emit_shuffle,
    store_rows,
    zero_rows,
)

COLUMNS = 64  # codes of a row that are taken at once
_UNITS = 16  # bytes from the initial values of rows to their units, in stats
_DIGITS = 3
_ROWS_A_STEP = 4
# A turn takes 16 rows, or half of their columns: eight lines. It asks for six of what is read
# next, other steps for the rest. Six were faster than five at a head_dim of 128, equal at 64.
_ROWS_A_TURN = 16
_LINES_A_TURN = 6
_FLOAT16 = Const(FLOAT16)
_NONE, _HALF, _WHOLE = Const(0), Const(2), Const(4)  # quarters
_ONE, _THREE = Const(1), Const(_DIGITS)

_I8, _I16, _I32, _FLOAT = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.FloatType()
_BYTES, _WORDS = ir.VectorType(_I8, COLUMNS), ir.VectorType(_I32, NARROW)
_FLOATS = ir.VectorType(_FLOAT, NARROW)
_MAGNITUDE, _INFINITE, _NAN = 0x7FFFFFFF, 0x7F800000, 0x7FC00000
_MANTISSA_BITS = 23
_UNIT_BITS = 22  # of the largest factor, whose integer is at least 2**22
# Three signed digits end at 127 * 0x10101, a little below 2**23: so does what this rounds up.
_NEARLY_ONE = 1.0 + 1.0 / 128.0
_EXPONENT_MIN = (_UNIT_BITS + 1) << _MANTISSA_BITS  # of the largest: else its unit is subnormal
_HALF_DIGITS = 0x808080


def is_built_for() -> bool:
    """Whether kernels are compiled for a processor that has the instruction."""
    _, _, features = cpu_target.target_context.codegen().magic_tuple()
    return "+avx512vnni" in features and "+avx512bw" in features


class Words(types.Type):  # type: ignore[misc]  # Numba is untyped
    """16 int32 side by side."""

    def __init__(self) -> None:
        super().__init__(name="int32x16")


@register_model(Words)
class _WordsModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, words: Words) -> None:
        super().__init__(manager, words, _WORDS)


def _words(number: int) -> Any:
    return ir.Constant(_WORDS, [number] * NARROW)


def _row_address(builder: Any, address: Any, stride: Any, r: int) -> Any:
    return builder.add(address, builder.mul(stride, ir.Constant(stride.type, r)))


@intrinsic
def _zero_words(typingctx: Any, rows: Any, each: Any, digits: Any) -> Any:
    """A tuple of vectors of zeros: for each of `rows`, `each` of every digit."""
    count = constant_value(rows) * constant_value(each) * constant_value(digits)
    tile = types.UniTuple(Words(), count)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return context.make_tuple(builder, tile, [_words(0)] * tile.count)

    return tile(rows, each, digits), codegen


def _larger(builder: Any, a: Any, b: Any) -> Any:
    return emit_call(builder, f"llvm.umax.v{a.type.count}i32", a.type, [a, b])


@intrinsic
def _raise_peaks(typingctx: Any, peaks: Any, tile: Any) -> Any:
    """The larger magnitudes, as bits of float32, lane by lane: NaN is the largest."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        raised = []
        for r in range(peaks.count):
            peak, values = (builder.extract_value(arg, r) for arg in args)
            bits = builder.and_(builder.bitcast(values, _WORDS), _words(_MAGNITUDE))
            raised.append(_larger(builder, peak, bits))
        return context.make_tuple(builder, peaks, raised)

    return peaks(peaks, tile), codegen


def _gather(builder: Any, tile: Any, join: Callable[[Any, Any], Any]) -> Any:
    """Join all lanes of each vector of a tile of at most four: those of vector r in lane r."""
    vectors = [builder.extract_value(tile, r) for r in range(len(tile.type))]
    nothing = ir.Constant(vectors[0].type, None)
    return emit_gathered(builder, vectors + [nothing] * (4 - len(vectors)), join)


def _units_of(builder: Any, largest: Any) -> Any:
    """The bits of the units of rows whose largest magnitudes are four such bits."""
    four = largest.type

    def all_of(number: int) -> Any:
        return ir.Constant(four, [number] * 4)

    floats = ir.VectorType(_FLOAT, 4)
    nearly_one = ir.Constant(floats, [_NEARLY_ONE] * 4)
    raised = builder.bitcast(builder.fmul(builder.bitcast(largest, floats), nearly_one), four)
    power = builder.and_(raised, all_of(_INFINITE))
    power = emit_call(builder, "llvm.umax.v4i32", four, [power, all_of(_EXPONENT_MIN)])
    unit = builder.sub(power, all_of(_UNIT_BITS << _MANTISSA_BITS))
    is_finite = builder.icmp_unsigned("<", largest, all_of(_INFINITE))
    return builder.select(is_finite, unit, all_of(_NAN))


@intrinsic
def _store_stats(typingctx: Any, constants: Any, peaks: Any, stats: Any) -> Any:
    """Write to `stats` the sum of each row's constants, then each row's unit, four of each."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        constants, peaks, stats = args
        initial = _gather(builder, constants, builder.fadd)
        builder.store(initial, pointer_to(builder, stats, initial.type), align=4)
        largest = _gather(builder, peaks, lambda x, y: _larger(builder, x, y))
        at = builder.add(stats, ir.Constant(stats.type, _UNITS))
        builder.store(_units_of(builder, largest), pointer_to(builder, at, largest.type), align=4)
        return context.get_dummy_value()

    return types.void(constants, peaks, types.int64), codegen


@intrinsic
def _load_inverses(typingctx: Any, rows: Any, units: Any) -> Any:
    """A tile of 1 / unit of each row, in every lane; of no meaning where the unit is NaN."""
    tile = types.UniTuple(Vector(NARROW), constant_value(rows))

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        inverses = []
        for r in range(tile.count):
            at = builder.add(args[1], ir.Constant(args[1].type, 4 * r))
            unit = builder.load(pointer_to(builder, at, _I32), align=4)
            inverse = builder.bitcast(builder.sub(_I32(254 << _MANTISSA_BITS), unit), _FLOAT)
            inverses.append(emit_splat(builder, inverse, NARROW))
        return context.make_tuple(builder, tile, inverses)

    return tile(rows, types.int64), codegen


@intrinsic
def _store_digits(typingctx: Any, inverses: Any, address: Any, stride: Any) -> Any:
    """Replace 16 factors of each row, at `address + r * stride`, by their digits.

    16 bytes hold those of four factors: four d0, four d1, four d2, four that mean nothing.
    """
    places = [
        16 * lane + 4 * factor + digit
        for lane in range(4) for digit in range(4) for factor in range(4)
    ]  # fmt: skip

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, address, stride = args
        for r in range(inverses.count):
            place = pointer_to(builder, _row_address(builder, address, stride, r), _FLOATS)
            inverse = builder.extract_value(args[0], r)
            scaled = builder.fmul(builder.load(place, align=4), inverse)
            whole = emit_call(builder, "llvm.lrint.v16i32.v16f32", _WORDS, [scaled])
            # Half of each digit's range added makes them unsigned, which bytes of a number are.
            unsigned = builder.add(whole, _words(_HALF_DIGITS))
            digits = builder.bitcast(builder.xor(unsigned, _words(_HALF_DIGITS)), _BYTES)
            digits = emit_shuffle(builder, digits, digits, places)
            builder.store(digits, builder.bitcast(place, _BYTES.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(inverses, types.int64, types.int64), codegen


def _unpack(builder: Any, a: Any, b: Any, upper: int) -> Any:
    """Interleave the lower or the upper halves of each 128 bits of two vectors."""
    lanes = a.type.count
    half = lanes // 8
    places = []
    for lane in range(4):
        for i in range(half):
            first = (2 * lane + upper) * half + i
            places += [first, lanes + first]
    return emit_shuffle(builder, a, b, places)


def _interleave(builder: Any, address: Any, row_bytes: Any, quarters: range) -> list[Any]:
    """Quarters of 64 columns of four rows, as lanes of four codes."""
    codes = []
    for i in range(_ROWS_A_STEP):
        row = pointer_to(builder, _row_address(builder, address, row_bytes, i), _BYTES)
        codes.append(builder.load(row, align=1))
    pairs = ir.VectorType(_I16, COLUMNS // 2)
    found = []
    for half in range(quarters.start // 2, quarters.stop // 2):
        a, b = (_unpack(builder, codes[i], codes[i + 1], half) for i in (0, 2))
        a, b = (builder.bitcast(joined, pairs) for joined in (a, b))
        found += [builder.bitcast(_unpack(builder, a, b, part), _WORDS) for part in (0, 1)]
    return found


@intrinsic
def _add_dots(
    typingctx: Any, first: Any, each: Any, sums: Any, codes: Any, row_bytes: Any, digits: Any,
    stride: Any,
) -> Any:  # fmt: skip
    """Add four rows of codes times their digits, which are at `digits + r * stride`.

    `sums`: of each row and digit, in this order, `each` quarters from `first` on.
    """
    quarters = range(constant_value(first), constant_value(first) + constant_value(each))
    rows = sums.count // (_DIGITS * len(quarters))

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, _, tile, codes, row_bytes, digits, stride = args
        lanes = _interleave(builder, codes, row_bytes, quarters)
        added: list[Any] = []
        for r in range(rows):
            row = _row_address(builder, digits, stride, r)
            for digit in range(_DIGITS):
                at = builder.add(row, ir.Constant(row.type, 4 * digit))
                four = builder.load(pointer_to(builder, at, _I32), align=4)
                factor = emit_splat(builder, four, NARROW)
                for lane in lanes:
                    total = builder.extract_value(tile, len(added))
                    name = "llvm.x86.avx512.vpdpbusd.512"
                    added.append(emit_call(builder, name, _WORDS, [total, lane, factor]))
        return context.make_tuple(builder, sums, added)

    integer = types.int64
    return sums(first, each, sums, integer, integer, integer, integer), codegen


def _combine(builder: Any, sums: list[Any], unit: Any, initial: Any) -> Any:
    """initial + unit (S0 + 256 S1 + 65536 S2)."""
    total, *higher = (builder.sitofp(digit, _FLOATS) for digit in sums)
    for k, digit in enumerate(higher, 1):
        total = emit_fma(builder, digit, ir.Constant(_FLOATS, [256.0**k] * NARROW), total)
    return emit_fma(builder, total, unit, initial)


@intrinsic
def _store_dots(
    typingctx: Any, first: Any, each: Any, sums: Any, stats: Any, result: Any, stride: Any
) -> Any:
    """Write the columns of the quarters from `first` on to `result + r * stride`, as float32."""
    start, quarters = constant_value(first), constant_value(each)
    size = _DIGITS * quarters

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, _, tile, stats, result, stride = args
        vectors = [builder.extract_value(tile, i) for i in range(sums.count)]
        for r in range(sums.count // size):
            initial, unit = (
                emit_splat(builder, builder.load(pointer_to(
                    builder, builder.add(stats, ir.Constant(stats.type, offset + 4 * r)), _FLOAT
                ), align=4), NARROW)
                for offset in (0, _UNITS)
            )  # fmt: skip
            row = _row_address(builder, result, stride, r)
            own = vectors[r * size : (r + 1) * size]
            found = [_combine(builder, own[q::quarters], unit, initial) for q in range(quarters)]
            for pair in range(0, quarters, 2):
                _store_pair(builder, found[pair : pair + 2], row, start + pair)
        return context.get_dummy_value()

    return types.void(first, each, sums, types.int64, types.int64, types.int64), codegen


def _store_pair(builder: Any, pair: list[Any], row: Any, quarter: int) -> None:
    """Write two neighbouring quarters: eight columns of each sixteen."""
    low, high = pair
    for lane in range(4):
        four = list(range(4 * lane, 4 * lane + 4))
        eight = emit_shuffle(builder, low, high, four + [NARROW + i for i in four])
        at = builder.add(row, ir.Constant(row.type, 4 * (16 * lane + 4 * quarter)))
        builder.store(eight, pointer_to(builder, at, eight.type), align=4)


@step
def _fold(
    rows: Any, source: Any, source_stride: Any, count: Any, scales: Any, zeros: Any, target: Any,
    target_stride: Any, stats: Any, cursor: Any,
) -> None:  # fmt: skip
    """Factors as digits: source[r] * scale; initial[r] = source[r]·zero. Both may be one place.

    Reads `count` scales and zeros; writes digits up to a multiple of 16, those beyond 0.
    """
    constants = zero_rows(rows, NARROW)
    peaks = _zero_words(rows, _ONE, _ONE)
    for i in range(0, count, NARROW):
        fetch_more(cursor, 1)
        scale = load_narrow(_FLOAT16, scales + 2 * i, count - i)
        zero = load_narrow(_FLOAT16, zeros + 2 * i, count - i)
        constants = add_products(constants, source + 4 * i, source_stride, zero)
        factors = add_products(zero_rows(rows, NARROW), source + 4 * i, source_stride, scale)
        peaks = _raise_peaks(peaks, factors)
        store_rows(factors, target + 4 * i, target_stride)
    _store_stats(constants, peaks, stats)
    inverses = _load_inverses(rows, stats + _UNITS)
    for i in range(0, count, NARROW):
        fetch_more(cursor, 1)
        _store_digits(inverses, target + 4 * i, target_stride)


@step
def _sum_quarters(
    rows: Any, first: Any, each: Any, matrix: Any, row_bytes: Any, count: Any, digits: Any,
    stride: Any, stats: Any, result: Any, result_stride: Any, cursor: Any,
) -> None:  # fmt: skip
    sums = _zero_words(rows, each, _THREE)
    for i in range(0, count, _ROWS_A_TURN):
        fetch_more(cursor, _LINES_A_TURN * number(each) // 2)
        for k in range(i, min(i + _ROWS_A_TURN, count), _ROWS_A_STEP):
            codes = matrix + row_bytes * k
            sums = _add_dots(first, each, sums, codes, row_bytes, digits + 4 * k, stride)
    _store_dots(first, each, sums, stats, result, result_stride)


@step
def _sum_columns(
    rows: Any, matrix: Any, row_bytes: Any, count: Any, digits: Any, stride: Any, stats: Any,
    result: Any, result_stride: Any, cursor: Any,
) -> None:  # fmt: skip
    """The sum above for 64 columns, over `count` rows.

    A sum has three accumulators a quarter: of several rows, half of the columns fit registers;
    of one row, sums of a half would wait for each other.
    """
    if number(rows) == 1:
        _sum_quarters(
            rows, _NONE, _WHOLE, matrix, row_bytes, count, digits, stride, stats, result,
            result_stride, cursor,
        )  # fmt: skip
    else:
        _sum_quarters(
            rows, _NONE, _HALF, matrix, row_bytes, count, digits, stride, stats, result,
            result_stride, cursor,
        )  # fmt: skip
        _sum_quarters(
            rows, _HALF, _HALF, matrix, row_bytes, count, digits, stride, stats, result,
            result_stride, cursor,
        )  # fmt: skip


@step
def _fold_group(
    rows: Any, job: Any, base: Any, group: Any, digits: Any, stats: Any, scratch: Any
) -> None:
    d, scales = job.head_dim, 2 * job.head_dim * group
    _fold(
        rows, scratch, job.q_stride, d, base + job.key_scale + scales,
        base + job.key_zero + scales, digits, job.q_stride, stats, scratch + job.cursor,
    )  # fmt: skip


@step
def scores(rows: Any, job: Any, base: Any, seen: Any, scratch: Any) -> None:
    """Scores of 8-bit keys in groups of 64 tokens.

    A group's factors are folded before the sums of the one before: neither waits for the other.
    """
    d, stats, digits = job.head_dim, scratch + job.stats, scratch + job.folded
    next_stats, next_digits = stats + CACHE_LINE_BYTES, digits + (job.output - job.folded) // 2
    groups = (seen + COLUMNS - 1) // COLUMNS
    _fold_group(rows, job, base, 0, digits, stats, scratch)
    for group in range(groups):
        if group + 1 < groups:
            _fold_group(rows, job, base, group + 1, next_digits, next_stats, scratch)
        _sum_columns(
            rows, base + job.keys + COLUMNS * d * group, COLUMNS, d, digits, job.q_stride, stats,
            scratch + job.weights + 4 * COLUMNS * group, job.weight_stride, scratch + job.cursor,
        )  # fmt: skip
        stats, next_stats = next_stats, stats
        digits, next_digits = next_digits, digits


@step
def values(rows: Any, job: Any, base: Any, seen: Any, scratch: Any) -> None:
    """Output rows from 8-bit values of at least 64 channels.

    The last 64 channels may be among those before: sums are exact, so they come out the same.
    """
    d, digits, stats = job.head_dim, scratch + job.weights, scratch + job.stats
    cursor = scratch + job.cursor
    _fold(
        rows, digits, job.weight_stride, seen, base + job.value_scale, base + job.value_zero,
        digits, job.weight_stride, stats, cursor,
    )  # fmt: skip
    for block in range(0, d, COLUMNS):
        c = min(block, d - COLUMNS)
        _sum_columns(
            rows, base + job.values + c, d, seen, digits, job.weight_stride, stats,
            scratch + job.output + 4 * c, job.q_stride, cursor,
        )  # fmt: skip
