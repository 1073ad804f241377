"""What somebody removes of the cold folder under a daemon is not said to be kept any more."""

import shutil
from pathlib import Path

from tests.rig import in_loop
from tests.test_keeping import kept, make, reopened
from tests.wirerig import small_config, store_session
from tierd.client import Client
from tierd.daemon import EmbeddedDaemon
from tierd.disk.simulated import SimulatedDisk
from tierd.disk.slabfiles import slab_name
from tierd.keeping import LOOK_SECONDS


@in_loop
async def test_blocks_whose_slab_somebody_removed_are_not_said_to_be_kept() -> None:
    disk = SimulatedDisk(1)
    rig = make(disk, warm_blocks=16, cold_blocks=256)
    session = await kept(rig, 12)
    whole = await kept(rig, 4)
    keeper = rig.store.keeper
    keeper.look()
    assert keeper.removed_blocks(session) == keeper.removed_blocks(whole) == 0
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


def test_a_session_whose_slabs_were_removed_says_so(tmp_path: Path) -> None:
    with (
        EmbeddedDaemon(small_config(tmp_path, **{"cold.ephemeral": False})) as daemon,
        Client.connect(daemon.socket) as job,
        Client.connect(daemon.socket, kind="tool") as tool,
    ):
        session = store_session(job, 4)
        for file in (tmp_path / "cold" / "slab").iterdir():
            file.unlink()
        row = tool.session(session)
        assert row["kept"] and row["removed_blocks"] == row["sealed_blocks"] == 4
        assert "somebody removed slab/" in tool.stats()["tiers"]["cold"]["device"]
