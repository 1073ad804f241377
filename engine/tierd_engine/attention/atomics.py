"""What threads of a team need to meet, as intrinsics: ordered words, a pause, ways to sleep.

A word is an int64 at an absolute, 8-byte aligned address. All are sequentially
consistent. Every function is callable only from compiled code.

To sleep on a word is Linux's futex(2), on the word's low half: who changes it wakes the sleepers.
"""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from tierd_engine.attention.compiling import inlined, step
from tierd_engine.attention.simd import pointer_to

_I64 = ir.IntType(64)
_I32 = ir.IntType(32)
_BYTES = ir.IntType(8).as_pointer()
TOKEN_BYTES = 8  # as an eventfd has it
_MONOTONIC = 1  # clock_gettime(2)
_FUTEX = {"x86_64": 202, "aarch64": 98}  # the number of the system call
_FUTEX_WAIT_PRIVATE, _FUTEX_WAKE_PRIVATE = 128, 129
_ALL = 2**31 - 1
_NS_PER_SECOND = 10**9
# Intrinsics, as inline assembly needs a parser that not every host has.
_PAUSES = {"x86_64": ("llvm.x86.sse2.pause", []), "aarch64": ("llvm.aarch64.hint", [1])}


def _libc(builder: Any, name: str, result: Any, arguments: Any, *, var_arg: bool = False) -> Any:
    function = builder.module.globals.get(name)
    if function is None:
        kind = ir.FunctionType(result, arguments, var_arg=var_arg)
        function = ir.Function(builder.module, kind, name=name)
    return function


@intrinsic
def load_word(typingctx: Any, address: Any) -> Any:
    """The word at `address`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(pointer_to(builder, args[0], _I64), "seq_cst", 8)

    return types.int64(types.int64), codegen


@intrinsic
def store_word(typingctx: Any, address: Any, value: Any) -> Any:
    """Set the word at `address`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[1], pointer_to(builder, args[0], _I64), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


def _swap(operation: str) -> Any:
    @intrinsic
    def swap(typingctx: Any, address: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointer = pointer_to(builder, args[0], _I64)
            return builder.atomic_rmw(operation, pointer, args[1], "seq_cst")

        return types.int64(types.int64, types.int64), codegen

    return swap


@intrinsic
def replace_word(typingctx: Any, address: Any, expected: Any, value: Any) -> Any:
    """Set the word to `value` if it is `expected`; return whether it was."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = pointer_to(builder, args[0], _I64)
        pair = builder.cmpxchg(pointer, args[1], args[2], "seq_cst", "seq_cst")
        return builder.extract_value(pair, 1)

    return types.boolean(types.int64, types.int64, types.int64), codegen


exchange = _swap("xchg")  # set the word, return what was there
add_word = _swap("add")  # add to the word, return what was there


@intrinsic
def pause(typingctx: Any) -> Any:
    """Tell the core that this thread waits for another: some tens of cycles."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if platform.machine() in _PAUSES:
            name, numbers = _PAUSES[platform.machine()]
            function = _libc(builder, name, ir.VoidType(), [_I32] * len(numbers))
            builder.call(function, [ir.Constant(_I32, number) for number in numbers])
        return context.get_dummy_value()

    return types.void(), codegen


def _move_bytes(name: str) -> Any:
    @intrinsic
    def move(typingctx: Any, fd: Any, address: Any, size_bytes: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            function = _libc(builder, name, _I64, [_I32, _BYTES, _I64])
            data = builder.inttoptr(args[1], _BYTES)
            return builder.call(function, [builder.trunc(args[0], _I32), data, args[2]])

        return types.int64(types.int64, types.int64, types.int64), codegen

    return move


_read, write_bytes = _move_bytes("read"), _move_bytes("write")  # of the C library


@step
def take_token(fd: Any, token: Any) -> None:
    """Sleep until there is a token in `fd`, an eventfd or a pipe, and take it.

    `token`: 8 bytes to use.
    """
    while _read(fd, token, TOKEN_BYTES) != TOKEN_BYTES:  # a signal came
        pass


@step
def give_token(fd: Any, token: Any) -> None:
    """Put a token into the eventfd `fd`. `token`: the address of an int64 1."""
    while write_bytes(fd, token, TOKEN_BYTES) != TOKEN_BYTES:
        pass


@inlined
def wait_awake(address: Any, value: Any, spins: Any) -> Any:
    """Return whether the word came to differ from `value` within `spins` pauses."""
    for _ in range(spins):
        if load_word(address) != value:
            return True
        pause()
    return load_word(address) != value


def _futex(builder: Any, address: Any, operation: int, value: Any, timeout: Any) -> None:
    call = _libc(builder, "syscall", _I64, [_I64], var_arg=True)
    number = ir.Constant(_I64, _FUTEX[platform.machine()])
    # As words, whatever the kernel takes of them: so a variadic function is given registers whole.
    builder.call(call, [number, address, ir.Constant(_I64, operation), value, timeout])


@intrinsic
def now_ns(typingctx: Any) -> Any:
    """Nanoseconds of a clock that only rises."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pair = cgutils.alloca_once(builder, _I64, size=2)
        call = _libc(builder, "clock_gettime", _I32, [_I32, _I64.as_pointer()])
        builder.call(call, [ir.Constant(_I32, _MONOTONIC), pair])
        seconds = builder.load(pair)
        rest = builder.load(builder.gep(pair, [ir.Constant(_I32, 1)]))
        return builder.add(builder.mul(seconds, ir.Constant(_I64, _NS_PER_SECOND)), rest)

    return types.int64(), codegen


@intrinsic
def sleep_on(typingctx: Any, address: Any, value: Any, seconds: Any, rest_ns: Any) -> Any:
    """Sleep while the word at `address` has the low half of `value`: until `wake_sleepers`, a
    signal, or so many seconds and nanoseconds have gone by."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address, value, seconds, rest = args
        pair = cgutils.alloca_once(builder, _I64, size=2)
        builder.store(seconds, pair)
        builder.store(rest, builder.gep(pair, [ir.Constant(_I32, 1)]))
        timeout = builder.ptrtoint(pair, _I64)
        _futex(builder, address, _FUTEX_WAIT_PRIVATE, value, timeout)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 4), codegen


@intrinsic
def wake_sleepers(typingctx: Any, address: Any) -> Any:
    """Wake all who sleep on the word at `address`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        everybody = ir.Constant(_I64, _ALL)
        _futex(builder, args[0], _FUTEX_WAKE_PRIVATE, everybody, ir.Constant(_I64, 0))
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@step
def sleep_while(address: Any, value: Any, sleepers: Any, until_ns: Any) -> Any:
    """Sleep while the word at `address` is `value`, until `now_ns` is `until_ns`; return the word.

    `sleepers`: the address of a word that is not 0 while somebody may sleep. Who changes the word
    at `address` looks there after it, and wakes them.
    """
    add_word(sleepers, 1)
    word = load_word(address)
    while word == value:
        left = until_ns - now_ns()
        if left <= 0:
            break
        sleep_on(address, value, left // _NS_PER_SECOND, left % _NS_PER_SECOND)
        word = load_word(address)
    add_word(sleepers, -1)
    return word
