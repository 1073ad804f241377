"""End-to-end tests run on one thread: tiny models gain nothing from a second."""

from __future__ import annotations

from collections.abc import Iterator

import numba
import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Take one thread of torch's and Numba's, and give back what was there."""
    before = torch.get_num_threads(), numba.get_num_threads()
    numba.set_num_threads(1)
    torch.set_num_threads(1)
    yield
    numba.set_num_threads(before[1])
    torch.set_num_threads(before[0])
