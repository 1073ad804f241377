"""What tests over real sockets share: daemons in this process and in others, engines, pages.

Pages have made-up bytes that depend on (layer, block), so a page at a wrong place shows.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from tierd.client import Client, Demotion, SessionHandle
from tierd.codec.digest import payload_digest
from tierd.codec.layout import HEADER_BYTES, page_layout
from tierd.config import DaemonConfig, load_config
from tierd.disk.header import SlotHeader
from tierd.disk.slotlocks import lock_range
from tierd.errors import DaemonUnavailable
from tierd.types import CodecId, DType, Geometry, Namespace, Tier

LAYERS = 2
# float32 pages of 16 x 128: a raw slot has 20 KiB, an int8 slot 12 KiB.
GEOMETRY = Geometry(LAYERS, kv_heads=1, head_dim=128, dtype=DType.FLOAT32, block_tokens=16)
INT8 = Namespace(GEOMETRY, "weights", CodecId.INT8)
OTHER = Namespace(GEOMETRY, "other weights", CodecId.INT8)
BLOCK_BYTES = LAYERS * page_layout(GEOMETRY, CodecId.INT8).slot_bytes
MAX_TOKENS = 64 * GEOMETRY.block_tokens
START_SECONDS = 60.0  # a Python process with grpc starts in about one, alone on the machine
ROOT = Path(__file__).parent.parent


def small_config(folder: Path, *, warm_bytes: int = 4 << 20, **overrides: object) -> DaemonConfig:
    """Return settings of a small daemon that keeps everything under `folder`."""
    settings = {
        "service.socket": str(folder / "run" / "tierd.sock"),
        "service.drain_seconds": 0.5,
        "service.log_level": "error",
        "warm.budget_bytes": warm_bytes,
        "cold.folder": str(folder / "cold"),
        "cold.cap_bytes": 64 << 20,
        "cold.slab_bytes": 1 << 20,
        "cold.ephemeral": True,
    }
    return load_config(overrides={**settings, **overrides})


@contextmanager
def daemon_process(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Run `tierd serve` in a process of its own; yield it and its socket."""
    socket = str(folder / "run" / "tierd.sock")
    command = [sys.executable, "-m", "tierd.cli", "serve", "--socket", socket, "--warm", "4MiB",
               "--cold-dir", str(folder / "cold"), "--cold-cap", "64MiB"]  # fmt: skip
    with process(command) as daemon:
        eventually(lambda: connects(socket), START_SECONDS)
        yield daemon, socket


@contextmanager
def process(command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command that can import what this process can; it is killed at the end."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    child = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdin is not None and child.stdout is not None
    try:
        yield child
    finally:
        child.kill()
        child.stdin.close()
        child.stdout.close()
        child.wait(timeout=10.0)


@contextmanager
def engine_process(socket: str, script: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run `script` in an engine's process, with `client` connected; yield it once it says so.

    The script ends with print("ready") and then the process waits for its stdin to close.
    """
    lines = [
        "from tests.wirerig import *",
        f"client = Client.connect({socket!r})",
        script,
        "print('ready', flush=True)",
        "sys.stdin.read()",
    ]
    with process([sys.executable, "-c", "\n".join(lines)]) as engine:
        assert engine.stdout is not None
        said = engine.stdout.readline()
        while said and said != b"ready\n":
            said = engine.stdout.readline()
        assert said, "the engine's process ended early"
        yield engine


def connects(socket: str) -> bool:
    """Say whether a daemon answers."""
    try:
        Client.connect(socket, kind="tool").close()
    except DaemonUnavailable:
        return False
    return True


def eventually(condition: Callable[[], bool], seconds: float = 5.0) -> float:
    """Wait until `condition` holds; return the seconds it took. AssertionError at the limit."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < seconds, f"not so within {seconds} s"
        time.sleep(0.01)
    return time.monotonic() - started


def page_bytes(layer: int, block: int, codec: CodecId) -> bytes:
    """Return the made-up payload of a page."""
    size = page_layout(GEOMETRY, codec).payload_bytes
    return np.random.default_rng((layer, block)).bytes(size)


@contextmanager
def lent(client: Client, demotion: Demotion) -> Iterator[dict[int, int]]:
    """Lock a cold demotion's slots, as the wire contract asks; yield each slab's fd."""
    fds: dict[int, int] = {}
    try:
        for row, layer in np.ndindex(*demotion.slab.shape):
            slab_id, slot = int(demotion.slab[row, layer]), int(demotion.slot[row, layer])
            slab = client.slab(slab_id)
            if slab_id not in fds:
                flags = os.O_RDWR | (os.O_DIRECT if slab.direct else 0)
                fds[slab_id] = os.open(f"/proc/self/fd/{slab.fd}", flags)
            lock_range(fds[slab_id], slot * slab.slot_bytes, slab.slot_bytes)
        if client.lost:
            raise DaemonUnavailable("the daemon has died: its slots may be another's")
        yield fds
    finally:
        for fd in fds.values():
            os.close(fd)


def write_cold(
    client: Client, handle: SessionHandle, demotion: Demotion, fds: dict[int, int]
) -> npt.NDArray[np.uint8]:
    """Write every page with its header to its cold slot; return digests [blocks, layers, 16]."""
    digests = np.zeros((*demotion.slab.shape, 16), np.uint8)
    for row, layer in np.ndindex(*demotion.slab.shape):
        slab_id, slot = int(demotion.slab[row, layer]), int(demotion.slot[row, layer])
        codec, size = CodecId(int(demotion.codec[row, layer])), client.slab(slab_id).slot_bytes
        payload = page_bytes(layer, demotion.blocks[row], codec)
        digest = xxhash.xxh3_128_digest(payload)
        header = SlotHeader(
            handle.store_uuid, slab_id, slot, int(demotion.generation[row, layer]), codec,
            GEOMETRY.dtype, handle.number, layer, demotion.blocks[row], handle.namespace.digest(),
            GEOMETRY.page_bytes, len(payload), digest,
        )  # fmt: skip
        with mmap.mmap(-1, size) as aligned:
            aligned[: HEADER_BYTES + len(payload)] = header.pack() + payload
            assert os.pwritev(fds[slab_id], [aligned], slot * size) == size
        digests[row, layer] = np.frombuffer(digest, np.uint8)
    return digests


def write_pages(client: Client, demotion: Demotion) -> npt.NDArray[np.uint8]:
    """Do an engine's part of a demotion: fill the slots; return digests [blocks, layers, 16]."""
    digests = np.zeros((*demotion.slab.shape, 16), np.uint8)
    for row, block in enumerate(demotion.blocks):
        for layer in range(LAYERS):
            codec = CodecId(int(demotion.codec[row, layer]))
            slab = client.slab(int(demotion.slab[row, layer]))
            start = int(demotion.slot[row, layer]) * slab.slot_bytes + HEADER_BYTES
            payload = page_bytes(layer, block, codec)
            ctypes.memmove(slab.address + start, payload, len(payload))
            digest = payload_digest(slab.address + start, len(payload))
            digests[row, layer] = np.frombuffer(digest, np.uint8)
    return digests


def demote(
    client: Client, handle: SessionHandle, blocks: Sequence[int], *, include_first: bool = False,
    writes_cold: bool = False,
) -> None:  # fmt: skip
    """Demote all of `blocks`, in as many plans as it takes."""
    left = list(blocks)
    while left:
        plan = handle.plan_demotion(
            left, len(left), include_first=include_first, writes_cold=writes_cold
        )
        if plan.cold:
            with lent(client, plan) as fds:
                handle.commit(plan, write_cold(client, handle, plan, fds))
        else:
            handle.commit(plan, write_pages(client, plan))
        left = [block for block in left if block not in plan.blocks]


def store_session(client: Client, blocks: int, namespace: Namespace = INT8) -> str:
    """Suspend a new session of `blocks` sealed blocks; return its id."""
    handle = client.open_session(namespace, MAX_TOKENS)
    demote(client, handle, range(blocks), include_first=True)
    handle.suspend(np.arange(blocks * GEOMETRY.block_tokens, dtype=np.uint32), blocks)
    return handle.id


def read_page(client: Client, handle: SessionHandle, layer: int, block: int) -> bytes:
    """Return a published page's payload as an engine reads it: from memory or from the file."""
    table = handle.table.read(block + 1)
    slab = client.slab(int(table.slab[layer, block]))
    assert int(table.tier[layer, block]) == slab.tier
    offset = int(table.slot[layer, block]) * slab.slot_bytes
    length = page_layout(GEOMETRY, CodecId(int(table.codec[layer, block]))).payload_bytes
    if slab.tier is Tier.WARM:
        return ctypes.string_at(slab.address + offset + HEADER_BYTES, length)
    with mmap.mmap(-1, slab.slot_bytes) as aligned:
        assert os.preadv(slab.fd, [aligned], offset) == slab.slot_bytes
        return aligned[HEADER_BYTES : HEADER_BYTES + length]


def codec_at(block: int) -> CodecId:
    """Return what a block is stored with: the first exactly, the others as int8."""
    return CodecId.RAW if block == 0 else CodecId.INT8
