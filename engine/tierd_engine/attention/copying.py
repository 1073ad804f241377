"""Page copies on all threads: what stream does before it attends."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt


def copy_pages(
    source: npt.NDArray[np.int64], destination: npt.NDArray[np.int64], size_bytes: int
) -> None:
    """Copy `size_bytes` from each source address to the destination address beside it.

    Both arrays: [pages] absolute addresses; regions do not overlap.
    """
    for src, dst in zip(source.tolist(), destination.tolist(), strict=True):
        ctypes.memmove(dst, src, size_bytes)
