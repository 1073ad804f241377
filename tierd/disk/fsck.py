"""fsck: checks a cold folder whole, and mends its index.

    check     superblock, snapshots, journal; then the header and the digest of every page
    rebuild   the same, then: superblock, a snapshot of the pages whose bytes are theirs

A page that no readable record names is not taken up, however sound its slot: a
freed slot keeps its header, so a header alone cannot say whether its page is
still the session's, and a page of a text that was cut off and written anew
would be wrong bytes. Such slots are counted as `unnamed`.

Nothing else may have the folder open: the disk's lock sees to it.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from tierd.disk import journal, snapshot, superblock
from tierd.disk.header import HEADER_BYTES, SlotHeader, verify_slot
from tierd.disk.image import Image
from tierd.disk.ledger import SLAB_IDS_RESERVED, Ledger
from tierd.disk.ports import DiskPort
from tierd.disk.records import Rows
from tierd.disk.recovery import SLAB_FOLDER, RecoveryReport, recover
from tierd.disk.superblock import Superblock
from tierd.errors import NotFound, PageDamaged, StorageError
from tierd.types import CodecId, SlabRecord
from tierd.units import SECTOR_BYTES

if TYPE_CHECKING:
    from tierd.clock import Clock


@dataclass(frozen=True, slots=True)
class DamagedPage:
    """A page whose slot does not hold it."""

    session: int
    layer: int
    block: int
    slab: int
    slot: int
    reason: str


@dataclass(slots=True)
class FsckReport:
    """What was looked at, and what is wrong: `damage`, and `pages` whose bytes are not theirs.

    `unnamed`: slots with a sound header that no record names.
    """

    store_uuid: str = ""
    sessions: int = 0
    slabs: int = 0
    pages_checked: int = 0
    unnamed: int = 0
    damage: list[str] = field(default_factory=list)
    pages: list[DamagedPage] = field(default_factory=list)
    lost: list[tuple[int, int]] = field(default_factory=list)  # (session, first lost token)
    notes: list[str] = field(default_factory=list)
    rebuilt: bool = False

    @property
    def clean(self) -> bool:
        """Whether nothing is wrong."""
        return not (self.damage or self.pages or self.lost)


def check(disk: DiskPort, clock: Clock) -> FsckReport:
    """Look at everything, write nothing. Raises StorageError when the disk itself fails."""
    report = FsckReport()
    try:
        found = recover(disk, new_uuid=_no_uuid, clock=clock, strict=False)
    except StorageError as error:
        report.damage.append(str(error))
        return report
    report.store_uuid = found.store_uuid.hex()
    if found.fresh:
        report.notes.append("there is no store here yet")
    _tell(report, found.report)
    for name in disk.names(snapshot.FOLDER):
        if name.endswith(superblock.TEMPORARY) or name in found.leftovers:
            continue
        try:
            snapshot.read_snapshot(disk, int(name.rpartition("/")[2], 16), found.store_uuid)
        except StorageError as error:
            report.damage.append(f"{name}: {error}")
    _check_slots(disk, found.image, found.store_uuid, report)
    _find_orphans(disk, found.image, report)
    return report


def _find_orphans(disk: DiskPort, image: Image, report: FsckReport) -> None:
    """Tell of slab files beside damaged records: what no record names cannot be used."""
    names = {f"{SLAB_FOLDER}/{slab:08x}" for slab in image.slabs}
    orphans = [name for name in disk.names(SLAB_FOLDER) if name not in names]
    if orphans and report.damage:
        report.damage.append(
            f"{len(orphans)} slab files ({', '.join(orphans[:3])}{', ...' * (len(orphans) > 3)}) "
            "are named by no readable record: the pages in them, and their sessions, are lost "
            "unless the records can be had from elsewhere; --rebuild gives them up"
        )


def rebuild(disk: DiskPort, clock: Clock) -> FsckReport:
    """Check, then mend what can be mended; return what was wrong.

    Pages whose bytes are not theirs are dropped and their slots never used
    again; parked sessions end at their first gap. Raises StorageFull, StorageError.
    """
    notes = _mend_superblock(disk)
    report = check(disk, clock)
    report.notes += notes
    for _ in range(2):
        # Once to write it down; the second start cuts sessions where pages were dropped.
        ledger = Ledger.open(disk, new_uuid=_no_uuid, clock=clock, strict=False)
        report.lost += [lost for lost in ledger.recovery.lost if lost not in report.lost]
        for page in report.pages if not report.rebuilt else []:
            ledger.drop_pages(page.session, [(page.layer, page.block)])
            ledger.quarantine(page.slab, page.slot, page.reason)
        ledger.flush(sync=True)
        ledger.snapshot()
        ledger.close()
        report.rebuilt = True
    return report


def _no_uuid() -> bytes:
    return bytes(superblock.UUID_BYTES)


def _tell(report: FsckReport, recovered: RecoveryReport) -> None:
    """Take over what recovery found."""
    report.damage += recovered.damage
    report.damage += [f"{what}: damaged" for what in recovered.repaired]
    report.damage += [f"{SLAB_FOLDER}/{slab:08x}: missing" for slab in recovered.missing_slabs]
    report.lost += recovered.lost
    harmless = "nothing needs it" if not recovered.damage else "not used"
    report.notes += [f"{name}: {harmless}" for name in recovered.dropped_files]
    if recovered.torn_tail:
        report.notes.append("the journal's end is torn, as a crash leaves it")


# -- slots ----------------------------------------------------------------------------


def _check_slots(disk: DiskPort, image: Image, store_uuid: bytes, report: FsckReport) -> None:
    """Compare every slot with the index."""
    report.sessions, report.slabs = len(image.sessions), len(image.slabs)
    rows = image.all_rows()
    by_slab = rows[np.argsort(rows["slab"], kind="stable")]
    for slab in sorted(image.slabs.values(), key=lambda slab: slab.slab):
        first, last = np.searchsorted(by_slab["slab"], [slab.slab, slab.slab + 1]).tolist()
        own = by_slab[first:last]
        try:
            with _OpenSlab(disk, slab) as opened:
                report.pages += _damaged_pages(opened, own, image, store_uuid)
                report.unnamed += _unnamed(opened, own, store_uuid)
        except (NotFound, StorageError) as error:
            report.damage.append(f"{SLAB_FOLDER}/{slab.slab:08x}: {error}")
        report.pages_checked += len(own)


class _OpenSlab:
    """A slab's file and a buffer of one slot."""

    def __init__(self, disk: DiskPort, slab: SlabRecord) -> None:
        self._disk, self.slab = disk, slab
        self._handle = disk.open(f"{SLAB_FOLDER}/{slab.slab:08x}")
        self.slots = min(slab.slots, disk.size_bytes(self._handle) // slab.slot_bytes)
        self._buffer = memoryview(mmap.mmap(-1, slab.slot_bytes))

    def __enter__(self) -> _OpenSlab:
        return self

    def __exit__(self, *_: object) -> None:
        self._disk.release(self._handle)

    def read(self, slot: int, size_bytes: int) -> memoryview:
        """Return a slot's first bytes, valid until the next call. Raises StorageError."""
        if slot >= self.slots:
            raise StorageError("the file ends before the slot")
        piece = self._buffer[:size_bytes]
        self._disk.read_into(self._handle, slot * self.slab.slot_bytes, piece)
        return piece


def _damaged_pages(
    opened: _OpenSlab, rows: Rows, image: Image, store_uuid: bytes
) -> Iterator[DamagedPage]:
    for row in rows:
        session, layer, block, slot = (int(row[n]) for n in ("session", "layer", "block", "slot"))
        try:
            held = opened.read(slot, opened.slab.slot_bytes)
            header = SlotHeader.unpack(held)
            if HEADER_BYTES + header.stored_bytes > opened.slab.slot_bytes:
                raise StorageError("the header names more bytes than the slot has")
            expected = replace(
                header,
                store_uuid=store_uuid, slab=opened.slab.slab, slot=slot,
                generation=int(row["generation"]), codec=CodecId(int(row["codec"])),
                dtype=image.sessions[session].namespace.geometry.dtype, session=session,
                layer=layer, block=block, namespace_digest=opened.slab.namespace_digest,
                payload_digest=row["digest"].tobytes(),
            )  # fmt: skip
            verify_slot(held, expected)
        except (PageDamaged, StorageError, ValueError) as error:
            yield DamagedPage(session, layer, block, opened.slab.slab, slot, str(error))


def _unnamed(opened: _OpenSlab, rows: Rows, store_uuid: bytes) -> int:
    """Count the slots with a header of this store that no row names."""
    count = 0
    for slot in sorted(set(range(opened.slots)) - set(rows["slot"].tolist())):
        try:
            count += SlotHeader.unpack(opened.read(slot, HEADER_BYTES)).store_uuid == store_uuid
        except (PageDamaged, StorageError):
            continue  # never written, or nobody's
    return count


# -- superblock -----------------------------------------------------------------------


def _mend_superblock(disk: DiskPort) -> list[str]:
    """Write a superblock where two copies do not agree; return what was done.

    Its name comes from a copy, a snapshot or a slot. Raises StorageError if
    none of them says it.
    """
    try:
        copies = superblock.read_copies(disk)
    except NotFound:
        copies = []
    folders = (journal.FOLDER, snapshot.FOLDER, SLAB_FOLDER)
    if superblock.choose(copies) or not any(disk.names(folder) for folder in folders):
        return []
    sources: list[Callable[[DiskPort], Iterator[Superblock]]] = [
        lambda _: (copy for copy in copies if copy), _from_snapshots, _from_slots,
    ]  # fmt: skip
    for source in sources:
        said = max(source(disk), key=lambda found: found.epoch, default=None)
        if said is not None:
            slabs = [journal.segment_number(name) for name in disk.names(SLAB_FOLDER)]
            limit = max(said.slab_limit, *slabs, 0) + SLAB_IDS_RESERVED
            mended = Superblock(said.store_uuid, said.epoch + 1, limit, 0)
            superblock.write_superblock(disk, mended)
            return [f"superblock: written anew for store {said.store_uuid.hex()}"]
    raise StorageError("superblock: no copy, snapshot or slot says which store this is")


def _first_sector(disk: DiskPort, name: str) -> memoryview:
    """Return a file's first sector, zeros if there is none."""
    sector = memoryview(mmap.mmap(-1, SECTOR_BYTES))
    handle = disk.open(name)
    try:
        if disk.size_bytes(handle) >= SECTOR_BYTES:
            disk.read_into(handle, 0, sector)
    finally:
        disk.release(handle)
    return sector


def _from_snapshots(disk: DiskPort) -> Iterator[Superblock]:
    for name in disk.names(snapshot.FOLDER):
        try:
            header = snapshot.SnapshotHeader.unpack(_first_sector(disk, name))
        except StorageError:
            continue
        yield Superblock(header.store_uuid, header.epoch, header.slab_limit, 0)


def _from_slots(disk: DiskPort) -> Iterator[Superblock]:
    for name in disk.names(SLAB_FOLDER):
        try:
            yield Superblock(SlotHeader.unpack(_first_sector(disk, name)).store_uuid, 0, 1, 0)
        except (PageDamaged, StorageError):
            continue
