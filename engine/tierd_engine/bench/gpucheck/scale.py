"""How large a check is: a Llama-3.1-8B's shape on a GPU, or a tiny one on the fake device.

The fake runs the same code with the CPU's kernels, so that a machine without a GPU tries all
of it but the hardware. Its figures mean nothing.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tierd.types import DType, Geometry
from tierd.units import GIB, MIB
from tierd_engine.arena import TORCH_DTYPES, hot_block_bytes
from tierd_engine.cache import ATTENTION_NAME
from tierd_engine.device.opening import DeviceName, DeviceRig, fake_rig, open_rig
from tierd_engine.device.port import Device

SYNC_SECONDS = 60.0  # the longest timed piece is a step of some seconds; a minute is a dead GPU
DECODE_STEPS = 12


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes of one check. `copy_bytes`: of a timed copy."""

    geometry: Geometry
    heads: int
    hidden: int
    intermediate: int
    vocabulary: int
    context_tokens: int
    hot_bytes: int
    steps: int
    copy_bytes: int
    resident_tokens: int
    cold_tokens: int
    is_dry: bool


_LLAMA = Geometry(layers=32, kv_heads=8, head_dim=128, dtype=DType.BFLOAT16, block_tokens=256)
_TINY = Geometry(layers=2, kv_heads=2, head_dim=32, dtype=DType.BFLOAT16, block_tokens=64)
REAL = Scale(
    _LLAMA, 32, 4096, 14336, 128256, 131072, 4 * GIB, DECODE_STEPS, 256 * MIB, 32768, 32768, False
)
DRY = Scale(
    _TINY, 4, 64, 128, 251, 640, 4 * hot_block_bytes(_TINY), 3, 1 * MIB, 256, 640, True
)  # fmt: skip


@contextlib.contextmanager
def opened(scale: Scale) -> Iterator[DeviceRig]:
    """Yield the device of a scale. Raises DeviceUnavailable where a real one has no GPU."""
    if scale.is_dry:
        from tierd_engine.device.fake import FakeDevice
        from tierd_engine.device.fakepath import FakePath
        from tierd_engine.device.pinning import HostLimits, Pins
        from tierd_engine.device.probing import ColdPaths

        device = FakeDevice(torn_copies=False)
        # So the disk's path is "gds" both ways: units land, and demoted pages are taken.
        reads, writes = itertools.count(), itertools.count()
        paths = ColdPaths(
            device, FakePath(device), counts=lambda: next(reads), write_counts=lambda: next(writes)
        )
        rig = fake_rig(device, Pins(device, HostLimits(None, None)), paths)
    else:
        rig = _open_cuda()
    try:
        yield rig
    finally:
        rig.close()


def _open_cuda() -> DeviceRig:
    rig = open_rig(DeviceName.CUDA)
    assert rig is not None, "CUDA was asked for"
    return rig


def random_model(scale: Scale, device: torch.device) -> Any:
    """Return a decoder of the scale's shape with random weights, on the device."""
    import transformers as tf

    geometry = scale.geometry
    config = tf.LlamaConfig(
        vocab_size=scale.vocabulary, hidden_size=scale.hidden,
        intermediate_size=scale.intermediate, num_hidden_layers=geometry.layers,
        num_attention_heads=scale.heads, num_key_value_heads=geometry.kv_heads,
        head_dim=geometry.head_dim, max_position_embeddings=2 * scale.context_tokens,
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(TORCH_DTYPES[geometry.dtype])
    try:
        with device:
            model = tf.LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)
    model.config._attn_implementation = ATTENTION_NAME
    return model


def wait_for(device: Device, event: Any) -> None:
    """Wait until all that is on the compute stream now has run."""
    device.record(event, device.compute, "record: check")
    device.wait_host(event, SYNC_SECONDS, "wait: check")
