"""Compiles a kernel for one signature, and keeps the machine code on disk where that is safe.

Numba keys its disk cache by the one file in which a function stands, not by those of the
functions and intrinsics that are compiled into it; it puts all signatures of a function into one
index, where two processes that compile at once can leave one's code under the other's signature.
So here a digest of all that the machine code depends on is part of the function's name, hence of
the names of its files: sources, signature, options, Numba, processor.

Invariants:
  a cache file holds one function for one signature; whoever writes it writes the same code
  code of sources that changed since this process started is never kept
  a cache that is missing, full, read-only or damaged costs time, and nothing else

Importing this imports Numba.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

import numba
import xxhash
from numba import njit
from numba.core.imputils import lower_constant
from numba.core.registry import cpu_target
from numba.extending import NativeValue, models, register_model, typeof_impl, unbox

from tierd.began import BEGAN_NS

_logger = logging.getLogger(__name__)

_HERE = Path(__file__).parent
# What kernels of pages are compiled from, wherever they stand: constants among it.
SHARED_SOURCES = (
    *sorted(_HERE.glob("*.py")),
    *(_HERE.parent / name for name in ("types.py", "units.py")),
)


class Const:
    """A number known when a kernel is compiled: its type carries it, as a C++ template's does.

    Passed through functions it makes each of them a specialisation.
    """

    def __init__(self, value: int) -> None:
        self.value = value


class ConstType(numba.types.Type):  # type: ignore[misc]  # Numba is untyped
    """Numba's type of a `Const`: one type a value."""

    def __init__(self, value: int) -> None:
        self.value = value
        super().__init__(name=f"Const({value})")


register_model(ConstType)(models.OpaqueModel)


@typeof_impl.register(Const)
def _type_of_const(constant: Const, context: Any) -> ConstType:
    return ConstType(constant.value)


@unbox(ConstType)
def _unbox_const(const_type: Any, instance: Any, context: Any) -> Any:
    return NativeValue(context.context.get_dummy_value())


@lower_constant(ConstType)
def _lower_const(context: Any, builder: Any, const_type: Any, value: Any) -> Any:
    return context.get_dummy_value()


@dataclass(frozen=True, slots=True)
class Compiled:
    """A function compiled for one signature, as Python and as C may call it."""

    call: Callable[..., Any]
    address: int


@dataclass(frozen=True, slots=True)
class Sources:
    """Files that machine code is made of, and what they were when this process read them."""

    digest: str
    is_as_loaded: bool


@functools.cache
def read_sources(paths: tuple[Path, ...]) -> Sources:
    """Return the digest of files, which are those that were imported if none is newer than that."""
    hasher = xxhash.xxh3_64()
    newest_ns = 0
    for path in paths:
        with path.open("rb") as file:
            content = file.read()
            newest_ns = max(newest_ns, os.fstat(file.fileno()).st_ctime_ns)
        hasher.update(f"{path.name} {len(content)}\n".encode() + content)
    return Sources(hasher.hexdigest(), newest_ns < BEGAN_NS)


def compile_cached(
    function: Callable[..., Any],
    signature: tuple[Any, ...],
    sources: Iterable[Path] = SHARED_SOURCES,
    **options: Any,
) -> Compiled:
    """Return `function` compiled for `signature`, loaded from Numba's disk cache if it is there.

    `sources`: all files that are compiled into it; its own is added. Division is the machine's: a
    kernel raises nothing.
    """
    own = Path(function.__code__.co_filename)
    found = read_sources(tuple(dict.fromkeys((*sources, own))))
    options = {"error_model": "numpy", **options}
    dispatcher = None
    if found.is_as_loaded:
        dispatcher = _compile_on_disk(function, signature, found.digest, options)
    if dispatcher is None:
        dispatcher = njit(**options)(function)
        dispatcher.compile(signature)
    (result,) = dispatcher.overloads.values()
    name = result.fndesc.llvm_cfunc_wrapper_name
    return Compiled(result.entry_point, result.library.get_pointer_to_function(name))


def _compile_on_disk(
    function: Callable[..., Any], signature: tuple[Any, ...], digest: str, options: dict[str, Any]
) -> Any:
    """Return a dispatcher that has compiled or loaded; None where a cache cannot be."""
    key = _key(signature, digest, options)
    try:
        dispatcher = njit(cache=True, **options)(_renamed(function, key))
    except (RuntimeError, OSError) as error:  # no folder for a cache
        _logger.debug("kernels are compiled anew: %s", error)
        return None
    try:
        dispatcher.compile(signature)
    except Exception as error:
        # Either the cache: it cannot be written, or what a crash left cannot be read, which raises
        # anything. Or the function: then it raises again when it is compiled without the cache.
        _logger.debug("kernel cache %s: %s", dispatcher.stats.cache_path, error)
        if not dispatcher.overloads and not _forget(dispatcher.stats.cache_path, key):
            raise
    return dispatcher if dispatcher.overloads else None


def _key(signature: tuple[Any, ...], digest: str, options: dict[str, Any]) -> str:
    machine = cpu_target.target_context.codegen().magic_tuple()
    parts = (digest, numba.__version__, machine, str(signature), sorted(options.items()))
    return xxhash.xxh3_64_hexdigest(repr(parts).encode())


def _renamed(function: Any, key: str) -> Any:
    """Return a copy of a function that Numba's cache files under a name of its own."""
    copy = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__,
        function.__closure__,
    )  # fmt: skip
    copy.__module__ = function.__module__
    copy.__qualname__ = f"{function.__qualname__}_{key}"
    return copy


def _forget(folder: str, key: str) -> bool:
    """Remove the files of a key; returns whether there were any, removable or not."""
    files = list(Path(folder).glob(f"*_{key}-*")) if folder else []
    for file in files:
        try:
            file.unlink(missing_ok=True)
        except OSError as error:
            _logger.debug("kernel cache: %s cannot be removed: %s", file, error)
    return bool(files)
