"""xxHash's own XXH3 for compiled code: the functions that its Python package is made of.

A thread that digests or checks pages so needs no interpreter, whose lock it would take from others.
Where the package does not show them (`is_there`), that is done through Python instead.

A page that was read or written long ago is not in a cache, and a core waits for memory more than
it hashes. So its lines are asked for ahead of the hashing: 16 GB/s a core instead of 12, where
bytes in a cache are hashed at 40. Importing this imports Numba.
"""

from __future__ import annotations

import ctypes
import functools
import platform
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

_I64 = ir.IntType(64)
_I32 = ir.IntType(32)
_BYTES = ir.IntType(8).as_pointer()
_HASH = ir.LiteralStructType([_I64, _I64])  # XXH128_hash_t: low64, high64
_NAMES = (
    "XXH3_64bits", "XXH3_128bits",
    "XXH3_createState", "XXH3_freeState",
    "XXH3_128bits_reset", "XXH3_128bits_update", "XXH3_128bits_digest",
)  # fmt: skip
# Where both words of XXH128_hash_t come back in registers, as LLVM returns a pair of words.
_MACHINES = frozenset(("x86_64", "aarch64"))

_LINE_BYTES = 64  # of a cache
_PIECE_BYTES = 1024  # what XXH3 hashes between two scrambles of its state
# As far as memory delivers within its own delay, and some; 4 to 32 KiB do alike.
_AHEAD_BYTES = 8192


def is_there() -> bool:
    """Return whether compiled code may call them, as far as can be told now."""
    try:
        return find()
    except OSError:
        return False


@functools.cache
def find() -> bool:
    """Make their names known to LLVM; return whether compiled code may call them.

    Raises OSError where that cannot be told now: this process may open no more files, say.
    """
    if platform.machine() not in _MACHINES:
        return False
    try:
        import xxhash._xxhash  # type: ignore[import-not-found]  # it is compiled

        library = ctypes.CDLL(xxhash._xxhash.__file__)
        found = {name: _function(library, name) for name in _NAMES}
    except (ImportError, AttributeError):
        return False
    for name, function in found.items():
        address = ctypes.cast(function, ctypes.c_void_p).value
        assert address is not None
        llvmlite.binding.add_symbol(f"tierd_{name}", address)
    return True


def _function(library: ctypes.CDLL, name: str) -> Any:
    """Return a function, the one for this processor where there are several.

    The plain name is of code for any: half as fast as AVX-512's.
    """
    return getattr(library, f"{name}_dispatch", None) or getattr(library, name)


def _call(builder: Any, name: str, result: Any, args: Any) -> Any:
    """Call by name; an argument that is to be an address is a pointer already."""
    name = f"tierd_{name}"
    function = builder.module.globals.get(name)
    if function is None:
        kind = ir.FunctionType(result, [argument.type for argument in args])
        function = ir.Function(builder.module, kind, name=name)
    return builder.call(function, args)


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _BYTES)


@intrinsic
def xxh3_64(typingctx: Any, address: Any, size_bytes: Any) -> Any:
    """XXH3_64bits of `size_bytes` bytes at `address`: uint64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _call(builder, "XXH3_64bits", _I64, [_pointer(builder, args[0]), args[1]])

    return types.uint64(types.int64, types.int64), codegen


@intrinsic
def _xxh3_128_at(typingctx: Any, address: Any, size_bytes: Any, digest: Any) -> Any:
    """Whether XXH3_128bits of bytes at `address` is the 16 bytes, big-endian, at `digest`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        found = _call(builder, "XXH3_128bits", _HASH, [_pointer(builder, args[0]), args[1]])
        return _is_stored(builder, found, args[2])

    return types.boolean(types.int64, types.int64, types.int64), codegen


def _is_stored(builder: Any, found: Any, digest: Any) -> Any:
    """Whether a hash is the 16 bytes, big-endian, at an address."""
    same = None
    for offset, word in ((0, 1), (8, 0)):  # the high word first; each by its number in _HASH
        address = builder.add(digest, ir.Constant(_I64, offset))
        stored = builder.load(builder.inttoptr(address, _I64.as_pointer()), align=1)
        swapped = builder.bswap(stored)
        equal = builder.icmp_unsigned("==", swapped, builder.extract_value(found, word))
        same = equal if same is None else builder.and_(same, equal)
    return same


@intrinsic
def _new_state(typingctx: Any) -> Any:
    """A new hash's state: its address, or 0. `_end_state` takes it."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        state = _call(builder, "XXH3_createState", _BYTES, [])
        return builder.ptrtoint(state, _I64)

    return types.int64(), codegen


@intrinsic
def _reset(typingctx: Any, state: Any) -> Any:
    """Begin an XXH3_128bits: 0 if it worked."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _call(builder, "XXH3_128bits_reset", _I32, [_pointer(builder, args[0])])

    return types.int32(types.int64), codegen


@intrinsic
def _update(typingctx: Any, state: Any, address: Any, size_bytes: Any) -> Any:
    """Hash bytes on: 0 if it worked."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointers = [_pointer(builder, address) for address in args[:2]]
        return _call(builder, "XXH3_128bits_update", _I32, [*pointers, args[2]])

    return types.int32(types.int64, types.int64, types.int64), codegen


@intrinsic
def _end_state(typingctx: Any, state: Any, digest: Any) -> Any:
    """Whether what was hashed is the 16 bytes, big-endian, at `digest`. The state is gone then."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        state = _pointer(builder, args[0])
        found = _call(builder, "XXH3_128bits_digest", _HASH, [state])
        _call(builder, "XXH3_freeState", _I32, [state])
        return _is_stored(builder, found, args[1])

    return types.boolean(types.int64, types.int64), codegen


@intrinsic
def _ask_for(typingctx: Any, address: Any) -> Any:
    """Let a line come from memory. No address is wrong: one that is not mapped does nothing."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        name = "llvm.prefetch.p0i8"
        function = builder.module.globals.get(name)
        if function is None:
            kind = ir.FunctionType(ir.VoidType(), [_BYTES, _I32, _I32, _I32])
            function = ir.Function(builder.module, kind, name=name)
        # To be read; into the second cache, for the first is small; data.
        how = [ir.Constant(_I32, number) for number in (0, 2, 1)]
        builder.call(function, [_pointer(builder, args[0]), *how])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@njit(nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def xxh3_128_at(address: Any, size_bytes: Any, digest: Any) -> Any:
    """Whether XXH3_128bits of bytes at `address` is the 16 bytes, big-endian, at `digest`.

    For bytes that are in no cache; `size_bytes` is an int64.
    """
    state = _new_state()
    if state == 0:  # no memory for it
        return _xxh3_128_at(address, size_bytes, digest)
    failed = _reset(state)
    for offset in range(0, size_bytes, _PIECE_BYTES):
        for line in range(0, _PIECE_BYTES, _LINE_BYTES):
            _ask_for(address + offset + _AHEAD_BYTES + line)
        failed |= _update(state, address + offset, min(_PIECE_BYTES, size_bytes - offset))
    same = _end_state(state, digest)
    return same and failed == 0
