"""Warm slabs: a sealed memfd each, mapped for writing.

Invariants:
  a slab has one memfd and one mapping from `create` or `adopt` to `destroy`
  the bytes of a slab that is released live on with the engines that map it
"""

from __future__ import annotations

import os

from tierd.errors import TierdError
from tierd.memory.memfd import Mapping, create_memfd
from tierd.types import SlabRecord


class MemfdBacking:
    """Warm slabs: a sealed memfd and a writable mapping each."""

    def __init__(self) -> None:
        self._fds: dict[int, int] = {}
        self._mappings: dict[int, Mapping] = {}

    def create(self, slab: SlabRecord) -> None:
        """Make a slab. Raises TierFull when the host has no memory for it."""
        slab_id, size_bytes = slab.slab, slab.size_bytes
        fd = create_memfd(f"tierd-slab-{slab_id}", size_bytes)
        try:
            self._mappings[slab_id] = Mapping(fd, size_bytes, writable=True)
        except TierdError:
            os.close(fd)
            raise
        self._fds[slab_id] = fd

    def adopt(self, slab: SlabRecord, fd: int) -> None:
        """Take in a slab that another daemon made; `fd` is copied. Raises StorageError."""
        own = os.dup(fd)
        try:
            self._mappings[slab.slab] = Mapping(own, slab.size_bytes, writable=True)
        except TierdError:
            os.close(own)
            raise
        self._fds[slab.slab] = own

    def destroy(self, slab_id: int) -> None:
        """Free the memory, unmap and close. An engine that still maps the slab reads zeros."""
        mapping = self._mappings.pop(slab_id)
        mapping.discard()
        mapping.close()
        os.close(self._fds.pop(slab_id))

    def fd(self, slab_id: int) -> int:
        """Return the memfd."""
        return self._fds[slab_id]

    def mapping(self, slab_id: int) -> Mapping:
        """Return the mapping, valid until `destroy`."""
        return self._mappings[slab_id]

    def release(self) -> None:
        """Unmap and close every slab; the bytes live on with the engines that have them."""
        for slab_id in list(self._fds):
            self._mappings.pop(slab_id).close()
            os.close(self._fds.pop(slab_id))

    def close(self) -> None:
        """Destroy every slab. Idempotent."""
        for slab_id in list(self._fds):
            self.destroy(slab_id)
