"""fsck: a store whole, each kind of damage found and named, and an index mended."""

import random

import numpy as np
import pytest
import xxhash

from tests.disk.ledgerrig import NAMESPACE, SEGMENT_BYTES, UUID
from tierd.disk.fsck import FsckReport, check, rebuild
from tierd.disk.header import HEADER_BYTES, SlotHeader
from tierd.disk.ledger import Ledger
from tierd.disk.memory import MemoryDisk
from tierd.disk.records import PAGE_ROW, SessionRecord
from tierd.disk.superblock import read_copies
from tierd.errors import StorageError
from tierd.testing import FakeClock
from tierd.types import CodecId, DType, SlabRecord

SLOT_BYTES, SLOTS, BLOCKS, LAYERS = HEADER_BYTES + 8192, 24, 4, 2
SESSIONS = (7, 2**63 + 1)


def opened(disk: MemoryDisk) -> Ledger:
    return Ledger.open(disk, new_uuid=lambda: UUID, clock=FakeClock(), segment_bytes=SEGMENT_BYTES)


def write_page(
    disk: MemoryDisk, slab: int, slot: int, session: int, block: int, layer: int
) -> tuple:
    """Write a page as the store does; return its row."""
    payload = random.Random(f"{session} {block} {layer}").randbytes(8000)
    digest = xxhash.xxh3_128_digest(payload)
    header = SlotHeader(
        UUID, slab, slot, 1, CodecId.INT8, DType.FLOAT32, session, layer, block,
        NAMESPACE.digest(), 8192, len(payload), digest,
    )  # fmt: skip
    data = disk.named[f"slab/{slab:08x}"]
    data[slot * SLOT_BYTES : slot * SLOT_BYTES + HEADER_BYTES + 8000] = header.pack() + payload
    place = (slab, slot, 1, np.frombuffer(digest, np.uint8))
    return (session, block, layer, CodecId.INT8, 0, *place)


def store(*, manifests: bool = True) -> tuple[MemoryDisk, int]:
    """Return a disk with two parked sessions in one slab, two free slots with old pages."""
    disk = MemoryDisk()
    led = opened(disk)
    slab = led.take_slab_id()
    disk.create(f"slab/{slab:08x}", SLOT_BYTES * SLOTS)
    led.add_slab(SlabRecord(slab, NAMESPACE.digest(), SLOT_BYTES, SLOTS))
    slots = iter(range(SLOTS))
    for session in SESSIONS:
        pages = [(block, layer) for block in range(BLOCKS) for layer in range(LAYERS)]
        rows = [write_page(disk, slab, next(slots), session, *page) for page in pages]
        led.put_session(SessionRecord(session, NAMESPACE, "running"))
        led.commit(np.array(rows, dtype=PAGE_ROW))
        led.flush()
        led.put_session(SessionRecord(session, NAMESPACE, "parked", bytes(4 * 64), BLOCKS))
        led.flush(sync=True)
        if manifests:
            led.keep(session)
    for block in range(2):
        write_page(disk, slab, next(slots), 99, block, 0)
    led.snapshot()
    led.put_session(SessionRecord(99, NAMESPACE, "running"))
    led.close()
    return disk, slab


def checked(disk: MemoryDisk) -> FsckReport:
    before = {name: bytes(data) for name, data in disk.named.items()}
    report = check(disk, FakeClock())
    assert {name: bytes(data) for name, data in disk.named.items()} == before
    assert not disk.files
    return report


@pytest.fixture
def disk() -> MemoryDisk:
    made, _ = store()
    made.files.clear()
    return made


def test_a_sound_store_is_clean_and_its_figures_are_told(disk: MemoryDisk) -> None:
    report = checked(disk)
    assert report.clean and not report.damage
    assert (report.sessions, report.slabs, report.pages_checked, report.unnamed) == (3, 1, 16, 2)
    assert report.store_uuid == UUID.hex()


def test_kept_sessions_without_their_manifests_are_named_and_nothing_is_lost(
    disk: MemoryDisk,
) -> None:
    del disk.named[f"kept/{SESSIONS[1]:016x}"]
    report = checked(disk)
    assert report.clean and report.once_only == [SESSIONS[1]]
    rebuild(disk, FakeClock())
    assert checked(disk).once_only == []


def test_a_superblock_that_is_not_there_is_not_called_one_that_disagrees(disk: MemoryDisk) -> None:
    del disk.named["superblock"]
    (said,) = checked(disk).damage
    assert said.startswith("superblock: the file is not there and there is data, which no daemon")
    report = rebuild(disk, FakeClock())
    assert "superblock: the file is not there" in report.damage and report.sound


def test_a_journal_that_is_gone_is_said_with_what_that_means(disk: MemoryDisk) -> None:
    for name in [name for name in disk.named if name.startswith(("journal/", "snap/"))]:
        del disk.named[name]
    gone, *taken = checked(disk).damage
    assert gone.startswith("journal: its files are gone, and frames 1 to ")
    assert gone.endswith("are missing: what these kept is taken from kept/, or it is lost")
    assert len(taken) == 2 and all("its session is taken up as it says" in line for line in taken)


def test_an_empty_folder_is_clean() -> None:
    report = checked(MemoryDisk())
    assert report.clean and report.notes


@pytest.mark.parametrize("where", ["header", "payload"])
def test_each_page_that_is_damaged_is_named(disk: MemoryDisk, where: str) -> None:
    offset = 3 * SLOT_BYTES + (20 if where == "header" else HEADER_BYTES + 700)
    disk.named["slab/00000001"][offset] ^= 4
    (page,) = checked(disk).pages
    assert (page.session, page.block, page.layer, page.slot) == (7, 1, 1, 3)
    assert ("checksum" if where == "header" else "digest") in page.reason


def test_a_page_in_anothers_place_is_damage_though_it_is_whole(disk: MemoryDisk) -> None:
    slab = disk.named["slab/00000001"]
    slab[0:SLOT_BYTES] = slab[SLOT_BYTES : 2 * SLOT_BYTES]
    (page,) = checked(disk).pages
    assert "another page" in page.reason


@pytest.mark.parametrize("name", ["superblock", "snap/", "journal/"])
def test_damage_of_records_is_named(disk: MemoryDisk, name: str) -> None:
    name = next(file for file in disk.named if file.startswith(name))
    disk.named[name][40] ^= 1
    report = checked(disk)
    assert not report.clean
    assert any(name.partition("/")[0] in line for line in report.damage)
    assert not report.pages


def test_a_slab_that_is_gone_or_cut_is_damage(disk: MemoryDisk) -> None:
    whole = disk.named["slab/00000001"]
    disk.named["slab/00000001"] = whole[: 5 * SLOT_BYTES + 100]
    report = checked(disk)
    assert len(report.pages) == 16 - 5
    del disk.named["slab/00000001"]
    report = checked(disk)
    assert "missing" in report.damage[0]
    assert sorted(report.lost) == [(session, 0) for session in SESSIONS]


def test_rebuilding_a_sound_store_changes_nothing_that_is_held(disk: MemoryDisk) -> None:
    report = rebuild(disk, FakeClock())
    assert report.clean and report.rebuilt
    led = opened(disk)
    assert [len(led.pages_of(session)) for session in SESSIONS] == [8, 8]
    assert led.sessions()[7].sealed_blocks == BLOCKS


def test_rebuilding_drops_damaged_pages_and_cuts_sessions_there(disk: MemoryDisk) -> None:
    disk.named["slab/00000001"][3 * SLOT_BYTES + HEADER_BYTES] ^= 1
    report = rebuild(disk, FakeClock())
    assert len(report.pages) == 1
    assert report.lost == [(7, 16)]
    assert checked(disk).clean
    led = opened(disk)
    assert led.sessions()[7].sealed_blocks == 1
    assert len(led.pages_of(7)) == 2
    assert len(led.pages_of(SESSIONS[1])) == 8
    assert led.quarantined(1) == {3}


@pytest.mark.parametrize("kept_copies", [1, 0])
def test_a_lost_superblock_is_written_anew(disk: MemoryDisk, kept_copies: int) -> None:
    copies = read_copies(disk)
    for copy in range(kept_copies, 4):
        disk.named["superblock"][copy * 65536] ^= 1
    report = checked(disk)
    assert "no two copies agree" in report.damage[0]
    with pytest.raises(StorageError):
        opened(disk)
    report = rebuild(disk, FakeClock())
    assert "written anew" in report.mended[0] and report.sound and not report.clean
    assert checked(disk).clean
    led = opened(disk)
    assert led.epoch > copies[0].epoch or kept_copies == 0
    assert [len(led.pages_of(session)) for session in SESSIONS] == [8, 8]
    assert led.take_slab_id() > 1


def test_without_snapshots_a_slot_says_which_store_it_is(disk: MemoryDisk) -> None:
    for name in [name for name in disk.named if name.startswith(("superblock", "snap"))]:
        del disk.named[name]
    rebuild(disk, FakeClock())
    assert opened(disk).store_uuid == UUID


def test_a_store_that_nothing_names_is_refused(disk: MemoryDisk) -> None:
    for name in [
        name for name in disk.named if name.startswith(("superblock", "snap", "slab", "kept"))
    ]:
        del disk.named[name]
    with pytest.raises(StorageError, match="which store"):
        rebuild(disk, FakeClock())


# -- what no suspension has kept -------------------------------------------------------


def with_unkept(disk: MemoryDisk) -> int:
    """Add a session that was never kept, with two pages in a slab of its own; return the slab."""
    led = opened(disk)
    slab = led.take_slab_id()
    disk.create(f"slab/{slab:08x}", SLOT_BYTES * SLOTS)
    led.add_slab(SlabRecord(slab, NAMESPACE.digest(), SLOT_BYTES, SLOTS))
    rows = [write_page(disk, slab, slot, 98, 0, slot) for slot in range(2)]
    led.put_session(SessionRecord(98, NAMESPACE, "running"))
    led.commit(np.array(rows, dtype=PAGE_ROW))
    led.close()
    disk.files.clear()
    return slab


def test_a_slab_that_is_gone_with_pages_that_were_never_kept_is_a_note(disk: MemoryDisk) -> None:
    slab = with_unkept(disk)
    del disk.named[f"slab/{slab:08x}"]
    report = checked(disk)
    assert report.clean, report
    notes = " ".join(report.notes)
    assert f"slab/{slab:08x}: missing" in notes
    assert "session 0000000000000062: its KV from token 0 on is gone, and was never kept" in notes


def test_a_damaged_page_that_was_never_kept_is_a_note_and_a_rebuild_drops_it(
    disk: MemoryDisk,
) -> None:
    slab = with_unkept(disk)
    disk.named[f"slab/{slab:08x}"][HEADER_BYTES] ^= 1
    report = checked(disk)
    assert report.clean and not report.pages, report
    assert [(page.session, page.slot) for page in report.unkept_pages] == [(98, 0)]
    report = rebuild(disk, FakeClock())
    assert report.sound and not report.lost, report
    disk.files.clear()
    assert not checked(disk).unkept_pages
    assert opened(disk).quarantined(slab) == {0}
