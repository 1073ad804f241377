"""What a job says of a session that was not kept: where it is, and what may yet become of it."""

import pytest

from tierd.errors import DeadlineExceeded, StorageError, StorageFull, TierdError, TierFull
from tierd_engine.report import JobReport, NotKept

ROOM = "keeps it by itself once there is room"
MEMORY = "is kept in the daemon's memory alone, what of it is not on disk"


@pytest.mark.parametrize(
    ("error", "new", "resumed"),
    [
        (TierFull("the cap"), ROOM, "stays as it was kept before this job"),
        (StorageFull("no space"), ROOM, "stays as it was kept before this job"),
        (StorageError("Read-only file system"), "it ends with the daemon, unless the disk takes "
         "it before", "is as it was before this job"),
    ],
)  # fmt: skip
def test_room_is_promised_only_where_room_is_what_lacks(
    error: TierdError, new: str, resumed: str
) -> None:
    report = JobReport("answer", {"session": {"id": "000000000000000a", "kept": True}})
    said = str(NotKept(report, error, resumed=False))
    assert said.startswith(f"{error}. Session 000000000000000a {MEMORY}: ") and said.endswith(new)
    again = NotKept(report, error, resumed=True)
    assert str(again) == f"{error}. Session 000000000000000a {resumed}"
    assert again.says_what_stays and report.sections["session"]["kept"] is False


def test_of_what_is_not_known_nothing_is_said() -> None:
    report = JobReport("answer", {"session": {"id": "000000000000000a", "kept": True}})
    error = NotKept(report, DeadlineExceeded("no answer"), resumed=True)
    assert str(error) == "no answer" and not error.says_what_stays
