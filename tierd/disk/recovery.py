"""Recovery: superblock quorum, newest valid snapshot, then the journal up to its end.

Nothing is written here: `recover` looks, the ledger acts. What it finds is a
consistent prefix of what was said, less what cannot be: pages in slabs that
are gone, pages beyond a gap of a parked session. The ledger says first that
these have gone, so that no later start sees them again.

Where the journal ends: at the first frame that does not follow. If a frame
beyond it says that the missing one was durable, it is damage and reported as
such; if not, it is the torn end of a crash, and nothing acknowledged is lost.

A manifest that is newer than what could be read of the journal says that frames
were lost: its session is taken up as it was kept then, in the ledger's next epoch.

Sessions that the superblock names as dropped are no more, whatever journal and
manifests say: the ledger that was told of it had no room to write it down there.

Frames that no later frame calls durable may stand in the page cache alone,
after a kill or a failed sync: `tail`, which the ledger writes once more.
"""

from __future__ import annotations

import mmap
import shlex
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from tierd.disk import journal, manifest, prune, snapshot, superblock
from tierd.disk.frames import (
    ORIGIN,
    Frame,
    FrameKind,
    Link,
    seed_of,
    unpack_frame,
)
from tierd.disk.image import Image
from tierd.disk.journal import Segment
from tierd.disk.ports import FOLDERS, DiskPort
from tierd.disk.records import (
    unpack_records,
)
from tierd.disk.snapshot import SnapshotFile
from tierd.disk.window import Window
from tierd.errors import NotFound, StorageError
from tierd.units import SECTOR_BYTES, round_up

if TYPE_CHECKING:
    from tierd.clock import Clock

SLAB_FOLDER = "slab"


@dataclass(slots=True)
class RecoveryReport:
    """What a start found. `seconds` per step; `lost`: (session, first lost token).

    `unkept`, `empty_slabs`: see prune.Pruned; nothing that was kept is gone with these.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    snapshot: str = ""
    segments: int = 0
    frames: int = 0
    records: int = 0  # rows count one each
    rows: int = 0  # in the index at the end
    torn_tail: bool = False
    damage: list[str] = field(default_factory=list)
    repaired: list[str] = field(default_factory=list)
    dropped_files: list[str] = field(default_factory=list)
    missing_slabs: list[int] = field(default_factory=list)
    empty_slabs: list[int] = field(default_factory=list)
    dropped_pages: int = 0
    lost: list[tuple[int, int]] = field(default_factory=list)
    unkept: list[tuple[int, int]] = field(default_factory=list)
    restored: list[int] = field(default_factory=list)  # sessions taken up from their manifests


@dataclass(slots=True)
class Recovered:
    """All that the ledger goes on from."""

    fresh: bool  # nothing was there
    store_uuid: bytes
    epoch: int  # highest seen
    superblock: superblock.Superblock
    next_slab: int
    image: Image
    end: Link  # of what is known to be durable
    tail: list[bytes]  # payloads of what follows, in the image already
    segments: list[Segment]
    next_segment: int
    snapshots: list[SnapshotFile]  # newest last
    leftovers: list[str]  # files that nothing needs
    pruned: prune.Pruned  # left out of the image; the ledger says so first
    manifests: manifest.FoundManifests  # the newer ones are in the image; the ledger says so too
    report: RecoveryReport


def _sequence_of(name: str) -> int:
    return int(name.rpartition("/")[2], 16)


@dataclass(slots=True)
class _Step:
    """A segment whose HEAD could be read."""

    number: int
    head: Frame
    size_bytes: int


def recover(
    disk: DiskPort, *, new_uuid: Callable[[], bytes], clock: Clock, strict: bool = True
) -> Recovered:
    """Look at all that stands on a disk.

    Raises StorageError: see `find_superblock`; and when `strict` for a sector
    of the journal that cannot be read, and for a frame that is sound and not
    understood, which a later version must have written. Otherwise the journal
    ends before these, and they count as damage.
    """
    return _Recovery(disk, clock, strict).run(new_uuid)


def find_superblock(disk: DiskPort, report: RecoveryReport) -> superblock.Superblock | None:
    """Return the superblock; None for an empty folder.

    Raises StorageError when there are files and no two copies agree: what
    stands there could be another store's.
    """
    try:
        copies = superblock.read_copies(disk)
        why = "no two copies agree"
    except NotFound:
        copies = []
        why = "the file is not there"  # its successor, if there is one, is empty
    chosen = superblock.choose(copies)
    if chosen is None and any(disk.names(folder) for folder in FOLDERS):
        raise StorageError(
            f"superblock: {why} and there is data, which no daemon takes up before "
            f"`{_rebuild_command(disk)}` has written it anew"
        )
    if chosen is not None:
        bad = [str(number) for number, copy in enumerate(copies) if copy is None]
        if bad:
            # Two that agree are enough, and this start's update mends the others.
            report.repaired.append(f"superblock: copies {', '.join(bad)} of 0 to 3")
    return chosen


def _rebuild_command(disk: DiskPort) -> str:
    return f"tierd fsck {shlex.quote(disk.folder)} --rebuild"


class _Recovery:
    """One run; its parts share the report."""

    def __init__(self, disk: DiskPort, clock: Clock, strict: bool) -> None:
        self.disk, self.clock, self.strict = disk, clock, strict
        self.report = RecoveryReport()
        self.superblock = superblock.Superblock(b"", 0, 1, 0)
        self.fresh = False
        self.image = Image()
        self.leftovers: list[str] = []
        self.store_uuid = b""
        self.seed = 0
        self.end = ORIGIN
        self.epoch = 0
        self.proven = ORIGIN
        self.tail: deque[tuple[Link, bytes]] = deque()  # beyond `proven`; a HEAD has no payload
        self.limit_epoch = 0  # of the records that the image's slab limit is from
        self.steps: list[_Step] = []
        self.next_segment = 1  # above every file, with a HEAD or without

    @contextmanager
    def _timed(self, step: str) -> Iterator[None]:
        began = self.clock.monotonic()
        yield
        self.report.seconds[step] = self.clock.monotonic() - began

    def run(self, new_uuid: Callable[[], bytes]) -> Recovered:
        with self._timed("superblock"):
            found = find_superblock(self.disk, self.report)
            self.fresh = found is None
            found = found or superblock.Superblock(new_uuid(), 0, 1, 0)
            self.superblock = found
            self.store_uuid, self.seed = found.store_uuid, seed_of(found.store_uuid)
            self.epoch = found.epoch
            self._whole_names("")
        with self._timed("heads"):
            self.steps = self._heads()
        with self._timed("snapshot"):
            snapshots = self._load_snapshot()
        with self._timed("journal"):
            segments = self._replay()
            if self.end.sequence < found.durable and not self.report.damage:
                what = "" if self.steps else "its files are gone, and "
                missing = f"{what}frames {self.end.sequence + 1} to {found.durable} are missing"
                self._damaged(
                    journal.FOLDER, f"{missing}: what these kept is taken from kept/, or it is lost"
                )
        with self._timed("manifests"):
            manifests = self._take_up_manifests()
            for number in found.dropped:
                self.image.drop_session(number)
        with self._timed("check"):
            slabs = {journal.segment_number(name) for name in self._whole_names(SLAB_FOLDER)}
            pruned = prune.prune(self.image, slabs)
            self._note(pruned, slabs)
            self._note_stale(manifests)
        return Recovered(
            self.fresh, self.store_uuid, self.epoch, found, self._next_slab(found, slabs),
            self.image, self.proven,
            [payload for _, payload in self.tail if payload], segments, self.next_segment,
            snapshots, self.leftovers, pruned, manifests, self.report,
        )  # fmt: skip

    def _take_up_manifests(self) -> manifest.FoundManifests:
        """Put into the image what manifests know and lost frames said."""
        self._whole_names(manifest.FOLDER)
        end = (self.limit_epoch, self.end.sequence)
        found = manifest.find_manifests(self.disk, self.store_uuid, end)
        gone = self.superblock.dropped
        found.newer = [newer for newer in found.newer if newer.session.number not in gone]
        for newer in found.newer:
            number = newer.session.number
            name = manifest.manifest_name(number)
            lost = "newer than the journal, which has lost its frames"
            self._damaged(name, f"{lost}: its session is taken up as it says")
            self.report.restored.append(number)
            for slab in newer.slabs:
                self.image.slabs.setdefault(slab.slab, slab)
            self.image.drop_session(number)
            self.image.sessions[number] = newer.session
            self.image.commit(newer.rows)
        return found

    def _note_stale(self, manifests: manifest.FoundManifests) -> None:
        """Manifests of sessions that are not kept any more are leftovers, if all records are.

        Those of sessions that the superblock names as dropped are in any case.
        """
        kept = {session.number for session in self.image.sessions.values() if session.kept}
        found = {*manifests.sizes, *manifests.damaged}
        stale = found & set(self.superblock.dropped) if self.report.damage else found - kept
        self.leftovers += [manifest.manifest_name(number) for number in sorted(stale)]
        manifests.sizes = {n: size for n, size in manifests.sizes.items() if n not in stale}
        self.report.dropped_files += self.leftovers

    def _note(self, pruned: prune.Pruned, slabs: set[int]) -> None:
        report = self.report
        report.damage += pruned.damage
        report.missing_slabs += pruned.missing_slabs
        report.empty_slabs += pruned.empty_slabs
        report.dropped_pages = pruned.dropped_pages
        report.lost += pruned.lost
        report.unkept += pruned.unkept
        report.rows = pruned.rows
        unknown = [f"{SLAB_FOLDER}/{slab:08x}" for slab in sorted(slabs - set(self.image.slabs))]
        if not report.damage:
            # After damage a slab's record may be what is missing: its file stays for fsck.
            self.leftovers += unknown

    def _next_slab(self, found: superblock.Superblock, slabs: set[int]) -> int:
        """Return an id above all that were ever given out."""
        spoken_for = found.slab_limit
        if self.limit_epoch >= found.epoch:
            # The store was not closed: records of its last epoch may have reserved more.
            spoken_for = max(spoken_for, self.image.slab_limit)
        return max(spoken_for, max(slabs, default=0) + 1)

    def _whole_names(self, folder: str) -> list[str]:
        """Return a folder's files; those not whole when the store stopped are leftovers."""
        names = self.disk.names(folder)
        whole = [name for name in names if not name.endswith(superblock.TEMPORARY)]
        self.leftovers += sorted(set(names) - set(whole))
        return whole

    # -- snapshot -----------------------------------------------------------------
    def _load_snapshot(self) -> list[SnapshotFile]:
        """Load the newest valid snapshot; return the files that stay, newest last."""
        names = self._whole_names(snapshot.FOLDER)
        while names:
            name = names[-1]
            try:
                read = snapshot.read_snapshot(self.disk, _sequence_of(name), self.store_uuid)
                self._refuse_superseded(read.header)
            except StorageError as error:
                self.report.damage.append(f"{name}: {error}")
                self.leftovers.append(names.pop())
                continue
            self.image, self.end = read.image, read.header.end
            self.proven = self.end  # the journal is synced before a snapshot is written
            self.epoch = max(self.epoch, read.header.epoch)
            self.limit_epoch = read.header.epoch
            self.report.snapshot = name
            break
        return [SnapshotFile(_sequence_of(name), self._size(name)) for name in names]

    def _refuse_superseded(self, header: snapshot.SnapshotHeader) -> None:
        """Raise StorageError if a later start, which could not read it, went on from before."""
        for step in self.steps:
            older = step.head.follows.sequence < header.end.sequence
            if step.head.epoch > header.epoch and older:
                raise StorageError("snapshot: a later start went on without it")

    def _size(self, name: str) -> int:
        with _opened(self.disk, name) as (_, size_bytes):
            return size_bytes

    # -- journal ------------------------------------------------------------------
    def _heads(self) -> list[_Step]:
        """Read every segment's HEAD; return the segments in the order they were begun."""
        steps = []
        for name in self._whole_names(journal.FOLDER):
            with _opened(self.disk, name) as (handle, size_bytes):
                first = memoryview(mmap.mmap(-1, SECTOR_BYTES))[: min(size_bytes, SECTOR_BYTES)]
                self._read_piece(name, handle, 0, first)
                number = journal.segment_number(name)
                self.next_segment = max(self.next_segment, number + 1)
                try:
                    head = unpack_frame(first, 0, self.seed)
                    if journal.head_size_bytes(head, number) != size_bytes:
                        self._damaged(name, f"{size_bytes} bytes long, it was made longer")
                    steps.append(_Step(number, head, size_bytes))
                except StorageError as error:
                    self._headless(name, self._window(name, handle, size_bytes), str(error))
        self.epoch = max([self.epoch, *(step.head.epoch for step in steps)])
        return sorted(steps, key=lambda step: (step.head.epoch, step.number))

    def _window(self, name: str, handle: int, size_bytes: int) -> Window:
        return Window(lambda at, piece: self._read_piece(name, handle, at, piece), size_bytes)

    def _headless(self, name: str, window: Window, reason: str) -> None:
        """A HEAD is durable before anything but copies is written: other frames are damage."""
        for frame in window.strays(self.seed):
            if frame.kind == FrameKind.COPY:
                continue
            self.report.damage.append(f"{name}: {reason}, and holds frame {frame.sequence}")
            break
        self.leftovers.append(name)

    def _replay(self) -> list[Segment]:
        """Apply the journal beyond the snapshot; return the segments and how far each counts."""
        segments = []
        broken = False
        for index, step in enumerate(self.steps):
            later = [other.head.follows.sequence for other in self.steps[index + 1 :]]
            cut = min(later, default=None)
            if not broken and (cut is None or cut > self.end.sequence):
                broken = not self._replay_segment(step, cut)
            last = self.end.sequence if cut is None else cut
            segments.append(Segment(step.number, step.size_bytes, last))
        # What is beyond the proven end will stand in a new segment.
        return [replace(s, last=min(s.last, self.proven.sequence)) for s in segments]

    def _replay_segment(self, step: _Step, cut: int | None) -> bool:
        """Apply a segment's frames up to sequence `cut`; return whether all of them are there."""
        name = journal.segment_name(step.number)
        self.report.segments += 1
        if step.head.sequence > self.end.sequence:
            if step.head.follows != self.end:
                self._damaged(name, f"frames before {step.head.sequence} are missing")
                return False
            self._enter(step.head)
        with _opened(self.disk, name) as (handle, size_bytes):
            window = self._window(name, handle, size_bytes)
            self._walk(name, window, step.head, cut)
            missing = self.end.sequence + 1
            if cut is None:
                return self._look_beyond(name, window, step.head.epoch, missing)
        if cut >= missing:
            self._damaged(name, f"frames {missing} to {cut} are damaged")
        return cut < missing

    def _look_beyond(self, name: str, window: Window, epoch: int, missing: int) -> bool:
        """Tell a torn end from damage; return whether it is no damage."""
        self.report.torn_tail |= not window.blank_here()
        closed = self.superblock.epoch > epoch and self.superblock.durable < missing
        if closed and not self.report.torn_tail:
            return True  # closed here: nothing can stand beyond, and most of a start is reading it
        for frame in window.strays(self.seed):
            if frame.epoch == epoch and frame.sequence >= missing:
                self.report.torn_tail = True
                if frame.durable >= missing:
                    self._damaged(name, f"frame {missing} is damaged, it had been durable")
                    return False
        return True

    def _advance(self, frame: Frame) -> None:
        """Take a frame as the journal's end; it may call frames before it durable."""
        while self.tail and self.tail[0][0].sequence <= frame.durable:
            self.proven = self.tail.popleft()[0]
        self.tail.append((frame.link, b"" if frame.kind == FrameKind.HEAD else frame.payload))
        self.end = frame.link

    def _enter(self, head: Frame) -> None:
        self._advance(head)
        self.limit_epoch = max(self.limit_epoch, head.epoch)

    def _walk(self, name: str, window: Window, head: Frame, cut: int | None) -> None:
        """Apply frames from the HEAD on; leave the window after the last that follows."""
        link = head.link
        window.offset = head.length
        while cut is None or link.sequence < cut:
            frame = window.find(link, self.seed)
            if frame is None and link.sequence < self.end.sequence:
                # Damaged where the snapshot covers it: go on behind.
                strays = window.strays(self.seed)
                frame = next((stray for stray in strays if stray.follows == self.end), None)
            if frame is None or (frame.sequence > self.end.sequence and frame.follows != self.end):
                break
            if frame.sequence > self.end.sequence and not self._apply(name, frame):
                break
            link = frame.link
            window.pass_by(frame)

    def _apply(self, name: str, frame: Frame) -> bool:
        """Apply a frame whole; return whether it could be understood."""
        try:
            records = list(unpack_records(frame.payload))
            for record in records:
                self.report.records += self.image.apply(record)
        except StorageError as error:
            reason = f"frame {frame.sequence} is sound and not understood: {error}"
            if self.strict:
                raise StorageError(f"{name}: {reason}; was it a later version of tierd?") from error
            self._damaged(name, reason)
            return False
        self._advance(frame)
        self.report.frames += 1
        return True

    def _damaged(self, name: str, reason: str) -> None:
        self.report.damage.append(f"{name}: {reason}")

    def _read_piece(self, name: str, handle: int, offset: int, piece: memoryview) -> None:
        """Fill `piece`, trying twice. Raises StorageError; if not `strict`, zeros are damage."""
        for _ in range(2):
            try:
                return self.disk.read_into(handle, offset, piece)
            except StorageError as error:
                reason = str(error)
        if len(piece) > SECTOR_BYTES:
            half = round_up(len(piece) // 2, SECTOR_BYTES)
            self._read_piece(name, handle, offset, piece[:half])
            self._read_piece(name, handle, offset + half, piece[half:])
        else:
            what = f"sector {offset // SECTOR_BYTES} cannot be read: {reason}"
            if self.strict:
                # It may be readable the next time; going on without it would be for good.
                command = _rebuild_command(self.disk)
                raise StorageError(f"{name}: {what}; `{command}` goes on without it")
            piece[:] = bytes(len(piece))
            self._damaged(name, what)
        return None


@contextmanager
def _opened(disk: DiskPort, name: str) -> Iterator[tuple[int, int]]:
    """Open a file meanwhile: its handle, and its bytes in whole sectors."""
    handle = disk.open(name)
    try:
        yield handle, disk.size_bytes(handle) // SECTOR_BYTES * SECTOR_BYTES
    finally:
        disk.release(handle)
