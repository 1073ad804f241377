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
from tests.test_keeping import ids, kept, make, reopened, resumed, suspend
from tests.wirerig import ROOT
from tierd.backups import AGAIN_SECONDS
from tierd.disk.faults import FOR_EVER, Fault, FaultKind
from tierd.disk.fsck import check
from tierd.disk.simulated import SimulatedDisk
from tierd.errors import NotFound, StorageFull, TierFull
from tierd.testing import FakeClock
from tierd.types import SessionState, Tier

FULL = Fault(FaultKind.FULL, "create", count=FOR_EVER)


async def full(blocks: int = 4, warm_blocks: int = 8) -> tuple[Rig, int]:
    """Return a store that was started on a full disk, and the session kept there."""
    disk = SimulatedDisk(1)
    rig = make(disk)
    number = (await kept(rig, blocks)).number
    rig.ledger.flush()
    disk = disk.kill()
    disk.plan.add(FULL)
    rig = Rig(
        warm_blocks * INT8_BLOCK, 64 * INT8_BLOCK, disk, durable=True, patient=True,
        first_number=1000,
    )  # fmt: skip
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
async def test_a_suspension_is_refused_at_once_and_a_resumed_session_is_as_it_was_kept() -> None:
    rig, number = await full()
    session = resumed(rig, number, 4)
    await demote(rig, session, [4, 5])
    task = await start(rig.mover.suspend(1, number, ids(6), 6))
    await turns(rig, task, passes=1)
    with pytest.raises(StorageFull):
        task.result()
    assert session.state is SessionState.RUNNING and len(session.index) == 6 * LAYERS
    intact(rig, session)
    rig.store.close_session(number, engine_id=1)
    assert session.state is SessionState.SUSPENDED and not rig.store.keeper.ram_only
    resumed(rig, number, 4)
    disk = rig.disk.kill()
    disk.plan.clear()
    resumed(reopened(disk), number, 4)


async def dropped(rig: Rig, number: int, **options) -> None:
    """Drop a session as the service does."""
    task = await start(rig.mover.acks.close_session(number, **options))
    await turns(rig, task)
    task.result()


async def ram_only(rig: Rig, blocks: int = 4):
    """Return a new session whose suspension was refused, and whose engine has left it."""
    session = rig.session()
    await demote(rig, session, range(blocks), include_first=True)
    with pytest.raises(StorageFull):
        await suspend(rig, session, blocks)
    rig.store.close_session(session.number, engine_id=1)
    return session


@pytest.mark.parametrize("then", ["space", "killed", "resumed", "dropped"])
@in_loop
async def test_a_new_session_is_kept_in_ram_alone_and_on_disk_once_there_is_space(
    then: str,
) -> None:
    rig, number = await full(warm_blocks=32)
    kept_now: list = []
    rig.mover.backups.on_kept = kept_now.append
    session = await ram_only(rig)
    assert session.state is SessionState.SUSPENDED
    assert rig.store.keeper.ram_only_blocks(session) == 4
    await while_it_waits(rig, 2 * AGAIN_SECONDS)
    assert rig.store.keeper.ram_only_blocks(session) == 4 and not kept_now
    if then == "resumed":
        resumed(rig, session.number, 4)
        rig.store.close_session(session.number, engine_id=1)
        assert rig.store.keeper.ram_only_blocks(session) == 4
    if then == "dropped":  # nothing of it is on disk: its end needs no note, and here is no spare
        await dropped(rig, session.number)
    disk = rig.disk
    if then == "killed":
        disk = disk.kill()
    disk.plan.clear()
    if then != "killed":
        await while_it_waits(rig, 4 * AGAIN_SECONDS)
        assert [found is session for found in kept_now] == [True] * (then != "dropped")
        disk = disk.crash(keep=())
    assert check(disk, FakeClock()).clean
    again = reopened(disk)
    resumed(again, number, 4)
    if then in ("killed", "dropped"):
        with pytest.raises(NotFound):
            again.store.session(session.number)
    else:
        resumed(again, session.number, 4)


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


DROP_SCRIPT = """
import os, subprocess, sys
from pathlib import Path
import numpy as np, pytest
from tests.wirerig import *
from tierd.errors import NotFound, StorageFull
from tierd.cli import main
folder = Path(sys.argv[1])
socket = str(folder.parent / "run" / "tierd.sock")
tokens = np.arange(8 * 16, dtype=np.uint32)
COMMAND = [sys.executable, "-m", "tierd.cli", "serve", "--socket", socket, "--warm", "4MiB",
           "--cold-dir", str(folder), "--cold-cap", "8MiB"]
def serve():
    daemon = subprocess.Popen(COMMAND, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    eventually(lambda: connects(socket), START_SECONDS)
    return daemon
def killed(daemon):
    daemon.kill()
    daemon.wait()
def kept(client):
    handle = client.open_session(INT8, MAX_TOKENS)
    demote(client, handle, range(8), include_first=True)
    handle.suspend(tokens, 8)
    return handle.id
def is_full(client):
    return "read-only" in client.stats()["tiers"]["cold"]["device"]
daemon = serve()
with Client.connect(socket) as client:
    first, second = kept(client), kept(client)
daemon.terminate()
daemon.wait()
neighbour = os.open(folder / "not-ours", os.O_RDWR | os.O_CREAT)
def fill():
    free = os.statvfs(folder)
    size = os.fstat(neighbour).st_size + free.f_bavail * free.f_frsize
    os.posix_fallocate(neighbour, 0, size)
    assert os.statvfs(folder).f_bavail == 0
fill()
daemon = serve()
with Client.connect(socket) as client:
    assert is_full(client)
assert main(["sessions", "--drop", first, "--yes", "--daemon", socket]) == 0
killed(daemon)
assert main(["fsck", str(folder)]) == 0
daemon = serve()  # full still: gone, the other is there; a new one is in RAM only
with Client.connect(socket) as client:
    assert is_full(client)
    assert [row["id"] for row in client.sessions()] == [second]
    with pytest.raises(NotFound):
        client.session(first)
    assert main(["sessions", "--drop", first, "--yes", "--daemon", socket]) == 5
    handle = client.open_session(INT8, MAX_TOKENS)
    demote(client, handle, range(8), include_first=True)
    with pytest.raises(StorageFull):
        handle.suspend(tokens, 8)
    handle.close()
    third = client.session(handle.id)
    assert not third["kept"] and third["ram_only_blocks"] == 8, third
    os.ftruncate(neighbour, 0)
    eventually(lambda: client.session(handle.id)["kept"], 30.0)
    assert not is_full(client)
killed(daemon)
daemon = serve()
with Client.connect(socket) as client:
    assert {row["id"] for row in client.sessions()} == {second, handle.id}
    handle = client.resume(handle.id, INT8, MAX_TOKENS)
    with client.epochs.step(handle.table.epoch()):
        for block in range(8):
            for layer in range(LAYERS):
                expected = page_bytes(layer, block, codec_at(block))
                assert read_page(client, handle, layer, block) == expected
killed(daemon)

# Nothing to note it with: the drop is refused, and a restart has the session.
os.unlink(folder / "superblock.spare")
fill()
daemon = serve()
assert main(["sessions", "--drop", second, "--yes", "--daemon", socket]) == 1
killed(daemon)
os.ftruncate(neighbour, 0)
daemon = serve()
with Client.connect(socket) as client:
    assert second in {row["id"] for row in client.sessions()}
killed(daemon)
"""


@pytest.mark.parametrize("script", [SCRIPT, DROP_SCRIPT], ids=["served", "dropped"])
def test_a_real_file_system_that_is_full_at_the_start(tmp_path: Path, script: str) -> None:
    """On a tmpfs of its own, in a mount namespace of that process alone."""
    place = tmp_path / "cold"
    place.mkdir()
    mount = f'mount -t tmpfs -o size=12m tmpfs {place} && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", mount, "sh"]
    if os.geteuid() != 0:
        command[1:1] = ["--user", "--map-root-user"]
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare here")
    if subprocess.run([*command, "true"], capture_output=True, timeout=30).returncode:
        pytest.skip("this user may not mount a tmpfs")
    done = subprocess.run(
        [*command, sys.executable, "-c", script, str(place)],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
