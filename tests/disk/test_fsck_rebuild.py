"""fsck --rebuild where records are lost: what manifests and slots say, and what is told of it."""

from dataclasses import asdict

import pytest

from tests.disk.ledgerrig import NAMESPACE
from tests.disk.test_fsck import BLOCKS, LAYERS, SESSIONS, SLOT_BYTES, checked, opened, store
from tierd.disk.fsck import FsckReport, rebuild
from tierd.disk.header import HEADER_BYTES, SlotHeader
from tierd.disk.memory import MemoryDisk
from tierd.disk.records import SessionRecord
from tierd.testing import FakeClock
from tierd.units import SECTOR_BYTES

TOKENS = bytes(4 * 64)


@pytest.fixture
def disk() -> MemoryDisk:
    made, _ = store()
    made.files.clear()
    return made


def lose(disk: MemoryDisk, *starts: str) -> None:
    for name in [name for name in disk.named if name.startswith(starts)]:
        del disk.named[name]


def spoil(disk: MemoryDisk, *starts: str) -> None:
    """Damage every sector of files."""
    for name in [name for name in disk.named if name.startswith(starts)]:
        for sector in range(0, len(disk.named[name]), SECTOR_BYTES):
            disk.named[name][sector] ^= 1


def assert_whole(disk: MemoryDisk, *numbers: int) -> None:
    led = opened(disk)
    for number in numbers:
        assert led.sessions()[number] == SessionRecord(number, NAMESPACE, "parked", TOKENS, BLOCKS)
        assert len(led.pages_of(number)) == BLOCKS * LAYERS
    led.check_integrity()
    led.close()
    assert checked(disk).clean


@pytest.mark.parametrize("how", [lose, spoil])
@pytest.mark.parametrize("what", [("journal", "snap"), ("journal", "snap", "superblock")])
def test_kept_sessions_come_back_whole_without_the_ledger(disk: MemoryDisk, how, what) -> None:
    how(disk, *what)
    assert not checked(disk).clean
    report = rebuild(disk, FakeClock())
    assert report.rebuilt and report.sound and not report.clean
    assert not report.lost and not report.unresumable and not report.left
    assert sorted(report.restored) == sorted(SESSIONS)
    assert report.sessions == 2, "the third was never kept"
    assert any(f"{SESSIONS[0]:016x}" in line for line in report.mended)
    assert_whole(disk, *SESSIONS)


def test_a_page_written_over_since_ends_its_session_there_and_is_named(disk: MemoryDisk) -> None:
    """Session 7's block 2 was given up, and its slot has another page now."""
    slab = disk.named["slab/00000001"]
    slot = 4
    held = SlotHeader.unpack(bytes(slab[slot * SLOT_BYTES :][:HEADER_BYTES]))
    assert (held.session, held.block) == (7, 2)
    other = SlotHeader.unpack(bytes(slab[8 * SLOT_BYTES :][:HEADER_BYTES]))
    slab[slot * SLOT_BYTES : slot * SLOT_BYTES + HEADER_BYTES] = other.pack_at(1, slot, 9)
    lose(disk, "journal", "snap")
    report = rebuild(disk, FakeClock())
    assert [(page.session, page.block) for page in report.pages] == [(7, 2)]
    assert report.lost == [(7, 2 * NAMESPACE.geometry.block_tokens)] and report.sound
    led = opened(disk)
    assert led.sessions()[7].sealed_blocks == 2 and led.sessions()[7].token_ids == TOKENS
    assert len(led.pages_of(7)) == 2 * LAYERS
    led.close()
    assert_whole(disk, SESSIONS[1])


def test_pages_of_sessions_that_were_not_kept_are_named_and_given_up(disk: MemoryDisk) -> None:
    lose(disk, "journal", "snap")
    report = rebuild(disk, FakeClock())
    assert report.strays == [(99, 2)] and report.sound
    assert 99 not in opened(disk).sessions()


def test_a_kept_session_whose_token_ids_are_lost_too_is_named_and_not_sound(
    disk: MemoryDisk,
) -> None:
    lose(disk, "journal", "snap")
    spoil(disk, f"kept/{7:016x}")
    report = rebuild(disk, FakeClock())
    assert report.unresumable == [7] and not report.sound
    assert (7, BLOCKS * LAYERS) in report.strays
    assert report.sessions == 1
    assert_whole(disk, SESSIONS[1])


def test_slabs_that_nothing_names_are_counted_with_their_pages(disk: MemoryDisk) -> None:
    lose(disk, "journal", "snap", "kept")
    report = checked(disk)
    assert any("1 slab files (slab/00000001) with 18 pages" in line for line in report.damage), (
        report.damage
    )
    report = rebuild(disk, FakeClock())
    assert dict(report.strays) == {7: 8, SESSIONS[1]: 8, 99: 2}
    assert report.sessions == 0 and not report.left
    assert not [name for name in disk.named if name.startswith("slab")]
    assert checked(disk).clean


@pytest.mark.parametrize("where", [40, SECTOR_BYTES + 40])
def test_a_damaged_manifest_alone_costs_nothing_and_is_written_anew(
    disk: MemoryDisk, where: int
) -> None:
    name = f"kept/{7:016x}"
    disk.named[name][where] ^= 1
    report = checked(disk)
    assert [line for line in report.damage if name in line] and not report.unresumable
    report = rebuild(disk, FakeClock())
    assert report.sound and any(name in line for line in report.mended)
    lose(disk, "journal", "snap")
    rebuild(disk, FakeClock())
    assert_whole(disk, *SESSIONS)


def test_a_store_of_before_there_were_manifests_gets_them() -> None:
    disk, _ = store(manifests=False)
    disk.files.clear()
    assert not disk.names("kept") and checked(disk).clean
    assert rebuild(disk, FakeClock()).clean
    lose(disk, "journal", "snap", "superblock")
    rebuild(disk, FakeClock())
    assert_whole(disk, *SESSIONS)


def test_damage_in_a_session_that_an_engine_has_is_cut_and_named(disk: MemoryDisk) -> None:
    led = opened(disk)
    led.put_session(SessionRecord(7, NAMESPACE, "running", TOKENS, BLOCKS))
    led.close()
    disk.files.clear()
    disk.named["slab/00000001"][3 * SLOT_BYTES + HEADER_BYTES] ^= 1
    report = rebuild(disk, FakeClock())
    assert report.lost == [(7, NAMESPACE.geometry.block_tokens)] and report.sound
    assert opened(disk).sessions()[7].sealed_blocks == 1


def test_the_epoch_goes_on_above_all_that_was_seen(disk: MemoryDisk) -> None:
    for _ in range(5):
        opened(disk).close()
        disk.files.clear()
    epoch = opened(disk).epoch
    disk.files.clear()
    number = SESSIONS[0]
    led = opened(disk)
    led.keep(number)
    led.close()
    disk.files.clear()
    lose(disk, "journal", "snap", "superblock")
    rebuild(disk, FakeClock())
    assert opened(disk).epoch > epoch


def test_the_report_is_plain_values(disk: MemoryDisk) -> None:
    lose(disk, "journal", "snap")
    found = asdict(rebuild(disk, FakeClock()))
    assert {"damage", "mended", "lost", "unresumable", "strays", "restored", "left"} <= set(found)
    assert FsckReport().clean and FsckReport().sound
