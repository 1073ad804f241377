"""`tierd fsck` on a real folder: clean, damaged, mended, in use, not there."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.disk.ledgerrig import NAMESPACE, SEGMENT_BYTES, UUID
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
    assert "snap/" in outcome.out and outcome.out.splitlines()[-1] == "damage was found"
    outcome = tierd("fsck", str(folder), "--rebuild", "--json")
    assert outcome.code == 1
    assert json.loads(outcome.out)["rebuilt"]
    assert tierd("fsck", str(folder)).code == 0


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
