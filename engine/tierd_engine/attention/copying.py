"""Page copies on all threads: what stream does before it attends."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from tierd.codec.workers import run_spans


def copy_pages(
    source: npt.NDArray[np.int64], destination: npt.NDArray[np.int64], size_bytes: int
) -> None:
    """Copy `size_bytes` from each source address to the destination address beside it.

    Both arrays: [pages] absolute addresses; regions do not overlap.
    """
    sources, destinations = source.tolist(), destination.tolist()

    def copy_span(first: int, end: int) -> None:
        for i in range(first, end):
            ctypes.memmove(destinations[i], sources[i], size_bytes)

    run_spans(copy_span, len(sources), len(sources) * size_bytes)
