"""Simulated disk: loses what was not synced when the power goes, and fails in every known way.

    disk = SimulatedDisk(seed, faults=[Fault(FaultKind.POWER_CUT, first=17)])
    with contextlib.suppress(PowerCut):
        work(disk)
    work_again(disk.crash())

Invariants:
  bytes and sizes are pending until their file is synced, names until their folder is
  a crash applies the pending changes it keeps in the order they were made, each whole
    unless torn; any subset may be kept, which is more than real disks do
  `crash` touches nothing here: its disks share no bytes with this one nor each other
  after a power cut or `kill` this disk stands still: each call is PowerCut
  the same seed, calls and faults give the same outcome, from one thread
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Collection, Mapping, Sequence

from tierd.disk.faults import Fault, FaultKind, FaultPlan, PowerCut
from tierd.disk.ports import FOLDERS, assert_whole_sectors, folder_of
from tierd.disk.sectors import (
    Change,
    Copies,
    Inode,
    Names,
    apply_bytes,
    apply_names,
    overlay,
    read_sectors,
    torn_change,
)
from tierd.errors import NotFound, StorageError, StorageFull
from tierd.units import SECTOR_BYTES, format_size

_NEVER_SECONDS = 60.0  # a test that forgets `unstick` ends
_NO_FAULTS: Mapping[FaultKind, float] = {}


class SimulatedDisk:
    """A disk with no hardware. `delay` passes time for slow I/O: a fake clock's `advance`.

    `watch(operation, name)` is called before each operation that can fail: there a
    test may look at what a `crash` would leave.
    """

    folder = "simulated"

    def __init__(
        self,
        seed: int,
        *,
        capacity_bytes: int = 2**40,
        faults: Sequence[Fault] = (),
        rates: Mapping[FaultKind, float] = _NO_FAULTS,
        delay: Callable[[float], None] = lambda _: None,
        watch: Callable[[str, str], None] = lambda _operation, _name: None,
    ) -> None:
        self.seed, self.capacity_bytes = seed, capacity_bytes
        self.direct = False
        self.operations = 0
        self._delay, self._watch = delay, watch
        self._draw = random.Random(f"bytes {seed}")
        self.plan = FaultPlan(random.Random(f"faults {seed}"), faults, rates)
        self._mutex = threading.RLock()
        self._unstuck = threading.Event()
        self._stopped = False
        self._boots = self._crashes = 0
        self._last_handle = 0
        self._open: dict[int, Inode] = {}
        self._names: dict[str, Inode] = {}
        self._durable_names: dict[str, Inode] = {}
        # By the file or the folder that a sync makes durable; each with its place in time.
        self._pending: dict[Inode | str, list[tuple[int, Change]]] = {}
        self._changes = 0

    # -- faults ---------------------------------------------------------------

    def _begin(self, operation: str, name: str) -> FaultKind | None:
        """Count an operation and let its fault strike; return a kind that the caller must do."""
        with self._mutex:
            self._assert_running()
            self._watch(operation, name)
            self.operations += 1
            fault = self.plan.strike(operation, name)
        if fault is None:
            return None
        if fault.kind is FaultKind.SLOW:
            self._delay(fault.seconds)
            return None
        if fault.kind is FaultKind.NEVER:
            self._unstuck.wait(timeout=_NEVER_SECONDS)
            return None
        what = f"{operation} {name}, operation {self.operations}"
        if fault.kind is FaultKind.IO_ERROR:
            raise StorageError(self._told(f"{what}: input/output error"))
        if fault.kind is FaultKind.FULL:
            raise StorageFull(self._told(f"{what}: no space left"))
        if fault.kind is FaultKind.POWER_CUT:
            self._stopped = True
            raise PowerCut(self._told(what))
        return fault.kind

    def _told(self, what: str) -> str:
        return f"simulated disk, seed {self.seed}: {what}"

    def _assert_running(self) -> None:
        if self._stopped:
            raise PowerCut(self._told("the machine has stopped"))

    def unstick(self) -> None:
        """Let I/O that never ends go on, now and later."""
        self._unstuck.set()

    # -- names ----------------------------------------------------------------

    def create(self, name: str, size_bytes: int) -> int:
        """Make a file of zeros. Raises StorageFull, StorageError."""
        folder_of(name)
        self._begin("create", name)
        with self._mutex:
            if name in self._names:
                raise StorageError(self._told(f"{name} is there already"))
            if size_bytes > self.free_bytes():
                raise StorageFull(self._told(f"no {format_size(size_bytes)} left for {name}"))
            inode = Inode()
            self._resize(inode, size_bytes)
            self._name({name: inode})
            return self._opened(inode)

    def open(self, name: str) -> int:
        """Open a file that is there. Raises NotFound, StorageError."""
        folder_of(name)
        self._begin("open", name)
        with self._mutex:
            return self._opened(self._by_name(name))

    def _opened(self, inode: Inode) -> int:
        self._last_handle += 1
        self._open[self._last_handle] = inode
        return self._last_handle

    def _by_name(self, name: str) -> Inode:
        if name not in self._names:
            raise NotFound(self._told(f"there is no {name}"))
        return self._names[name]

    def _name_of(self, inode: Inode) -> str:
        with self._mutex:
            return next((name for name, named in self._names.items() if named is inode), "")

    def _name(self, names: Names) -> None:
        apply_names(self._names, names)
        self._add(folder_of(next(iter(names))), Change(names=names))

    def _resize(self, inode: Inode, size_bytes: int) -> None:
        inode.resize(size_bytes)
        self._add(inode, Change(inode=inode, size_bytes=size_bytes))

    def _add(self, owner: Inode | str, change: Change) -> None:
        self._changes += 1
        self._pending.setdefault(owner, []).append((self._changes, change))

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder, sorted."""
        assert folder in ("", *FOLDERS), folder
        with self._mutex:
            self._assert_running()
            return sorted(name for name in self._names if folder_of(name) == folder)

    def rename(self, old: str, new: str) -> None:
        """Give a file another name: after a crash both names are as before, or both as after."""
        assert folder_of(old) == folder_of(new), f"{old=} {new=}"
        self._begin("rename", old)
        with self._mutex:
            inode = self._by_name(old)
            if old != new:
                self._name({old: None, new: inode})

    def sync_folder(self, folder: str) -> None:
        """Make a folder's names durable. Raises StorageError."""
        assert folder in ("", *FOLDERS), folder
        self._begin("sync_folder", folder)
        with self._mutex:
            for _, change in self._pending.pop(folder, []):
                apply_names(self._durable_names, change.names)
            self._forget_the_removed()

    def _forget_the_removed(self) -> None:
        """Drop what is pending of files that nothing reaches any more, whatever is lost."""
        reached = {*self._open.values(), *self._names.values(), *self._durable_names.values()}
        for changes in self._pending.values():
            reached.update(filter(None, (i for _, c in changes for i in c.names.values())))
        for owner in [owner for owner in self._pending if isinstance(owner, Inode)]:
            if owner not in reached:
                del self._pending[owner]

    def remove(self, name: str) -> None:
        """Remove a file by name, if it is there."""
        folder_of(name)
        with self._mutex:
            self._assert_running()
            if name in self._names:
                self._name({name: None})

    # -- bytes ----------------------------------------------------------------

    def _file(self, handle: int) -> Inode:
        with self._mutex:
            self._assert_running()
            if handle not in self._open:
                raise StorageError(self._told("the file was deleted"))
            return self._open[handle]

    def size_bytes(self, handle: int) -> int:
        """Return a file's size. Raises StorageError."""
        return self._file(handle).size_bytes

    def read_into(self, handle: int, offset: int, buffer: memoryview) -> None:
        """Fill `buffer`. Raises StorageError."""
        inode = self._file(handle)
        assert_whole_sectors(inode.size_bytes, offset, [buffer])
        name = self._name_of(inode)
        kind = self._begin("read", name)
        with self._mutex:
            size = len(buffer)
            if kind is FaultKind.SHORT:
                size = self._draw.randrange(size // SECTOR_BYTES) * SECTOR_BYTES
            read_sectors(inode.current, offset, buffer[:size])
            if kind is FaultKind.SHORT:
                raise StorageError(self._told(f"read {name}: input/output error after {size} B"))
            if kind is FaultKind.STALE_READ:
                overlay(inode.previous, offset, buffer)
            if kind is FaultKind.BIT_FLIP:
                buffer[self._draw.randrange(size)] ^= 1 << self._draw.randrange(8)

    def scatter(self, handle: int, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill all buffers, one after the other: one operation. Raises StorageError."""
        assert_whole_sectors(self.size_bytes(handle), offset, buffers)
        found = memoryview(bytearray(sum(map(len, buffers))))
        try:
            self.read_into(handle, offset, found)
        finally:  # a short read fills the first of them
            for buffer in buffers:
                buffer[:], found = found[: len(buffer)], found[len(buffer) :]

    def write(self, handle: int, offset: int, buffers: Sequence[memoryview]) -> None:
        """Write all buffers. Raises StorageFull, StorageError."""
        inode = self._file(handle)
        assert_whole_sectors(inode.size_bytes, offset, buffers)
        name = self._name_of(inode)
        kind = self._begin("write", name)
        data = b"".join(buffers)
        if kind is FaultKind.LOST_WRITE:
            return
        with self._mutex:
            if kind is FaultKind.BIT_FLIP:
                flipped = bytearray(data)
                flipped[self._draw.randrange(len(data))] ^= 1 << self._draw.randrange(8)
                data = bytes(flipped)
            if kind is FaultKind.MISDIRECTED:
                inode, offset = self._elsewhere(inode, offset, len(data))
            if kind is FaultKind.SHORT:
                data = data[: self._draw.randrange(len(data) // SECTOR_BYTES) * SECTOR_BYTES]
            self._write(inode, offset, data)
        if kind is FaultKind.SHORT:
            raise StorageError(self._told(f"write {name}: input/output error after {len(data)} B"))

    def _elsewhere(self, inode: Inode, offset: int, length: int) -> tuple[Inode, int]:
        """Return another place of that length, in any file; the same if there is no other."""
        places = [
            (other, start)
            for other in {id(file): file for file in self._names.values()}.values()
            for start in range(0, other.size_bytes - length + 1, max(length, SECTOR_BYTES))
            if other is not inode or abs(start - offset) >= length
        ]
        return self._draw.choice(places) if places else (inode, offset)

    def _write(self, inode: Inode, offset: int, data: bytes) -> None:
        for start in range(0, len(data), SECTOR_BYTES):
            sector = (offset + start) // SECTOR_BYTES
            inode.previous[sector] = inode.current.get(sector, bytes(SECTOR_BYTES))
            inode.current[sector] = data[start : start + SECTOR_BYTES]
            self._add(inode, Change(inode=inode, sector=sector, data=inode.current[sector]))

    def sync(self, handle: int) -> None:
        """Make a file's bytes and size durable. Raises StorageError.

        When it fails and drops, what was pending is read as before, and a later
        sync succeeds: as Linux does it.
        """
        inode = self._file(handle)
        kind = self._begin("sync", self._name_of(inode))
        with self._mutex:
            changes = self._pending.pop(inode, [])
            if kind is FaultKind.SYNC_DROPS:
                inode.dropped = True
                raise StorageError(self._told("sync: input/output error"))
            for _, change in changes:
                apply_bytes(inode, change)

    def flip_bit(self, handle: int, bit: int) -> None:
        """Damage a file where it lies."""
        inode = self._file(handle)
        sector, bit = divmod(bit, SECTOR_BYTES * 8)
        with self._mutex:
            data = bytearray(inode.current.get(sector, bytes(SECTOR_BYTES)))
            data[bit // 8] ^= 1 << bit % 8
            if inode in self._pending:
                self._write(inode, sector * SECTOR_BYTES, bytes(data))
            else:
                inode.current[sector] = inode.durable[sector] = bytes(data)

    def reader_fd(self, handle: int) -> int:
        """Return -1: nothing outside this process can read it."""
        return -1

    def is_there(self, handle: int) -> bool:
        """Return whether a file has a name."""
        with self._mutex:
            inode = self._open.get(handle)
            return inode is None or inode in self._names.values()

    def require_there(self) -> None:
        """Do nothing: no folder of it can be removed."""

    def locked_ranges(self, handle: int) -> list[tuple[int, int]]:
        """Return none."""
        return []

    def release(self, handle: int) -> None:
        """Close a file and keep it."""
        with self._mutex:
            self._file(handle)
            del self._open[handle]

    def delete(self, handle: int) -> None:
        """Close and remove a file. After a crash it may be back: whole, or empty."""
        with self._mutex:
            inode = self._file(handle)
            del self._open[handle]
            self._resize(inode, 0)
            if name := self._name_of(inode):
                self._name({name: None})

    # -- the end of a machine -------------------------------------------------

    def pending(self) -> int:
        """Return how many changes a crash may keep or lose: sectors, sizes and names."""
        return sum(len(changes) for changes in self._pending.values())

    def _changes_in_order(self) -> list[Change]:
        dated = [pending for changes in self._pending.values() for pending in changes]
        return [change for _, change in sorted(dated, key=lambda pending: pending[0])]

    def crash(self, keep: Collection[int] | None = None, *, torn: bool = False) -> SimulatedDisk:
        """Return the disk as the next boot would see it if the power went now, with no faults.

        `keep`: which of the pending changes, by their order from 0, reach the
        disk; None draws a subset. `torn`: half of the kept sectors are written
        in part. Calling again without `keep` draws another outcome.
        """
        self._crashes += 1
        draw = random.Random(f"crash {self.seed} {self._boots} {self._crashes}")
        changes = self._changes_in_order()
        if keep is None:
            share = draw.random()
            keep = {index for index in range(len(changes)) if draw.random() < share}
        copies = Copies()
        names = {name: copies.of(inode) for name, inode in self._durable_names.items()}
        for index in sorted(keep):
            change = changes[index]
            if change.inode is None:
                apply_names(names, {n: i and copies.of(i) for n, i in change.names.items()})
                continue
            inode = copies.of(change.inode)
            if torn and change.sector >= 0 and draw.random() < 0.5:
                change = torn_change(change, inode.durable, draw)
            apply_bytes(inode, change)
        after = self._next()
        after._names, after._durable_names = names, dict(names)
        for inode in names.values():
            inode.settle()
        return after

    def kill(self) -> SimulatedDisk:
        """End the process alone: return the disk with all that was written, synced or not."""
        self._stopped = True
        after = self._next()
        after._names, after._durable_names = self._names, self._durable_names
        after._pending, after._changes = self._pending, self._changes
        self._names, self._durable_names, self._pending = {}, {}, {}
        return after

    def _next(self) -> SimulatedDisk:
        after = SimulatedDisk(self.seed, capacity_bytes=self.capacity_bytes, delay=self._delay)
        after._boots = self._boots + 1
        return after

    # -- the whole ------------------------------------------------------------

    def free_bytes(self) -> int:
        """Return what the capacity leaves."""
        return self.capacity_bytes - self.used_bytes()

    def used_bytes(self) -> int:
        """Return the bytes of all files, open or named."""
        with self._mutex:
            self._assert_running()
            files = {id(file): file for file in (*self._open.values(), *self._names.values())}
            return sum(file.size_bytes for file in files.values())

    def describe(self) -> str:
        """Return one line for people."""
        return f"simulated, seed {self.seed}"

    __repr__ = describe

    def check_integrity(self) -> None:
        """Raise AssertionError unless what is not pending is durable."""
        with self._mutex:
            folders = {owner for owner in self._pending if isinstance(owner, str)}
            for name in self._names.keys() | self._durable_names.keys():
                same = self._names.get(name) is self._durable_names.get(name)
                assert same or folder_of(name) in folders, f"{name}, seed {self.seed}"
            for name, inode in self._names.items():
                inode.check_integrity()
                settled = inode.current == inode.durable or inode.dropped
                assert settled or inode in self._pending, f"{name}, seed {self.seed}"

    def close(self) -> None:
        """Forget every handle; what has a name stays, and can be opened again."""
        self._open.clear()
