"""fsck: checks a cold folder whole, and mends its index.

    check     superblock, snapshots, journal, manifests; the header and the digest of every page
    rebuild   the same, then: superblock, a snapshot of the pages whose bytes are theirs, manifests

Where the snapshots and the journal are lost, a session's manifest says which
slots hold what was kept of it; each is believed once its header and its bytes
have been compared. A page that neither a record nor a manifest names is not
taken up, however sound its slot: a freed slot keeps its header, so a header
alone cannot say whether its page is still the session's, and a page of a text
that was cut off and written anew would be wrong bytes. Such slots are counted
as `unnamed`, and where records are lost their sessions are named as `strays`.

Nothing else may have the folder open: the disk's lock sees to it.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from tierd.disk import journal, manifest, snapshot, strays, superblock
from tierd.disk.header import HEADER_BYTES, SlotHeader, verify_slot
from tierd.disk.image import Image
from tierd.disk.ledger import SLAB_IDS_RESERVED, Ledger
from tierd.disk.ports import FOLDERS, DiskPort
from tierd.disk.records import Rows
from tierd.disk.recovery import SLAB_FOLDER, Recovered, RecoveryReport, recover
from tierd.disk.superblock import Superblock
from tierd.errors import NotFound, PageDamaged, StorageError
from tierd.types import CodecId, SlabRecord
from tierd.units import SECTOR_BYTES

if TYPE_CHECKING:
    from tierd.clock import Clock

_EPOCH_BITS = 12  # a start's generations begin at its epoch << 12 (placement.py)


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
    """What was looked at and found, what was mended, what is lost.

    Figures are those of the index: after a rebuild, of the new one. `damage` is of
    records, `pages` are those whose bytes are not theirs, `unnamed` the slots with a
    sound header that no record names. `unkept_pages` are as `pages`, of what no suspension
    has kept: a crash may leave these so, and nobody was promised them.
    """

    store_uuid: str = ""
    sessions: int = 0
    slabs: int = 0
    pages_checked: int = 0
    unnamed: int = 0
    damage: list[str] = field(default_factory=list)
    pages: list[DamagedPage] = field(default_factory=list)
    unkept_pages: list[DamagedPage] = field(default_factory=list)
    mended: list[str] = field(default_factory=list)
    restored: list[int] = field(default_factory=list)  # sessions taken up from manifests
    lost: list[tuple[int, int]] = field(default_factory=list)  # (session, first lost token)
    unmanifested: list[int] = field(default_factory=list)  # sessions whose manifest is damaged
    once_only: list[int] = field(default_factory=list)  # kept sessions that have no manifest
    unresumable: list[int] = field(default_factory=list)  # kept, and their token ids are lost
    # (session, slots that hold pages of it) where records are lost: perhaps kept, perhaps not
    strays: list[tuple[int, int]] = field(default_factory=list)
    left: list[str] = field(default_factory=list)  # damage that a rebuild could not mend
    notes: list[str] = field(default_factory=list)
    rebuilt: bool = False

    @property
    def clean(self) -> bool:
        """Whether nothing was wrong."""
        return not (self.damage or self.pages or self.lost or self.unresumable)

    @property
    def sound(self) -> bool:
        """Whether nothing is wrong now: all was clean, or all that was kept is mended.

        Where no session is left and slots name some, one of these may have been kept.
        """
        all_strays = bool(self.strays) and not self.sessions
        mended = self.rebuilt and not (self.left or self.unresumable or all_strays)
        return self.clean or mended


def check(disk: DiskPort, clock: Clock) -> FsckReport:
    """Look at everything, write nothing. Raises StorageError when the disk itself fails."""
    report = FsckReport()
    try:
        _check(disk, clock, report)
    except StorageError as error:
        report.damage.append(str(error))
    return report


def _check(disk: DiskPort, clock: Clock, report: FsckReport) -> Recovered:
    found = _check_records(disk, clock, report)
    _check_slots(disk, found.image, found.store_uuid, report)
    _find_orphans(disk, found, report)
    return found


def _check_records(disk: DiskPort, clock: Clock, report: FsckReport) -> Recovered:
    """Look at superblock, journal, snapshots and manifests."""
    found = recover(disk, new_uuid=_no_uuid, clock=clock, strict=False)
    report.store_uuid = found.store_uuid.hex()
    report.sessions, report.slabs = len(found.image.sessions), len(found.image.slabs)
    if found.fresh:
        report.notes.append("there is no store here yet")
    if found.superblock.dropped:
        report.notes.append(
            "sessions dropped on a full disk, which the journal names once there is space: "
            f"{len(found.superblock.dropped)}"
        )
    _tell(report, found.report)
    readers: list[tuple[str, Callable[[str], object]]] = [
        (snapshot.FOLDER, lambda name: snapshot.read_snapshot(
            disk, int(name.rpartition("/")[2], 16), found.store_uuid)),
        (manifest.FOLDER, lambda name: manifest.read_manifest(disk, name, found.store_uuid)),
    ]  # fmt: skip
    for folder, read in readers:
        for name in disk.names(folder):
            if name.endswith(superblock.TEMPORARY) or name in found.leftovers:
                continue
            try:
                read(name)
            except StorageError as error:
                report.damage.append(f"{name}: {error}")
                if folder == manifest.FOLDER:
                    report.unmanifested.append(manifest.session_number(name))
    sessions = found.image.sessions
    kept = {number for number, record in sessions.items() if record.kept}
    report.unresumable += [number for number in report.unmanifested if number not in kept]
    manifested = {*found.manifests.sizes, *report.unmanifested}
    report.once_only = sorted(kept - manifested)
    return found


def _find_orphans(disk: DiskPort, found: Recovered, report: FsckReport) -> None:
    """Where records are lost, tell what stands in slots that no record names."""
    if not report.damage:
        return
    known = {f"{SLAB_FOLDER}/{slab:08x}" for slab in found.image.slabs}
    names = disk.names(SLAB_FOLDER)
    orphans = [name for name in names if name not in known]
    known_sessions = {*found.image.sessions, *found.superblock.dropped}
    counts = strays.count_strays(disk, names, found.store_uuid, known_sessions)
    report.strays = sorted(counts.items())
    if orphans:
        slots = strays.count_strays(disk, orphans, found.store_uuid, ()).total()
        report.damage.append(
            f"{len(orphans)} slab files ({', '.join(orphans[:3])}{', ...' * (len(orphans) > 3)}) "
            f"with {slots} pages are named by no readable record or manifest"
        )


def rebuild(disk: DiskPort, clock: Clock) -> FsckReport:
    """Check, then mend what can be mended; return what was wrong, and what became of it.

    Pages whose bytes are not theirs are dropped and their slots never used
    again; kept sessions end at their first gap. Raises StorageFull, StorageError.
    """
    report = FsckReport()
    was_there = superblock.NAME in disk.names("")
    mended = _mend_superblock(disk)
    if mended:
        why = "no two copies agree" if was_there else "the file is not there"
        report.damage.append(f"superblock: {why}")
        report.mended.append(mended)
    _check(disk, clock, report)
    for _ in range(2):
        # Once to write it down; the second start cuts sessions where pages were dropped.
        ledger = Ledger.open(disk, new_uuid=_no_uuid, clock=clock, strict=False)
        report.lost += [lost for lost in ledger.recovery.lost if lost not in report.lost]
        if not report.rebuilt:
            _drop_damaged(ledger, report)
        ledger.flush(sync=True)
        _write_manifests(disk, ledger, report)
        ledger.snapshot()
        ledger.close()
        report.rebuilt = True
    _look_again(disk, clock, report)
    return report


def _write_manifests(disk: DiskPort, ledger: Ledger, report: FsckReport) -> None:
    """Write down once more what is kept, where that is missing or damaged."""
    kept = {number for number, record in ledger.sessions().items() if record.kept}
    wanting = [] if report.rebuilt else report.unmanifested
    for number in sorted({*ledger.unmanifested, *wanting}):
        if number in kept:
            ledger.keep(number)
            report.mended.append(f"{manifest.manifest_name(number)}: written anew")
        else:
            disk.remove(manifest.manifest_name(number))


def _drop_damaged(ledger: Ledger, report: FsckReport) -> None:
    sessions = ledger.sessions()
    damaged = [*report.pages, *report.unkept_pages]
    for page in damaged:
        ledger.drop_pages(page.session, [(page.layer, page.block)])
        ledger.quarantine(page.slab, page.slot, page.reason)
        record = sessions.get(page.session)
        if record is not None and record.kept and record.sealed_blocks > page.block:
            sessions[page.session] = replace(record, sealed_blocks=page.block)
    if damaged:
        report.mended.append(f"{len(damaged)} damaged pages: dropped, their slots shut")
    for number, record in ledger.sessions().items():
        shorter = sessions[number]
        if shorter != record and record.state != "parked":  # those the next start cuts, and names
            ledger.put_session(shorter)
            tokens = shorter.sealed_blocks * record.namespace.geometry.block_tokens
            report.lost.append((number, tokens))


def _look_again(disk: DiskPort, clock: Clock, report: FsckReport) -> None:
    """Take the new index's figures, and what is still wrong with its records."""
    after = FsckReport()
    _check_records(disk, clock, after)
    report.sessions, report.slabs = after.sessions, after.slabs
    report.left = after.damage
    report.mended += [
        f"session {number:016x}: taken up from its manifest" for number in report.restored
    ]
    report.mended.append(f"index: written anew, with {after.sessions} sessions")


def _no_uuid() -> bytes:
    return bytes(superblock.UUID_BYTES)


def _tell(report: FsckReport, recovered: RecoveryReport) -> None:
    """Take over what recovery found."""
    report.damage += recovered.damage
    report.damage += [f"{what}: damaged" for what in recovered.repaired]
    for slab in recovered.missing_slabs:
        found = f"{SLAB_FOLDER}/{slab:08x}: missing"
        if slab in recovered.empty_slabs:
            report.notes.append(f"{found}, and nothing that was kept stood there")
        else:
            report.damage.append(found)
    report.lost += recovered.lost
    report.notes += [
        f"session {number:016x}: its KV from token {token:,d} on is gone, and was never kept"
        for number, token in recovered.unkept
    ]
    report.restored += recovered.restored
    harmless = "nothing needs it" if not recovered.damage else "not used"
    report.notes += [f"{name}: {harmless}" for name in recovered.dropped_files]
    if recovered.torn_tail:
        report.notes.append("the journal's end is torn, as a crash leaves it")


# -- slots ----------------------------------------------------------------------------


def _check_slots(disk: DiskPort, image: Image, store_uuid: bytes, report: FsckReport) -> None:
    """Compare every slot with the index."""
    rows = image.all_rows()
    by_slab = rows[np.argsort(rows["slab"], kind="stable")]
    for slab in sorted(image.slabs.values(), key=lambda slab: slab.slab):
        first, last = np.searchsorted(by_slab["slab"], [slab.slab, slab.slab + 1]).tolist()
        own = by_slab[first:last]
        try:
            with _OpenSlab(disk, slab) as opened:
                for page in _damaged_pages(opened, own, image, store_uuid):
                    kept = page.block < image.sessions[page.session].kept_blocks
                    (report.pages if kept else report.unkept_pages).append(page)
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


def _mend_superblock(disk: DiskPort) -> str:
    """Write a superblock where two copies do not agree; return what was done, or "".

    Its name comes from a copy, a snapshot, a manifest or a slot; its epoch lies above
    all that they name. Raises StorageError if none of them says which store it is.
    """
    try:
        copies = superblock.read_copies(disk)
    except NotFound:
        copies = []
    if superblock.choose(copies) or not any(disk.names(folder) for folder in FOLDERS):
        return ""
    said = [copy for copy in copies if copy]
    for source in (_from_snapshots, _from_manifests, _from_slots):
        said += source(disk)
    if not said:
        raise StorageError("superblock: no copy, snapshot, manifest or slot says which store it is")
    name = said[0].store_uuid
    own = [found for found in said if found.store_uuid == name]
    slabs = [journal.segment_number(slab) for slab in disk.names(SLAB_FOLDER)]
    limit = max(*(found.slab_limit for found in own), *slabs, 0) + SLAB_IDS_RESERVED
    epoch = max(found.epoch for found in own) + 1
    superblock.write_superblock(disk, Superblock(name, epoch, limit, 0, _dropped(own)))
    return f"superblock: written anew for store {name.hex()}"


def _dropped(said: list[Superblock]) -> tuple[int, ...]:
    """Return the sessions that a copy names as dropped, unless something is of a later start.

    That one has said so elsewhere, and may have kept a session anew under such a number.
    """
    epoch = max(found.epoch for found in said)
    lists = [found.dropped for found in said if found.epoch == epoch]
    return max(lists, key=len)


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


def _from_manifests(disk: DiskPort) -> Iterator[Superblock]:
    for name in disk.names(manifest.FOLDER):
        try:
            header = manifest.ManifestHeader.unpack(_first_sector(disk, name))
        except StorageError:
            continue
        yield Superblock(header.store_uuid, header.stamp[0], 1, 0)


def _from_slots(disk: DiskPort) -> Iterator[Superblock]:
    for name in disk.names(SLAB_FOLDER):
        try:
            for header in strays.headers_in(disk, name):
                # Slots of one run begin above its epoch's floor: generation >> 12 at least.
                yield Superblock(header.store_uuid, header.generation >> _EPOCH_BITS, 1, 0)
        except StorageError:
            continue
