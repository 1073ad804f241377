"""Every kernel compiled for GPUs that need not be here, and what each build takes of one.

`python -m tierd_engine.gpu.building` prints registers, shared memory and spills of each build. It
exits 1 if one spills, or if one whose bytes are compared with the CPU's may round otherwise. Needs
Triton with its ptxas, no GPU; not the interpreter.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tierd.codec.layout import page_layout
from tierd.types import CodecId, DType, Geometry
from tierd_engine.gpu.attending import attend_kernel
from tierd_engine.gpu.decoding import decode_kernel
from tierd_engine.gpu.digesting import digest_kernel
from tierd_engine.gpu.elements import EXACT, FUSED
from tierd_engine.gpu.encoding import ENCODE, encode_kernel
from tierd_engine.gpu.merging import MERGE, merge_kernel
from tierd_engine.gpu.shapes import (
    CallShape,
    PageShape,
    call_shape,
    constants,
    padded,
    page_shape,
    warps_of,
)
from tierd_engine.gpu.xxhashing import CHAIN, chain_kernel, sums_kernel

CAPABILITIES = (80, 90)
WARP = 32
CODECS = (CodecId.RAW, CodecId.INT8, CodecId.K8V4, CodecId.INT4, CodecId.FP8)
QUERIES = (1, 16)  # a step, and as many as the fused kernel takes: both numbers of rows
_POINTERS = {DType.FLOAT32: "*fp32", DType.BFLOAT16: "*bf16", DType.FLOAT16: "*fp16"}
# Instructions that are not one IEEE operation, rounded to nearest, subnormals kept.
_LOOSE = re.compile(
    r"^\s*(?:@\S+\s+)?(fma\.\S+|mad\.\S*f32|\w+\.(?:\S*\.)?(?:ftz|approx|full)\S*)", re.M
)
_RESOURCES = {
    "registers": r"Used (\d+) registers",
    "spill_bytes": r"(\d+) bytes spill stores",
    "stack_bytes": r"(\d+) bytes stack frame",
}


@dataclass(frozen=True, slots=True)
class Model:
    """A model's shape: `share` query heads a KV head."""

    name: str
    kv_heads: int
    share: int
    head_dim: int
    dtype: DType


MODELS = (
    Model("Llama-3", 8, 4, 128, DType.BFLOAT16),
    Model("Qwen2", 4, 7, 128, DType.BFLOAT16),
    Model("SmolLM2", 3, 3, 64, DType.BFLOAT16),
    Model("SmolLM2, float32", 3, 3, 64, DType.FLOAT32),
    Model("Llama-3, float16", 8, 4, 128, DType.FLOAT16),
)


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel and the types of its arguments, in order; a constant stands for itself."""

    name: str
    function: Any
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Build:
    """What one build takes: registers a thread, shared memory a program, spilled bytes.

    `loose`: instructions in it that may round otherwise than the CPU's one IEEE step at a time.
    """

    kernel: str
    capability: int
    registers: int
    shared_bytes: int
    spill_bytes: int
    stack_bytes: int
    cubin_bytes: int
    loose: tuple[str, ...]
    must_be_exact: bool

    @property
    def is_spilled(self) -> bool:
        """Whether registers were put into local memory."""
        return self.spill_bytes > 0 or self.stack_bytes > 0

    @property
    def is_refused(self) -> bool:
        """Whether this build must not be used."""
        return self.is_spilled or (self.must_be_exact and bool(self.loose))


def kernels_of(model: Model, queries: tuple[int, ...] = QUERIES) -> Iterator[Kernel]:
    """Yield every kernel that a model's jobs run, attention for these numbers of queries."""
    geometry = Geometry(1, model.kv_heads, model.head_dim, model.dtype)
    heads = model.kv_heads * model.share
    arguments: tuple[Any, ...]
    for codec in CODECS:
        layout = page_layout(geometry, codec)
        page = page_shape(layout)
        arguments = ("*i64", "*i64", "*i32", page)
        yield Kernel(f"encode {codec.name.lower()}", encode_kernel, arguments, ENCODE)
        for to in sorted({model.dtype, DType.FLOAT32}):
            arguments = ("*i64", "*i64", "*i64", "i32", page, to.value)
            yield Kernel(f"decode {codec.name.lower()} to {to}", decode_kernel, arguments, EXACT)
        for n in queries:
            call = call_shape(layout, heads, n, is_causal=n > 1, is_interpreted=False)
            arguments = (
                _POINTERS[model.dtype], "*i64", "*i32", "*i64", "*i64", "*fp32", "*fp32", "fp32",
                "i32", "i32", "i32", page, call,
            )  # fmt: skip
            name = f"attend {codec.name.lower()}, {n} queries"
            yield Kernel(
                name, attend_kernel, arguments, {**FUSED, "num_warps": warps_of(page, call)}
            )
    sizes = (model.head_dim, padded(model.head_dim))
    arguments = ("*fp32", "*fp32", "*fp32", "*fp32", "i32", "i32", *sizes)
    yield Kernel("merge", merge_kernel, arguments, MERGE)
    yield Kernel("digest", digest_kernel, ("*i64", "*i64", "i32"), EXACT)
    yield Kernel("xxh3 sums", sums_kernel, ("*i64", "*i64", "i32", "i32"), EXACT)
    yield Kernel("xxh3 chain", chain_kernel, ("*i64", "*i64", "i32", "i32"), CHAIN)


def build(kernel: Kernel, capability: int) -> Build:
    """Compile a kernel to a cubin. Raises Triton's errors if it does not compile."""
    names = kernel.function.arg_names
    types: dict[str, str] = {}
    fixed: dict[tuple[int, ...], Any] = {}
    aligned: dict[tuple[int, ...], Any] = {}
    for i, (name, argument) in enumerate(zip(names, kernel.arguments, strict=True)):
        is_type = isinstance(argument, str) and re.fullmatch(r"\*?(i|fp|bf)\d+", argument)
        types[name] = argument if is_type else "constexpr"
        if not is_type:
            is_shape = isinstance(argument, PageShape | CallShape)
            fixed[(i,)] = constants(argument) if is_shape else argument
        elif argument.startswith("*"):
            aligned[(i,)] = [["tt.divisibility", 16]]  # as torch's allocations are
    source = ASTSource(kernel.function, signature=types, constexprs=fixed, attrs=aligned)
    said = io.StringIO()
    with triton.knobs.compilation.scope(), triton.knobs.nvidia.scope(), redirect_stdout(said):
        triton.knobs.compilation.always_compile = True  # what lies in the cache says nothing
        triton.knobs.nvidia.dump_ptxas_log = True
        compiled = triton.compile(
            source, target=GPUTarget("cuda", capability, WARP), options=dict(kernel.options)
        )
    return Build(
        kernel.name, capability, shared_bytes=compiled.metadata.shared,
        cubin_bytes=len(compiled.asm["cubin"]),
        loose=tuple(sorted(set(_LOOSE.findall(compiled.asm["ptx"])))),
        must_be_exact=not kernel.options["enable_fp_fusion"],
        **{name: int(_found(pattern, said.getvalue())) for name, pattern in _RESOURCES.items()},
    )  # fmt: skip


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(f"{pattern!r} is not in what the compiler said: {text[:400]!r}")
    return match[1]


def main() -> int:
    """Build everything, a line each; return 1 if a build is refused."""
    parser = argparse.ArgumentParser(prog="gpu-compile", description=__doc__)
    parser.add_argument("--model", choices=[model.name for model in MODELS], help="this one only")
    parser.add_argument("--json", action="store_true", help="an object a line")
    parser.add_argument("--quick", action="store_true", help="attention of one query only")
    chosen = parser.parse_args()
    if triton.knobs.runtime.interpret:
        parser.error("TRITON_INTERPRET is set: nothing would be compiled")
    refused = 0
    for model in MODELS:
        if chosen.model not in (None, model.name):
            continue
        for kernel in kernels_of(model, QUERIES[:1] if chosen.quick else QUERIES):
            for capability in CAPABILITIES:
                result = build(kernel, capability)
                refused += result.is_refused
                line = json.dumps({"model": model.name, **asdict(result)})
                sys.stdout.write((line if chosen.json else _told(model, result)) + "\n")
                sys.stdout.flush()
    return 1 if refused else 0


def _told(model: Model, result: Build) -> str:
    spills = f"{result.spill_bytes} B spilled" if result.is_spilled else "no spills"
    if result.must_be_exact:
        spills += f", not exact: {' '.join(result.loose)}" if result.loose else ", exact"
    return (
        f"sm_{result.capability}  {model.name:<18} {result.kernel:<24} {result.registers:>3} "
        f"registers  {result.shared_bytes:>6} B shared  {result.cubin_bytes:>6} B cubin  {spills}"
    )


if __name__ == "__main__":
    sys.exit(main())
