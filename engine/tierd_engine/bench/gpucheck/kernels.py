"""Every GPU kernel and codec against the CPU, on fresh random pages; the seed is in the report."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from subprocess import SubprocessError
from typing import Any

import numpy as np
import torch

from tierd import codec as host
from tierd.codec.devicedigest import device_digests
from tierd.codec.layout import PageLayout, page_layout
from tierd.errors import TierdError
from tierd.types import CodecId, DType
from tierd_engine.arena import TORCH_DTYPES
from tierd_engine.bench.gpucheck.scale import Scale

CODECS = (CodecId.RAW, CodecId.INT8, CodecId.K8V4, CodecId.INT4, CodecId.FP8)
# Few tokens then hold most of the weight, so that o is of the values' own size, 1, and an error
# shows; weights rounded to bfloat16 are off by 2^-9 each.
SHARPNESS = 3.0
ATTEND_ERROR_MAX = 5e-3
_ROUND_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class _Pages:
    """Pages side by side on a device, all poison; addresses int64 [count]."""

    memory: torch.Tensor
    addresses: torch.Tensor

    @classmethod
    def empty(cls, count: int, layout: PageLayout, device: torch.device) -> _Pages:
        memory = torch.full((count, layout.payload_bytes), 0xFF, dtype=torch.uint8, device=device)
        steps = torch.arange(count, dtype=torch.int64, device=device) * layout.payload_bytes
        return cls(memory, steps + memory.data_ptr())

    def on_host(self) -> np.ndarray[Any, Any]:
        copy: np.ndarray[Any, Any] = self.memory.cpu().numpy().copy()
        return copy


def check_kernels(scale: Scale, _: Path, __: dict[str, Any]) -> dict[str, Any]:
    """Return a row a codec and kernel: whether it holds, and what was seen."""
    device = torch.device("cpu") if scale.is_dry else _cuda()
    seed = int(np.random.default_rng().integers(2**32))
    rows = []
    for codec in CODECS:
        rows += list(_codec_rows(scale, codec, device, seed))
    return {"seed": seed, "rows": rows, "holds": all(row["holds"] for row in rows)}


def _cuda() -> torch.device:
    if not torch.cuda.is_available():
        from tierd.errors import DeviceUnavailable

        raise DeviceUnavailable("torch finds no CUDA device")
    return torch.device("cuda", 0)


def _codec_rows(
    scale: Scale, codec: CodecId, device: torch.device, seed: int
) -> Iterator[dict[str, Any]]:
    from triton.errors import TritonError  # of a kernel that does not compile, or does not fit

    # The interpreter takes a second for each few hundred programs.
    geometry = replace(
        scale.geometry, layers=1, kv_heads=1 if scale.is_dry else scale.geometry.kv_heads
    )
    raw, layout = page_layout(geometry, CodecId.RAW), page_layout(geometry, codec)
    generator = torch.Generator().manual_seed(seed)
    count = 2 if scale.is_dry else 5
    shape = count, raw.payload_bytes // raw.dtype.itemsize
    x = torch.randn(shape, generator=generator).to(TORCH_DTYPES[raw.dtype])
    hot = _Pages.empty(count, raw, device)
    hot.memory.copy_(x.view(torch.uint8))
    encoded = _Pages.empty(count, layout, device)
    ours = np.full((count, layout.payload_bytes), 0xFF, np.uint8)
    source, target = hot.on_host(), ours
    host.encode_pages(_addresses(source), _addresses(target), layout)
    checks: dict[str, Callable[[], float]] = {
        "encode": lambda: _encode(hot, encoded, layout, ours),
        "digest": lambda: _digest(encoded, layout, ours),
        "xxh3": lambda: _xxh3(encoded, layout, ours),
        "decode": lambda: _decode(encoded, layout, ours, device),
        "attend": lambda: _attend(scale, encoded, layout, ours, generator),
    }
    for name, check in checks.items():
        allowed = ATTEND_ERROR_MAX if name == "attend" else 0.0
        row: dict[str, Any] = {"codec": codec.name.lower(), "kernel": name, "allowed": allowed}
        try:
            row["error"] = check()
            row["holds"] = row["error"] <= allowed
            if name == "xxh3" and device.type == "cuda":
                row["bytes_per_second"] = _xxh3_rate(encoded, layout)
        except (RuntimeError, TierdError, AssertionError, SubprocessError, TritonError) as error:
            row |= {"error": None, "holds": False, "said": str(error)[:300]}
        yield row


def _addresses(pages: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    steps: np.ndarray[Any, Any] = np.arange(len(pages), dtype=np.int64) * pages.shape[1]
    return pages.ctypes.data + steps


def _encode(hot: _Pages, encoded: _Pages, layout: PageLayout, ours: Any) -> float:
    """Return how many bytes differ; a page that is refused counts whole."""
    from tierd_engine.gpu.encoding import encode_pages

    status = encode_pages(hot.addresses, encoded.addresses, layout)
    differ = (encoded.on_host() != ours).sum()
    return float(differ) + float((status != 0).sum()) * layout.payload_bytes


def _digest(encoded: _Pages, layout: PageLayout, ours: Any) -> float:
    from tierd_engine.gpu.digesting import digest_pages

    encoded.memory.copy_(torch.from_numpy(ours))  # whatever the encoder did
    found = digest_pages(encoded.addresses, layout.payload_bytes).cpu().numpy().view(np.uint64)
    return float((found != device_digests(_addresses(ours), layout.payload_bytes)).sum())


def _xxh3(encoded: _Pages, layout: PageLayout, ours: Any) -> float:
    from tierd_engine.gpu.xxhashing import xxh3_pages

    encoded.memory.copy_(torch.from_numpy(ours))
    out = torch.full((len(ours), 2), -1, dtype=torch.int64, device=encoded.memory.device)
    xxh3_pages(encoded.addresses, layout.payload_bytes, out)
    halves = out.cpu().numpy().astype(">i8").view(np.uint8)
    expected = host.digest_pages(_addresses(ours), layout.payload_bytes)
    return float((halves.reshape(-1, 16) != expected).any(axis=1).sum())


def _xxh3_rate(encoded: _Pages, layout: PageLayout) -> float:
    """Return bytes digested per second, of as many pages as a round has."""
    from tierd_engine.gpu.xxhashing import xxh3_pages

    times = _ROUND_BYTES // layout.payload_bytes // len(encoded.addresses) + 1
    addresses = encoded.addresses.repeat(times)
    out = torch.empty((len(addresses), 2), dtype=torch.int64, device=addresses.device)
    make: Any = torch.cuda.Event  # it has no types
    began, ended = make(enable_timing=True), make(enable_timing=True)
    for _ in range(2):  # the first one compiles nothing, but finds its memory
        began.record()
        xxh3_pages(addresses, layout.payload_bytes, out)
        ended.record()
        ended.synchronize()
    seconds: float = began.elapsed_time(ended) * 1e-3
    return len(addresses) * layout.payload_bytes / seconds


def _decoded(ours: Any, layout: PageLayout) -> tuple[Any, Any]:
    """Return the CPU's float32 keys and values, [kv_heads, pages * tokens, head_dim]."""
    shape = (layout.kv_heads, len(ours) * layout.block_tokens, layout.head_dim)
    keys, values = np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32)
    host.decode_pages(_addresses(ours), layout, keys, values)
    return keys, values


def _decode(encoded: _Pages, layout: PageLayout, ours: Any, device: torch.device) -> float:
    from tierd_engine.gpu.decoding import decode_pages

    keys, values = _decoded(ours, layout)
    out = torch.full((2, *keys.shape), torch.nan, device=device)
    page_bytes = layout.block_tokens * layout.head_dim * 4
    pages = torch.arange(len(ours), dtype=torch.int64, device=device) * page_bytes
    head_bytes = keys.shape[1] * layout.head_dim * 4
    decode_pages(
        encoded.addresses, out[0].data_ptr() + pages, out[1].data_ptr() + pages, head_bytes,
        layout, DType.FLOAT32,
    )  # fmt: skip
    found = out.cpu().numpy()
    return float((found[0] != keys).sum() + (found[1] != values).sum())


def _attend(
    scale: Scale, encoded: _Pages, layout: PageLayout, ours: Any, generator: torch.Generator
) -> float:
    """Return the largest error of attention and merge against float64, for one query."""
    from tierd_engine.gpu.attending import attend_pages
    from tierd_engine.gpu.merging import merge_partials

    device, heads, d = encoded.memory.device, scale.heads, layout.head_dim
    q = SHARPNESS * torch.randn((1, heads, d), generator=generator)
    q = q.to(TORCH_DTYPES[layout.dtype])
    tokens = torch.full((len(ours),), layout.block_tokens, dtype=torch.int32)
    tokens[-1] = layout.block_tokens // 2 + 1  # a ragged tail
    o = torch.full((len(ours), 1, heads, d), torch.nan, device=device)
    lse = torch.full((len(ours), 1, heads), torch.nan, device=device)
    out, out_lse = torch.full_like(o[0], torch.nan), torch.full_like(lse[0], torch.nan)
    attend_pages(
        q.to(device), encoded.addresses, tokens.to(device), layout, d**-0.5, o, lse
    )  # fmt: skip
    merge_partials(o, lse, out, out_lse)
    keys, values = _decoded(ours, layout)
    end = int(tokens.sum())
    share = heads // layout.kv_heads
    wide = q[0].double().numpy().reshape(layout.kv_heads, share, d)
    score = np.einsum("gsd,gtd->gst", wide, keys[:, :end].astype(np.float64)) * d**-0.5
    weights = np.exp(score - score.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    exact = np.einsum("gst,gtd->gsd", weights, values[:, :end].astype(np.float64))
    error = np.abs(out[0].cpu().double().numpy().reshape(exact.shape) - exact).max()
    return float("inf") if np.isnan(error) else float(error)
