"""Bits flip and files are cut under a closed store: detected or harmless, never a wrong row.

4,000 bits of a whole store's files, and every cut at a sector; every bit and
every cut of each format by itself stand with the tests of that format.
"""

import random
from collections import Counter

import pytest

from tests.disk.ledgerrig import UUID, Rig, State, slab_files, state_of
from tierd.disk.memory import MemoryDisk
from tierd.disk.recovery import recover
from tierd.errors import StorageError
from tierd.testing import FakeClock
from tierd.units import SECTOR_BYTES

FLIPS = {"superblock": 500, "snap": 1000, "journal": 2500}


def store(seed: int) -> tuple[MemoryDisk, Rig]:
    """Return a closed store: two snapshots, several segments, records beyond."""
    disk = MemoryDisk()
    rig = Rig(disk, seed)
    for number in range(60):
        rig.step()
        if number in (20, 40):
            rig.snapshot()
        if number % 25 == 24:
            rig.reopen()
    rig.open_session()
    rig.commit()
    rig.led.close()
    rig.states = [rig.now]
    return disk, rig


DISK, RIG = store(1)


def outcome(disk: MemoryDisk) -> str:
    """Recover; return what was noticed. Raises AssertionError for a state that never was."""
    try:
        found = recover(disk, new_uuid=lambda: UUID, clock=FakeClock())
    except StorageError:
        return "refused"
    state, files = state_of(found.image), slab_files(disk)
    if state == RIG.now.pruned(files):
        return "harmless"
    report = found.report
    assert any(state == old.pruned(files) for old in RIG.history), "a state that never was"
    assert report.damage or report.torn_tail, "less than was acknowledged, and nothing said"
    return "detected"


def sectors_in_use(name: str) -> list[int]:
    """Return the sectors of a file that hold something, and the next one."""
    data = DISK.named[name]
    used = [n for n in range(len(data) // SECTOR_BYTES)
            if any(data[n * SECTOR_BYTES : (n + 1) * SECTOR_BYTES])]  # fmt: skip
    return [*used, min(used[-1] + 1, len(data) // SECTOR_BYTES - 1)]


@pytest.fixture
def files() -> dict[str, list[int]]:
    named = [name for name in DISK.named if not name.startswith(("slab", "superblock.spare"))]
    return {name: sectors_in_use(name) for name in named}


def test_the_store_is_worth_damaging(files: dict[str, list[int]]) -> None:
    kinds = Counter(name.partition("/")[0] for name in files)
    assert kinds["snap"] == 2 and kinds["journal"] >= 2 and kinds["superblock"] == 1
    assert outcome(DISK) == "harmless"
    assert len(RIG.now.pages) >= 5
    assert RIG.now != State()


@pytest.mark.parametrize("kind", FLIPS)
def test_a_flipped_bit_is_detected_or_harmless(kind: str, files: dict[str, list[int]]) -> None:
    draw = random.Random(f"flips {kind}")
    names = [name for name in files if name.startswith(kind)]
    seen: Counter[str] = Counter()
    for _ in range(FLIPS[kind]):
        name = draw.choice(names)
        bit = draw.choice(files[name]) * SECTOR_BYTES * 8 + draw.randrange(SECTOR_BYTES * 8)
        DISK.named[name][bit // 8] ^= 1 << bit % 8
        try:
            seen[outcome(DISK)] += 1
        finally:
            DISK.named[name][bit // 8] ^= 1 << bit % 8
    if kind != "journal":
        # Four copies of one, and two snapshots with the journal since the older.
        assert seen == {"harmless": FLIPS[kind]}
    assert outcome(DISK) == "harmless"


def test_a_file_cut_anywhere_is_detected_or_harmless(files: dict[str, list[int]]) -> None:
    for name in files:
        whole = DISK.named[name]
        end = (files[name][-1] + 2) * SECTOR_BYTES
        cuts = {*range(0, min(end, len(whole)), SECTOR_BYTES), *range(1, 4096, 97), len(whole) - 1}
        for length in sorted(cuts):
            DISK.named[name] = whole[:length]
            outcome(DISK)
        DISK.named[name] = whole
    assert outcome(DISK) == "harmless"


def test_a_file_that_is_gone_is_detected_or_harmless(files: dict[str, list[int]]) -> None:
    for name in files:
        whole = DISK.named.pop(name)
        assert outcome(DISK) in ("harmless", "detected", "refused"), name
        DISK.named[name] = whole
