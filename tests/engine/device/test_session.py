"""Whole sessions on the fake device: a tiny model's own greedy tokens, in random orders."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from tests.engine.device.directrig import StrictPath
from tests.engine.fakes import FakeDaemon
from tests.engine.support import TierRig, greedy, own_greedy, random_tokens, tiny_model
from tierd.errors import StaleGeneration
from tierd.types import CodecId, DType, Namespace, Tier
from tierd_engine.arena import hot_block_bytes
from tierd_engine.attention.plan import PlanMode
from tierd_engine.device.exploring import RandomChooser
from tierd_engine.device.fake import FakeDevice, Refusals
from tierd_engine.device.fakepath import FakePath, Fault
from tierd_engine.device.fences import Fence
from tierd_engine.device.opening import DeviceRig, fake_rig
from tierd_engine.device.pinning import HostLimits, Pins
from tierd_engine.device.probing import ColdPaths
from tierd_engine.fidelity import kl_divergence
from tierd_engine.generator import Generator
from tierd_engine.guard import QualityGuard
from tierd_engine.session import SessionKV

CONTEXT, NEW, LONG = 120, 12, 40


class Rig:
    """A tiny model over a session on a device, and a fake daemon. Closes what it opened."""

    def __init__(
        self, seed: int, *, codec: CodecId = CodecId.RAW, mode: PlanMode = PlanMode.AUTO,
        device: FakeDevice | None = None, is_guarded: bool = False, blocks: int = 3,
    ) -> None:  # fmt: skip
        self.tiny = tiny_model(5, "llama")
        geometry = self.tiny.shape.geometry(DType.FLOAT32, 16)
        namespace = Namespace(geometry, weights_digest="x", codec=codec)
        self.daemon = FakeDaemon(namespace, CONTEXT + NEW, warm_slots=200)
        self.device = device or FakeDevice(RandomChooser(seed))
        self.rig: DeviceRig = fake_rig(self.device, Pins(self.device, HostLimits(None, None)))
        heads = self.tiny.shape.heads
        self.kv = SessionKV(
            self.daemon, self.daemon, heads,  # type: ignore[arg-type]
            blocks * hot_block_bytes(geometry), CONTEXT + NEW, mode,
            QualityGuard(namespace) if is_guarded else None, self.rig,
        )  # fmt: skip
        self.kv.arena.poison()
        self.generator = Generator(self.tiny.model, self.kv)
        self.prompt = random_tokens(CONTEXT, 5)

    def expected(self) -> list[int]:
        return own_greedy(self.tiny.model, self.prompt, NEW)[0]

    def close(self) -> None:
        self.kv.check_integrity()
        self.kv.close()
        assert self.device.pending == 0 and self.rig.pins.pinned_bytes == 0
        assert not self.daemon.unmapping
        self.device.check_integrity()
        self.rig.close()


@pytest.mark.parametrize("mode", list(PlanMode))
@pytest.mark.parametrize("seed", range(2))
def test_raw_gives_the_own_caches_tokens_in_any_order(mode: PlanMode, seed: int) -> None:
    rig = Rig(seed, mode=mode)
    assert greedy(rig.generator, rig.prompt, NEW).tokens == rig.expected()
    assert rig.kv.counts.step_rpcs == 0 and rig.kv.agent.demoted_blocks > 0
    figures = rig.kv.workings.figures()
    assert figures is not None and figures["pageable_bytes"] == 0 and figures["pinned_bytes"] > 0
    assert (figures["near_bytes"] > 0) == (mode is not PlanMode.STREAM)
    assert rig.device.pageable_bytes == 0
    rig.close()


def test_with_int8_and_a_guard_a_session_is_the_hosts() -> None:
    on_device = Rig(3, codec=CodecId.INT8, is_guarded=True)
    on_host = Rig(3, codec=CodecId.INT8, is_guarded=True)
    on_host.kv.close()
    host = SessionKV(
        on_host.daemon, on_host.daemon, on_host.tiny.shape.heads,  # type: ignore[arg-type]
        on_host.kv.arena.budget_bytes, CONTEXT + NEW, PlanMode.AUTO,
        QualityGuard(on_host.daemon.namespace),
    )  # fmt: skip
    ours = greedy(on_device.generator, on_device.prompt, NEW)
    theirs = greedy(Generator(on_host.tiny.model, host), on_host.prompt, NEW)
    assert ours.tokens == theirs.tokens
    # Prefill sums in another order than the host's, and a rounding flips a code here and there:
    # the two differ by less than int8 itself does from the exact cache.
    pairs = zip(ours.logits, theirs.logits, strict=True)
    assert np.mean([kl_divergence(other, one) for one, other in pairs]) < 1e-5
    guards = on_device.kv.guard, host.guard
    assert guards[0] and guards[1] and guards[0].verdict and guards[1].verdict
    assert guards[0].verdict.codecs == guards[1].verdict.codecs
    host.close()
    on_device.close()


def test_pageable_memory_is_slower_not_wrong_and_the_report_says_so() -> None:
    device = FakeDevice(RandomChooser(7), refusals=Refusals(registered_bytes_max=0))
    rig = Rig(7, device=device)
    assert greedy(rig.generator, rig.prompt, NEW).tokens == rig.expected()
    figures = rig.kv.workings.figures()
    assert figures is not None and figures["pinned_bytes"] == 0 and device.pageable_bytes > 0
    assert "--warm" in figures["pageable_reason"]
    rig.close()


def test_a_page_given_away_in_a_step_costs_the_step() -> None:
    rig = Rig(11, mode=PlanMode.STREAM)
    rig.generator.feed(rig.prompt)
    reclaimed = iter([0, 0, 99])
    rig.daemon.table.reclaimed = lambda: next(reclaimed, 0)  # type: ignore[method-assign]
    logits = rig.generator.feed([1])
    own = own_greedy(rig.tiny.model, [*rig.prompt, 1], 1)[1][0]
    np.testing.assert_allclose(logits.numpy(), own.numpy(), atol=3e-4)
    assert next(reclaimed, None) is None, "the stale answer was not looked at"
    rig.close()


def test_one_that_is_always_given_away_ends_typed_and_closes() -> None:
    rig = Rig(12, mode=PlanMode.STREAM)
    rig.generator.feed(rig.prompt)
    rig.daemon.table.reclaimed = lambda: 99  # type: ignore[method-assign]
    with pytest.raises(StaleGeneration):
        rig.generator.feed([1])
    assert not rig.daemon.epochs.inside
    rig.close()


def test_a_block_that_cannot_be_encoded_goes_down_raw() -> None:
    rig = Rig(13, codec=CodecId.INT8)
    rig.generator.feed(rig.prompt[:40])
    slot = rig.kv.slot_of(1)
    rig.device.drain()
    rig.kv.arena.values[slot, 1, 0, 3] = 1e6  # finite, but out of float16's range
    rig.generator.feed(rig.prompt[40:])
    assert rig.kv.agent.raw_fallback_blocks == 1 and rig.daemon.aborted > 0
    tables = rig.daemon.table.arrays
    assert (tables["codec"][:, 1] == CodecId.RAW).all() and (
        tables["tier"][:, 1] == Tier.WARM
    ).all()
    rig.close()


def test_truncation_cancel_and_suspension_leave_nothing_under_way() -> None:
    rig = Rig(14)
    rig.generator.feed(rig.prompt)
    rig.kv.begin(1)
    rig.kv.cancel()
    rig.kv.truncate(rig.kv.position - 20)
    del rig.generator.token_ids[rig.kv.position :]
    assert greedy(rig.generator, rig.prompt[rig.kv.position :], NEW).tokens == rig.expected()
    rig.kv.suspend(np.array(rig.generator.token_ids, np.uint32))
    assert rig.kv.arena.used_slots == 0
    rig.close()


def test_closing_the_client_first_unpins_before_it_unmaps() -> None:
    rig = Rig(15)
    rig.generator.feed(rig.prompt)
    assert rig.rig.pins.pinned_bytes > 0
    for told in rig.daemon.unmapping:
        told()
    left = rig.rig.pins.pinned_bytes
    assert left == rig.kv.reader.ring.total_bytes
    rig.close()


def test_every_fence_is_passed_by_a_session() -> None:
    rig = Rig(16, codec=CodecId.INT8)
    greedy(rig.generator, rig.prompt, 2)
    cold = {Fence.RECORD_COLD_COPIED, Fence.WAIT_COLD_COPIED}
    assert set(rig.device.labels) == set(Fence) - cold - ENDS - DIRECT
    rig.close()


@pytest.mark.parametrize("mode", [PlanMode.STREAM, PlanMode.AUTO])
def test_over_real_slabs_and_a_disk_a_session_is_exact(mode: PlanMode) -> None:
    tiny = tiny_model(5, "llama")
    device = FakeDevice(RandomChooser(17))
    rig = fake_rig(device, Pins(device, HostLimits(None, None)))
    tiers = TierRig(
        tiny.shape, tiny.model, 200, NEW, hot="20%", warm="30%", plan=mode, block_tokens=16, rig=rig
    )
    prompt = random_tokens(200, 18)
    with tiers:
        run = greedy(tiers.generator, prompt, NEW)
        assert run.tokens == own_greedy(tiny.model, prompt, NEW)[0]
        counts = tiers.kv.counts
        assert counts.step_rpcs == 0
        few = FEW_FENCES if mode is PlanMode.STREAM else set()
        assert set(device.labels) == set(Fence) - ENDS - DIRECT - few
        assert tiers.kv.reader.pages_read > 0 and device.pageable_bytes == 0
        tiers.kv.check_integrity()
    assert device.pending == 0 and device.registered_bytes == 0
    device.check_integrity()
    rig.close()


# Prefill makes plan after plan, and drops what was read for the last: these are decode's reads.
FAULTS = {9: Fault.WRONG, 14: Fault.HANG}


@pytest.mark.parametrize("faults", [{}, FAULTS], ids=["whole", "faulty"])
def test_cold_pages_land_past_ram_and_a_session_is_exact(faults: dict[int, Fault]) -> None:
    tiny = tiny_model(5, "llama")
    device = FakeDevice(RandomChooser(18))
    numbers = itertools.count()
    path = FakePath(device, {number + 1: fault for number, fault in faults.items()})
    paths = ColdPaths(device, path, counts=lambda: next(numbers))
    rig = fake_rig(device, Pins(device, HostLimits(None, None)), paths)
    tiers = TierRig(
        tiny.shape, tiny.model, 200, NEW, hot="20%", warm="30%", plan=PlanMode.STREAM,
        block_tokens=16, rig=rig,
    )  # fmt: skip
    prompt = random_tokens(200, 18)
    with tiers:
        run = greedy(tiers.generator, prompt, NEW)
        assert run.tokens == own_greedy(tiny.model, prompt, NEW)[0]
        figures = tiers.kv.workings.figures()
        assert figures is not None and figures["cold_paths"][0]["kind"] == "gds"
        direct = figures["direct"]
        assert direct["units"] > 0 and tiers.kv.counts.step_rpcs == 0
        assert (direct["mismatches"] + direct["deadlines"] > 0) == bool(faults), direct
        tiers.kv.check_integrity()
    rig.close()


class LateReads(RandomChooser):
    """Any order, in which a disk's reads are as late as they can be."""

    def choose(self, options: Sequence[str]) -> int:
        others = [i for i, name in enumerate(options) if name != "disk"]
        return others[super().choose([options[i] for i in others])]


WRITE_FAULTS: dict[str, dict[int, Fault]] = {
    "whole": {},
    "failing": {0: Fault.ERROR, 5: Fault.SHORT},
    "hanging": {4: Fault.HANG},
    "not on the disk": {0: Fault.WRONG},
}


@pytest.mark.parametrize("faults", WRITE_FAULTS.values(), ids=list(WRITE_FAULTS))
def test_demoted_pages_go_past_ram_to_a_disk_and_a_session_is_exact(
    faults: dict[int, Fault],
) -> None:
    tiny = tiny_model(5, "llama")
    # Blocks fill, and are demoted, while reads for the next step are under way.
    device = FakeDevice(LateReads(19))
    reads, writes = itertools.count(), itertools.count()
    path = StrictPath(device, write_faults=faults)
    paths = ColdPaths(
        device, path, counts=lambda: next(reads), write_counts=lambda: next(writes)
    )  # fmt: skip
    rig = fake_rig(device, Pins(device, HostLimits(None, None)), paths)
    tiers = TierRig(
        tiny.shape, tiny.model, 200, LONG, hot="20%", warm="20%", plan=PlanMode.STREAM,
        block_tokens=16, rig=rig,
    )  # fmt: skip
    prompt = random_tokens(200, 18)
    with tiers:
        run = greedy(tiers.generator, prompt, LONG)
        path.let_go()
        assert run.tokens == own_greedy(tiny.model, prompt, LONG)[0]
        stats, figures = tiers.client.stats(), tiers.kv.workings.figures()
        assert figures is not None and stats["corrupt"] == 0
        written = tiers.kv.workings.cold_writer.figures()
        found, row = figures["direct_writes"], figures["cold_paths"][0]
        assert written["direct"] == found and written["failures"] == 0
        if faults == WRITE_FAULTS["not on the disk"]:
            assert found["mismatches"] == 1 and row["writes"] == "posix" and found["chunks"] == 1
        else:
            assert found["pages"] > 0 and row["writes"] == "gds" and found["mismatches"] == 0
        assert (
            found["errors"] == sum(f is not Fault.HANG for f in faults.values())
            or (found["mismatches"])
        )
        assert found["deadlines"] == (Fault.HANG in faults.values())
        assert bool(found["given_up"]) == (Fault.HANG in faults.values())
        assert stats["direct_demotions"] > 0
        fenced = tiers.daemon._daemon.store.placement.fenced
        assert bool(fenced) == (Fault.HANG in faults.values())  # those slots are nobody's
        tiers.kv.check_integrity()
    rig.close()


ENDS = {
    Fence.RECORD_OUT_ENDED, Fence.WAIT_OUT_ENDED, Fence.RECORD_NEAR_ENDED, Fence.WAIT_NEAR_ENDED,
}  # fmt: skip
DIRECT = {
    Fence.RECORD_LANDING_READ, Fence.WAIT_LANDING_READ, Fence.RECORD_CHECKED, Fence.WAIT_CHECKED,
    Fence.RECORD_SLOTS_WHOLE, Fence.WAIT_SLOTS_WHOLE,
}  # fmt: skip
FEW_FENCES = {
    Fence.RECORD_QUERY, Fence.WAIT_QUERY, Fence.RECORD_QUERY_DOWN, Fence.WAIT_QUERY_DOWN,
    Fence.RECORD_PARTIAL_UP, Fence.WAIT_PARTIAL_UP,
}  # fmt: skip
