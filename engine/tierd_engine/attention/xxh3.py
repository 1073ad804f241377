"""xxHash's own XXH3 for compiled code: the functions that its Python package is made of.

A thread that checks pages so needs no interpreter, whose lock it would take from who attends.
Where the package does not show them (`is_there`), pages are checked through Python instead.
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
        for offset, word in ((0, 1), (8, 0)):  # the high word first
            at = builder.add(args[2], ir.Constant(_I64, offset))
            pointer = builder.inttoptr(at, _I64.as_pointer())
            stored = builder.bswap(builder.load(pointer, align=1))
            equal = builder.icmp_unsigned("==", stored, builder.extract_value(found, word))
            same = equal if same is None else builder.and_(same, equal)
        return same

    return types.boolean(types.int64, types.int64, types.int64), codegen
