"""A kept session that found no room on disk is copied there by itself, once there is some."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from tests.moversteps import demote, start
from tests.rig import Rig, in_loop
from tests.test_keeping import ids, kept, make, reopened, resumed, suspend
from tests.wirerig import INT8, MAX_TOKENS, eventually, small_config, store_session
from tests.wirerig import demote as demote_all
from tierd import backups
from tierd.backups import AGAIN_SECONDS
from tierd.client import Client
from tierd.daemon import EmbeddedDaemon
from tierd.disk.simulated import SimulatedDisk
from tierd.errors import StorageError, TierFull
from tierd.types import SessionState


async def ram_only(rig: Rig, blocks: int = 4):
    """Return a session whose suspension found no room, and whose engine has left it."""
    session = rig.session()
    await demote(rig, session, range(blocks), include_first=True)
    with pytest.raises(TierFull):
        await suspend(rig, session, blocks, patient=True)
    rig.store.close_session(session.number, engine_id=1)
    assert session.state is SessionState.SUSPENDED
    assert rig.store.keeper.ram_only_blocks(session)
    rig.store.check_integrity()
    return session


async def passes(rig: Rig, seconds: float) -> None:
    for _ in range(int(seconds / 0.5)):
        rig.mover.pump()
        rig.lanes.run()
        rig.clock.advance(0.5)
        rig.store.check_integrity()
        await asyncio.sleep(0)


def told(rig: Rig) -> list:
    found: list = []
    rig.mover.backups.on_kept = found.append
    return found


@in_loop
async def test_a_session_in_ram_alone_is_kept_once_another_makes_room() -> None:
    disk = SimulatedDisk(1)
    rig = make(disk, cold_blocks=6)
    kept_now = told(rig)
    first = await kept(rig)
    session = await ram_only(rig)
    left = rig.store.keeper.ram_only_blocks(session)
    await passes(rig, 5 * AGAIN_SECONDS)
    assert rig.store.keeper.ram_only_blocks(session) == left and not kept_now
    assert rig.store.keeper.ram_only_blocks(first) == 0  # nothing was dropped for it
    rig.store.close_session(first.number)
    await passes(rig, 2 * AGAIN_SECONDS)
    assert kept_now == [session] and not rig.store.keeper.ram_only
    resumed(reopened(disk.crash(keep=()), cold_blocks=6), session.number, 4)


@in_loop
async def test_a_disk_that_is_full_is_tried_seldom_and_takes_the_session_once_it_is_not() -> None:
    disk = SimulatedDisk(1)
    rig = make(disk, warm_blocks=16)
    kept_now = told(rig)
    await kept(rig)
    disk.capacity_bytes = disk.used_bytes()
    session = await ram_only(rig, 12)
    tries, begin_moves = [], rig.store.placement.begin_moves

    def counted(*arguments, **options):
        tries.append(rig.clock.monotonic())
        return begin_moves(*arguments, **options)

    rig.store.placement.begin_moves = counted
    await passes(rig, 10 * AGAIN_SECONDS)
    assert 5 <= len(tries) <= 11 and not kept_now
    disk.capacity_bytes = 2**40
    await passes(rig, 4 * AGAIN_SECONDS)
    assert kept_now == [session]
    resumed(reopened(disk.crash(keep=())), session.number, 12)


@in_loop
async def test_it_is_in_ram_alone_until_the_sync_has_returned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = SimulatedDisk(1)
    rig = make(disk, cold_blocks=6)
    kept_now = told(rig)
    first = await kept(rig)
    session = await ram_only(rig)
    rig.store.close_session(first.number)
    files = rig.store.placement.cold_files

    def fail() -> None:
        raise StorageError("the sync fails")

    with monkeypatch.context() as patched:
        patched.setattr(type(files), "sync", lambda self: fail())
        await passes(rig, 3 * AGAIN_SECONDS)
    assert not session.index.unbacked_count
    assert session.number in rig.store.keeper.ram_only and not kept_now
    await passes(rig, 3 * AGAIN_SECONDS)
    assert kept_now == [session]
    resumed(reopened(disk.crash(keep=()), cold_blocks=6), session.number, 4)


@pytest.mark.parametrize("then", ["resumed", "dropped"])
@in_loop
async def test_one_that_is_resumed_or_dropped_meanwhile_waits_no_more(then: str) -> None:
    disk = SimulatedDisk(1)
    rig = make(disk, cold_blocks=6)
    kept_now = told(rig)
    first = await kept(rig)
    session = await ram_only(rig)
    rig.store.close_session(first.number)
    rig.clock.advance(AGAIN_SECONDS)
    rig.mover.pump()  # its copies are on their way
    if then == "resumed":
        rig.store.resume_session(1, session.number, session.namespace, 1024)
    else:
        rig.store.close_session(session.number)
    await passes(rig, 2 * AGAIN_SECONDS)
    assert not rig.store.keeper.ram_only and not kept_now
    if then == "resumed":
        task = await start(rig.mover.suspend(1, session.number, ids(4), 4))
        await passes(rig, AGAIN_SECONDS)
        task.result()
        resumed(reopened(disk.crash(keep=()), cold_blocks=6), session.number, 4)


def test_the_daemon_says_so_in_its_log_and_its_list_of_sessions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(backups, "AGAIN_SECONDS", 0.2)
    cap = {"cold.ephemeral": False, "cold.cap_bytes": 1 << 20, "service.log_level": "info"}
    with (
        EmbeddedDaemon(small_config(tmp_path, **cap)) as daemon,
        Client.connect(daemon.socket) as job,
        Client.connect(daemon.socket, kind="tool") as tool,
    ):
        first = store_session(job, 4)
        handle = job.open_session(INT8, MAX_TOKENS)
        demote_all(job, handle, range(4), include_first=True)
        with pytest.raises(TierFull):
            handle.suspend(np.arange(64, dtype=np.uint32), 4)
        handle.close()
        row = tool.session(handle.id)
        assert not row["kept"] and row["ram_only_blocks"]
        tool.close_session(first)
        eventually(lambda: tool.session(handle.id)["kept"], 10.0)
        assert tool.session(handle.id)["ram_only_blocks"] == 0
    assert "a session that was in RAM only is on disk now" in capfd.readouterr().err
