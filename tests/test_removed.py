"""What somebody removes of the cold folder under a daemon is not said to be kept any more."""

import shutil
import time
from pathlib import Path

import pytest

from tests.rig import INT8, Rig, in_loop
from tests.test_backups import passes
from tests.test_keeping import kept, make, reopened, resumed, suspend
from tests.wirerig import small_config, store_session
from tierd.backups import AGAIN_SECONDS
from tierd.client import Client
from tierd.daemon import EmbeddedDaemon
from tierd.disk.simulated import SimulatedDisk
from tierd.disk.slabfiles import slab_name
from tierd.errors import StorageError
from tierd.keeping import LOOK_SECONDS
from tierd.types import SessionState, Tier


def remove_slabs(rig: Rig, session) -> None:
    """Remove the files of all that a session has on disk."""
    for slab in set(rig.ledger.pages_of(session.number)["slab"].tolist()):
        rig.disk.remove(slab_name(slab))


@in_loop
async def test_blocks_whose_slab_somebody_removed_are_not_said_to_be_kept() -> None:
    disk = SimulatedDisk(1)
    rig = make(disk, warm_blocks=16, cold_blocks=256)
    session = await kept(rig, 12)
    whole = await kept(rig, 4)
    keeper = rig.store.keeper
    keeper.look()
    assert keeper.removed_blocks(session) == keeper.removed_blocks(whole) == 0
    for key in rig.store.traffic.pages_in(Tier.WARM, session, range(12)):
        assert rig.store.traffic.fall_back(key)  # so that it is nowhere else
    rows = rig.ledger.pages_of(session.number)
    slab = int(rows["slab"][-1])
    first = int(rows["block"][rows["slab"] == slab].min())
    disk.remove(slab_name(slab))
    keeper.look()
    assert keeper.is_kept(session) and keeper.removed_blocks(session) == 12 - first
    assert slab_name(slab) in keeper.removed.trouble and not keeper.removed.why
    rig.ledger.flush(sync=True)
    again = reopened(disk.kill(), cold_blocks=256)
    (found,) = (s for s in again.store.sessions() if s.number == session.number)
    assert found.sealed_blocks == first, "as it was said"


@in_loop
async def test_what_is_in_ram_is_copied_anew_where_its_files_were_removed() -> None:
    disk = SimulatedDisk(1)
    rig = make(disk, warm_blocks=16, cold_blocks=256)
    session = await kept(rig, 4)
    keeper = rig.store.keeper
    remove_slabs(rig, session)
    keeper.look()
    assert not keeper.is_kept(session) and keeper.ram_only_blocks(session) == 4
    rig.store.check_integrity()
    await passes(rig, 2 * AGAIN_SECONDS)
    assert keeper.is_kept(session) and not keeper.removed_blocks(session)
    resumed(reopened(disk.kill(), cold_blocks=256), session.number, 4)


@in_loop
async def test_a_session_is_kept_anew_where_the_files_of_its_copies_were_removed() -> None:
    disk = SimulatedDisk(1)
    rig = make(disk, warm_blocks=16, cold_blocks=256)
    session = await kept(rig, 4)
    again = rig.store.resume_session(1, session.number, INT8, 1024)
    remove_slabs(rig, session)
    await suspend(rig, again, 4)  # nobody has looked since
    resumed(reopened(disk.kill(), cold_blocks=256), session.number, 4)


@in_loop
async def test_a_session_some_of_which_is_nowhere_but_in_removed_files_is_not_kept() -> None:
    disk = SimulatedDisk(1)
    rig = make(disk, warm_blocks=16, cold_blocks=256)
    session = await kept(rig, 4)
    again = rig.store.resume_session(1, session.number, INT8, 1024)
    for key in rig.store.traffic.pages_in(Tier.WARM, again, [3]):
        assert rig.store.traffic.fall_back(key)
    remove_slabs(rig, session)
    with pytest.raises(StorageError, match="1 blocks of the session are not kept: somebody"):
        await suspend(rig, again, 4)
    assert again.state is SessionState.RUNNING
    rig.store.check_integrity()


@in_loop
async def test_files_that_went_while_the_folder_was_away_are_seen_once_it_is_back() -> None:
    rig = make(SimulatedDisk(1), warm_blocks=16, cold_blocks=256)
    session = await kept(rig, 4)
    keeper, well = rig.store.keeper, rig.ledger.require_there

    def away() -> None:
        raise StorageError("somebody moved it")

    rig.ledger.require_there = away
    remove_slabs(rig, session)
    keeper.look()
    assert not keeper.is_kept(session) and keeper.ram_only_blocks(session) == 0
    rig.ledger.require_there = well
    keeper.look()
    assert not keeper.is_kept(session) and keeper.ram_only_blocks(session) == 4
    rig.store.check_integrity()


@in_loop
async def test_where_the_journal_was_removed_nothing_is_said_to_be_kept() -> None:
    disk = SimulatedDisk(1)
    rig = make(disk)
    session = await kept(rig)
    keeper, told = rig.store.keeper, []
    rig.mover.on_troubles = lambda before, now: told.append(now)
    assert keeper.is_kept(session)
    for name in disk.names("journal"):
        disk.remove(name)
    rig.clock.advance(LOOK_SECONDS)
    rig.mover.pump()  # nobody asked
    assert not keeper.is_kept(session)
    rig.mover.pump()
    assert (
        "somebody removed journal/" in told[-1]["folder"] == rig.store.stats()["troubles"]["folder"]
    )


def test_a_session_whose_folder_was_removed_is_not_said_to_be_kept(tmp_path: Path) -> None:
    with (
        EmbeddedDaemon(small_config(tmp_path, **{"cold.ephemeral": False})) as daemon,
        Client.connect(daemon.socket) as job,
        Client.connect(daemon.socket, kind="tool") as tool,
    ):
        session = store_session(job, 4)
        assert tool.session(session)["kept"] and not tool.stats()["troubles"]
        shutil.rmtree(tmp_path / "cold")
        assert not tool.session(session)["kept"]
        (row,) = tool.sessions()
        assert not row["kept"] and row["ram_only_blocks"] == 0
        assert "was removed; nothing in it is kept" in tool.stats()["troubles"]["folder"]
        assert "was removed" in tool.stats()["tiers"]["cold"]["device"]


def test_a_daemon_that_finds_kept_sessions_without_their_files_in_kept_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = small_config(tmp_path, **{"cold.ephemeral": False, "service.log_level": "warning"})
    with EmbeddedDaemon(config) as daemon, Client.connect(daemon.socket) as job:
        session = store_session(job, 4)
    with EmbeddedDaemon(config):
        pass
    assert "written down once" not in capfd.readouterr().err
    shutil.rmtree(tmp_path / "cold" / "kept")
    with (
        EmbeddedDaemon(config) as daemon,
        Client.connect(daemon.socket, kind="tool") as tool,
    ):
        assert tool.session(session)["kept"] and tool.session(session)["sealed_blocks"] == 4
    said = capfd.readouterr().err
    assert "kept sessions are written down once, not twice" in said and "fsck --rebuild" in said


def test_a_session_whose_slabs_were_removed_is_put_on_disk_again(tmp_path: Path) -> None:
    with (
        EmbeddedDaemon(small_config(tmp_path, **{"cold.ephemeral": False})) as daemon,
        Client.connect(daemon.socket) as job,
        Client.connect(daemon.socket, kind="tool") as tool,
    ):
        session = store_session(job, 4)
        for file in (tmp_path / "cold" / "slab").iterdir():
            file.unlink()
        assert "somebody removed slab/" in tool.stats()["tiers"]["cold"]["device"]
        give_up_at = time.monotonic() + 3 * AGAIN_SECONDS
        while not (row := tool.session(session))["kept"]:
            assert time.monotonic() < give_up_at, row
            time.sleep(0.05)
        assert row["removed_blocks"] == row["ram_only_blocks"] == 0 and row["sealed_blocks"] == 4
