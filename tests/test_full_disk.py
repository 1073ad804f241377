"""A daemon started on a full disk: kept sessions are resumed and read, nothing new is kept, and
it goes on by itself once there is space.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.moversteps import cool, demote, intact, start, turns
from tests.rig import INT8, INT8_BLOCK, LAYERS, Rig, in_loop
from tests.test_keeping import ids, kept, make, resumed, suspend
from tests.wirerig import ROOT
from tierd.disk.faults import FOR_EVER, Fault, FaultKind
from tierd.disk.simulated import SimulatedDisk
from tierd.errors import StorageFull, TierFull
from tierd.types import SessionState, Tier

FULL = Fault(FaultKind.FULL, "create", count=FOR_EVER)


async def full(blocks: int = 4) -> tuple[Rig, int]:
    """Return a store that was started on a full disk, and the session kept there."""
    disk = SimulatedDisk(1)
    number = (await kept(make(disk), blocks)).number
    disk = disk.kill()
    disk.plan.add(FULL)
    rig = Rig(8 * INT8_BLOCK, 64 * INT8_BLOCK, disk, durable=True, patient=True, first_number=1000)
    rig.engine(1)
    assert rig.store.ledger.waiting
    return rig, number


async def while_it_waits(rig: Rig, seconds: float = 3.0) -> None:
    """Let time pass; the ledger tries to begin each second."""
    for _ in range(int(seconds / 0.5)):
        rig.mover.pump()
        rig.lanes.run()
        rig.clock.advance(0.5)
        rig.store.check_integrity()


@in_loop
async def test_a_kept_session_is_resumed_read_and_promoted_and_new_ones_go_to_warm() -> None:
    rig, number = await full()
    session = resumed(rig, number, 4)
    await while_it_waits(rig)
    asked = await start(rig.mover.promote(1, number, [0, 1]))
    await turns(rig, asked)
    assert asked.result() == 2 * LAYERS == session.index.pages_in(Tier.WARM)
    intact(rig, session)
    await demote(rig, session, [4, 5])
    intact(rig, session)
    other = rig.session()
    await demote(rig, other, [1, 2])
    assert rig.store.ledger.waiting


@in_loop
async def test_a_suspension_is_refused_at_once_and_the_session_stays_as_it_is() -> None:
    rig, number = await full()
    session = resumed(rig, number, 4)
    await demote(rig, session, [4, 5])
    with pytest.raises(StorageFull):
        await rig.mover.suspend(1, number, ids(6), 6)
    assert session.state is SessionState.RUNNING
    assert len(session.index) == 6 * LAYERS and session.sealed_blocks == 4
    intact(rig, session)


@in_loop
async def test_nothing_is_written_and_warm_that_is_full_says_so() -> None:
    rig, number = await full()
    session = resumed(rig, number, 4)
    wrote: list[str] = []
    rig.disk._watch = lambda operation, name: (
        wrote.append(name) if operation in ("write", "rename") else None
    )
    task = await start(demote(rig, session, range(4, 30)))
    for _ in range(300):
        rig.mover.pump()
        rig.lanes.run()
        rig.clock.advance(0.5)
        await start(noop())
        if task.done():
            break
    assert isinstance(task.exception(), TierFull | AssertionError)
    assert not [name for name in wrote if name.startswith(("slab", "journal"))], wrote
    intact(rig, session)


async def noop() -> None:
    """Let other tasks go on."""


@in_loop
async def test_it_goes_on_by_itself_once_there_is_space() -> None:
    rig, number = await full()
    session = resumed(rig, number, 4)
    await demote(rig, session, [4, 5])
    await while_it_waits(rig)
    rig.disk.plan.clear()
    await while_it_waits(rig)
    assert not rig.store.ledger.failed
    await suspend(rig, session, 6)
    again = Rig(8 * INT8_BLOCK, 64 * INT8_BLOCK, rig.disk.crash(keep=()), durable=True,
                first_number=2000)  # fmt: skip
    again.engine(1)
    session = again.store.resume_session(1, number, INT8, 1024)
    assert session.sealed_blocks == 6
    cool(again, session)
    intact(again, session)


# -- a real file system ---------------------------------------------------------------

SCRIPT = """
import os, sys
from pathlib import Path
import numpy as np, pytest
from tests.wirerig import *
from tierd.daemon import EmbeddedDaemon
from tierd.errors import StorageFull
folder = Path(sys.argv[1])
config = small_config(folder.parent, **{"cold.folder": str(folder), "cold.ephemeral": False,
                                        "cold.cap_bytes": 8 << 20})
tokens = np.arange(8 * 16, dtype=np.uint32)
def read(client, handle, blocks):
    with client.epochs.step(handle.table.epoch()):
        for block in range(blocks):
            for layer in range(LAYERS):
                assert read_page(client, handle, layer, block) == page_bytes(
                    layer, block, codec_at(block))
with EmbeddedDaemon(config) as daemon, Client.connect(daemon.socket) as client:
    handle = client.open_session(INT8, MAX_TOKENS)
    demote(client, handle, range(8), include_first=True)
    handle.suspend(tokens, 8)
    number = handle.id
free = os.statvfs(folder)
neighbour = os.open(folder / "not-ours", os.O_RDWR | os.O_CREAT)
os.posix_fallocate(neighbour, 0, free.f_bavail * free.f_frsize)
assert os.statvfs(folder).f_bavail == 0
for _ in range(2):  # as often as one likes
    with EmbeddedDaemon(config) as daemon, Client.connect(daemon.socket) as client:
        handle = client.resume(number, INT8, MAX_TOKENS)
        assert (handle.sealed_blocks, list(handle.token_ids)) == (8, list(tokens))
        read(client, handle, 8)
        with pytest.raises(StorageFull):
            handle.suspend(tokens, 8)
        read(client, handle, 8)
        assert "read-only" in client.stats()["tiers"]["cold"]["device"]
        handle.close()
with EmbeddedDaemon(config) as daemon, Client.connect(daemon.socket) as client:
    handle = client.resume(number, INT8, MAX_TOKENS)
    os.ftruncate(neighbour, 0)
    eventually(lambda: "read-only" not in client.stats()["tiers"]["cold"]["device"], 10.0)
    handle.suspend(tokens, 8)
with EmbeddedDaemon(config) as daemon, Client.connect(daemon.socket) as client:
    read(client, client.resume(number, INT8, MAX_TOKENS), 8)

# Without a cap, cold grows into the space that comes free after the start.
import tierd.daemon
tierd.daemon.GROW_SECONDS = 0.1
capless = small_config(folder.parent, **{"cold.folder": str(folder), "cold.ephemeral": False,
                                         "cold.cap_bytes": 0})
free = os.statvfs(folder)
os.posix_fallocate(neighbour, 0, free.f_bavail * free.f_frsize)
with EmbeddedDaemon(capless) as daemon, Client.connect(daemon.socket) as client:
    def capacity():
        return client.stats()["tiers"]["cold"]["capacity_bytes"]
    before = capacity()
    os.ftruncate(neighbour, 0)
    eventually(lambda: capacity() > before + (2 << 20), 10.0)
"""


def test_a_real_file_system_that_is_full_at_the_start(tmp_path: Path) -> None:
    """On a tmpfs of its own, in a mount namespace of that process alone."""
    place = tmp_path / "cold"
    place.mkdir()
    script = f'mount -t tmpfs -o size=12m tmpfs {place} && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", script, "sh"]
    if os.geteuid() != 0:
        command[1:1] = ["--user", "--map-root-user"]
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare here")
    if subprocess.run([*command, "true"], capture_output=True, timeout=30).returncode:
        pytest.skip("this user may not mount a tmpfs")
    done = subprocess.run(
        [*command, sys.executable, "-c", SCRIPT, str(place)],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
