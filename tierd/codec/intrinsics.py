"""Raw addresses in Numba-compiled code, for the codec and attention kernels.

Every function here is callable only from code that Numba compiles. Importing
this module imports Numba: only kernel modules do, never the lobby of a package.
"""

from __future__ import annotations

from typing import Any

from numba import carray, njit, types
from numba.extending import intrinsic


@intrinsic
def pointer_from_address(typingctx: Any, address: Any) -> Any:
    """An absolute address (int64) -> void pointer, for `carray`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), codegen


@njit(inline="always")
def as_array(address: Any, shape: Any, dtype: Any) -> Any:
    """Return a C-contiguous array view of memory at `address`; it owns nothing.

    `shape`: int or tuple of ints; `dtype`: a NumPy scalar class such as
    `np.uint8`, known at compile time. The caller keeps the memory mapped.
    """
    return carray(pointer_from_address(address), shape, dtype)
