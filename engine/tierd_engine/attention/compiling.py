"""Compiles a kernel for one signature, with Numba's disk cache where that is safe.

Numba keys its cache by the one file in which a function stands, not by those of
the functions and intrinsics that are compiled into it. So a digest of all
kernel sources is part of the type of `Const`, hence of every kernel's
signature: code compiled from other sources is never found.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numba import njit

KERNEL_SOURCES = (
    "atomics.py", "compiling.py", "fourbit.py", "kernel.py", "layercall.py", "merging.py",
    "product.py", "simd.py", "team.py", "tile.py", "writing.py",
)  # fmt: skip

# A step is compiled into a kernel and never called from Python: it needs no wrappers.
# Division is the machine's: a kernel raises nothing.
# `inlined` is for what stands in a loop over vectors: a call there would spill every register.
STEP: dict[str, Any] = {
    "no_cpython_wrapper": True, "no_cfunc_wrapper": True, "error_model": "numpy"
}  # fmt: skip
step = njit(**STEP)
inlined = njit(**STEP, forceinline=True)


@functools.cache
def sources_digest() -> str:
    """Return a digest of the sources of every kernel and intrinsic."""
    import xxhash

    from tierd.codec import intrinsics

    hasher = xxhash.xxh3_64()
    here = Path(__file__).parent
    for path in (Path(intrinsics.__file__), *(here / name for name in KERNEL_SOURCES)):
        hasher.update(path.read_bytes())
    return hasher.hexdigest()


@dataclass(frozen=True, slots=True)
class Compiled:
    """A function compiled for one signature, as Python and as C may call it."""

    call: Callable[..., None]
    address: int


def compile_cached(
    function: Callable[..., None], signature: tuple[Any, ...], **options: Any
) -> Compiled:
    """Return `function` compiled for `signature`, loaded from Numba's disk cache if it is there.

    `signature` must hold a ConstType. Where no cache folder can be written the
    function is compiled without.
    """
    try:
        dispatcher = njit(cache=True, error_model="numpy", **options)(function)
        dispatcher.compile(signature)
    except (RuntimeError, OSError):  # no folder for a cache; the folder is full or read-only
        dispatcher = njit(error_model="numpy", **options)(function)
        dispatcher.compile(signature)
    (result,) = dispatcher.overloads.values()
    name = result.fndesc.llvm_cfunc_wrapper_name
    return Compiled(result.entry_point, result.library.get_pointer_to_function(name))
