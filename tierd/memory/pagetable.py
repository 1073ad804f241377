"""Page table in shared memory: where each page of a session is, one 16-byte entry each.

Invariants:
  only the daemon writes; engines map it read-only (the memfd is sealed so)
  an entry is valid if its check matches; a torn one is read again, never used
  `version` rises after each batch of changes, `epoch` before slots are reused

    0     magic "TIERDPT1", u32 format, u32 layers, u32 max_blocks, u32 0, u64 session
    64    u64 epoch, the daemon's
    128   u64 version
    192   u64 reclaimed: slots retired before this epoch may have been reused
    4096  entries [layers, max_blocks]: u64 word, u32 generation, u32 check
          word = tier | codec << 4 | slab << 8 | slot << 32
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tierd.errors import InvalidArgument, LayoutMismatch, StaleGeneration
from tierd.memory.memfd import Mapping, create_memfd, seal_future_write
from tierd.types import Place, Tier
from tierd.units import SECTOR_BYTES, round_up

_MAGIC = b"TIERDPT1"
_FORMAT = 1
_HEADER = struct.Struct("<8sIIIIQ")
_EPOCH_OFFSET, _VERSION_OFFSET, _RECLAIMED_OFFSET = 64, 128, 192
_ENTRY = np.dtype([("word", "<u8"), ("generation", "<u4"), ("check", "<u4")])
SLAB_MAX, SLOT_MAX = 2**24 - 1, 2**32 - 1
# Writing an entry takes under 1 us, unless the daemon loses its core half-way: then tens of
# ms. So a few reads at once, then one each 0.1 ms (0.16 as timers go): 0.16 s in all, within
# the 250 ms that a dead daemon may hold an engine up.
_TORN_READS_MAX = 1000
_TORN_READS_AT_ONCE = 16
_TORN_PAUSE_SECONDS = 1e-4

_MIX_A, _MIX_B = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F  # odd: from splitmix64 and xxh64
_U64 = 2**64 - 1


def _check(word: int, generation: int) -> int:
    """Return the check of an entry; that of the empty one is 0. A multiply-xorshift mix."""
    mixed = (word * _MIX_A ^ generation * _MIX_B) & _U64
    return (mixed ^ mixed >> 32) & 0xFFFFFFFF


def _checks(
    word: npt.NDArray[np.uint64], generation: npt.NDArray[np.uint32]
) -> npt.NDArray[np.uint32]:
    """Return `_check` of each entry."""
    mixed = word * np.uint64(_MIX_A) ^ generation.astype(np.uint64) * np.uint64(_MIX_B)
    mixed ^= mixed >> np.uint64(32)
    return mixed.astype(np.uint32)


@dataclass(frozen=True, slots=True)
class PageTableView:
    """A copy of entries, each valid in itself: arrays [layers, blocks]. Tier 0 is empty."""

    tier: npt.NDArray[np.uint8]
    codec: npt.NDArray[np.uint8]
    slab: npt.NDArray[np.uint32]
    slot: npt.NDArray[np.uint32]
    generation: npt.NDArray[np.uint32]


def table_bytes(layers: int, max_blocks: int) -> int:
    """Return the size of a table's memfd."""
    return SECTOR_BYTES + round_up(layers * max_blocks * _ENTRY.itemsize, SECTOR_BYTES)


class PageTableWriter:
    """The daemon's side. Owns the memfd and its mapping."""

    def __init__(self, session_id: int, layers: int, max_blocks: int) -> None:
        if layers < 1 or max_blocks < 1:
            raise InvalidArgument(f"page table of {layers} layers, {max_blocks} blocks")
        size = table_bytes(layers, max_blocks)
        self.session, self.layers, self.max_blocks = session_id, layers, max_blocks
        self.fd = create_memfd("tierd-page-table", size, others_read_only=True)
        self._mapping = Mapping(self.fd, size, writable=True)
        seal_future_write(self.fd)
        buffer = self._mapping.buffer
        _HEADER.pack_into(buffer, 0, _MAGIC, _FORMAT, layers, max_blocks, 0, session_id)
        self._array = np.frombuffer(buffer, np.uint8)
        self._entries = _entries(self._array, layers, max_blocks)
        self._epoch = self._array[_EPOCH_OFFSET : _EPOCH_OFFSET + 8].view("<u8")
        self._version = self._array[_VERSION_OFFSET : _VERSION_OFFSET + 8].view("<u8")
        self._reclaimed = self._array[_RECLAIMED_OFFSET : _RECLAIMED_OFFSET + 8].view("<u8")
        self._closed = False

    def publish(self, layer: int, block: int, place: Place) -> None:
        """Make one page findable. Call it last: its bytes must be whole by now."""
        assert place.tier is not Tier.NONE, place
        assert 0 < place.slab <= SLAB_MAX and 0 <= place.slot <= SLOT_MAX, place
        word = int(place.tier) | int(place.codec) << 4 | place.slab << 8 | place.slot << 32
        self._write(layer, block, word, place.generation)

    def publish_all(self, pages: Sequence[tuple[int, int]], places: Sequence[Place]) -> None:
        """Make pages, (layer, block) each, findable: `publish`, in a tenth of the time a page."""
        layers, blocks = map(list, zip(*pages, strict=True))
        assert min(layers) >= 0 and max(layers) < self.layers, f"{layers=}"
        assert min(blocks) >= 0 and max(blocks) < self.max_blocks, f"{blocks=}"
        tiers, _, slabs, slots, generations = zip(*places, strict=True)
        assert min(tiers) > Tier.NONE and min(slabs) > 0 and max(slabs) <= SLAB_MAX, places
        assert min(slots) >= 0 and max(slots) <= SLOT_MAX, places
        # Python's numbers: an array of places takes three times as long to make.
        words = [
            tier | codec << 4 | slab << 8 | slot << 32 for tier, codec, slab, slot, _ in places
        ]
        entries = np.zeros(len(places), _ENTRY)
        entries["word"], entries["generation"] = words, generations
        entries["check"] = _checks(entries["word"], entries["generation"])
        self._entries[layers, blocks] = entries

    def unpublish(self, layer: int, block: int) -> None:
        """Make one page unfindable. Its slot may be reused only after epochs have passed."""
        self._write(layer, block, 0, 0)

    def _write(self, layer: int, block: int, word: int, generation: int) -> None:
        assert 0 <= layer < self.layers and 0 <= block < self.max_blocks, f"{layer=} {block=}"
        self._entries[layer, block] = (word, generation, _check(word, generation))

    def set_epoch(self, epoch: int) -> None:
        """Show the daemon's epoch to the engine."""
        self._epoch[0] = epoch

    def set_reclaimed(self, epoch: int) -> None:
        """Say that slots retired before `epoch` are reused from now on. Call it before they are."""
        self._reclaimed[0] = epoch

    def bump_version(self) -> None:
        """Say that a batch of changes is complete."""
        self._version[0] += np.uint64(1)

    def close(self) -> None:
        """Close the memfd; engines that still map it keep their mapping. Idempotent."""
        if self._closed:
            return
        self._closed = True
        del self._entries, self._epoch, self._version, self._reclaimed, self._array
        self._mapping.close()
        os.close(self.fd)


class PageTableReader:
    """The engine's side. Maps `fd` read-only; does not own the fd.

    Raises LayoutMismatch if `fd` is not a page table of this version.
    """

    def __init__(self, fd: int) -> None:
        with Mapping(fd, SECTOR_BYTES, writable=False) as head:
            fields = _HEADER.unpack_from(head.buffer, 0)
        magic, version, self.layers, self.max_blocks, _, self.session = fields
        if magic != _MAGIC or version != _FORMAT:
            raise LayoutMismatch("not a page table of this version")
        size = table_bytes(self.layers, self.max_blocks)
        self._mapping = Mapping(fd, size, writable=False)
        array = np.frombuffer(self._mapping.buffer, np.uint8)
        self._entries = _entries(array, self.layers, self.max_blocks)
        self._epoch = array[_EPOCH_OFFSET : _EPOCH_OFFSET + 8].view("<u8")
        self._version = array[_VERSION_OFFSET : _VERSION_OFFSET + 8].view("<u8")
        self._reclaimed = array[_RECLAIMED_OFFSET : _RECLAIMED_OFFSET + 8].view("<u8")

    def version(self) -> int:
        """Return the number of completed batches of changes."""
        return int(self._version[0])

    def epoch(self) -> int:
        """Return the daemon's epoch."""
        return int(self._epoch[0])

    def reclaimed(self) -> int:
        """Return the epoch before which retired slots may have been reused.

        A step that entered at epoch e reads good bytes as long as this is at
        most e. It is more only if the daemon took this engine for dead.
        """
        return int(self._reclaimed[0])

    def read(self, blocks: int) -> PageTableView:
        """Return a copy of the first `blocks` columns; 0 is allowed.

        Each entry is whole in itself; two entries may be from different moments.
        Raises StaleGeneration if one stays torn.
        """
        assert 0 <= blocks <= self.max_blocks, f"{blocks=} {self.max_blocks=}"
        source = self._entries[:, :blocks]
        copy = source.copy()
        for attempt in range(_TORN_READS_MAX):
            torn = _checks(copy["word"], copy["generation"]) != copy["check"]
            if not torn.any():
                return _unpack(copy)
            if attempt >= _TORN_READS_AT_ONCE:
                time.sleep(_TORN_PAUSE_SECONDS)
            copy[torn] = source[torn]
        raise StaleGeneration("page table: an entry stayed torn; the daemon died while writing it")

    def read_left(self, blocks: int) -> tuple[PageTableView, npt.NDArray[np.bool_]]:
        """Return what a dead daemon left, and which entries [layers, blocks] it left torn: empty.

        Nothing writes it any more, so one look is as good as many.
        """
        assert 0 <= blocks <= self.max_blocks, f"{blocks=} {self.max_blocks=}"
        copy = self._entries[:, :blocks].copy()
        torn = _checks(copy["word"], copy["generation"]) != copy["check"]
        copy[torn] = np.zeros(1, copy.dtype)[0]
        return _unpack(copy), torn

    def close(self) -> None:
        """Unmap. Idempotent."""
        for name in ("_entries", "_epoch", "_version", "_reclaimed"):
            self.__dict__.pop(name, None)
        self._mapping.close()


def _entries(array: npt.NDArray[np.uint8], layers: int, max_blocks: int) -> npt.NDArray[np.void]:
    end = SECTOR_BYTES + layers * max_blocks * _ENTRY.itemsize
    return array[SECTOR_BYTES:end].view(_ENTRY).reshape(layers, max_blocks)


def _unpack(entries: npt.NDArray[np.void]) -> PageTableView:
    word = entries["word"]
    return PageTableView(
        tier=(word & np.uint64(0xF)).astype(np.uint8),
        codec=(word >> np.uint64(4) & np.uint64(0xF)).astype(np.uint8),
        slab=(word >> np.uint64(8) & np.uint64(SLAB_MAX)).astype(np.uint32),
        slot=(word >> np.uint64(32)).astype(np.uint32),
        generation=entries["generation"].copy(),
    )
