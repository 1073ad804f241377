"""Cold slots in the hands of an engine when it, or the daemon, is killed; jobs past a full warm."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.support import TierRig, greedy, own_greedy, random_tokens, tiny_model
from tests.wirerig import (
    INT8,
    LAYERS,
    MAX_TOKENS,
    codec_at,
    connects,
    daemon_process,
    demote,
    engine_process,
    eventually,
    lent,
    page_bytes,
    read_page,
)
from tierd.client import Client
from tierd.errors import DaemonUnavailable
from tierd.types import CodecId, Namespace, Tier
from tierd_engine.device.exploring import RandomChooser
from tierd_engine.device.fake import FakeDevice
from tierd_engine.device.opening import DeviceRig, fake_rig
from tierd_engine.device.pinning import HostLimits, Pins

# Warm is lent out by a plan that is never committed, so that it is full and stays so.
HOLD_WARM = """
holder = client.open_session(INT8, 1 << 20)
held = holder.plan_demotion(range(1, 2000), 2000)
handle = client.open_session(INT8, MAX_TOKENS)
"""


def reserved(tool: Client) -> int:
    return int(tool.stats()["tiers"]["cold"]["reserved_slots"])


@pytest.mark.parametrize("written", ["nothing", "half", "all"])
def test_an_engine_killed_before_its_commit_leaves_nothing(tmp_path: Path, written: str) -> None:
    script = (
        HOLD_WARM
        + {
            "nothing": "plan = handle.plan_demotion(range(1, 9), 8, writes_cold=True)",
            "half": (
                "plan = handle.plan_demotion(range(1, 9), 8, writes_cold=True)\n"
                "stack = lent(client, plan); fds = stack.__enter__()"
            ),
            "all": (
                "plan = handle.plan_demotion(range(1, 9), 8, writes_cold=True)\n"
                "stack = lent(client, plan); fds = stack.__enter__()\n"
                "write_cold(client, handle, plan, fds)"
            ),
        }[written]
        + "\nassert plan.cold"
    )
    with daemon_process(tmp_path) as (_, socket), Client.connect(socket, kind="tool") as tool:
        with engine_process(socket, script) as engine:
            assert reserved(tool) == 8 * LAYERS
            engine.send_signal(signal.SIGKILL)
            eventually(lambda: reserved(tool) == 0, 2.0)
            eventually(lambda: tool.stats()["tiers"]["cold"]["slabs"] == 0, 2.0)
        assert tool.stats()["corrupt"] == 0 and not tool.sessions()


def places_of(plan: Any) -> set[tuple[int, int]]:
    return set(zip(plan.slab.ravel().tolist(), plan.slot.ravel().tolist(), strict=True))


def test_slots_an_engine_holds_across_a_restart_are_nobody_elses(tmp_path: Path) -> None:
    script = HOLD_WARM + (
        "import json\n"
        "plan = handle.plan_demotion(range(1, 5), 4, writes_cold=True)\n"
        "stack = lent(client, plan); fds = stack.__enter__()\n"
        f"open({str(tmp_path / 'places')!r}, 'w').write(json.dumps(\n"
        "    [plan.slab.ravel().tolist(), plan.slot.ravel().tolist()]))\n"
    )
    with (
        daemon_process(tmp_path) as (daemon, socket),
        engine_process(socket, script) as engine,
    ):
        its_own = set(zip(*json.loads((tmp_path / "places").read_text()), strict=True))
        assert len(its_own) == 4 * LAYERS
        daemon.kill()
        daemon.wait(10.0)
        with daemon_process(tmp_path) as (_, socket), Client.connect(socket) as client:
            holder = client.open_session(INT8, 1 << 20)
            held = holder.plan_demotion(range(1, 2000), 2000)
            handle = client.open_session(INT8, MAX_TOKENS)
            first = handle.plan_demotion(range(1, 5), 4, writes_cold=True)
            assert first.cold
            assert not places_of(first) & its_own
            engine.send_signal(signal.SIGKILL)
            engine.wait(10.0)

            def is_free() -> bool:
                plan = handle.plan_demotion(range(5, 60), 55, writes_cold=True)
                found = places_of(plan)
                handle.abort(plan)
                return its_own <= found

            eventually(is_free, 5.0)
            assert held.blocks


def test_an_engine_whose_daemon_died_before_it_locked_does_not_write(tmp_path: Path) -> None:
    with daemon_process(tmp_path) as (daemon, socket), Client.connect(socket) as client:
        holder = client.open_session(INT8, 1 << 20)
        holder.plan_demotion(range(1, 2000), 2000)
        handle = client.open_session(INT8, MAX_TOKENS)
        plan = handle.plan_demotion([1], 1, writes_cold=True)
        client.slab(int(plan.slab[0, 0]))
        daemon.kill()
        daemon.wait(10.0)
        eventually(lambda: client.lost)
        with pytest.raises(DaemonUnavailable), lent(client, plan):
            pytest.fail("its slots may be another's by now")


def test_committed_pages_survive_the_daemon_being_killed(tmp_path: Path) -> None:
    with daemon_process(tmp_path) as (daemon, socket), Client.connect(socket) as client:
        holder = client.open_session(INT8, 1 << 20)
        holder.plan_demotion(range(1, 2000), 2000)
        handle = client.open_session(INT8, MAX_TOKENS)
        demote(client, handle, range(6), include_first=True, writes_cold=True)
        assert client.stats()["direct_demotions"] == 6 * LAYERS
        handle.suspend(np.arange(6 * 16, dtype=np.uint32), 6)
        daemon.kill()
        daemon.wait(10.0)
        number = handle.id
        with daemon_process(tmp_path) as (_, again), Client.connect(again) as client:
            eventually(lambda: connects(again))
            handle = client.resume(number, INT8, MAX_TOKENS)
            assert handle.sealed_blocks == 6
            for block in range(6):
                for layer in range(LAYERS):
                    expected = page_bytes(layer, block, codec_at(block))
                    assert read_page(client, handle, layer, block) == expected


# -- whole jobs -------------------------------------------------------------------------


@contextmanager
def tiers_past_warm(codec: CodecId, rig: DeviceRig | None, hot: str = "20%") -> Iterator[TierRig]:
    tiny = tiny_model(5, "llama")
    tiers = TierRig(
        tiny.shape,
        tiny.model,
        200,
        12,
        hot=hot,
        warm="30%",
        codec=codec,
        block_tokens=16,
        rig=rig,
    )
    with tiers:
        geometry = tiers.kv.geometry
        other = Namespace(geometry, weights_digest="another", codec=codec)
        holder = tiers.client.open_session(other, 1 << 20)
        held = holder.plan_demotion(range(1, 2000), 2000)
        assert held.blocks
        yield tiers


@pytest.mark.parametrize("device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("codec", [CodecId.RAW, CodecId.INT8])
def test_a_job_past_a_full_warm_tier_is_exact(codec: CodecId, device: bool) -> None:
    fake = FakeDevice(RandomChooser(17))
    rig = fake_rig(fake, Pins(fake, HostLimits(None, None))) if device else None
    prompt = random_tokens(200, 18)
    with tiers_past_warm(codec, rig) as tiers:
        run = greedy(tiers.generator, prompt, 12)
        if codec is CodecId.RAW:
            assert run.tokens == own_greedy(tiers.model, prompt, 12)[0]
        stats = tiers.client.stats()
        assert stats["direct_demotions"] > 0 and stats["corrupt"] == 0
        table = tiers.kv.handle.table.read(12)
        assert (table.tier == Tier.COLD).any()
        figures = tiers.kv.workings.cold_writer.figures()
        assert figures["pages"] == stats["direct_demotions"] and not figures["failures"]
        tiers.kv.check_integrity()
    if rig is not None:
        fake.check_integrity()
        rig.close()


def test_blocks_go_to_cold_together_so_that_a_layer_of_them_is_one_read() -> None:
    prompt = random_tokens(200, 18)
    with tiers_past_warm(CodecId.RAW, None, hot="50%") as tiers:
        run = greedy(tiers.generator, prompt, 12)
        assert run.tokens == own_greedy(tiers.model, prompt, 12)[0]
        together = min(tiers.kv.agent.blocks_together, tiers.kv.arena.slot_count // 2)
        table = tiers.kv.handle.table.read(13)
        for layer in range(tiers.kv.geometry.layers):
            cold = np.flatnonzero(table.tier[layer] == Tier.COLD)
            slots = table.slot[layer, cold].astype(np.int64)
            assert len(cold) >= together >= 3
            runs = np.split(slots, np.flatnonzero(np.diff(slots) != 1) + 1)
            assert max(map(len, runs)) >= together
        tiers.kv.check_integrity()
