"""How many threads PyTorch gets in a step of few queries.

A linear layer of one row reads its weights once. For a small model that takes
less time than it takes to wake a second thread (which sleeps soon, see
cores.py): SmolLM2's step outside attention was 40 ms with two threads and 25 ms
with one in bfloat16, 28 and 15 ms with int8 weights. So below a size a decode
step's PyTorch runs on the calling thread. Attention keeps all cores: its
threads are Numba's.

Where threads spin instead (cores.py) nobody has to be woken, and all take part.

The rule looks at sizes and settings, never at a clock: a run repeats bit for bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from tierd_engine.cores import threads_sleep_soon

# Waking a thread takes about 0.1 ms, one thread reads weights at about 13 GB/s, and two threads
# save half of that time: they gain from 0.1 ms x 13 GB/s / 0.5 = 2.6 MB a layer on.
LAYER_BYTES_MIN = 2_600_000


def mean_layer_bytes(model: Any) -> float:
    """Return the mean bytes of the weights [out, in] in the model's blocks, 0 if there are none.

    Embeddings and the output layer are left out: they are used once a step.
    """
    outer = {id(part) for part in (model.get_input_embeddings(), model.get_output_embeddings())}
    sizes = [
        tensor.nbytes
        for module in model.modules()
        if id(module) not in outer
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))
        if tensor.dim() == 2
    ]
    return sum(sizes) / len(sizes) if sizes else 0.0


class StepThreads:
    """PyTorch's threads for steps of few queries of one model."""

    def __init__(self, model: Any) -> None:
        self.is_single = threads_sleep_soon() and mean_layer_bytes(model) < LAYER_BYTES_MIN

    @contextlib.contextmanager
    def few_queries(self) -> Iterator[None]:
        """Run the block's PyTorch operators on as many threads as a small step gains from."""
        before = torch.get_num_threads()
        if not self.is_single or before == 1:
            yield
            return
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)
