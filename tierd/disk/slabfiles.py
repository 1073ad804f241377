"""Cold slabs: one preallocated file each, slot i at i * slot_bytes, over a disk port.

Invariants:
  a slab has a file from `create` to `destroy`, and no other slab has it
  a file's name comes from the slab's id alone, never from the wire
"""

from __future__ import annotations

from collections.abc import Sequence

from tierd.disk.ports import DiskPort
from tierd.errors import NotFound


class SlabFiles:
    """The backing of the cold tier's pools."""

    def __init__(self, disk: DiskPort) -> None:
        self.disk = disk
        self._handles: dict[int, int] = {}

    def create(self, slab_id: int, size_bytes: int) -> None:
        """Make a slab's file, allocated. Raises StorageFull, StorageError."""
        assert slab_id not in self._handles, slab_id
        self._handles[slab_id] = self.disk.create(f"slab/{slab_id:08x}", size_bytes)

    def destroy(self, slab_id: int) -> None:
        """Remove a slab's file."""
        self.disk.delete(self._handles.pop(slab_id))

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
        self.disk.write(self._handle(slab_id), slot * slot_bytes, buffers)

    def _handle(self, slab_id: int) -> int:
        if slab_id not in self._handles:
            raise NotFound(f"there is no cold slab {slab_id}")
        return self._handles[slab_id]

    def close(self) -> None:
        """Remove every slab's file. Idempotent."""
        for slab_id in list(self._handles):
            self.destroy(slab_id)

    def check_integrity(self) -> None:
        """Raise AssertionError if two slabs share a file."""
        handles = list(self._handles.values())
        assert len(handles) == len(set(handles)), f"{self._handles=}"
