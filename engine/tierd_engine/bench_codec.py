"""Codec throughput beside this machine's memory copy and plain PyTorch, in one run, alternating.

Figures are GB/s of hot (bfloat16) bytes, whichever way they go; the limit is
the faster of two copies of the same bytes: PyTorch's, and memcpy page by page
(encode raw). Data is synthetic: right for throughput only.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tierd.codec import PageLayout, decode_pages, digest_pages, encode_pages, page_layout
from tierd.codec.devicedigest import device_digests
from tierd.types import CodecId, DType, Geometry
from tierd_engine.bench.machine import describe_machine

# The bars: the speed of encoding ÷ that of a copy. fp8 has none: it is for GPUs.
TORCH_TIMES_MIN = 20
ENCODE_RATIO_MIN = {CodecId.INT8: 0.5, CodecId.K8V4: 0.3, CodecId.INT4: 0.3}

_GEOMETRY = Geometry(layers=30, kv_heads=3, head_dim=64, dtype=DType.BFLOAT16, block_tokens=256)
_CODECS = (CodecId.INT8, CodecId.K8V4, CodecId.INT4, CodecId.FP8)
_PAGES = 1200  # 236 MB: several times any last-level cache
_ROUNDS = 9
_PAUSE_SECONDS = 0.02  # PyTorch's OpenMP threads spin for about 4 ms after each operator


@dataclass(frozen=True, slots=True)
class CodecRow:
    """One measured figure; `ratio` is to the copy of the same run."""

    name: str
    bytes_per_second: float
    limit_bytes_per_second: float

    @property
    def ratio(self) -> float:
        """Achieved ÷ limit."""
        return self.bytes_per_second / self.limit_bytes_per_second


class _Buffer:
    """`count` pages side by side in one allocation, 64-byte aligned."""

    def __init__(self, count: int, layout: PageLayout) -> None:
        self.tensor = torch.zeros(count * layout.payload_bytes, dtype=torch.uint8)
        pages = np.arange(count, dtype=np.int64)
        self.addresses: npt.NDArray[np.int64] = (
            self.tensor.data_ptr() + pages * layout.payload_bytes
        )


def benchmark_codec() -> list[CodecRow]:
    """Measure encode, decode and digest; print each with limit and ratio; return the rows."""
    raw = page_layout(_GEOMETRY, CodecId.RAW)
    hot, copy = _Buffer(_PAGES, raw), _Buffer(_PAGES, raw)
    hot.tensor.view(torch.bfloat16).normal_()
    shape = (_GEOMETRY.kv_heads, _PAGES * _GEOMETRY.block_tokens, _GEOMETRY.head_dim)
    arrays = np.zeros(shape, np.uint16), np.zeros(shape, np.uint16)
    actions: dict[str, Callable[[], object]] = {
        "copy, torch": lambda: copy.tensor.copy_(hot.tensor),
        "copy, encode raw": lambda: encode_pages(hot.addresses, copy.addresses, raw),
    }
    for codec in _CODECS:
        actions |= _codec_actions(codec, hot, arrays)
    actions["encode int8, plain torch"] = lambda: _encode_with_torch(hot.tensor, raw)
    compile_seconds = sum(_seconds(action) for action in actions.values())
    times: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(_ROUNDS):
        for name, action in actions.items():
            times[name].append(_seconds(action))
    rows = _rows(times, hot.tensor.numel())
    _print(rows, compile_seconds)
    return rows


def _codec_actions(
    codec: CodecId, hot: _Buffer, arrays: tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint16]]
) -> dict[str, Callable[[], object]]:
    layout = page_layout(_GEOMETRY, codec)
    name, encoded = codec.name.lower(), _Buffer(_PAGES, layout)
    actions: dict[str, Callable[[], object]] = {
        f"encode {name}": lambda: encode_pages(hot.addresses, encoded.addresses, layout),
        f"decode {name}": lambda: decode_pages(encoded.addresses, layout, *arrays),
    }
    if codec is CodecId.INT8:
        actions["encode int8, 1 thread"] = lambda: encode_pages(
            hot.addresses, encoded.addresses, layout, threads=1
        )
        actions["digest int8"] = lambda: digest_pages(encoded.addresses, layout.payload_bytes)
        actions["device digest int8"] = lambda: device_digests(
            encoded.addresses, layout.payload_bytes
        )
    return actions


def _rows(times: dict[str, list[float]], hot_bytes: int) -> list[CodecRow]:
    copies = (seconds for name, seconds in times.items() if name.startswith("copy"))
    limit = hot_bytes / min(statistics.median(seconds) for seconds in copies)
    rows = []
    for name, seconds in times.items():
        rows.append(CodecRow(name, hot_bytes / statistics.median(seconds), limit))
    return rows


def _print(rows: list[CodecRow], first_call_seconds: float) -> None:
    write = sys.stdout.write
    bars = {f"encode {codec.name.lower()}": bar for codec, bar in ENCODE_RATIO_MIN.items()}
    write(f"codec: {describe_machine()}\n")
    write(f"{'GB/s of bfloat16':<26}{'figure':>8}{'limit':>8}{'ratio':>8}\n")
    for row in rows:
        figure, limit = row.bytes_per_second / 1e9, row.limit_bytes_per_second / 1e9
        verdict = ""
        if row.name in bars:
            verdict = f"  bar {bars[row.name]} {_held(row.ratio >= bars[row.name])}"
        write(f"{row.name:<26}{figure:>8.2f}{limit:>8.2f}{row.ratio:>8.2f}{verdict}\n")
    speeds = {row.name: row.bytes_per_second for row in rows}
    times = speeds["encode int8"] / next(v for k, v in speeds.items() if k.endswith("plain torch"))
    write(
        f"encode int8 is {times:.1f} times plain torch  bar {TORCH_TIMES_MIN} "
        f"{_held(times >= TORCH_TIMES_MIN)}\n"
    )
    write(f"first calls, kernels compiled: {first_call_seconds:.1f} s\n")


def _held(holds: bool) -> str:
    return "holds" if holds else "MISSED"


def _encode_with_torch(hot: torch.Tensor, raw: PageLayout) -> list[torch.Tensor]:
    """The same codes and scales (less key_error) of the same pages with PyTorch's operators.

    Of a few pages, whose intermediate tensors stay in the caches, they make seven times as many
    bytes a second: 2.0 GB/s of 30 pages beside 0.28 of 1,200.
    """
    part = (-1, 2, raw.block_tokens, raw.head_dim)
    pages = hot.view(torch.bfloat16).view(part).float()
    keys = pages[:, 0].reshape(len(pages), -1, raw.group_tokens, raw.head_dim)
    out = []
    for x, axis in ((keys, 2), (pages[:, 1], 2)):
        zero = x.amin(axis, keepdim=True).half()
        scale = ((x.amax(axis, keepdim=True) - zero.float()) / 255).half()
        codes = ((x - zero.float()) / scale.float()).round().clamp(0, 255).to(torch.uint8)
        out += [zero, scale, codes]
    out[2] = out[2].transpose(2, 3).contiguous()
    return out


def _seconds(action: Callable[[], object]) -> float:
    time.sleep(_PAUSE_SECONDS)
    start = time.perf_counter()
    action()
    return time.perf_counter() - start
