"""The daemon: builds its parts, opens its doors, and takes everything down again.

Invariants:
  parts are closed in the reverse of the order in which they were made
  a client's death frees all that it held, within one turn of the loop
  if the mover's loop ends, the daemon ends: nothing else moves pages

`Daemon` runs in the caller's event loop; `EmbeddedDaemon` runs the same object
in a thread of a job's own process, behind an abstract socket that has no file.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import secrets
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from tierd import __version__
from tierd.bootstrap import BootstrapServer, require_free_socket
from tierd.clock import SystemClock
from tierd.coldcap import journal_bytes, metadata_bytes, too_small
from tierd.config import DaemonConfig, check_memory
from tierd.disk.ledger import Ledger
from tierd.disk.posix import PosixDisk
from tierd.disk.recovery import RecoveryReport
from tierd.disk.slabfiles import SlabFiles
from tierd.disk.superblock import SUPERBLOCK_BYTES
from tierd.disk.volatile import VolatileLedger
from tierd.errors import (
    ConfigError,
    DaemonUnavailable,
    DeadlineExceeded,
    StorageError,
    StorageFull,
    TierdError,
    TierFull,
)
from tierd.host import Host, rpc_target
from tierd.lanes import ThreadLanes
from tierd.logs import new_log
from tierd.memory.slabmemory import MemfdBacking
from tierd.metrics import Metrics
from tierd.mover import Mover, Troubles
from tierd.openfiles import DAEMON_FILES, require_files
from tierd.pools import TierParts
from tierd.rpcserver import RpcServer
from tierd.sessions import Session
from tierd.store import Store
from tierd.types import PageKey, Tier, digest8
from tierd.units import SECTOR_BYTES, format_size

_COLD_FREE_SHARE = 0.9  # of the free space, where no cap is set: the rest stays for others
GROW_SECONDS = 5.0  # between two looks at whether more of the disk has come free
# Of the cap's 1/64 that is for snapshots, three take 132 bytes a page of 12 KiB: 1/93. A manifest
# has 44 bytes a page and the token ids: 1/280 and a little.
MANIFESTS_PER_CAP = 210
_START_SECONDS, _STOP_SECONDS = 10.0, 10.0  # an embedded daemon's; it starts in well under one
_SCRAPE_SECONDS = 2.0


class Daemon:
    """One daemon. Use as an async context; then `serve_forever` or do other work."""

    def __init__(self, config: DaemonConfig) -> None:
        self.config = config
        self.boot_id = secrets.token_hex(16)
        self.socket = config.service.socket
        self.log = new_log(config.service.log_level).bind(boot=self.boot_id[:8])
        self._stack = contextlib.AsyncExitStack()
        self._stopping: asyncio.Event | None = None
        self._segment_bytes = 0  # of the ledger's journal, if it is on the disk

    async def __aenter__(self) -> Daemon:
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    def _log_troubles(self, before: Troubles, now: Troubles) -> None:
        for what in now.keys() - before.keys():
            self.log.warning("trouble", what=what, why=now[what])
        for what in before.keys() - now.keys():
            self.log.info("trouble is over", what=what)

    def _log_lost(self, session: Session, lost: Sequence[PageKey], why: str) -> None:
        self.log.warning(
            "pages were lost", session=digest8(session.id), pages=len(lost),
            layer=lost[0].layer, block=lost[0].block, why=why,
        )  # fmt: skip

    async def _start(self) -> None:
        config = self.config
        raise_file_limit()
        require_files(DAEMON_FILES, "a daemon")
        check_memory(config)  # reads files
        self._stopping = asyncio.Event()
        require_free_socket(self.socket)  # before a recovery, which may take long
        disk = PosixDisk(config.cold.folder, ephemeral=config.cold.ephemeral)
        self._stack.callback(disk.close)
        self.disk = disk
        self.store = self._open_store(disk)
        self._stack.callback(self.store.close)
        self.store.traffic.on_lost = self._log_lost
        lanes = ThreadLanes()
        self.mover = Mover(self.store, lanes)
        self.mover.on_troubles = self._log_troubles
        self.mover.backups.on_kept = lambda session: self.log.info(
            "a session that was in RAM only is on disk now", session=session.id
        )
        if not config.cold.cap_bytes:
            grow_task = asyncio.create_task(self._grow_cold(lanes), name="tierd-grow")
            self._stack.callback(grow_task.cancel)
        mover_task = asyncio.create_task(self._run_mover(), name="tierd-mover")
        self._stack.push_async_callback(self._stop_mover, mover_task)
        # The bootstrap socket is bound first: it is what refuses a second daemon at one path.
        host = Host(self)
        bootstrap = BootstrapServer(self.socket, host, connections_max=config.limits.connections)
        self._stack.callback(bootstrap.close)
        self.store.placement.on_new_slab = lambda namespace, slab: host.new_slab(
            bootstrap, namespace, slab
        )
        metrics = Metrics()
        self.rpc = RpcServer(
            store=self.store,
            mover=self.mover,
            boot_id=self.boot_id,
            target=rpc_target(self.socket),
            in_flight_calls_max=config.limits.in_flight_calls,
            cold_device=self._cold_device,
            offers=host.offers,
            drain=self.drain,
            call_done=metrics.call_done,
        )
        self._stack.push_async_callback(self.rpc.stop, config.service.drain_seconds)
        await self.rpc.start()
        if config.service.metrics_port:
            self._stack.callback(self._serve_metrics(metrics))
        bootstrap.serve()
        self.log.info(
            "serving", version=__version__, pid=os.getpid(), socket=self.socket,
            warm_bytes=config.warm.budget_bytes, cold=disk.describe(),
        )  # fmt: skip

    def _open_store(self, disk: PosixDisk) -> Store:
        """Recover what the cold folder holds. Raises StorageError, StorageFull, ConfigError."""
        config, clock = self.config, SystemClock()
        cap_bytes = self._cold_bytes(disk)
        ledger: Ledger | VolatileLedger
        if config.cold.ephemeral:
            ledger = VolatileLedger(secrets.token_bytes(16))
        else:
            segment_bytes = self._segment_bytes = journal_bytes(cap_bytes)
            try:
                ledger = Ledger.open(
                    disk,
                    new_uuid=lambda: secrets.token_bytes(16),
                    clock=clock,
                    segment_bytes=segment_bytes,
                    patient=True,
                    manifest_bytes_max=cap_bytes // MANIFESTS_PER_CAP,
                )
            except StorageFull as error:
                needed_bytes = segment_bytes + SUPERBLOCK_BYTES
                raise StorageFull(
                    f"{error}; a new store needs {format_size(needed_bytes)} free"
                ) from None
            self._log_recovery(ledger.recovery)
            if once_only := len(ledger.unmanifested):
                self.log.warning(
                    "kept sessions are written down once, not twice", sessions=once_only,
                    why="they have no file in kept/; tierd fsck --rebuild writes it anew",
                )  # fmt: skip
            if ledger.waiting:
                self.log.warning(
                    "the disk is full: cold pages are read, none is written until there is space",
                    why=ledger.waiting, needs_bytes=segment_bytes,
                )  # fmt: skip
            cap_bytes -= metadata_bytes(cap_bytes, segment_bytes)
            if not config.cold.cap_bytes:  # what others took of the disk takes nothing from us
                slabs_bytes = sum(slab.size_bytes for slab in ledger.slabs().values())
                cap_bytes = max(cap_bytes, slabs_bytes)
        self._stack.callback(self._close_ledger, ledger)
        try:
            return Store(
                warm=TierParts(MemfdBacking(), config.warm.budget_bytes, config.warm.slab_bytes),
                cold=TierParts(SlabFiles(disk, ledger), cap_bytes, config.cold.slab_bytes),
                ledger=ledger,
                clock=clock,
            )
        except TierFull:
            raise ConfigError(too_small(disk.folder, cap_bytes, ledger)) from None

    def _close_ledger(self, ledger: Ledger | VolatileLedger) -> None:
        try:
            ledger.close()
        except StorageError as error:  # the next start finds what was acknowledged
            self.log.warning("the ledger could not be closed", why=str(error))

    def _log_recovery(self, found: RecoveryReport) -> None:
        seconds = sum(found.seconds.values())
        self.log.info(
            "recovered", pages=found.rows, frames=found.frames, seconds=round(seconds, 3),
            torn_tail=found.torn_tail,
        )  # fmt: skip
        for damage in found.damage:
            self.log.warning("damage found", what=damage)
        for number, token in [*found.lost, *found.unkept]:
            self.log.warning("a session lost pages", session=f"{number:016x}", first_token=token)

    def _cold_device(self) -> str:
        ledger, keeper = self.store.ledger, self.store.keeper
        keeper.look()
        if keeper.removed.why:
            return keeper.removed.why
        if keeper.removed.trouble:
            return f"{self.disk.describe()}; {keeper.removed.trouble}"
        if ledger.waiting:
            return f"{self.disk.describe()}; read-only until there is space: {ledger.waiting}"
        if ledger.failed:
            return f"{self.disk.describe()}; read-only: {ledger.failed}"
        lasts = "kept across restarts" if ledger.durable else "ends with the daemon"
        return f"{self.disk.describe()}; {lasts}"

    def _serve_metrics(self, metrics: Metrics) -> Callable[[], None]:
        loop, port = asyncio.get_running_loop(), self.config.service.metrics_port

        async def stats() -> dict[str, Any]:
            return self.store.stats()

        def snapshot() -> dict[str, Any]:
            # A scrape comes in a thread of its own; only the loop's may touch the store.
            return asyncio.run_coroutine_threadsafe(stats(), loop).result(_SCRAPE_SECONDS)

        try:
            return metrics.serve(port, snapshot)
        except OSError as error:
            raise ConfigError(f"service.metrics_port: {port}: {error.strerror}") from None

    def _cold_bytes(self, disk: PosixDisk) -> int:
        free, used = disk.free_bytes(), disk.used_bytes()
        cap = self.config.cold.cap_bytes or used + int(free * _COLD_FREE_SHARE)
        if cap > free + used:
            there = f"{disk.folder} has {format_size(free)} free"
            if not used:
                raise StorageFull(f"cold.cap_bytes is {format_size(cap)}; {there}")
            # What is kept there can be read all the same, and there may be space again.
            self.log.warning("the cold cap is beyond the disk", cap_bytes=cap, why=there)
        return cap // SECTOR_BYTES * SECTOR_BYTES

    async def _grow_cold(self, lanes: ThreadLanes) -> None:
        """Where no cap is set: let the cold tier grow into space that has come free since."""
        found: list[int] = []

        def look() -> None:
            with contextlib.suppress(StorageError):
                found.append(
                    self.disk.used_bytes() + int(self.disk.free_bytes() * _COLD_FREE_SHARE)
                )

        def grow() -> None:
            budget, ledger = self.store.placement.pools[Tier.COLD].budget, self.store.ledger
            for cap_bytes in found:
                if isinstance(ledger, Ledger):
                    room_bytes = cap_bytes // MANIFESTS_PER_CAP
                    ledger.manifests.bytes_max = max(ledger.manifests.bytes_max, room_bytes)
                slabs_bytes = cap_bytes - metadata_bytes(cap_bytes, self._segment_bytes)
                budget.limit_bytes = max(budget.limit_bytes, slabs_bytes)
            found.clear()
            self.mover.wake()

        while True:
            await asyncio.sleep(GROW_SECONDS)
            if lanes.free():  # a disk that hangs holds a lane, not the loop
                lanes.begin(look, grow)

    async def _run_mover(self) -> None:
        try:
            await self.mover.run()
        finally:
            self.drain()

    async def _stop_mover(self, task: asyncio.Task[None]) -> None:
        await self.mover.stop()
        await task

    def drain(self) -> None:
        """Take no new work and end `serve_forever`. Idempotent."""
        if self._stopping is not None:
            self._stopping.set()

    @property
    def leaves_engines(self) -> bool:
        """Whether it stops while engines live on, which will look for the next daemon."""
        stopping = self._stopping is not None and self._stopping.is_set()
        return stopping and self.store.keeper.durable

    async def wait_drained(self) -> None:
        """Return once `drain` was called."""
        assert self._stopping is not None, "the daemon is not started"
        await self._stopping.wait()

    async def serve_forever(self) -> None:
        """Serve until `drain`, SIGTERM or SIGINT."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.drain)
        try:
            await self.wait_drained()
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
        self.log.info("stopping")


def raise_file_limit() -> None:
    """Let this process open as many files as it may: two a cold slab, two a client."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class EmbeddedDaemon:
    """A daemon in a thread of this process. Use as a context; `socket` is where it answers."""

    def __init__(self, config: DaemonConfig) -> None:
        self.socket = f"@tierd-{os.getpid()}-{secrets.token_hex(8)}"
        service = replace(config.service, socket=self.socket)
        self._config = replace(config, service=service)
        self._ready = threading.Event()
        self._error: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._daemon: Daemon | None = None
        self._thread = threading.Thread(target=self._run, name="tierd-daemon", daemon=True)

    def __enter__(self) -> EmbeddedDaemon:
        self._thread.start()
        if not self._ready.wait(_START_SECONDS):
            raise DeadlineExceeded(f"the embedded daemon did not start in {_START_SECONDS:.0f} s")
        if self._error is not None:
            error = self._error
            if isinstance(error, TierdError):
                raise error
            why = str(error) or type(error).__name__
            raise DaemonUnavailable(f"the embedded daemon did not start: {why}") from error
        return self

    def __exit__(self, *error: object) -> None:
        if self._loop is not None and self._daemon is not None:
            with contextlib.suppress(RuntimeError):  # its loop may have ended by itself
                self._loop.call_soon_threadsafe(self._daemon.drain)
        self._thread.join(_STOP_SECONDS)
        if self._thread.is_alive():
            raise DeadlineExceeded(f"the embedded daemon did not stop in {_STOP_SECONDS:.0f} s")
        if self._error is not None:
            raise DaemonUnavailable("the embedded daemon has failed") from self._error

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            # Raised again in the thread that waits for us, or lost with a thread nobody watches.
            self._error = error
            if self._ready.is_set():
                raise
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        async with Daemon(self._config) as daemon:
            self._daemon = daemon
            self._ready.set()
            await daemon.wait_drained()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Hold the daemon's loop still, as if it hung; for tests of deadlines."""
        assert self._loop is not None, "the daemon is not running"
        gate = threading.Event()
        self._loop.call_soon_threadsafe(gate.wait, 60.0)
        try:
            yield
        finally:
            gate.set()
