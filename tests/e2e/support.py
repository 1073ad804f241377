"""Support for end-to-end tests: engines of tiny models, and daemons in this process and others."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import numpy as np
import torch

from tests.engine.support import TinyModel, own_greedy, random_tokens, tiny_model
from tests.wirerig import START_SECONDS, connects, eventually, process
from tierd.client import Client
from tierd.codec.layout import page_layout
from tierd.config import load_config
from tierd.daemon import EmbeddedDaemon
from tierd.types import CodecId, DType, Namespace, Tier
from tierd_engine.arena import hot_block_bytes
from tierd_engine.attention.plan import PlanMode
from tierd_engine.generator import Generator
from tierd_engine.guard import QualityGuard
from tierd_engine.session import SessionKV
from tierd_engine.weightonly import Weights, apply_weights

BLOCK_TOKENS = 16
NEW_TOKENS = 64
CONTEXT = 300  # 18 blocks and 12 tokens
TRAINED_TOKENS = 4096
MODEL = 6  # seeds of tiny models: llama, 4 KV heads x 3, head_dim 16
OTHER_MODEL = 8  # qwen2, 3 KV heads x 4, head_dim 20, with biases


@functools.cache
def model(seed: int) -> TinyModel:
    """Return a tiny model as a job has it, made once."""
    tiny = tiny_model(seed)
    apply_weights(tiny.model, Weights.AUTO)
    return tiny


@functools.cache
def prompt(context: int, seed: int = 1) -> tuple[int, ...]:
    """Return a prompt of `context` tokens."""
    return tuple(random_tokens(context, seed))


@functools.cache
def expected(seed: int, context: int, prompt_seed: int = 1) -> tuple[int, ...]:
    """Return the NEW_TOKENS greedy tokens of a model over its own cache."""
    plain = tiny_model(seed).model
    tokens, _ = own_greedy(plain, list(prompt(context, prompt_seed)), NEW_TOKENS)
    return tuple(tokens)


def namespace(tiny: TinyModel, codec: CodecId = CodecId.RAW, codec_layers: str = "") -> Namespace:
    """Return the namespace of a tiny model's KV."""
    geometry = tiny.shape.geometry(DType.FLOAT32, BLOCK_TOKENS)
    return Namespace(geometry, weights_digest=tiny.name, codec=codec, codec_layers=codec_layers)


def block_bytes(tiny: TinyModel) -> int:
    """Return the bytes of one block below the hot tier: all layers' slots."""
    geometry = namespace(tiny).geometry
    return geometry.layers * page_layout(geometry, CodecId.RAW).slot_bytes


class Engine:
    """One engine on a daemon: a client, a session and greedy decoding, a token at a time.

    Use as a context. `tokens`: the new tokens made so far.
    """

    def __init__(
        self, socket: str, tiny: TinyModel, *, hot_blocks: int = 3, max_tokens: int = 512,
        plan: PlanMode = PlanMode.NEAR, resume: str | None = None, rejoin_seconds: float = 0.3,
        space: Namespace | None = None, guarded: bool = False, promotes: bool | None = None,
    ) -> None:  # fmt: skip
        self.client = Client.connect(socket)
        space = space or namespace(tiny)
        if resume is None:
            handle = self.client.open_session(space, max_tokens)
        else:
            handle = self.client.resume(resume, space, max_tokens)
        self.handle = handle
        budget = hot_blocks * hot_block_bytes(space.geometry)
        heads = tiny.shape.heads
        guard = QualityGuard(space) if guarded else None
        self.kv = SessionKV(
            self.client, handle, heads, budget, max_tokens, plan, guard, promotes=promotes
        )
        self.kv.arena.poison()
        self.kv.link.rejoin_seconds = rejoin_seconds
        self.generator = Generator(tiny.model, self.kv)
        self.tokens: list[int] = []
        self._logits = torch.empty(0)
        if resume is not None:
            self.generator.resume([int(token) for token in handle.token_ids], handle.sealed_blocks)

    def prefill(self, tokens: Sequence[int], advanced: Callable[[int], None] | None = None) -> None:
        """Feed tokens, in chunks as the hot budget allows."""
        self._logits = self.generator.feed(list(tokens), advanced)

    def step(self) -> None:
        """Make one token and feed it."""
        self.tokens.append(int(self._logits.argmax()))
        self._logits = self.generator.feed([self.tokens[-1]])

    def steps(self, count: int) -> None:
        """Make `count` tokens."""
        for _ in range(count):
            self.step()

    def suspend(self) -> str:
        """Hand the session to the daemon and return its id."""
        self.kv.suspend(np.array(self.generator.token_ids, dtype=np.uint32))
        return self.handle.id

    def pages(self, tier: Tier) -> list[tuple[int, int]]:
        """Return (layer, block) of this session's pages in a tier, block by block."""
        found = self.handle.table.read(self.kv.sealed_blocks).tier == tier
        return [(int(layer), int(block)) for block, layer in np.argwhere(found.T)]

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kv.close()
        self.client.close()


@contextmanager
def embedded(
    tiny: TinyModel, folder: Path, warm_blocks: int, cold_blocks: int = 400
) -> Iterator[EmbeddedDaemon]:
    """Run a daemon in this process whose tiers hold that many blocks of a model; check it last."""
    config = load_config(
        overrides={
            "warm.budget_bytes": warm_blocks * block_bytes(tiny),
            "cold.folder": str(folder / "cold"),
            "cold.cap_bytes": cold_blocks * block_bytes(tiny),
            "cold.slab_bytes": 1 << 20,
            "cold.ephemeral": True,
            "service.log_level": "error",
            "service.drain_seconds": 0.5,
        }
    )
    with EmbeddedDaemon(config) as daemon:
        yield daemon
        store = daemon._daemon.store  # type: ignore[union-attr]
        eventually(lambda: not store.placement.moving)
        store.check_integrity()


@contextmanager
def served(
    tiny: TinyModel, folder: Path, warm_blocks: int
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Run `tierd serve` in a process of its own; yield it and its socket."""
    socket = str(folder / "run" / "tierd.sock")
    command = [sys.executable, "-m", "tierd.cli", "serve", "--socket", socket,
               "--warm", str(warm_blocks * block_bytes(tiny)),
               "--cold-dir", str(folder / "cold"), "--cold-cap", "64MiB"]  # fmt: skip
    with process(command) as daemon:
        eventually(lambda: connects(socket), START_SECONDS)
        yield daemon, socket


@contextmanager
def respawning(tiny: TinyModel, folder: Path, warm_blocks: int) -> Iterator[tuple[Respawner, str]]:
    """Run a daemon that is started again, within milliseconds, whenever it is killed."""
    socket = str(folder / "run" / "tierd.sock")
    command = [sys.executable, "-m", "tests.e2e.respawn", "serve", "--socket", socket,
               "--warm", str(warm_blocks * block_bytes(tiny)),
               "--cold-dir", str(folder / "cold"), "--cold-cap", "64MiB"]  # fmt: skip
    with process(command) as parent:
        yield Respawner(parent), socket


class Respawner:
    """The daemon that runs now, of a process that starts one after another."""

    def __init__(self, parent: subprocess.Popen[bytes]) -> None:
        self._parent = parent
        self.next()

    def next(self) -> None:
        """Wait until the next daemon is there."""
        assert self._parent.stdout is not None
        self.pid = int(self._parent.stdout.readline().split()[1])

    def kill(self) -> None:
        """Kill the daemon and wait for the next."""
        os.kill(self.pid, signal.SIGKILL)
        self.next()


@contextmanager
def slab_for_writing(engine: Engine, layer: int, block: int) -> Iterator[tuple[int, int]]:
    """Yield an fd that writes to the file of a cold page, and the page's offset in it."""
    table = engine.handle.table.read(block + 1)
    assert table.tier[layer, block] == Tier.COLD
    slab = engine.client.slab(int(table.slab[layer, block]))
    # The engine's own fd is read-only: its file, which has no name, is opened anew.
    fd = os.open(f"/proc/self/fd/{slab.fd}", os.O_WRONLY)
    try:
        yield fd, int(table.slot[layer, block]) * slab.slot_bytes
        os.fsync(fd)
    finally:
        os.close(fd)
