"""The resident path beside PyTorch's own decode attention over a contiguous cache, one layer."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from tierd_engine.arena import TORCH_DTYPES, hot_block_bytes
from tierd_engine.bench.gpucheck.kernels import SHARPNESS
from tierd_engine.bench.gpucheck.scale import Scale, opened, wait_for
from tierd_engine.device.arena import DeviceArena
from tierd_engine.device.opening import DeviceRig

_ROUNDS, _CALLS = 7, 20
ERROR_MAX = 1e-2  # PyTorch's o is rounded to bfloat16: 2^-9 of up to 3


def check_resident(scale: Scale, _: Path, __: dict[str, Any]) -> dict[str, Any]:
    """Return seconds of ours and of PyTorch's fastest, and the largest difference."""
    with opened(scale) as rig:
        return _compare(scale, rig)


def _compare(scale: Scale, rig: DeviceRig) -> dict[str, Any]:
    geometry = replace(scale.geometry, layers=1)
    blocks = scale.resident_tokens // geometry.block_tokens
    device, kernels = rig.device, rig.kernels
    arena = DeviceArena(device, geometry, blocks * hot_block_bytes(geometry), blocks_max=blocks)
    slots = [arena.allocate() for _ in range(blocks)]
    where, dtype = device.torch_device, TORCH_DTYPES[geometry.dtype]
    shape = (geometry.kv_heads, scale.resident_tokens, geometry.head_dim)
    keys, values = (torch.randn(shape, device=where).to(dtype) for _ in range(2))
    for number, slot in enumerate(slots):
        part = slice(number * geometry.block_tokens, (number + 1) * geometry.block_tokens)
        arena.write(slot, 0, 0, keys[:, part], values[:, part])
    heads, d = scale.heads, geometry.head_dim
    q = (SHARPNESS * torch.randn((1, heads, d), device=where)).to(dtype)
    addresses = np.array([arena.page_address(slot, 0) for slot in slots], np.int64)
    pages = torch.from_numpy(addresses).to(where)
    tokens = torch.full((blocks,), geometry.block_tokens, dtype=torch.int32, device=where)
    o = torch.empty((blocks, 1, heads, d), device=where)
    lse = torch.empty((blocks, 1, heads), device=where)
    out, out_lse = torch.empty((1, heads, d), device=where), torch.empty((1, heads), device=where)

    def ours() -> None:
        kernels.attend(q, pages, tokens, arena.layout, d**-0.5, o, lse, None, None, 1)
        kernels.merge(o, lse, out, out_lse)

    as_heads = q.view(1, heads, 1, d)
    as_rows = q.view(1, geometry.kv_heads, heads // geometry.kv_heads, d)
    theirs: dict[str, Callable[[], Any]] = {
        "grouped": lambda: F.scaled_dot_product_attention(
            as_heads, keys[None], values[None], enable_gqa=True
        ),
        "a KV head's queries as rows": lambda: F.scaled_dot_product_attention(
            as_rows, keys[None], values[None]
        ),
    }
    times = {"ours": _seconds(rig, ours)}
    times |= {name: _seconds(rig, call) for name, call in theirs.items()}
    exact = theirs["a KV head's queries as rows"]().float().view(heads, d)
    error = float((out[0] - exact).abs().max())
    arena.close()
    fastest = min(seconds for name, seconds in times.items() if name != "ours")
    read = 2 * keys.numel() * keys.element_size()
    return {
        "tokens": scale.resident_tokens, "seconds": times, "ratio": times["ours"] / fastest,
        "bytes_per_second": read / times["ours"], "error": error, "holds": error < ERROR_MAX,
    }  # fmt: skip


def _seconds(rig: DeviceRig, call: Callable[[], Any]) -> float:
    device, ended = rig.device, rig.device.new_event("calls")
    times = []
    for _ in range(_ROUNDS + 1):
        began = time.perf_counter()
        for _ in range(_CALLS):
            device.launch(device.compute, lambda: _run(call))
        wait_for(device, ended)
        times.append((time.perf_counter() - began) / _CALLS)
    return statistics.median(times[1:])


def _run(call: Callable[[], Any]) -> None:
    call()
