"""The threads of a step of few queries: PyTorch's, and how long ours wait awake.

Attention and linear layers run on a team of our own (attention/team.py); what is
left to PyTorch in a decode step is too small to share. Where layers are left
that PyTorch multiplies: a product of one row reads its weights once, and for a
small layer that takes less time than it takes to wake a second thread (which
sleeps soon, see cores.py). So below a size PyTorch's operators run on the
calling thread.

Where threads spin instead (cores.py) nobody has to be woken, and all take part.

No result depends on a clock: a kernel of ours gives the same bits on any number
of threads, and PyTorch's number is a matter of sizes and settings.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from tierd_engine.attention.patience import Patience
from tierd_engine.cores import threads_sleep_soon
from tierd_engine.fewrotary import FewRowsRotary
from tierd_engine.fewrows import RowsLinear

# Waking a thread takes about 0.1 ms, one thread reads weights at about 13 GB/s, and two threads
# save half of that time: they gain from 0.1 ms x 13 GB/s / 0.5 = 2.6 MB a layer on.
LAYER_BYTES_MIN = 2_600_000


def mean_layer_bytes(model: Any) -> float:
    """Return the mean bytes of PyTorch's weights [out, in] in the model's blocks, 0 if none.

    Embeddings and the output layer are left out: they are used once a step. So are layers
    whose product is ours.
    """
    outer = {id(part) for part in (model.get_input_embeddings(), model.get_output_embeddings())}
    sizes = [
        tensor.nbytes
        for module in model.modules()
        if id(module) not in outer and not isinstance(module, RowsLinear)
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))
        if tensor.dim() == 2
    ]
    return sum(sizes) / len(sizes) if sizes else 0.0


class StepThreads:
    """The threads of steps of few queries of one model."""

    def __init__(self, model: Any) -> None:
        self._patience = Patience()
        self._rotary = FewRowsRotary(model)
        self.is_single = threads_sleep_soon() and mean_layer_bytes(model) < LAYER_BYTES_MIN

    @contextlib.contextmanager
    def few_queries(self) -> Iterator[None]:
        """Run the block's PyTorch operators on as many threads as a small step gains from."""
        self._patience.look()
        before = torch.get_num_threads()
        with self._rotary.inside():
            if not self.is_single or before == 1:
                yield
                return
            torch.set_num_threads(1)
            try:
                yield
            finally:
                torch.set_num_threads(before)
