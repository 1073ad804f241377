"""Elements of a page in the model's dtype, and the arrays that decoding fills.

Used by the kernels of every codec. Importing this imports Numba.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from tierd.codec import vector as v
from tierd.codec.layout import PageLayout
from tierd.codec.reference import HALF_MAX
from tierd.errors import InvalidArgument
from tierd.types import DType

FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2
_KINDS = {DType.FLOAT32: FLOAT32, DType.BFLOAT16: BFLOAT16, DType.FLOAT16: FLOAT16}
_HALF_MAX = np.float32(HALF_MAX)

ModelArray = npt.NDArray[np.float32] | npt.NDArray[np.uint16]


class Target(NamedTuple):
    """Where decoded tokens go: addresses of K and V [kv_heads, capacity_tokens, head_dim]."""

    kind: int
    keys: int
    values: int
    keys_head_bytes: int
    values_head_bytes: int
    start_token: int


def element_kind(dtype: DType) -> int:
    """Return the number that stands for a dtype in kernels."""
    return _KINDS[dtype]


def decode_target(
    keys: ModelArray, values: ModelArray, layout: PageLayout, tokens: int, start_token: int
) -> Target:
    """Return where `tokens` tokens from start_token on lie in keys and values.

    Each is [kv_heads, capacity_tokens, head_dim], float32, or uint16 for the
    bits of a 2-byte layout dtype; a head's tokens are contiguous.
    Raises InvalidArgument when shape, dtype, strides or capacity do not fit.
    """
    for name, array in (("keys", keys), ("values", values)):
        fits = array.ndim == 3 and array.shape[::2] == (layout.kv_heads, layout.head_dim)
        if not fits or not 0 <= start_token <= array.shape[1] - tokens:
            raise InvalidArgument(
                f"{name} of shape {array.shape} do not hold {tokens} tokens from {start_token} "
                f"on of {layout.kv_heads} heads of {layout.head_dim}"
            )
        if array.dtype != keys.dtype or not array.flags.writeable:
            raise InvalidArgument(f"{name} must be writable and of the dtype of keys")
        if layout.kv_heads * tokens > 0 and not array[0].flags.c_contiguous:
            raise InvalidArgument(f"{name}: the tokens of one head must be contiguous")
    if keys.dtype == np.float32:
        kind = FLOAT32
    elif keys.dtype == np.uint16 and layout.dtype is not DType.FLOAT32:
        kind = _KINDS[layout.dtype]
    else:
        raise InvalidArgument(f"cannot decode {layout.dtype} pages into {keys.dtype} arrays")
    return Target(
        kind, keys.ctypes.data, values.ctypes.data, keys.strides[0], values.strides[0], start_token
    )


# For functions that only kernels call: no way in from Python, which halves what they compile for.
# `inlined` is for what stands inside a loop over vectors: a call there would spill every register.
INNER: dict[str, bool] = {"nogil": True, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
inner = njit(**INNER)
inlined = njit(**INNER, forceinline=True)


@inlined
def load(address: Any, kind: Any) -> Any:
    """Sixteen elements, widened."""
    if kind == BFLOAT16:
        return v.load_bf16(address)
    if kind == FLOAT16:
        return v.load_f16(address)
    return v.load_f32(address)


@inlined
def store_all(address: Any, x: Any, kind: Any) -> None:
    """Sixteen finite lanes to nearest even; float16 stops at its ends."""
    if kind == BFLOAT16:
        v.store_bf16(address, x)
    elif kind == FLOAT16:
        v.store_f16(address, v.greater(v.lesser(x, v.splat(_HALF_MAX)), v.splat(-_HALF_MAX)))
    else:
        v.store_f32(address, x)


@inlined
def store(row: Any, c: Any, d: Any, x: Any, kind: Any, spare: Any) -> None:
    """Store lanes as elements c.. of a row of d elements; `spare` takes a tail, 64 bytes."""
    item = 4 if kind == FLOAT32 else 2
    if c + 16 <= d:
        store_all(row + c * item, x, kind)
    else:
        store_all(spare, x, kind)
        v.copy_bytes(row + c * item, spare, (d - c) * item)
