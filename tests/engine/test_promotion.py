"""Resumed sessions that promote, on the host and on the fake device: tokens, room, losses, ends."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.engine.fakes import FakeDaemon
from tests.engine.support import greedy, own_greedy, random_tokens, tiny_model
from tierd.codec.layout import HEADER_BYTES, page_layout
from tierd.codec.reference import decode_page
from tierd.errors import DaemonUnavailable
from tierd.types import CodecId, DType, Namespace, Tier
from tierd_engine.arena import hot_block_bytes
from tierd_engine.attention.plan import PlanMode
from tierd_engine.device.exploring import RandomChooser
from tierd_engine.device.fake import FakeDevice, bytes_at
from tierd_engine.device.opening import DeviceRig, fake_rig
from tierd_engine.device.pinning import HostLimits, Pins
from tierd_engine.generator import Generator
from tierd_engine.promotion import choose_blocks
from tierd_engine.session import SessionKV

TOKENS = 16
CONTEXT, NEW = 150, 40  # 9 sealed blocks and 6 tokens are suspended
SEALED = CONTEXT // TOKENS
PLACES = ["host", "device"]

_made: list[Resumed] = []


@pytest.fixture(autouse=True)
def close_all() -> Iterator[None]:
    """Close what a test opened, and look at the device's end."""
    yield
    while _made:
        _made.pop().close()


class Resumed:
    """A session that read a prompt on the host, was suspended, and is resumed with room in hot."""

    def __init__(
        self, place: str, *, blocks: int = 6, codec: CodecId = CodecId.RAW,
        mode: PlanMode = PlanMode.AUTO, promotes: bool | None = True, seed: int = 5,
        dtype: DType = DType.FLOAT32,
    ) -> None:  # fmt: skip
        self.tiny = tiny_model(seed, "llama")
        self.geometry = self.tiny.shape.geometry(dtype, TOKENS)
        namespace = Namespace(self.geometry, weights_digest="x", codec=codec)
        self.daemon = FakeDaemon(namespace, CONTEXT + NEW, warm_slots=200)
        self.prompt = random_tokens(CONTEXT, seed)
        first = self.open(3, PlanMode.NEAR, None, False)
        generator = Generator(self.tiny.model, first)
        self.first_token = int(generator.feed(self.prompt).argmax())
        first.suspend(np.array(self.prompt, np.uint32))
        first.workings.close()
        self.device: FakeDevice | None = None
        self.rig: DeviceRig | None = None
        if place == "device":
            self.device = FakeDevice(RandomChooser(seed))
            self.rig = fake_rig(self.device, Pins(self.device, HostLimits(None, None)))
        self.kv = self.open(blocks, mode, self.rig, promotes)
        _made.append(self)
        self.kv.arena.poison()
        self.generator = Generator(self.tiny.model, self.kv)
        self.rpcs = self.daemon.rpc_count

    def open(
        self, blocks: int, mode: PlanMode, rig: DeviceRig | None, promotes: bool | None
    ) -> SessionKV:
        budget = blocks * hot_block_bytes(self.geometry)
        daemon: Any = self.daemon
        return SessionKV(
            daemon, daemon, self.tiny.shape.heads, budget, CONTEXT + NEW, mode, None, rig,
            promotes=promotes,
        )  # fmt: skip

    def resume(self) -> None:
        self.generator.resume(list(self.prompt), SEALED)
        self.kv.check_integrity()
        assert not self.daemon.epochs.inside

    def hot(self) -> list[int]:
        return sorted(self.kv._hot)

    def expected(self, count: int = NEW) -> list[int]:
        return own_greedy(self.tiny.model, self.prompt, count)[0]

    def answer(self) -> list[int]:
        """Go on from the prompt greedily."""
        return greedy(self.generator, [], NEW).tokens

    def close(self) -> None:
        self.kv.check_integrity()
        self.kv.workings.close()
        if self.device is not None and self.rig is not None:
            assert self.device.pending == 0 and self.rig.pins.pinned_bytes == 0
            self.device.check_integrity()
            self.rig.close()


@pytest.mark.parametrize("mode", list(PlanMode))
@pytest.mark.parametrize("place", PLACES)
def test_with_raw_the_tokens_are_the_own_caches(place: str, mode: PlanMode) -> None:
    run = Resumed(place, mode=mode)
    run.resume()
    assert run.hot() == [0, 5, 6, 7, 8]  # one is left for the open block
    assert run.kv.promoted_hot_blocks == 5
    assert run.daemon.rpc_count == run.rpcs
    assert run.answer() == run.expected()
    counts = run.kv.counts
    assert counts.step_rpcs == 0 and counts.pages[Tier.HOT] > counts.pages[Tier.WARM]
    assert run.kv.arena.peak_bytes <= run.kv.arena.budget_bytes


@pytest.mark.parametrize("place", PLACES)
def test_without_promotion_nothing_is_hot_and_the_tokens_are_the_same(place: str) -> None:
    run = Resumed(place, promotes=False)
    run.resume()
    assert run.hot() == [] and run.kv.promoted_hot_blocks == 0
    assert run.answer() == run.expected()


@pytest.mark.parametrize("place", PLACES)
def test_pages_are_copied_inside_an_epoch_that_is_left_whatever_happens(place: str) -> None:
    run = Resumed(place)
    promote = run.kv.workings.promote

    def interrupted(ascents: Any) -> None:
        assert run.daemon.epochs.inside
        promote(ascents)
        raise KeyboardInterrupt

    run.kv.workings.promote = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        run.resume()
    assert not run.daemon.epochs.inside and run.hot() == [] and run.kv.arena.used_slots == 0


def test_on_a_device_it_is_on_and_on_the_host_it_is_off() -> None:
    for place, hot in (("host", 0), ("device", 5)):
        run = Resumed(place, promotes=None)
        run.resume()
        assert len(run.hot()) == hot


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("blocks", [1, 2, 3, 11])
def test_any_budget_is_kept_and_gives_the_same_tokens(place: str, blocks: int) -> None:
    run = Resumed(place, blocks=blocks)
    run.resume()
    assert len(run.hot()) == min(blocks - 1, SEALED)
    assert run.answer() == run.expected()
    assert run.kv.arena.peak_bytes <= run.kv.arena.budget_bytes


def test_room_is_left_for_the_tokens_known_to_follow() -> None:
    run = Resumed("host")
    run.generator.resume(list(run.prompt), SEALED - 2)  # two blocks were lost: 38 tokens follow
    assert run.hot() == [0, 5, 6]


@pytest.mark.parametrize("place", PLACES)
def test_promoted_blocks_make_room_first_the_oldest_of_them_and_without_a_call(place: str) -> None:
    run = Resumed(place)
    plans: list[list[int]] = []
    plan = run.daemon.plan_demotion

    def planned(blocks: list[int], need: int, **more: Any) -> Any:
        plans.append(list(blocks))
        return plan(blocks, need, **more)

    run.daemon.plan_demotion = planned  # type: ignore[method-assign]
    run.resume()
    logits = run.generator.feed([run.first_token])
    hot = [run.hot()]
    for _ in range(NEW - 2):
        logits = run.generator.feed([int(logits.argmax())])
        if run.hot() != hot[-1]:
            hot.append(run.hot())
    assert hot == [[0, 5, 6, 7, 8, 9], [0, 6, 7, 8, 9, 10], [0, 7, 8, 9, 10, 11]]
    assert run.daemon.rpc_count == run.rpcs and plans == []
    codecs = run.daemon.table.arrays["tier"][:, SEALED:]
    assert (codecs == Tier.NONE).all()
    run.kv.suspend(np.array(run.generator.token_ids, np.uint32))
    assert plans and set(plans[0]) == {9, 10}, "promoted blocks were offered"
    assert run.kv.arena.used_slots == 0


@pytest.mark.parametrize("place", PLACES)
def test_suspension_right_after_it_makes_no_call_to_demote(place: str) -> None:
    run = Resumed(place)
    run.resume()
    run.kv.suspend(np.array(run.prompt, np.uint32))
    assert run.daemon.rpc_count == run.rpcs and run.hot() == []
    assert run.daemon.suspended == (run.prompt, SEALED)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("lost", [0, 6, 8])
def test_a_promoted_block_whose_page_was_lost_is_recomputed(place: str, lost: int) -> None:
    run = Resumed(place)
    run.resume()
    assert lost in run.hot()
    run.daemon.table.arrays["tier"][1, lost] = Tier.NONE
    run.daemon.table.touch()
    assert run.answer() == run.expected()
    assert run.daemon.truncations == [(lost, 1)] and run.generator.losses == {lost: 1}


@pytest.mark.parametrize("place", PLACES)
def test_a_page_lost_below_them_forgets_those_after_it(place: str) -> None:
    run = Resumed(place)
    run.resume()
    run.daemon.table.arrays["tier"][0, 3] = Tier.NONE
    run.daemon.table.touch()
    assert run.answer() == run.expected()
    assert run.daemon.truncations == [(3, 0)]


@pytest.mark.parametrize("place", PLACES)
def test_a_promoted_block_is_not_opened_again(place: str) -> None:
    run = Resumed(place)
    run.resume()
    run.kv.truncate(7 * TOKENS + 5)
    assert run.kv.position == 7 * TOKENS and run.hot() == [0, 5, 6]
    assert run.daemon.truncations == [(7, None)]
    del run.generator.token_ids[run.kv.position :]
    run.kv.check_integrity()
    assert greedy(run.generator, run.prompt[run.kv.position :], NEW).tokens == run.expected()


@pytest.mark.parametrize("place", PLACES)
def test_slots_given_away_while_it_copies_leave_the_blocks_below(place: str) -> None:
    run = Resumed(place)
    epoch = run.daemon.table.epoch()
    answers = iter([0])
    run.daemon.table.reclaimed = lambda: next(answers, epoch + 1)  # type: ignore[method-assign]
    run.resume()
    assert run.hot() == [] and run.kv.arena.used_slots == 0 and run.kv.promoted_hot_blocks == 0
    run.daemon.table.reclaimed = lambda: 0  # type: ignore[method-assign]
    assert run.answer() == run.expected()


def test_a_daemon_that_is_gone_leaves_the_blocks_below() -> None:
    run = Resumed("host")

    def slab(slab_id: int) -> Any:
        raise DaemonUnavailable("gone")

    known, run.daemon.slab = run.daemon.slab, slab  # type: ignore[method-assign]
    run.resume()
    assert run.hot() == []
    run.daemon.slab = known  # type: ignore[method-assign]
    assert run.answer() == run.expected()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("codec", [CodecId.INT8, CodecId.FP8])
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
def test_lossy_pages_are_hot_as_they_decode(place: str, codec: CodecId, dtype: DType) -> None:
    run = Resumed(place, codec=codec, dtype=dtype)
    run.resume()
    if run.device is not None:
        run.device.drain()
    table = run.daemon.table.arrays
    for block in run.hot():
        for layer in range(run.geometry.layers):
            used = CodecId(int(table["codec"][layer, block]))
            assert block == 0 or used is codec
            layout = page_layout(run.geometry, used)
            slab = run.daemon.slab(int(table["slab"][layer, block]))
            start = slab.address + int(table["slot"][layer, block]) * layout.slot_bytes
            page = bytes_at(start + HEADER_BYTES, layout.payload_bytes).copy()
            exact = np.stack(decode_page(page, layout)).astype(np.float64)
            slot = run.kv.slot_of(block)
            hot = [
                part[slot, layer].double().numpy()
                for part in (run.kv.arena.keys, run.kv.arena.values)
            ]
            narrow = 0.0 if dtype is DType.FLOAT32 else 2.0**-8  # to nearest
            assert (np.abs(np.stack(hot) - exact) <= narrow * np.abs(exact)).all()


@pytest.mark.parametrize("place", PLACES)
def test_with_int8_logits_are_those_without_promotion(place: str) -> None:
    logits = []
    for promotes in (True, False):
        run = Resumed(place, codec=CodecId.INT8, promotes=promotes)
        run.resume()
        logits.append(run.generator.feed([run.first_token]))
    assert float((logits[0] - logits[1]).abs().max()) < 3e-4


def test_only_blocks_warm_in_every_layer_are_chosen_the_first_then_the_newest() -> None:
    tier = np.full((2, 6), Tier.WARM, np.uint8)
    tier[1, 4], tier[0, 2] = Tier.COLD, Tier.NONE
    table: Any = SimpleNamespace(tier=tier)
    assert choose_blocks(table, 9) == [0, 5, 3, 1]
    assert choose_blocks(table, 2) == [0, 5] and choose_blocks(table, -1) == []
    tier[0, 0] = Tier.COLD
    assert choose_blocks(table, 2) == [5, 3]
    assert choose_blocks(SimpleNamespace(tier=tier[:, :0]), 2) == []  # type: ignore[arg-type]
