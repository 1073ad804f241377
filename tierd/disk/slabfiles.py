"""Cold slabs: one preallocated file each, slot i at i * slot_bytes, over a disk port.

Invariants:
  a slab has a file from `create` or `restore` to `destroy`, and no other slab has it
  a file's name comes from the slab's id alone, never from the wire
  the ledger knows of a slab before a page in it can be recorded
  a written slab is unsynced until an fdatasync of its own succeeds; one that failed is suspect
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tierd.disk.ports import DiskPort
from tierd.disk.volatile import LedgerPort
from tierd.errors import NotFound, StorageError
from tierd.types import SlabRecord

FOLDER = "slab"


def slab_name(slab_id: int) -> str:
    """Return the name of a slab's file."""
    return f"{FOLDER}/{slab_id:08x}"


class SlabFiles:
    """The backing of the cold tier's pools."""

    def __init__(self, disk: DiskPort, ledger: LedgerPort) -> None:
        self.disk = disk
        self.suspects: set[int] = set()
        self._ledger = ledger
        self._handles: dict[int, int] = {}
        self._unsynced: set[int] = set()
        self._folder_unsynced = False

    def create(self, slab: SlabRecord) -> None:
        """Make a slab's file, allocated. Raises StorageFull, StorageError."""
        assert slab.slab not in self._handles, slab
        self._handles[slab.slab] = self.disk.create(slab_name(slab.slab), slab.size_bytes)
        self._folder_unsynced = True
        self._ledger.add_slab(slab)

    def restore(self, slab: SlabRecord) -> None:
        """Open the file of a slab of an earlier run. Raises NotFound, StorageError, StorageFull.

        One that is too short was cut by a power cut before its first sync: nothing in it
        was acknowledged. It is made anew, of zeros, which no page's header can be.
        """
        name = slab_name(slab.slab)
        handle = self.disk.open(name)
        if self.disk.size_bytes(handle) < slab.size_bytes:
            self.disk.delete(handle)
            handle = self.disk.create(name, slab.size_bytes)
        self._handles[slab.slab] = handle
        # What a killed daemon wrote may be in the page cache alone.
        self._unsynced.add(slab.slab)
        self._folder_unsynced = True

    def destroy(self, slab_id: int) -> None:
        """Remove a slab's file."""
        self.disk.delete(self._handles.pop(slab_id))
        self._unsynced.discard(slab_id)
        self.suspects.discard(slab_id)
        self._ledger.drop_slab(slab_id)

    def fd(self, slab_id: int) -> int:
        """Return an fd for reading, the disk's own; -1 if it has none."""
        return self.disk.reader_fd(self._handle(slab_id))

    def read_slot(self, slab_id: int, slot: int, slot_bytes: int, into: memoryview) -> None:
        """Read the first len(into) bytes of a slot. Raises StorageError."""
        self.disk.read_into(self._handle(slab_id), slot * slot_bytes, into)

    def read_slots(
        self, slab_id: int, slot: int, slot_bytes: int, into: Sequence[memoryview]
    ) -> None:
        """Read `slot` and those after it, one into each buffer, in one I/O. Raises StorageError."""
        self.disk.scatter(self._handle(slab_id), slot * slot_bytes, into)

    def write_slots(
        self, slab_id: int, slot: int, slot_bytes: int, buffers: Sequence[memoryview]
    ) -> None:
        """Write buffers of whole slots together, from `slot` on, in one I/O.

        Raises StorageFull, StorageError.
        """
        try:
            self.disk.write(self._handle(slab_id), slot * slot_bytes, buffers)
        finally:
            # Afterwards: a sync that runs meanwhile does not cover it, and must not clear it.
            self._unsynced.add(slab_id)

    def written_by_others(self, slab_ids: Collection[int]) -> None:
        """Engines have written to these slabs: the next sync covers them."""
        self._unsynced.update(slab_ids)

    def locked_slots(self, slab_id: int, slot_bytes: int) -> set[int]:
        """Return the slots that somebody is writing to, or may be: every one if none can tell."""
        handle = self._handle(slab_id)
        try:
            locked = self.disk.locked_ranges(handle)
        except StorageError:
            locked = [(0, self.disk.size_bytes(handle))]
        return {
            slot
            for start, size in locked
            for slot in range(start // slot_bytes, -(-(start + size) // slot_bytes))
        }

    def removed(self) -> frozenset[int]:
        """Return the slabs whose file somebody else removed; never waits for the disk."""
        return frozenset(
            slab_id for slab_id, handle in self._handles.items() if not self.disk.is_there(handle)
        )

    def sync(self) -> None:
        """Make every write that has returned durable; blocks. Raises StorageError.

        A slab whose fdatasync fails becomes suspect, and stays unsynced: the
        kernel may have dropped its pages, so a second try would prove nothing.
        """
        if self._folder_unsynced:
            self._folder_unsynced = False
            try:
                self.disk.sync_folder(FOLDER)
            except StorageError:
                self._folder_unsynced = True
                raise
        for slab_id in sorted(self._unsynced):
            if slab_id in self.suspects:
                raise StorageError(
                    f"{slab_name(slab_id)} could not be synced before, so nothing that went there "
                    "is kept for certain; start the daemon again once the disk works"
                )
            handle = self._handles.get(slab_id)
            self._unsynced.discard(slab_id)  # first: a write that comes now is for the next sync
            if handle is None:
                continue
            try:
                self.disk.sync(handle)
            except StorageError:
                self._unsynced.add(slab_id)
                self.suspects.add(slab_id)
                raise

    def _handle(self, slab_id: int) -> int:
        if slab_id not in self._handles:
            raise NotFound(f"there is no {slab_name(slab_id)}")
        return self._handles[slab_id]

    def close(self) -> None:
        """Let every file go: kept if the ledger is durable, else removed. Idempotent."""
        for handle in self._handles.values():
            if self._ledger.durable:
                self.disk.release(handle)
            else:
                self.disk.delete(handle)
        self._handles.clear()

    def check_integrity(self) -> None:
        """Raise AssertionError if two slabs share a file."""
        handles = list(self._handles.values())
        assert len(handles) == len(set(handles)), f"{self._handles=}"
