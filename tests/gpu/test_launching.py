"""Each kernel compiles as its own launch asks for it, on a driver that has no GPU behind it.

Triton reads types, alignment and the number 1 off the arguments of a launch: another build than
`tierd_engine.gpu.building`'s. Done in a process of its own: this one interprets kernels.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

LAUNCHES = """
import json
from collections import Counter
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from tierd.codec.layout import page_layout
from tierd.types import CodecId, DType, Geometry
from tierd_engine.gpu.attending import attend_pages
from tierd_engine.gpu.decoding import decode_pages
from tierd_engine.gpu.digesting import digest_pages
from tierd_engine.gpu.encoding import encode_pages
from tierd_engine.gpu.merging import merge_partials
from tierd_engine.gpu.xxhashing import xxh3_pages

class Driver:
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))

builds, run = {}, JITFunction.run

def compiled(self, *arguments, grid, warmup, **options):
    assert all(type(extent) is int and 0 < extent < 2**16 for extent in grid), grid
    build = run(self, *arguments, grid=grid, warmup=True, **options)
    builds[id(build)] = self.__name__, build
    return build

driver.set_active(Driver())
JITFunction.run = compiled
geometry, heads = Geometry(1, 2, 64, DType.BFLOAT16, 64), 8

def step(layout, pages, n):
    q = torch.empty((n, heads, 64), dtype=torch.bfloat16)
    o, lse = torch.empty((pages, n, heads, 64)), torch.empty((pages, n, heads))
    addresses, tokens = torch.empty(pages, dtype=torch.int64), torch.empty(pages, dtype=torch.int32)
    positions = torch.empty(n, dtype=torch.int64)
    causal = (addresses, positions) if n > 1 else (None, None)
    attend_pages(q, addresses, tokens, layout, 0.125, o, lse, *causal)
    merge_partials(o, lse, torch.empty_like(o[0]), torch.empty_like(lse[0]))

for codec in (CodecId.RAW, CodecId.INT8):
    layout = page_layout(geometry, codec)
    for pages in (1, 3):
        addresses = torch.empty(pages, dtype=torch.int64)
        encode_pages(addresses, addresses, layout)
        decode_pages(addresses, addresses, addresses, 8192, layout, DType.BFLOAT16)
        decode_pages(addresses, addresses, addresses, 2**33, layout, DType.FLOAT32)
        digest_pages(addresses, layout.payload_bytes)
        xxh3_pages(addresses, layout.payload_bytes, torch.empty((pages, 2), dtype=torch.int64))
        step(layout, pages, 1)
    step(layout, 3, 2)
made = Counter(name for name, _ in builds.values())
again = len(builds)
for codec in (CodecId.RAW, CodecId.INT8):
    for pages in (2, 5, 16):  # a step's pages change: nothing may be built anew for it
        step(page_layout(geometry, codec), pages, 1)
print(json.dumps([made, len(builds) - again, max(b.metadata.shared for _, b in builds.values())]))
"""


def test_each_launch_compiles_and_other_counts_of_pages_compile_nothing_anew() -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHES], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    found: list[Any] = json.loads(done.stdout)
    made, anew, shared_bytes = found
    kernels = {"attend", "merge", "encode", "decode", "digest", "sums", "chain"}
    assert set(made) == {f"{name}_kernel" for name in kernels}
    # Of each codec one for a query and one for several, which is causal.
    assert made["attend_kernel"] == 4 and made["merge_kernel"] == 1 and anew == 0, found
    assert shared_bytes < 99 * 1024  # what the smallest of these GPUs has a program
