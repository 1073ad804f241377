"""Demotion past the warm tier: the bytes on disk, the faults of a disk, and who is told what."""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.wirerig import INT8, LAYERS, MAX_TOKENS, eventually, small_config
from tierd.client import Client, Demotion
from tierd.codec.layout import HEADER_BYTES, page_layout
from tierd.daemon import EmbeddedDaemon
from tierd.disk.header import SlotHeader, verify_slot
from tierd.disk.slotlocks import locked_ranges
from tierd.errors import DaemonUnavailable, TierFull
from tierd.types import CodecId, Namespace, Tier
from tierd_engine.agent import PageEncoder, TransferAgent, encode_on_host
from tierd_engine.arena import HotArena
from tierd_engine.coldwrite import ColdWriter

GEOMETRY = INT8.geometry
WARM_BYTES = 4 << 20
BLOCKS = 10


class Engine:
    """A session whose hot blocks are filled at random, in front of a warm tier that is lent out."""

    def __init__(
        self, client: Client, namespace: Namespace = INT8, *, arena: HotArena | None = None,
        encode: PageEncoder = encode_on_host, **options: object,
    ) -> None:  # fmt: skip
        self.client = client
        self.handle = client.open_session(namespace, MAX_TOKENS)
        self.arena = arena or HotArena(GEOMETRY, 1 << 30, blocks_max=BLOCKS)
        self.hot: dict[int, int] = {}
        rng = np.random.default_rng(7)
        shape = (2, GEOMETRY.kv_heads, GEOMETRY.block_tokens, GEOMETRY.head_dim)
        for block in range(BLOCKS):
            self.hot[block] = self.arena.allocate()
            for layer in range(LAYERS):
                keys, values = torch.from_numpy(rng.standard_normal(shape).astype("f4"))
                self.arena.write(self.hot[block], layer, 0, keys, values)
        self.slots = dict(self.hot)
        self.cold = ColdWriter(client, self.handle, chunk_bytes=3 * 12288, **options)  # type: ignore[arg-type]
        self.agent = TransferAgent(
            client, self.handle, self.arena, encode=encode, cold=self.cold
        )  # fmt: skip

    def slot_of(self, block: int) -> int:
        return self.hot[block]

    def drop(self, block: int) -> None:
        self.hot.pop(block)

    def demote(self, blocks: Sequence[int], *, first: bool = False) -> None:
        self.agent.demote(self, blocks, len(blocks), include_first=first)
        self.cold.check_integrity()

    def expected(self, layer: int, block: int, codec: CodecId) -> bytes:
        """Return a page's payload as the CPU encodes it."""
        layout = page_layout(GEOMETRY, codec)
        memory = np.zeros(layout.payload_bytes + 64, np.uint8)
        target = memory.ctypes.data + -memory.ctypes.data % 64
        source = self.arena.page_address(self.slots[block], layer)
        encode_on_host(np.array([source]), np.array([target]), layout)
        start = target - memory.ctypes.data
        return memory[start : start + layout.payload_bytes].tobytes()

    def tiers(self) -> dict[int, set[int]]:
        table = self.handle.table.read(BLOCKS)
        return {block: set(table.tier[:, block].tolist()) for block in range(BLOCKS)}

    def check(self, blocks: Sequence[int], tier: Tier = Tier.COLD) -> None:
        """Check place, header and bytes of every page of these blocks."""
        table = self.handle.table.read(BLOCKS)
        for block in blocks:
            for layer in range(LAYERS):
                assert table.tier[layer, block] == tier
                codec = CodecId(int(table.codec[layer, block]))
                slab = self.client.slab(int(table.slab[layer, block]))
                slot = int(table.slot[layer, block])
                layout = page_layout(GEOMETRY, codec)
                expected = self.expected(layer, block, codec)
                if tier is Tier.WARM:
                    continue
                with mmap.mmap(-1, layout.slot_bytes) as aligned:
                    assert os.preadv(slab.fd, [aligned], slot * layout.slot_bytes) == len(aligned)
                    data = bytes(aligned)
                header = SlotHeader.unpack(data)
                assert (header.slab, header.slot) == (int(table.slab[layer, block]), slot)
                assert (header.session, header.layer, header.block) == (
                    self.handle.number, layer, block,
                )  # fmt: skip
                assert header.generation == table.generation[layer, block]
                assert header.namespace_digest == self.handle.namespace.digest()
                verify_slot(memoryview(data), header)
                assert data[HEADER_BYTES : HEADER_BYTES + layout.payload_bytes] == expected
                assert not any(data[HEADER_BYTES + layout.payload_bytes :])


def lend_all_of_warm(client: Client) -> Demotion:
    """Let another session's plan hold every warm slot: so warm is full, and stays so."""
    other = client.open_session(INT8, 1 << 20)
    other.holder = other.plan_demotion(range(1, 2000), 2000)  # type: ignore[attr-defined]
    client.other = other  # type: ignore[attr-defined]
    return other.holder  # type: ignore[attr-defined]


@pytest.fixture(params=[True, False], ids=["ephemeral", "durable"])
def full(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Client]:
    """A client of a daemon whose warm tier is full."""
    config = small_config(tmp_path, warm_bytes=WARM_BYTES, **{"cold.ephemeral": request.param})
    with EmbeddedDaemon(config) as daemon, Client.connect(daemon.socket) as client:
        client.daemon = daemon  # type: ignore[attr-defined]
        lend_all_of_warm(client)
        yield client


def reserved(client: Client) -> int:
    return int(client.stats()["tiers"]["cold"]["reserved_slots"])


def test_pages_go_to_cold_as_the_cpu_encodes_them(full: Client) -> None:
    engine = Engine(full)
    engine.demote([3, 1, 2])
    engine.demote([0, 4, 5, 6, 7, 8, 9], first=True)
    engine.check(range(BLOCKS))
    assert not engine.hot and reserved(full) == 0
    stats = full.stats()
    assert stats["direct_demotions"] == BLOCKS * LAYERS and stats["spills"] == 0
    assert engine.cold.counts.pages == BLOCKS * LAYERS
    assert engine.cold.figures()["failures"] == 0
    engine.cold.close()


def test_an_agent_that_cannot_write_cold_waits_for_room_in_warm(full: Client) -> None:
    engine = Engine(full)
    engine.agent.cold = None
    with pytest.raises(TierFull):
        engine.handle.plan_demotion([1], 1, deadline_seconds=1.0)
    assert engine.handle.plan_demotion([1], 1, writes_cold=True).cold


def test_short_writes_are_continued(full: Client) -> None:
    lengths: list[int] = []

    def short(fd: int, views: Sequence[memoryview], offset: int) -> int:
        part = views[0][: max(4096, len(views[0]) // 2 // 4096 * 4096)]
        lengths.append(len(part))
        return os.pwritev(fd, [part], offset)

    engine = Engine(full, write=short)
    engine.demote([1, 2, 3])
    engine.check([1, 2, 3])
    assert len(lengths) > 3


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, 0])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_write_that_fails_is_given_back_and_the_blocks_wait_for_warm(
    full: Client, number: int, at: int
) -> None:
    calls: list[int] = []

    def failing(fd: int, views: Sequence[memoryview], offset: int) -> int:
        calls.append(offset)
        if len(calls) == at + 1:
            if number == 0:
                return 0
            raise OSError(number, os.strerror(number))
        return os.pwritev(fd, views, offset)

    engine = Engine(full, write=failing)
    threading.Timer(0.3, lambda: full.other.abort(full.other.holder)).start()  # type: ignore[attr-defined]
    engine.demote([1, 2, 3, 4])
    assert engine.cold.counts.failures == 1 and not engine.cold.given_up
    assert not engine.cold.can_write
    assert reserved(full) == 0 and full.stats()["corrupt"] == 0
    tiers = engine.tiers()
    assert all(tiers[block] == {Tier.WARM} for block in (1, 2, 3, 4)), tiers
    assert set(engine.hot) == set(range(BLOCKS)) - {1, 2, 3, 4}


def test_a_slab_that_cannot_be_locked_is_a_failure_like_any_other(
    full: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, start: int, size_bytes: int) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr("tierd_engine.coldwrite.lock_range", refuse)
    engine = Engine(full)
    full.other.abort(full.other.holder)  # type: ignore[attr-defined]
    full.other.holder = full.other.plan_demotion(range(1, 2000), 2000)  # type: ignore[attr-defined]
    threading.Timer(0.3, lambda: full.other.abort(full.other.holder)).start()  # type: ignore[attr-defined]
    engine.demote([1])
    assert engine.cold.counts.failures == 1
    assert engine.tiers()[1] == {Tier.WARM}


def test_a_write_that_hangs_is_left_behind_and_its_slots_are_nobodys(full: Client) -> None:
    gate, entered = threading.Event(), threading.Event()

    def hanging(fd: int, views: Sequence[memoryview], offset: int) -> int:
        entered.set()
        assert gate.wait(30.0)
        return os.pwritev(fd, views, offset)

    engine = Engine(full, write=hanging, plan_seconds=0.3)
    threading.Timer(0.6, lambda: full.other.abort(full.other.holder)).start()  # type: ignore[attr-defined]
    began = time.monotonic()
    engine.demote([1, 2])
    assert time.monotonic() - began < 10.0 and entered.is_set()
    assert engine.cold.given_up and not engine.cold.can_write
    assert engine.tiers()[1] == {Tier.WARM}
    store = full.daemon._daemon.store  # type: ignore[attr-defined]
    assert store.placement.fenced and reserved(full) == 0
    (slab,) = store.placement.fenced
    fd = full.slab(slab).fd
    assert locked_ranges(fd, 0, 1 << 20)
    gate.set()
    eventually(lambda: all(f is None or f.done() for f in engine.cold._writes))
    engine.cold.close()
    assert store.placement.fenced  # a lock of a stuck write stays: who knows what it does next


def test_a_page_that_its_codec_cannot_encode_goes_down_raw(full: Client) -> None:
    engine = Engine(full)
    engine.arena.keys[engine.hot[2], 0, 0, 0, 0] = float("nan")
    threading.Timer(0.3, lambda: full.other.abort(full.other.holder)).start()  # type: ignore[attr-defined]
    engine.demote([1, 2, 3])
    assert engine.agent.raw_fallback_blocks == 1
    assert all(tier != {Tier.NONE} for block, tier in engine.tiers().items() if block in (1, 2, 3))
    assert reserved(full) == 0


def test_an_interruption_leaves_nothing_lent_and_nothing_written(full: Client) -> None:
    engine = Engine(full)
    calls = 0

    def interrupted(*arguments: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        return encode_on_host(*arguments)  # type: ignore[arg-type]

    engine.agent._encode_pages = interrupted  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        engine.demote([1, 2, 3, 4])
    assert reserved(full) == 0 and set(engine.hot) == set(range(BLOCKS))
    engine.cold.check_integrity()
    engine.agent._encode_pages = encode_on_host
    engine.demote([1, 2, 3, 4])
    engine.check([1, 2, 3, 4])


def test_slots_of_a_daemon_that_has_died_are_not_written(full: Client) -> None:
    wrote: list[int] = []
    engine = Engine(full, write=lambda fd, views, offset: wrote.append(offset) or len(views[0]))
    plan = engine.handle.plan_demotion([1], 1, writes_cold=True)
    for slab in np.unique(plan.slab).tolist():
        full.slab(slab)
    full._bootstrap.close()
    with pytest.raises(DaemonUnavailable), engine.cold.lent(plan):
        pytest.fail("the slots may be another's")
    assert not wrote


def test_a_commit_that_is_revoked_meanwhile_goes_down_another_way(full: Client) -> None:
    engine = Engine(full)
    told: list[Callable[[], None]] = [lambda: engine.handle.truncate(0)]

    def write(fd: int, views: Sequence[memoryview], offset: int) -> int:
        if told:
            told.pop()()
        return os.pwritev(fd, views, offset)

    engine.cold._write = write
    threading.Timer(0.3, lambda: full.other.abort(full.other.holder)).start()  # type: ignore[attr-defined]
    engine.demote([1, 2])
    assert engine.tiers()[1] == engine.tiers()[2] == {Tier.WARM}
    assert reserved(full) == 0


def test_whole_sessions_survive_a_restart(tmp_path: Path) -> None:
    config = small_config(tmp_path, warm_bytes=WARM_BYTES, **{"cold.ephemeral": False})
    with EmbeddedDaemon(config) as daemon, Client.connect(daemon.socket) as client:
        lend_all_of_warm(client)
        engine = Engine(client)
        engine.demote(range(BLOCKS), first=True)
        tokens = np.arange(BLOCKS * GEOMETRY.block_tokens, dtype=np.uint32)
        engine.handle.suspend(tokens, BLOCKS)
        number = engine.handle.id
    with EmbeddedDaemon(config) as daemon, Client.connect(daemon.socket) as client:
        engine.client = client
        engine.handle = client.resume(number, INT8, MAX_TOKENS)
        assert engine.handle.sealed_blocks == BLOCKS
        engine.check(range(BLOCKS))
