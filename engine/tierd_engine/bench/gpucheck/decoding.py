"""Decode over tiers at a long context, synthetic KV: each plan's tokens/s beside its links' limits.

Overlap: a step with only hot pages takes `resident` seconds, the copies of a step alone take
bytes ÷ the link's rate. What a step takes less than both together was hidden; the most that can
be is the shorter of the two.
"""

from __future__ import annotations

import re
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from tierd.codec.layout import page_layout
from tierd.errors import BudgetTooSmall
from tierd.types import CodecId, Tier
from tierd.units import GIB, MIB, format_size
from tierd_engine.arena import TORCH_DTYPES, hot_block_bytes
from tierd_engine.attention.plan import PlanMode
from tierd_engine.bench.gpucheck.scale import Scale, opened, random_model, wait_for
from tierd_engine.bench.rig import open_session_kv
from tierd_engine.bench.runners import TOKEN, below_bytes
from tierd_engine.device.executors import DeviceExecutors
from tierd_engine.device.opening import DeviceRig
from tierd_engine.generator import Generator
from tierd_engine.session import SessionKV

_WARM_UP_STEPS = 4  # the split between stream and near settles
_FILL_TOKENS = 512


def check_decode(scale: Scale, earlier: dict[str, Any], codec: CodecId) -> dict[str, Any]:
    """Return a row a plan, with all below hot warm, and the peak of VRAM over all of them."""
    warm = _slots_bytes(scale, codec, scale.context_tokens) + 64 * MIB
    room = available_bytes()
    if warm + 2 * GIB > room and not scale.is_dry:
        raise BudgetTooSmall(
            f"{codec.name.lower()} at {scale.context_tokens} tokens needs {format_size(warm)} of "
            f"RAM and 2 GiB to spare; {format_size(room)} are free",
            smallest_bytes=warm,
        )
    with opened(scale) as rig:
        model = random_model(scale, rig.device.torch_device)
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        _reset_peak(scale)
        total = scale.context_tokens + 64 * scale.geometry.block_tokens // 16
        with open_session_kv(
            scale.geometry, codec, scale.heads, hot_bytes=scale.hot_bytes, warm_bytes=warm,
            total_tokens=total, plan=PlanMode.STREAM, rig=rig,
        ) as kv:  # fmt: skip
            generator = Generator(model, kv)
            hot = (kv.arena.slot_count - 1) * scale.geometry.block_tokens
            fill(kv, min(hot, scale.context_tokens), rig)
            resident = _step_seconds(scale, rig, generator)
            fill(kv, scale.context_tokens, rig)
            plans = (PlanMode.STREAM, PlanMode.NEAR, PlanMode.AUTO)
            rows = [_row(scale, rig, generator, plan, resident, earlier) for plan in plans]
            staging = _staging_bytes(kv)
            figures = kv.workings.figures()
        peak = _peak(scale)
    return {
        "codec": codec.name.lower(), "context_tokens": scale.context_tokens,
        "resident_seconds": resident, "rows": rows, "device": figures,
        "vram": {"peak_bytes": peak, "weights_bytes": weights, "hot_bytes": scale.hot_bytes,
                 "staging_bytes": staging},
    }  # fmt: skip


def check_cold(scale: Scale, folder: Path, earlier: dict[str, Any]) -> dict[str, Any]:
    """Return a row of a session most of which is on the disk, and the paths that its pages took.

    Those that found warm full as they were demoted went to the disk at once: from VRAM, where the
    path allows it.
    """
    codec, tokens = CodecId.INT8, scale.cold_tokens
    geometry = scale.geometry
    all_bytes = _slots_bytes(scale, codec, tokens)
    with opened(scale) as rig, tempfile.TemporaryDirectory(dir=folder) as cold:
        model = random_model(scale, rig.device.torch_device)
        with open_session_kv(
            geometry, codec, scale.heads, hot_bytes=4 * hot_block_bytes(geometry),
            warm_bytes=all_bytes // 4, total_tokens=tokens + 4 * geometry.block_tokens,
            plan=PlanMode.STREAM, rig=rig, cold_folder=cold, cold_needed_bytes=all_bytes,
        ) as kv:  # fmt: skip
            generator = Generator(model, kv)
            began = time.perf_counter()
            fill(kv, tokens, rig)
            fill_seconds = time.perf_counter() - began
            cold_bytes = below_bytes(kv)[1]
            seconds = _step_seconds(scale, rig, generator)
            table = kv.handle.table.read(kv.sealed_blocks)
            figures = kv.workings.figures()
            written = kv.workings.cold_writer.figures()
            pages = int((table.tier == Tier.COLD).sum())
    rate = cold_bytes / seconds
    limit = earlier.get("links", {}).get("nvme_bytes_per_second")
    return {
        "tokens": tokens, "tokens_per_second": 1 / seconds, "cold_pages": pages,
        "cold_bytes_per_step": cold_bytes, "cold_bytes_per_second": rate,
        "of_nvme": rate / limit if limit else None, "fill_seconds": fill_seconds,
        "written": written, "device": figures,
    }  # fmt: skip


def fill(kv: SessionKV, tokens: int, rig: DeviceRig) -> None:
    """Fill a session to `tokens` tokens of random KV by its own append and demotion."""
    geometry, device = kv.geometry, rig.device
    shape = (2, geometry.kv_heads, _FILL_TOKENS, geometry.head_dim)
    dtype = TORCH_DTYPES[geometry.dtype]
    keys, values = torch.randn(shape, device=device.torch_device).to(dtype)
    while kv.position < tokens:
        n = min(_FILL_TOKENS, kv.step_tokens_max(), tokens - kv.position)
        kv.begin(n)
        kv.append_only()
        for layer in range(geometry.layers):
            kv.append(layer, keys[:, :n], values[:, :n])
        kv.finish()
    wait_for(device, device.new_event("filled"))


def available_bytes() -> int:
    """Return the RAM that may be used now without swapping."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.M)
    return int(found[1]) * 1024 if found else 0


def _slots_bytes(scale: Scale, codec: CodecId, tokens: int) -> int:
    slots = scale.geometry.layers * page_layout(scale.geometry, codec).slot_bytes
    return (scale.geometry.blocks_for(tokens) + 6) * slots


def _step_seconds(scale: Scale, rig: DeviceRig, generator: Generator) -> float:
    """Return the median seconds of a decode step."""
    generator.token_ids = [TOKEN] * generator.kv.position
    times = []
    for number in range(_WARM_UP_STEPS + scale.steps):
        began = time.perf_counter()
        generator.feed([TOKEN])
        if number >= _WARM_UP_STEPS:
            times.append(time.perf_counter() - began)
    return statistics.median(times)


def _row(
    scale: Scale, rig: DeviceRig, generator: Generator, plan: PlanMode, resident: float,
    earlier: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    kv = generator.kv
    kv.mode = plan
    executors = kv.executors
    assert isinstance(executors, DeviceExecutors)
    copied, near = executors.stager.counts.copied_bytes, executors.near.counts.bytes
    seconds = _step_seconds(scale, rig, generator)
    steps = _WARM_UP_STEPS + scale.steps
    copied = (executors.stager.counts.copied_bytes - copied) // steps
    near = (executors.near.counts.bytes - near) // steps
    links = earlier.get("links", {})
    row: dict[str, Any] = {
        "plan": str(plan), "tokens_per_second": 1 / seconds, "seconds": seconds,
        "link_bytes_per_step": copied, "near_bytes_per_step": near,
        "link_bytes_per_second": copied / seconds, "near_bytes_per_second": near / seconds,
        "hbm_bytes_per_second": kv.arena.used_bytes / seconds,
        "near_share": executors.rates.share,
    }  # fmt: skip
    for name, link in {"link": "pcie_up", "near": "dram", "hbm": "hbm"}.items():
        limit = links.get(f"{link}_bytes_per_second")
        row[f"of_{link}"] = row[f"{name}_bytes_per_second"] / limit if limit else None
    pcie = links.get("pcie_up_bytes_per_second")
    if pcie and copied:
        row |= overlap(seconds, resident, copied / pcie)
    return row


def overlap(seconds: float, resident: float, copying: float) -> dict[str, float]:
    """Return the share of copy time that was hidden, and that share of the most that can be."""
    hidden = min(max(resident + copying - seconds, 0.0), resident, copying)
    return {
        "hidden_of_copies": hidden / copying,
        "hidden_of_possible": hidden / min(resident, copying),
    }


def _staging_bytes(kv: SessionKV) -> int:
    """Return bytes of staging on the device: ring, parts, near's buffers, the encoder's."""
    host = kv.reader.ring.total_bytes
    return kv.executors.staging_bytes - host + kv.workings.encoder_bytes


def _reset_peak(scale: Scale) -> None:
    if not scale.is_dry:
        torch.cuda.reset_peak_memory_stats()


def _peak(scale: Scale) -> int | None:
    return None if scale.is_dry else int(torch.cuda.max_memory_allocated())
