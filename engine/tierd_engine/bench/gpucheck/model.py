"""SmolLM2 on the device: raw pages give the own cache's tokens, int8's loss is within its bar."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from tierd.codec.layout import page_layout
from tierd.errors import NotFound, TierdError
from tierd.types import CodecId, DType, Geometry
from tierd_engine import hf
from tierd_engine.arena import hot_block_bytes
from tierd_engine.attention.plan import PlanMode
from tierd_engine.bench.gpucheck.scale import Scale, opened, random_model
from tierd_engine.bench.rig import open_session_kv
from tierd_engine.device.opening import DeviceRig
from tierd_engine.fidelity import OwnCacheRun, kl_divergence
from tierd_engine.generator import Generator
from tierd_engine.prompt import build_prompt

LOGIT_DIFFERENCE_MAX = 3e-4  # attention.md: of raw, in float32
KL_MAX = 1e-4  # attention.md: of int8, mean
CONTEXT_TOKENS, NEW_TOKENS = 2000, 128


def check_model(scale: Scale, _: Path, __: dict[str, Any]) -> dict[str, Any]:
    """Return what raw and int8 did on SmolLM2 in float32; a random model where it is not there."""
    torch.backends.cuda.matmul.allow_tf32 = False
    with opened(scale) as rig:
        name, model, geometry, prompt, new_tokens = _chosen(scale, rig)
        own = OwnCacheRun(model)
        logits = [own.prefill(prompt)]
        tokens = [int(logits[0].argmax())]
        while len(tokens) < new_tokens:
            logits.append(own.decode(tokens[-1]))
            tokens.append(int(logits[-1].argmax()))
        heads = int(model.config.num_attention_heads)
        rows = []
        for codec in (CodecId.RAW, CodecId.INT8):
            plans = tuple(PlanMode) if codec is CodecId.RAW else (PlanMode.STREAM,)
            for plan in plans:
                ours = _forced(scale, model, geometry, heads, codec, plan, prompt, tokens)
                rows.append(_row(codec, plan, logits, ours))
    return {
        "model": name, "context_tokens": len(prompt), "tokens": new_tokens, "rows": rows,
        "holds": all(row["holds"] for row in rows),
    }  # fmt: skip


def _chosen(scale: Scale, rig: DeviceRig) -> tuple[str, Any, Geometry, list[int], int]:
    where = rig.device.torch_device
    if scale.is_dry:
        model = random_model(scale, where).float()
        shape = hf.model_shape(model.config)
        prompt = [int(i) for i in np.random.default_rng(1).integers(0, scale.vocabulary, 300)]
        return "random weights", model, shape.geometry(DType.FLOAT32, 64), prompt, 6
    from tierd_engine.bench.texts import python_reference

    try:
        folder = hf.resolve_model(hf.PACKAGED_MODEL)
    except TierdError as error:
        raise NotFound(f"SmolLM2 is not here: {error}") from error
    config = hf.load_config(folder)
    model = hf.load_model(folder, config, DType.FLOAT32).to(where)
    tokenizer = hf.load_tokenizer(folder)
    prompt = build_prompt(tokenizer, python_reference(), "What is it?", CONTEXT_TOKENS).token_ids
    geometry = hf.model_shape(config).geometry(DType.FLOAT32, 128)
    return "SmolLM2-135M", model, geometry, prompt, NEW_TOKENS


def _forced(
    scale: Scale, model: Any, geometry: Geometry, heads: int, codec: CodecId, plan: PlanMode,
    prompt: list[int], tokens: list[int],
) -> list[torch.Tensor]:  # fmt: skip
    """Return the logits over tiers, each after the own cache's tokens before it."""
    total = len(prompt) + len(tokens)
    blocks = geometry.blocks_for(total)
    slots = geometry.layers * page_layout(geometry, codec).slot_bytes
    raw = geometry.layers * page_layout(geometry, CodecId.RAW).slot_bytes
    with opened(scale) as rig, open_session_kv(
        geometry, codec, heads, hot_bytes=max(3, blocks // 4) * hot_block_bytes(geometry),
        warm_bytes=(blocks + 2) * slots + 2 * raw, total_tokens=total, plan=plan, rig=rig,
    ) as kv:  # fmt: skip
        generator = Generator(model, kv)
        logits = [generator.feed(prompt)]
        logits += [generator.feed([token]) for token in tokens[:-1]]
        kv.check_integrity()
        return logits


def _row(
    codec: CodecId, plan: PlanMode, own: list[torch.Tensor], ours: list[torch.Tensor]
) -> dict[str, Any]:
    difference = max(float((a - b).abs().max()) for a, b in zip(own, ours, strict=True))
    is_same = all(int(a.argmax()) == int(b.argmax()) for a, b in zip(own, ours, strict=True))
    kl = sum(kl_divergence(a, b) for a, b in zip(own, ours, strict=True)) / len(own)
    is_raw = codec is CodecId.RAW
    holds = is_same and difference < LOGIT_DIFFERENCE_MAX if is_raw else kl < KL_MAX
    return {
        "codec": codec.name.lower(), "plan": str(plan), "tokens_identical": is_same,
        "logit_difference_max": difference, "kl_mean": kl, "holds": holds,
    }  # fmt: skip
