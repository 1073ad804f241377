"""xxHash's own XXH3 for compiled code: the functions that its Python package is made of.

A thread that digests or checks pages so needs no interpreter, whose lock it would take from others.
Where the package does not show them (`is_there`), that is done through Python instead.
Importing this imports Numba.
"""

from __future__ import annotations

import ctypes
import functools
import platform
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_I64 = ir.IntType(64)
_BYTES = ir.IntType(8).as_pointer()
_HASH = ir.LiteralStructType([_I64, _I64])  # XXH128_hash_t: low64, high64
_NAMES = ("XXH3_64bits", "XXH3_128bits")
# Where both words of XXH128_hash_t come back in registers, as LLVM returns a pair of words.
_MACHINES = frozenset(("x86_64", "aarch64"))


@functools.cache
def is_there() -> bool:
    """Return whether compiled code may call them, having made their names known to LLVM."""
    if platform.machine() not in _MACHINES:
        return False
    try:
        import xxhash._xxhash  # type: ignore[import-not-found]  # it is compiled

        library = ctypes.CDLL(xxhash._xxhash.__file__)
        found = {name: getattr(library, name) for name in _NAMES}
    except (ImportError, OSError, AttributeError):
        return False
    for name, function in found.items():
        address = ctypes.cast(function, ctypes.c_void_p).value
        assert address is not None
        llvmlite.binding.add_symbol(f"tierd_{name}", address)
    return True


def _call(builder: Any, name: str, result: Any, args: Any) -> Any:
    name = f"tierd_{name}"
    function = builder.module.globals.get(name)
    if function is None:
        kind = ir.FunctionType(result, [_BYTES, _I64])
        function = ir.Function(builder.module, kind, name=name)
    return builder.call(function, [builder.inttoptr(args[0], _BYTES), args[1]])


@intrinsic
def xxh3_64(typingctx: Any, address: Any, size_bytes: Any) -> Any:
    """XXH3_64bits of `size_bytes` bytes at `address`: uint64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _call(builder, "XXH3_64bits", _I64, args)

    return types.uint64(types.int64, types.int64), codegen


@intrinsic
def xxh3_128_at(typingctx: Any, address: Any, size_bytes: Any, digest: Any) -> Any:
    """Whether XXH3_128bits of bytes at `address` is the 16 bytes, big-endian, at `digest`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        found = _call(builder, "XXH3_128bits", _HASH, args)
        same = None
        for pointer, word in _words_of_digest(builder, args[2]):
            stored = builder.bswap(builder.load(pointer, align=1))
            equal = builder.icmp_unsigned("==", stored, builder.extract_value(found, word))
            same = equal if same is None else builder.and_(same, equal)
        return same

    return types.boolean(types.int64, types.int64, types.int64), codegen


@intrinsic
def store_xxh3_128(typingctx: Any, address: Any, size_bytes: Any, digest: Any) -> Any:
    """Write XXH3_128bits of bytes at `address` to the 16 bytes, big-endian, at `digest`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        found = _call(builder, "XXH3_128bits", _HASH, args)
        for pointer, word in _words_of_digest(builder, args[2]):
            builder.store(builder.bswap(builder.extract_value(found, word)), pointer, align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


def _words_of_digest(builder: Any, address: Any) -> list[tuple[Any, int]]:
    """Return where the words of a big-endian digest lie, each with its number in XXH128_hash_t."""
    offsets = ((0, 1), (8, 0))  # the high word first
    return [
        (builder.inttoptr(builder.add(address, ir.Constant(_I64, offset)), _I64.as_pointer()), word)
        for offset, word in offsets
    ]
