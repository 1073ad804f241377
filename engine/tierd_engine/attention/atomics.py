"""What threads of a team need to meet, as intrinsics: ordered words, a pause, tokens to sleep on.

A word is an int64 at an absolute, 8-byte aligned address. All are sequentially
consistent. Every function is callable only from compiled code.
"""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from tierd_engine.attention.compiling import inlined, step
from tierd_engine.attention.simd import pointer_to

_I64 = ir.IntType(64)
_BYTES = ir.IntType(8).as_pointer()
TOKEN_BYTES = 8  # as an eventfd has it
# Intrinsics, as inline assembly needs a parser that not every host has.
_PAUSES = {"x86_64": ("llvm.x86.sse2.pause", []), "aarch64": ("llvm.aarch64.hint", [1])}


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
            kind = ir.FunctionType(ir.VoidType(), [ir.IntType(32)] * len(numbers))
            function = builder.module.globals.get(name)
            if function is None:
                function = ir.Function(builder.module, kind, name=name)
            builder.call(function, [ir.Constant(ir.IntType(32), number) for number in numbers])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def yield_core(typingctx: Any) -> Any:
    """Let another thread that is ready have this one's core."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function = builder.module.globals.get("sched_yield")
        if function is None:
            kind = ir.FunctionType(ir.IntType(32), [])
            function = ir.Function(builder.module, kind, name="sched_yield")
        builder.call(function, [])
        return context.get_dummy_value()

    return types.void(), codegen


def _move_token(name: str) -> Any:
    @intrinsic
    def move(typingctx: Any, fd: Any, token: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kind = ir.FunctionType(_I64, [ir.IntType(32), _BYTES, _I64])
            function = builder.module.globals.get(name)
            if function is None:
                function = ir.Function(builder.module, kind, name=name)
            fd = builder.trunc(args[0], ir.IntType(32))
            data = builder.inttoptr(args[1], _BYTES)
            return builder.call(function, [fd, data, ir.Constant(_I64, TOKEN_BYTES)])

        return types.int64(types.int64, types.int64), codegen

    return move


_read, _write = _move_token("read"), _move_token("write")  # of the C library


@step
def take_token(fd: Any, token: Any) -> None:
    """Sleep until there is a token in `fd`, an eventfd or a pipe, and take it.

    `token`: 8 bytes to use.
    """
    while _read(fd, token) != TOKEN_BYTES:  # a signal came
        pass


@step
def give_token(fd: Any, token: Any) -> None:
    """Put a token into the eventfd `fd`. `token`: the address of an int64 1."""
    while _write(fd, token) != TOKEN_BYTES:
        pass


@inlined
def wait_awake(address: Any, value: Any, spins: Any) -> Any:
    """Return whether the word came to differ from `value` within `spins` pauses."""
    for _ in range(spins):
        if load_word(address) != value:
            return True
        pause()
    return load_word(address) != value
