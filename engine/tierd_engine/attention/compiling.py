"""How the attention kernels are compiled: for one signature each, and kept on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit

from tierd.codec import compiling
from tierd.codec.compiling import SHARED_SOURCES, Compiled

_HERE = Path(__file__).parent
KERNEL_SOURCES = (
    *SHARED_SOURCES,
    *(_HERE / name for name in (
        "arriving.py", "atomics.py", "bytedot.py", "compiling.py", "fetching.py", "fourbit.py",
        "kernel.py", "layercall.py", "merging.py", "product.py", "rawkeys.py", "rmsnorm.py",
        "rotary.py", "simd.py", "stretch.py", "team.py", "tile.py", "works.py", "writing.py",
    )),
)  # fmt: skip

# A step is compiled into a kernel and never called from Python: it needs no wrappers.
# Division is the machine's: a kernel raises nothing.
# `inlined` is for what stands in a loop over vectors: a call there would spill every register.
STEP: dict[str, Any] = {
    "no_cpython_wrapper": True, "no_cfunc_wrapper": True, "error_model": "numpy"
}  # fmt: skip
step = njit(**STEP)
inlined = njit(**STEP, forceinline=True)


def compile_cached(
    function: Callable[..., None], signature: tuple[Any, ...], **options: Any
) -> Compiled:
    """Return `function` compiled for `signature`, from disk if it is there: see `tierd.codec`."""
    return compiling.compile_cached(function, signature, KERNEL_SOURCES, **options)
