"""Sessions dropped while the disk has no room for a journal: gone for good once `forget` returns.

The power goes at every operation from the drop, over the start that follows once there is space,
to the session that is kept anew under the number that was dropped.
"""

import contextlib
import random
from dataclasses import dataclass, field, replace

import pytest

from tests.disk.ledgerrig import (
    NAMESPACE,
    SEGMENT_BYTES,
    UUID,
    Rig,
    State,
    open_ledger,
    slab_files,
    state_of,
)
from tierd.disk import journal
from tierd.disk.fsck import check, rebuild
from tierd.disk.ledger import BUFFER_BYTES_MAX, Ledger
from tierd.disk.manifest import manifest_name
from tierd.disk.records import SessionRecord
from tierd.disk.recovery import recover
from tierd.disk.superblock import (
    DROPPED_MAX,
    SPARE,
    SUPERBLOCK_BYTES,
    Superblock,
    choose,
    read_copies,
    write_superblock,
)
from tierd.errors import StorageError, StorageFull
from tierd.testing import FakeClock, Fault, FaultKind, SimulatedDisk, crash_choices

SUBSETS = 8  # ways in which the power goes at one operation
ANEW = bytes(range(1, 65))  # token ids that no session of the rig has


def patient(disk: SimulatedDisk) -> Ledger:
    return open_ledger(disk, patient=True)


def found_on(disk: SimulatedDisk) -> State:
    found = recover(disk, new_uuid=lambda: UUID, clock=FakeClock())
    assert not found.report.damage, found.report.damage
    return state_of(found.image)


def noted(disk: SimulatedDisk) -> tuple[int, ...]:
    chosen = choose(read_copies(disk))
    assert chosen is not None
    return chosen.dropped


def full(seed: int, steps: int = 40) -> tuple[SimulatedDisk, int]:
    """Return a disk without a free byte that was killed, and a session that is kept on it."""
    rig = Rig(SimulatedDisk(seed), seed, manifests=True)
    while len(rig.now.sessions) < 4:
        rig.open_session()
    for _ in range(steps):
        rig.step()
    kept = SessionRecord(10**6 + seed, NAMESPACE, "parked", bytes(4 * 64), 0)
    rig.led.put_session(kept)
    rig.led.flush(sync=True)
    rig.led.keep(kept.number)
    disk = rig.disk.kill() if seed % 2 else rig.disk.crash(keep=())
    disk.capacity_bytes = disk.used_bytes()
    return disk, kept.number


def drop(led: Ledger, number: int) -> None:
    """Drop as the store does."""
    led.forget(number)
    led.drop_session(number)


@pytest.mark.parametrize("seed", range(10))
def test_a_session_dropped_while_it_waits_is_gone_and_all_else_is_there(seed: int) -> None:
    disk, number = full(seed)
    led = patient(disk)
    before = state_of(led._image)
    assert led.waiting and manifest_name(number) in disk.names("kept")
    drop(led, number)
    assert noted(disk) == (number,) and manifest_name(number) not in disk.names("kept")
    led.check_integrity()
    for after in (disk.crash([]), *(disk.crash() for _ in range(10)), disk.kill()):
        assert found_on(after) == before.without(number)
        after.capacity_bytes = after.used_bytes()
        again = patient(after)  # on a disk that is still full, and then is not
        assert again.waiting and number not in again.sessions()
        after.capacity_bytes = 2**40
        again.flush(sync=True)
        assert noted(after) == ()
        for later in (after.crash([]), after.crash(), after.kill()):
            assert found_on(later) == before.without(number)
            assert manifest_name(number) not in later.names("kept")


@dataclass
class Boundary:
    """One run from a full disk to one with space; at each operation the power goes.

    `may`: what the session may be found as, None for gone; `others`: and all the rest.
    """

    seed: int
    number: int
    draw: random.Random
    may: list[SessionRecord | None] = field(default_factory=list)
    others: list[dict[int, SessionRecord]] = field(default_factory=list)
    points: int = 0

    def look(self, disk: SimulatedDisk) -> None:
        for keep in crash_choices(disk.pending(), SUBSETS, self.draw):
            self.points += 1
            after = disk.crash(keep, torn=self.draw.random() < 0.3)
            self.check(found_on(after))
            if self.points % 4 == 0:
                self.go_on(after)

    def check(self, found: State) -> None:
        own = found.sessions.get(self.number)
        assert own in self.may, f"seed {self.seed}: {own=} {self.may=}"
        rest = {n: record for n, record in found.sessions.items() if n != self.number}
        assert rest in self.others, f"seed {self.seed}: {rest=} {self.others=}"
        assert own is not None or not any(page[0] == self.number for page in found.pages)

    def go_on(self, disk: SimulatedDisk) -> None:
        """Start on what is left: full again, or not; what is found then stays."""
        disk.capacity_bytes = disk.used_bytes() if self.draw.random() < 0.5 else 2**40
        led = patient(disk)
        state = state_of(led._image)
        self.check(state)
        if self.draw.random() < 0.5:
            disk.capacity_bytes = 2**40
            led.flush(sync=True)
        assert found_on(disk.crash([])).sessions == state.sessions, f"seed {self.seed}"


@pytest.mark.parametrize("seed", range(16))
def test_the_power_goes_anywhere_from_the_drop_to_the_session_kept_anew(seed: int) -> None:
    disk, number = full(seed)
    led = patient(disk)
    draw = random.Random(seed)
    old = led.sessions()[number]
    rest = {n: record for n, record in led.sessions().items() if n != number}
    run = Boundary(seed, number, draw, [old], [rest])
    disk._watch = lambda *_: run.look(disk)

    resumed = replace(old, state="running")
    led.put_session(resumed)  # nothing is written: a restart has it parked
    run.may.append(None)
    drop(led, number)
    run.may = [None]
    run.look(disk)
    if seed % 3:
        # Its engine hands it back under its number, and suspends it: in RAM alone, for now.
        led.put_session(SessionRecord(number, NAMESPACE, "running", ANEW, 0))
        if seed % 3 == 2:
            drop(led, number)
            led.put_session(SessionRecord(number, NAMESPACE, "running"))
            run.may.append(SessionRecord(number, NAMESPACE, "running"))
        else:
            run.may.append(SessionRecord(number, NAMESPACE, "running", ANEW, 0))
    other = SessionRecord(77, NAMESPACE, "parked", bytes(8), 0)
    led.put_session(other)
    run.others.append({**rest, 77: other})
    with pytest.raises(StorageFull):
        led.flush(sync=True)
    if seed % 2:  # space for the segment and not for the next superblock, which somebody took
        disk.remove(SPARE)
        disk.capacity_bytes = disk.used_bytes() + SEGMENT_BYTES
        with pytest.raises(StorageFull):
            led.flush(sync=True)
        assert led.waiting
    disk.capacity_bytes = 2**40
    led.flush(sync=True)
    run.others = run.others[-1:]
    run.may = run.may[-1:]
    run.look(disk)
    assert noted(disk) == ()
    anew = SessionRecord(number, NAMESPACE, "parked", ANEW, 0)
    run.may.append(anew)
    led.put_session(anew)
    led.flush(sync=True)
    run.may = [anew]
    led.keep(number)
    led.snapshot()
    run.look(disk)
    led.close()
    assert run.points > 100
    disk._watch = lambda *_: None
    assert found_on(disk.crash([])).sessions[number] == anew


def test_what_was_put_before_a_drop_does_not_follow_it_however_little_of_a_flush_is_left() -> None:
    """A session in RAM alone is dropped without a note: no part of the flush may bring it back."""
    disk, _ = full(2)
    led = patient(disk)
    operations = disk.operations
    tokens = random.Random(1).randbytes(3 * led._part_bytes + 4)
    led.put_session(SessionRecord(5, NAMESPACE, "running", tokens, 0))
    led.put_session(SessionRecord(6, NAMESPACE, "running", tokens, 0))
    drop(led, 5)
    assert disk.operations == operations and noted(disk) == ()
    for number in range(100, 140):
        led.put_session(SessionRecord(number, NAMESPACE, "running", tokens, 0))
    seen: set[bool] = set()

    def look(*_: str) -> None:
        for keep in crash_choices(disk.pending(), 20, random.Random(3)):
            seen.add(5 in found_on(disk.crash(keep)).sessions)

    disk._watch = look
    disk.capacity_bytes = 2**40
    led.flush(sync=True)
    assert seen == {False}


def test_a_session_put_again_and_again_while_it_waits_has_its_token_ids_once() -> None:
    disk, number = full(3)
    led = patient(disk)
    tokens = bytes(1 << 20)
    for round_number in range(2 * BUFFER_BYTES_MAX // len(tokens)):
        state = "parked" if round_number % 2 else "running"
        led.put_session(SessionRecord(number, NAMESPACE, state, tokens, 0))
    assert led.waiting and led._buffer_bytes < 2 * len(tokens)
    led.check_integrity()
    disk.capacity_bytes = 2**40
    led.flush(sync=True)
    record = found_on(disk.crash([])).sessions[number]
    assert (record.token_ids, record.state) == (tokens, "parked")


# -- what cannot be noted is refused ---------------------------------------------------


def refused(
    led: Ledger, disk: SimulatedDisk, number: int, kind: type[StorageError]
) -> SimulatedDisk:
    """A drop is refused; the next start has the session, whatever is left of what is pending.

    Return the disk after a kill.
    """
    with pytest.raises(kind) as caught:
        led.forget(number)
    assert type(caught.value) is kind, caught.value
    assert number in led.sessions() and led.waiting
    disk.plan.clear()
    for after in (disk.crash([]), disk.crash(), disk.kill()):
        assert number in found_on(after).sessions
    return after


def test_without_the_superblocks_next_file_a_drop_is_refused() -> None:
    disk, number = full(4)
    led = patient(disk)
    disk.remove(SPARE)
    disk.capacity_bytes = disk.used_bytes()
    refused(led, disk, number, StorageFull)


def test_a_list_that_is_full_takes_no_more() -> None:
    disk, number = full(5)
    before = choose(read_copies(disk))
    assert isinstance(before, Superblock)
    others = tuple(range(1, 1 + DROPPED_MAX))
    write_superblock(disk, replace(before, dropped=others))
    disk.capacity_bytes = disk.used_bytes()
    led = patient(disk)
    disk = refused(led, disk, number, StorageFull)
    assert patient(disk).waiting
    assert noted(disk) == others


@pytest.mark.parametrize("operation", ["write", "sync"])
def test_a_disk_that_fails_refuses_a_drop_and_takes_it_later(operation: str) -> None:
    disk, number = full(6)
    led = patient(disk)
    disk.plan.add(Fault(FaultKind.IO_ERROR, operation, prefix="superblock"))
    disk = refused(led, disk, number, StorageError)
    led = patient(disk)
    disk.capacity_bytes += SUPERBLOCK_BYTES  # what failed is gone: the next is made anew
    drop(led, number)
    assert number not in found_on(disk.crash([])).sessions


def test_a_folder_that_cannot_be_synced_leaves_it_open_until_the_next_note() -> None:
    disk, number = full(7)
    led = patient(disk)
    other = next(n for n in led.sessions() if n != number)
    disk.plan.add(Fault(FaultKind.IO_ERROR, "sync_folder"))
    with pytest.raises(StorageError):
        led.forget(number)
    disk.plan.clear()
    assert number in led.sessions()
    drop(led, other)
    for after in (disk.crash([]), disk.crash(), disk.kill()):
        sessions = found_on(after).sessions
        assert number in sessions and other not in sessions


def test_a_ledger_that_fails_while_it_waits_refuses_a_drop() -> None:
    disk, number = full(8)
    led = patient(disk)
    disk.capacity_bytes = 2**40
    disk.plan.add(Fault(FaultKind.SYNC_DROPS, "sync", prefix="journal"))
    with pytest.raises(StorageError):
        led.flush(sync=True)
    with pytest.raises(StorageError, match="read-only"):
        led.forget(number)


def test_each_operation_of_the_start_after_a_drop_fails_once_and_it_stays_dropped() -> None:
    at, struck = 0, True
    while struck:
        at += 1
        disk, number = full(9)
        led = patient(disk)
        drop(led, number)
        disk.capacity_bytes = 2**40
        seen: list[str] = []

        def fail(operation: str, _name: str, seen: list[str] = seen, at: int = at) -> None:
            seen.append(operation)
            if len(seen) == at:
                raise StorageError(f"{operation} fails")

        disk._watch = fail
        with contextlib.suppress(StorageError):
            led.flush(sync=True)
        disk._watch = lambda *_: None
        struck = len(seen) >= at
        for after in (disk.crash([]), disk.crash()):
            assert number not in found_on(after).sessions, seen
            assert number not in patient(after).sessions(), seen
    assert at > 10


def test_it_can_be_closed_after_a_drop_while_it_waits() -> None:
    disk, number = full(10)
    led = patient(disk)
    drop(led, number)
    with pytest.raises(StorageFull):
        led.close()
    assert number not in found_on(disk.crash([])).sessions


# -- fsck ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_fsck_finds_nothing_wrong_with_a_session_dropped_while_the_ledger_waited(seed: int) -> None:
    disk, number = full(seed, steps=0)
    led = patient(disk)
    sessions = set(led.sessions())
    drop(led, number)
    disk = disk.crash([])
    report = check(disk, FakeClock())
    assert report.clean and not report.strays, report
    assert any(note.startswith("sessions dropped on a full disk") for note in report.notes)
    disk.capacity_bytes = 2**40
    report = rebuild(disk, FakeClock())
    assert report.sound and number not in report.restored, report
    assert set(patient(disk).sessions()) == sessions - {number}
    assert noted(disk) == ()


@pytest.mark.parametrize("lost", ["journal", "superblock", "both"])
def test_a_rebuild_leaves_it_dropped_though_records_are_lost(lost: str) -> None:
    disk, number = full(1)
    manifests = {n: disk.names("kept") for n in (0,)}[0]
    led = patient(disk)
    kept = {n for n, record in led.sessions().items() if record.kept} - {number}
    held = {name: held_of(disk, name) for name in manifests}
    drop(led, number)
    disk = disk.kill()
    disk.capacity_bytes = 2**40
    name = manifest_name(number)
    handle = disk.create(name, len(held[name]))  # its removal was lost
    disk.write(handle, 0, [memoryview(held[name])])
    disk.release(handle)
    if lost != "superblock":
        for gone in [*disk.names("journal"), *disk.names("snap")]:
            disk.remove(gone)
    if lost != "journal":
        damage_copies(disk)
    report = rebuild(disk, FakeClock())
    assert number not in report.restored and number not in dict(report.strays), report
    assert name not in disk.names("kept")
    found = patient(disk).sessions()
    assert number not in found and (lost != "superblock" or kept <= set(found))


def held_of(disk: SimulatedDisk, name: str) -> bytearray:
    handle = disk.open(name)
    data = bytearray(disk.size_bytes(handle))
    disk.read_into(handle, 0, memoryview(data))
    disk.release(handle)
    return data


def damage_copies(disk: SimulatedDisk) -> None:
    """Leave one copy of four."""
    handle = disk.open("superblock")
    for copy in range(3):
        disk.write(handle, copy * 64 * 1024, [memoryview(bytearray(4096))])
    disk.sync(handle)
    disk.release(handle)


def test_slab_files_may_go_once_a_drop_is_noted_and_that_is_no_damage() -> None:
    rig = Rig(SimulatedDisk(3), 3)
    while not rig.now.pages:
        rig.step()
    rig.flush_durably()
    disk = rig.disk.kill()
    disk.capacity_bytes = disk.used_bytes()
    led = patient(disk)
    for number in list(led.sessions()):
        drop(led, number)
    for slab in slab_files(disk):
        disk.remove(f"slab/{slab:08x}")
    disk = disk.kill()
    report = check(disk, FakeClock())
    assert report.clean and not report.lost, report
    again = patient(disk)
    assert not again.sessions() and not again.slabs() and not again.recovery.lost


def test_a_version_2_superblock_is_there_only_while_the_list_is() -> None:
    disk, number = full(1)
    led = patient(disk)
    drop(led, number)
    assert read_copies(disk)[0].pack()[8] == 2
    disk.capacity_bytes = 2**40
    led.flush(sync=True)
    assert read_copies(disk)[0].pack()[8] == 1
    assert journal.FOLDER in {name.split("/")[0] for name in disk.names("journal")}
