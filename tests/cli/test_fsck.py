"""`tierd fsck` on a real folder: clean, damaged, mended, in use, not there."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.disk.ledgerrig import NAMESPACE, SEGMENT_BYTES, UUID
from tests.disk.test_fsck import SESSIONS, SLOT_BYTES, store, with_unkept
from tierd.cli import fsck
from tierd.disk.fsck import DamagedPage, FsckReport
from tierd.disk.header import HEADER_BYTES
from tierd.disk.ledger import Ledger
from tierd.disk.posix import PosixDisk
from tierd.disk.records import SessionRecord
from tierd.testing import FakeClock


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store with one session, closed."""
    with PosixDisk(str(tmp_path / "cold"), ephemeral=False) as disk:
        led = Ledger.open(
            disk, new_uuid=lambda: UUID, clock=FakeClock(), segment_bytes=SEGMENT_BYTES
        )
        led.put_session(SessionRecord(7, NAMESPACE, "parked", b"", 0))
        led.snapshot()
        led.close()
    return tmp_path / "cold"


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_a_sound_folder_is_clean(tierd: Any, folder: Path) -> None:
    outcome = tierd("fsck", str(folder))
    assert outcome.code == 0, outcome.err
    assert UUID.hex() in outcome.out
    assert outcome.out.splitlines()[-1] == "clean"


def test_json_is_versioned_and_has_everything(tierd: Any, folder: Path) -> None:
    found = json.loads(tierd("fsck", str(folder), "--json").out)
    assert (found["version"], found["clean"], found["sessions"]) == (1, True, 1)
    assert found["damage"] == found["pages"] == found["lost"] == []


def test_damage_is_named_and_exits_1_and_rebuild_mends_it(tierd: Any, folder: Path) -> None:
    flip(next((folder / "snap").iterdir()), 4096)
    outcome = tierd("fsck", str(folder))
    assert outcome.code == 1
    assert "found: snap/" in outcome.out and outcome.out.splitlines()[-1].startswith(
        "damage was found; "
    )
    outcome = tierd("fsck", str(folder), "--rebuild", "--json")
    assert outcome.code == 0
    found = json.loads(outcome.out)
    assert found["rebuilt"] and found["sound"] and not found["clean"]
    assert (found["sessions"], found["left"], found["lost"]) == (1, [], [])
    assert tierd("fsck", str(folder)).code == 0


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A store with two kept sessions, 4 pages each, whose journal and snapshots are damaged."""
    folder = tmp_path / "cold"
    memory, _ = store()
    with PosixDisk(str(folder), ephemeral=False):
        pass
    for name, data in memory.named.items():
        (folder / name).write_bytes(data)
    for place in (*(folder / "journal").iterdir(), *(folder / "snap").iterdir()):
        place.write_bytes(bytes(place.stat().st_size))
    return folder


def test_a_lost_index_is_rebuilt_from_slots_and_what_is_kept(tierd: Any, kept: Path) -> None:
    outcome = tierd("fsck", str(kept), "--rebuild")
    assert outcome.code == 0, outcome.out
    lines = outcome.out.splitlines()
    for session in SESSIONS:
        assert f"mended: session {session:016x}: taken up from its manifest" in lines
    assert lines[-1] == "damage was found, and mended; 1 sessions may be lost, named above"
    assert any("sessions" in line and line.split()[-1] == "2" for line in lines)
    assert tierd("fsck", str(kept)).out.splitlines()[-1] == "clean"


def test_what_is_lost_is_named_by_session_and_token_in_both_forms(tierd: Any, kept: Path) -> None:
    flip(kept / "slab" / "00000001", 3 * SLOT_BYTES + 5000)
    flip(kept / "kept" / f"{SESSIONS[1]:016x}", 30)
    text = tierd("fsck", str(kept)).out
    assert "lost" in text and text.splitlines()[-1].startswith("damage was found; ")
    outcome = tierd("fsck", str(kept), "--rebuild", "--json")
    assert outcome.code == 1, "a kept session cannot be resumed"
    found = json.loads(outcome.out)
    lost, gone = (f"{session:016x}" for session in (7, SESSIONS[1]))  # as `sessions` prints them
    assert found["lost"] == [[lost, 16]] and found["unresumable"] == [gone]
    assert {page["session"] for page in found["pages"]} <= {lost, gone}
    assert found["restored"] == [lost] and found["sessions"] == 1 and not found["sound"]
    assert tierd("fsck", str(kept)).code == 0


def test_a_damaged_page_is_named_by_its_slabs_file_in_both_forms(tierd: Any, kept: Path) -> None:
    assert tierd("fsck", str(kept), "--rebuild").code == 0
    flip(kept / "slab" / "00000001", 3 * SLOT_BYTES + 5000)
    text = tierd("fsck", str(kept)).out
    (line,) = (line for line in text.splitlines() if line.startswith("found: page: "))
    assert line.endswith("(slab/00000001, slot 3)")
    (page,) = json.loads(tierd("fsck", str(kept), "--json").out)["pages"]
    assert (page["file"], page["slab"], page["slot"]) == ("slab/00000001", 1, 3)


@pytest.mark.parametrize("findings", ["pages", "unkept_pages"])
def test_a_slab_is_named_in_hex_wherever_a_page_is(findings: str) -> None:
    page = DamagedPage(7, 1, 2, 43, 3, "other bytes")
    report = FsckReport(**{findings: [page]})
    (line,) = (line for lines in fsck._findings(report) for line in lines)
    assert "(slab/0000002b, slot 3)" in line
    assert fsck._named(report)[findings][0]["file"] == "slab/0000002b"


def test_what_is_gone_is_said_with_what_that_means(tierd: Any, kept: Path) -> None:
    assert tierd("fsck", str(kept), "--rebuild").code == 0
    (kept / "kept" / f"{SESSIONS[1]:016x}").unlink()
    outcome = tierd("fsck", str(kept))
    assert outcome.code == 0 and "kept sessions that have no file in kept/: 1." in outcome.out
    found = json.loads(tierd("fsck", str(kept), "--json").out)
    assert found["clean"] and found["once_only"] == [f"{SESSIONS[1]:016x}"]
    for place in (*(kept / "journal").iterdir(), *(kept / "snap").iterdir()):
        place.unlink()
    text = tierd("fsck", str(kept)).out
    said = "damage was found; 2 sessions may be lost, named above; --rebuild mends what can be"
    assert text.splitlines()[-1] == said
    (kept / "superblock").unlink()
    text = tierd("fsck", str(kept)).out
    (sessions,) = (line for line in text.splitlines() if line.split()[:1] == ["sessions"])
    assert sessions.split()[-1] == "-", "they were not looked at"
    assert text.splitlines()[-1] == "damage was found; --rebuild mends what can be"


def test_where_every_record_is_lost_what_may_be_lost_is_named(tierd: Any, kept: Path) -> None:
    for manifest in (kept / "kept").iterdir():
        manifest.unlink()
    outcome = tierd("fsck", str(kept), "--rebuild")
    assert outcome.code == 1 and "nothing lost" not in outcome.out
    for session in SESSIONS:
        assert f"lost?: session {session:016x}" in outcome.out
    assert tierd("fsck", str(kept)).code == 0


def test_a_session_cut_at_a_damaged_page_is_mended_and_named(tierd: Any, kept: Path) -> None:
    flip(kept / "slab" / "00000001", 3 * SLOT_BYTES + 5000)
    outcome = tierd("fsck", str(kept), "--rebuild")
    assert outcome.code == 0
    assert "lost: session 0000000000000007: its KV from token 16 on" in outcome.out
    assert "mended: 1 damaged pages: dropped" in outcome.out
    assert outcome.out.splitlines()[-1] == (
        "damage was found, and mended; 1 sessions lost KV, named above; "
        "1 sessions may be lost, named above"
    )


def test_a_folder_in_use_is_refused_and_its_holder_named(tierd: Any, folder: Path) -> None:
    with PosixDisk(str(folder), ephemeral=False):
        outcome = tierd("fsck", str(folder))
    assert outcome.code == 1
    assert "in use by process" in outcome.err
    assert outcome.err.count("\n") == 1


@pytest.mark.parametrize("made", [True, False])
def test_a_folder_that_is_no_store_is_left_alone(tierd: Any, tmp_path: Path, made: bool) -> None:
    place = tmp_path / "other"
    if made:
        place.mkdir()
    outcome = tierd("fsck", str(place))
    assert outcome.code == 5
    assert "no store" in outcome.err
    assert not made or not list(place.iterdir())


def test_what_was_never_kept_is_told_as_a_note_and_exits_0(tierd: Any, tmp_path: Path) -> None:
    memory, _ = store()
    slab = with_unkept(memory)
    memory.named[f"slab/{slab:08x}"][HEADER_BYTES] ^= 1
    with PosixDisk(str(tmp_path / "cold"), ephemeral=False):
        pass
    for name, data in memory.named.items():
        (tmp_path / "cold" / name).write_bytes(data)
    outcome = tierd("fsck", str(tmp_path / "cold"))
    assert outcome.code == 0, outcome.out
    assert "note: page: session 0000000000000062" in outcome.out
    assert "it was never kept" in outcome.out and outcome.out.splitlines()[-1] == "clean"


def test_the_command_that_is_proposed_names_the_folder(tierd: Any, folder: Path) -> None:
    place = folder.with_name("a cold folder")
    folder.rename(place)
    (place / "superblock").write_bytes(bytes(16))
    outcome = tierd("fsck", str(place))
    assert outcome.code == 1
    assert f"`tierd fsck '{place}' --rebuild`" in outcome.out
    assert tierd("fsck", str(place), "--rebuild").code == 0
