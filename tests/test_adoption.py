"""Handing pages back to the next daemon, where something goes wrong on the way."""

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.rig import INT8 as RIG_INT8
from tests.rig import INT8_BLOCK, LAYERS, Rig
from tests.wirerig import (
    BLOCK_BYTES,
    INT8,
    MAX_TOKENS,
    codec_at,
    demote,
    eventually,
    page_bytes,
    read_page,
    small_config,
    write_pages,
)
from tierd import client as clients
from tierd import keeping, service
from tierd.adoption import Offers, inspect
from tierd.client import Client, SessionHandle
from tierd.config import DaemonConfig
from tierd.daemon import EmbeddedDaemon
from tierd.demotions import RoomNeeded
from tierd.disk.simulated import SimulatedDisk
from tierd.errors import DeadlineExceeded, NotFound, TierdError, TierFull
from tierd.memory import slabmemory as slab_memory
from tierd.sessions import Session
from tierd.types import PageKey, SlabRecord, Tier, digest8


def config(folder: Path, warm_blocks: int = 16) -> DaemonConfig:
    return small_config(folder, warm_bytes=warm_blocks * BLOCK_BYTES, **{"cold.ephemeral": False})


@contextmanager
def again(settings: DaemonConfig, socket: str) -> Iterator[EmbeddedDaemon]:
    """Run the next daemon at a dead one's socket."""
    daemon = EmbeddedDaemon(settings)
    daemon.socket = socket
    daemon._config = replace(settings, service=replace(settings.service, socket=socket))
    with daemon:
        yield daemon


def assert_intact(client: Client, handle: SessionHandle, blocks: range) -> None:
    assert client.epochs is not None
    with client.epochs.step(handle.table.epoch()):
        for block in blocks:
            for layer in range(LAYERS):
                expected = page_bytes(layer, block, codec_at(block))
                assert read_page(client, handle, layer, block) == expected, (layer, block)


# -- a mapping that fails -------------------------------------------------------------


def test_a_slab_that_cannot_be_mapped_costs_its_own_pages_and_nothing_is_counted_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = SimulatedDisk(1)
    rig = Rig(disk=disk, durable=True)  # 16 blocks of warm: a slab holds one
    rig.engine(1)
    session = rig.session()
    rig.demote(session, range(1, 7))
    offers = Offers()
    offers.add_table(session.number, session.table.fd)
    for pool in rig.store.placement.pools[Tier.WARM]:
        for slab, slots in pool.slabs().items():
            record = SlabRecord(slab, pool.namespace_digest, pool.slot_bytes, slots)
            offers.add_slab(record, rig.store.placement.warm_memory.fd(slab))
    assert len(offers.slabs) == 6
    rig.ledger.flush()
    rig.store.close()
    rig = Rig(disk=disk.kill(), durable=True, first_number=100)
    rig.engine(1)
    fds = len(os.listdir("/proc/self/fd"))
    real, made = slab_memory.Mapping, 0

    def failing(*args: Any, **options: Any) -> Any:
        nonlocal made
        made += 1
        if made == 3:
            raise TierFull("the host has no memory for it")
        return real(*args, **options)

    monkeypatch.setattr(slab_memory, "Mapping", failing)
    refused = 0
    for slab in offers.slabs.values():
        try:
            rig.store.placement.hold_warm_slab(slab.record, slab.fd)
        except TierFull:
            refused += 1
        rig.store.check_integrity()
    assert refused == 1
    assert len(os.listdir("/proc/self/fd")) - fds == 5, "the failed one left an fd"
    assert rig.store.placement.pools[Tier.WARM].budget.used_bytes == 5 * INT8_BLOCK
    found = inspect(offers, session.number, RIG_INT8, rig.ledger.store_uuid, 64)
    adopted = rig.store.adopt_session(1, session.number, RIG_INT8, 1024, found)
    assert adopted.index.pages_in(Tier.WARM) == 5 * LAYERS
    rig.store.check_integrity()
    for (layer, block), page in adopted.index:
        key = PageKey(adopted.number, layer, block)
        assert rig.bytes_of(adopted, layer, block) == rig.payload(adopted, key, page.place.codec)
    offers.close()


# -- two engines, one after the other -------------------------------------------------


def offers_of(rig: Rig, session: Session) -> Offers:
    """Return what the session's engine hands over: its table, and the slabs that it names."""
    assert session.table is not None
    offers = Offers()
    offers.add_table(session.number, session.table.fd)
    named = {page.place.slab for _, page in session.index if page.place.tier is Tier.WARM}
    for pool in rig.store.placement.pools[Tier.WARM]:
        for slab in named & pool.slabs().keys():
            record = SlabRecord(slab, pool.namespace_digest, pool.slot_bytes, pool.slabs()[slab])
            offers.add_slab(record, rig.store.placement.warm_memory.fd(slab))
    return offers


def hand_back(rig: Rig, engine_id: int, number: int, offers: Offers) -> Session:
    """Do the daemon's part of a hand-over; the offers are closed."""
    for slab in offers.slabs.values():
        rig.store.placement.hold_warm_slab(slab.record, slab.fd)
    found = inspect(offers, number, RIG_INT8, rig.ledger.store_uuid, 64)
    offers.close()
    session = rig.store.adopt_session(engine_id, number, RIG_INT8, 1024, found)
    rig.store.check_integrity()
    return session


def two_engines_and_a_restart(blocks: int) -> tuple[Rig, list[tuple[int, Offers]]]:
    """Return the next daemon, with 16 blocks of warm, and what engines 1 and 2 hand over."""
    disk = SimulatedDisk(1)
    rig = Rig(disk=disk, durable=True)
    sessions = [rig.session(rig.engine(engine_id)) for engine_id in (1, 2)]
    for block in range(1, blocks + 1):
        for session in sessions:
            rig.demote(session, [block])
    left = [(session.number, offers_of(rig, session)) for session in sessions]
    rig.ledger.flush()
    rig.store.close()
    rig = Rig(disk=disk.kill(), durable=True, first_number=100)
    rig.engine(1)
    rig.engine(2)
    return rig, left


def test_the_engine_that_comes_first_does_not_take_the_room_of_the_other_ones_slabs() -> None:
    rig, ((first, offered), (second, waiting)) = two_engines_and_a_restart(blocks=6)
    session = hand_back(rig, 1, first, offered)
    assert session.index.pages_in(Tier.WARM) == 6 * LAYERS
    with pytest.raises(RoomNeeded):
        rig.demote(session, range(7, 13))
    plan = rig.store.plan_demotion(1, first, range(7, 13), 6, writes_cold=True)
    assert plan.tier is Tier.COLD, "an engine that can writes past warm meanwhile"
    rig.settle()
    assert session.index.pages_in(Tier.WARM) == 6 * LAYERS, "no spill that makes no room"
    other = hand_back(rig, 2, second, waiting)
    assert other.index.pages_in(Tier.WARM) == 6 * LAYERS
    rig.store.abort(1, plan.reservation)
    rig.demote(session, range(7, 10))
    for one in (session, other):
        for (layer, block), page in one.index:
            key = PageKey(one.number, layer, block)
            assert rig.bytes_of(one, layer, block) == rig.payload(one, key, page.place.codec)
    rig.store.check_integrity()


def test_room_for_slabs_that_never_come_is_free_when_the_time_for_claims_is_over() -> None:
    rig, ((first, offered), (_, never)) = two_engines_and_a_restart(blocks=6)
    never.close()
    session = hand_back(rig, 1, first, offered)
    budget = rig.store.placement.pools[Tier.WARM].budget
    assert budget.remaining_bytes == 0 and budget.unused_bytes == 10 * INT8_BLOCK
    rig.clock.advance(keeping.CLAIM_SECONDS + 1.0)
    rig.store.tick()
    assert budget.remaining_bytes == budget.unused_bytes == 10 * INT8_BLOCK
    rig.demote(session, range(7, 17))
    rig.store.check_integrity()


def test_pages_whose_slab_finds_no_room_are_said_to_be_lost_with_the_reason() -> None:
    rig, ((first, offered), (_, never)) = two_engines_and_a_restart(blocks=6)
    never.close()
    told: list[tuple[int, PageKey, str]] = []
    rig.store.traffic.on_lost = lambda _, lost, why: told.append((len(lost), lost[0], why))
    slabs = list(offered.slabs)
    held = [slab for slab in slabs if slab != slabs[2]]
    for slab in held:
        rig.store.placement.hold_warm_slab(offered.slabs[slab].record, offered.slabs[slab].fd)
    found = inspect(offered, first, RIG_INT8, rig.ledger.store_uuid, 64)
    offered.close()
    found.refused = {slabs[2]: "beyond the budget"}
    session = rig.store.adopt_session(1, first, RIG_INT8, 1024, found)
    assert told == [(LAYERS, PageKey(first, 0, 3), "beyond the budget")]
    rig.store.truncate(1, first, 3, damaged_layer=0)
    assert told[1:] == [(1, PageKey(first, 0, 3), "an engine needs it, and it is in no tier")]
    assert session.index.pages_in(Tier.WARM) == 2 * LAYERS
    rig.store.check_integrity()


@pytest.mark.parametrize("tier", [Tier.WARM, Tier.COLD])
@pytest.mark.parametrize("published", range(1, LAYERS))
def test_a_block_whose_daemon_died_while_it_published_it_can_be_demoted_again(
    tier: Tier, published: int
) -> None:
    """The engine has it hot still: it was never answered."""
    disk = SimulatedDisk(1)
    rig = Rig(disk=disk, durable=True, warm_bytes=(16 if tier is Tier.WARM else 1) * INT8_BLOCK)
    session = rig.session(rig.engine(1))
    rig.demote(session, [1])
    plan = rig.store.plan_demotion(1, session.number, [2], 1, writes_cold=True)
    assert plan.tier is tier
    demotion = rig.store.commit(1, plan.reservation, rig.write(session, plan))
    rig.ledger.flush()
    if demotion is not None:
        rig.store.loans.finish(demotion, None)
    assert session.table is not None
    for layer in range(published, LAYERS):
        session.table.unpublish(layer, 2)  # as it was before
    offered = offers_of(rig, session)
    rig.store.close()
    rig = Rig(disk=disk.kill(), durable=True, first_number=100)
    rig.engine(1)
    told: list[PageKey] = []
    rig.store.traffic.on_lost = lambda _, lost, why: told.extend(lost)
    adopted = hand_back(rig, 1, session.number, offered)
    assert adopted.index.blocks_from(0) == [1] and told == []
    assert rig.store.plan_demotion(1, adopted.number, [2], 1).blocks == [2]
    rig.store.check_integrity()


def test_a_daemon_logs_what_an_engine_found_lost(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = config(tmp_path)
    settings = replace(settings, service=replace(settings.service, log_level="warning"))
    with EmbeddedDaemon(settings) as daemon, Client.connect(daemon.socket) as client:
        handle = client.open_session(INT8, MAX_TOKENS)
        demote(client, handle, [1, 2])
        handle.truncate(2, damaged_layer=1)
        handle.truncate(5)
        session = handle.id
    lines = [line for line in capfd.readouterr().err.splitlines() if "pages were lost" in line]
    assert len(lines) == 1
    line = json.loads(lines[0])
    assert line["session"] == digest8(session) and session not in lines[0]
    assert (line["pages"], line["layer"], line["block"]) == (1, 1, 2)
    assert line["why"] == "an engine read other bytes than were written"


# -- an engine that leaves ------------------------------------------------------------


def test_an_engine_may_leave_while_its_pages_are_inspected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(tmp_path)
    with EmbeddedDaemon(settings) as daemon:
        socket = daemon.socket
        leaver, stayer = Client.connect(socket), Client.connect(socket)
        left, stayed = (client.open_session(INT8, MAX_TOKENS) for client in (leaver, stayer))
        demote(leaver, left, [1, 2])
        demote(stayer, stayed, [1, 2, 3])
    looking, gone = threading.Event(), threading.Event()
    honest, seen = service.inspect, []

    def slow(offers: Offers, session: int, *rest: Any) -> Any:
        if session == left.number:
            looking.set()
            assert gone.wait(10.0)
        found = honest(offers, session, *rest)
        seen.append((session, len(found.warm)))
        return found

    monkeypatch.setattr(service, "inspect", slow)
    with again(settings, socket) as daemon:
        leaver.reconnect()
        errors: list[TierdError] = []

        def hand_back() -> None:
            try:
                left.hand_back()
            except TierdError as error:
                errors.append(error)

        thread = threading.Thread(target=hand_back)
        thread.start()
        assert looking.wait(10.0)
        leaver._bootstrap.close()  # as its death would
        with Client.connect(socket, kind="tool") as tool:
            eventually(lambda: tool.stats()["engines"] == 0)
            gone.set()
            thread.join(20.0)
            assert not thread.is_alive() and errors, "it was told that it is not there any more"
            assert (left.number, 2 * LAYERS) in seen, "its pages were still whole"
            stayer.reconnect()
            assert stayed.hand_back() == 3 * LAYERS
            assert_intact(stayer, stayed, range(1, 4))
            assert tool.stats()["engines"] == 1
        store = daemon._daemon.store  # type: ignore[union-attr]
        eventually(lambda: not store.placement.moving)
        store.check_integrity()
        with pytest.raises(TierdError):
            store.session(left.number)
        stayed.close()
        stayer.close()
    leaver.close()


# -- a lost reply ---------------------------------------------------------------------


class Losing:
    """A stub's method whose first reply is lost: the call was carried out."""

    def __init__(self, method: Any) -> None:
        self._method = method
        self.calls = 0

    def with_call(self, *args: Any, **options: Any) -> Any:
        self.calls += 1
        reply = self._method.with_call(*args, **options)
        if self.calls == 1:
            raise DeadlineExceeded("the reply is lost")
        return reply


def test_a_plan_whose_reply_was_lost_is_given_again_over_the_wire(tmp_path: Path) -> None:
    with EmbeddedDaemon(config(tmp_path)) as daemon, Client.connect(daemon.socket) as client:
        handle = client.open_session(INT8, MAX_TOKENS)
        client.placement.PlanDemotion = Losing(client.placement.PlanDemotion)
        with pytest.raises(DeadlineExceeded):
            handle.plan_demotion([1, 2], 2)
        plan = handle.plan_demotion([1, 2], 2)
        assert plan.blocks == [1, 2]
        handle.commit(plan, write_pages(client, plan))
        assert_intact(client, handle, range(1, 3))
        stats = client.stats()
        assert stats["tiers"]["warm"]["reserved_slots"] == 0 and stats["demotions_open"] == 0
        assert stats["tiers"]["warm"]["pages"] == 2 * LAYERS


def test_a_plan_whose_reply_a_dead_daemon_never_sent_leaves_no_slot_behind(
    tmp_path: Path,
) -> None:
    settings = config(tmp_path)
    with EmbeddedDaemon(settings) as daemon:
        socket = daemon.socket
        client = Client.connect(socket)
        handle = client.open_session(INT8, MAX_TOKENS)
        demote(client, handle, [1])
        handle.plan_demotion([2, 3], 2)  # never committed: the daemon ends first
    with again(settings, socket) as daemon:
        client.reconnect()
        assert handle.hand_back() == LAYERS
        demote(client, handle, [2, 3])
        assert_intact(client, handle, range(1, 4))
        assert client.stats()["tiers"]["warm"]["reserved_slots"] == 0
        daemon._daemon.store.check_integrity()  # type: ignore[union-attr]
        handle.close()
        client.close()


# -- what a restart waits for ---------------------------------------------------------


def test_a_session_whose_openings_answer_was_lost_holds_nothing_up(tmp_path: Path) -> None:
    """It has no page: the next daemon does not know of it, and lends slots at once."""
    settings = config(tmp_path, warm_blocks=4)
    with EmbeddedDaemon(settings) as daemon:
        socket = daemon.socket
        client, other = Client.connect(socket), Client.connect(socket)
        handle = client.open_session(INT8, MAX_TOKENS)
        other.open_session(INT8, MAX_TOKENS)  # its engine never hears of it
        demote(client, handle, [1, 2])
    other.close()
    with again(settings, socket) as daemon:
        client.reconnect()
        assert handle.hand_back() == 2 * LAYERS
        assert daemon._daemon.store.keeper.claims_seconds == 0.0  # type: ignore[union-attr]
        plan = handle.plan_demotion([3, 4], 2, deadline_seconds=1.0)
        handle.commit(plan, write_pages(client, plan))
        handle.close()
        client.close()


def test_room_that_is_held_for_another_engine_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one died with the daemon. Its slots come free when its time is over, not before."""
    monkeypatch.setattr(keeping, "CLAIM_SECONDS", 7.0)
    settings = config(tmp_path, warm_blocks=4)
    with EmbeddedDaemon(settings) as daemon:
        socket = daemon.socket
        client, other = Client.connect(socket), Client.connect(socket)
        handle, dead = (one.open_session(INT8, MAX_TOKENS) for one in (client, other))
        demote(other, dead, [1])
        demote(client, handle, [1, 2, 3, 4])
        # Three blocks stay, and room for the next is made: else the smaller daemon holds too many.
        eventually(lambda: client.stats()["tiers"]["warm"]["pages"] == 3 * LAYERS)
    other.close()
    monkeypatch.setattr(clients, "ROOM_SECONDS", 3.0)
    # As if the spare block had been published in that moment: no slab is without a held slot.
    with again(config(tmp_path, warm_blocks=3), socket) as daemon:
        client.reconnect()
        assert handle.hand_back() == 4 * LAYERS

        def put(block: int, seconds: float | None) -> None:
            plan = handle.plan_demotion([block], 1, deadline_seconds=seconds)
            handle.commit(plan, write_pages(client, plan))

        with pytest.raises(TierFull, match="held for engines"):
            put(5, 1.0)
        put(5, None)
        assert_intact(client, handle, range(1, 6))
        with pytest.raises(NotFound):
            daemon._daemon.store.session(dead.number)  # type: ignore[union-attr]
        handle.close()
        client.close()
