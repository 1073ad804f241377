"""The simulated disk: what a power cut may lose, what a sync keeps, and each way to fail."""

import contextlib
import errno
import random
import threading

import pytest

from tests.disk.support import PAGE, SIZE, aligned, read
from tierd.errors import StorageError, StorageFull, TierdError
from tierd.testing import (
    FOR_EVER,
    FakeClock,
    Fault,
    FaultKind,
    PowerCut,
    SimulatedDisk,
    crash_choices,
    seed_told,
)

A, B = "slab/0000000a", "slab/0000000b"


def durable(disk: SimulatedDisk, name: str = A, fill: int = 1) -> int:
    """Make a file whose pages are all `fill`, durably; return its handle."""
    handle = disk.create(name, SIZE)
    disk.write(handle, 0, [aligned(SIZE, fill)])
    disk.sync(handle)
    disk.sync_folder("slab")
    disk.check_integrity()
    return handle


def pages(disk: SimulatedDisk, name: str = A) -> list[bytes]:
    """Return each page of a file as the set of its bytes."""
    handle = disk.open(name)
    size = disk.size_bytes(handle)
    data = read(disk, handle, 0, size) if size else b""
    disk.release(handle)
    return [bytes(sorted(set(data[i : i + PAGE]))) for i in range(0, len(data), PAGE)]


# -- the power goes -----------------------------------------------------------------


def test_what_was_synced_stays_and_what_was_not_may_go() -> None:
    disk = SimulatedDisk(1)
    handle = durable(disk)
    assert disk.pending() == 0
    disk.write(handle, PAGE, [aligned(2 * PAGE, 2)])
    assert disk.pending() == 2
    outcomes = [pages(disk.crash(keep))[:4] for keep in crash_choices(2, 100, random.Random(1))]
    one, two = b"\1", b"\2"
    assert sorted(outcomes) == [
        [one, one, one, one], [one, one, two, one], [one, two, one, one], [one, two, two, one],
    ]  # fmt: skip


def test_an_older_write_of_a_sector_may_be_what_stays() -> None:
    disk = SimulatedDisk(1)
    handle = durable(disk)
    disk.write(handle, 0, [aligned(PAGE, 2)])
    disk.write(handle, 0, [aligned(PAGE, 3)])
    assert {pages(disk.crash(keep))[0] for keep in ([], [0], [1], [0, 1])} == {b"\1", b"\2", b"\3"}
    assert pages(disk.crash([0]))[0] == b"\2"


def test_a_torn_sector_holds_old_and_new_bytes_in_pieces_a_drive_could_write() -> None:
    disk = SimulatedDisk(1)
    handle = durable(disk)
    disk.write(handle, 0, [aligned(PAGE, 2)])
    seen = set()
    for _ in range(40):
        after = disk.crash([0], torn=True)
        data = read(after, after.open(A), 0, PAGE)
        assert all(len(set(data[i : i + 512])) == 1 for i in range(0, PAGE, 512))
        seen.add(bytes(sorted(set(data))))
    assert {b"\2", b"\1\2"} <= seen
    assert pages(disk.crash([0]))[0] == b"\2"  # not torn unless asked


def test_names_are_durable_with_their_folder_and_sizes_with_their_file() -> None:
    disk = SimulatedDisk(1)
    handle = disk.create(A, SIZE)
    disk.write(handle, 0, [aligned(SIZE, 1)])
    disk.sync(handle)
    assert disk.crash([]).names("slab") == []
    assert pages(disk.crash([0])) == [b"\1"] * 16
    disk.sync_folder("journal")
    assert disk.pending() == 1, "another folder's sync is of no use"
    other = disk.create(B, SIZE)
    disk.sync_folder("slab")
    after = disk.crash([])
    assert after.names("slab") == [A, B]
    assert after.size_bytes(after.open(B)) == 0, "its size was never synced"
    assert pages(after, A) == [b"\1"] * 16
    assert other != handle


def test_sectors_without_the_size_are_beyond_the_end() -> None:
    disk = SimulatedDisk(1)
    handle = disk.create(A, SIZE)
    disk.sync_folder("slab")
    disk.write(handle, 0, [aligned(PAGE, 1)])
    size, sector = [0], [1]
    assert pages(disk.crash(sector)) == []
    assert pages(disk.crash(size)) == [b"\0"] * 16
    assert pages(disk.crash([0, 1])) == [b"\1"] + [b"\0"] * 15


def test_a_rename_happens_or_does_not() -> None:
    disk = SimulatedDisk(1)
    durable(disk, A, 1)
    durable(disk, B, 2)
    disk.rename(B, A)
    before, after = disk.crash([]), disk.crash([0])
    assert (pages(before, A), pages(before, B)) == ([b"\1"] * 16, [b"\2"] * 16)
    assert (after.names("slab"), pages(after, A)) == ([A], [b"\2"] * 16)


def test_a_removed_file_may_be_back_and_a_deleted_one_back_or_empty() -> None:
    disk = SimulatedDisk(1)
    durable(disk, A, 1)
    disk.delete(durable(disk, B, 2))
    disk.remove(A)
    assert disk.names("slab") == []
    emptied, unlinked, removed = [0], [1], [2]
    after = disk.crash([])
    assert (pages(after, A), pages(after, B)) == ([b"\1"] * 16, [b"\2"] * 16)
    assert pages(disk.crash(emptied), B) == []
    assert disk.crash(unlinked).names("slab") == [A]
    assert disk.crash(removed).names("slab") == [B]
    disk.sync_folder("slab")
    assert disk.pending() == 0
    disk.check_integrity()


def test_a_killed_process_loses_nothing_and_its_power_may_still_go() -> None:
    disk = SimulatedDisk(1)
    disk.write(durable(disk), 0, [aligned(PAGE, 2)])
    after = disk.kill()
    assert pages(after)[0] == b"\2"
    assert after.pending() == 1
    assert pages(after.crash([]))[0] == b"\1"


def test_nothing_reaches_a_machine_that_has_stopped() -> None:
    disk = SimulatedDisk(1)
    handle = durable(disk)
    disk.plan.add(Fault(FaultKind.POWER_CUT))
    with pytest.raises(PowerCut):
        disk.open(A)
    uses = (
        lambda: disk.write(handle, 0, [aligned(PAGE)]), lambda: disk.sync(handle),
        lambda: disk.create(B, SIZE), lambda: disk.remove(A), lambda: disk.delete(handle),
        lambda: disk.names("slab"),
    )  # fmt: skip
    for use in uses:
        with pytest.raises(PowerCut):
            use()
    assert pages(disk.crash()) == [b"\1"] * 16


def test_a_crash_leaves_the_outcomes_of_another_crash_alone() -> None:
    disk = SimulatedDisk(1)
    disk.write(durable(disk), 0, [aligned(PAGE, 2)])
    first, second = disk.crash([0]), disk.crash([])
    first.write(first.open(A), PAGE, [aligned(PAGE, 9)])
    assert pages(second) == [b"\1"] * 16
    assert pages(first)[:3] == [b"\2", b"\x09", b"\1"]
    for after in (first, second):
        after.check_integrity()


@pytest.mark.parametrize("pending", [0, 1, 3, 6, 40])
def test_crash_choices_differ_and_begin_with_nothing_and_all(pending) -> None:
    choices = list(crash_choices(pending, 50, random.Random(1)))
    assert len(choices) == len(set(choices)) == min(50, 2**pending)
    assert choices[:2] == [frozenset(), frozenset(range(pending))][: len(choices)]
    assert all(choice <= set(range(pending)) for choice in choices)


def work(disk: SimulatedDisk, draw: random.Random) -> None:
    """Do something of everything."""
    for number in range(30):
        name = f"slab/{draw.randrange(6):08x}"
        if name not in disk.names("slab"):
            disk.release(disk.create(name, SIZE))
        handle = disk.open(name)
        if disk.size_bytes(handle) < SIZE:  # made just before a crash
            disk.delete(handle)
            continue
        disk.write(handle, draw.randrange(16) * PAGE, [aligned(PAGE, number)])
        if draw.random() < 0.3:
            disk.sync(handle)
        if draw.random() < 0.2:
            disk.sync_folder("slab")
        if draw.random() < 0.2:
            disk.rename(name, f"slab/{draw.randrange(6):08x}")
        disk.delete(handle) if draw.random() < 0.2 else disk.release(handle)
        disk.check_integrity()


def test_the_same_seed_gives_the_same_disk_and_another_seed_another() -> None:
    def outcome(seed: int) -> list[object]:
        disk = SimulatedDisk(seed)
        work(disk, random.Random(1))
        after = [disk.crash(torn=True) for _ in range(2)]
        for boot in after:
            boot.check_integrity()
        return [(name, pages(boot, name)) for boot in after for name in boot.names("slab")]

    assert outcome(7) == outcome(7) != outcome(8)


def test_one_run_can_look_at_a_crash_before_each_operation() -> None:
    seen = []

    def look(operation: str, name: str) -> None:
        for keep in crash_choices(disk.pending(), 4, random.Random(1)):
            after = disk.crash(keep, torn=True)
            after.check_integrity()
            seen.append((operation, name, after.used_bytes()))

    disk = SimulatedDisk(1, watch=look)
    work(disk, random.Random(1))
    assert len({operation for operation, _, _ in seen}) == 6
    assert len(seen) > 2 * disk.operations


def test_the_power_can_be_cut_at_each_operation() -> None:
    whole = SimulatedDisk(1)
    work(whole, random.Random(1))
    for number in range(1, whole.operations + 1):
        disk = SimulatedDisk(number, faults=[Fault(FaultKind.POWER_CUT, first=number)])
        with seed_told(number):
            with pytest.raises(PowerCut):
                work(disk, random.Random(1))
            assert disk.operations == number
            after = disk.crash(torn=True)
            after.check_integrity()
            work(after, random.Random(2))


# -- faults -------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "outcomes"), [(1, "0100"), (2, "0110"), (FOR_EVER, "0111")])
def test_an_operation_fails_once_or_for_ever_and_tells_the_seed(count, outcomes) -> None:
    disk = SimulatedDisk(5, faults=[Fault(FaultKind.IO_ERROR, "read", first=2, count=count)])
    handle = durable(disk)
    for outcome in outcomes:
        if outcome == "0":
            assert read(disk, handle, 0, PAGE) == b"\1" * PAGE
        else:
            with pytest.raises(StorageError, match="seed 5: read slab/0000000a"):
                read(disk, handle, 0, PAGE)


def test_a_fault_is_for_the_files_and_operations_it_names() -> None:
    fault = Fault(FaultKind.IO_ERROR, count=FOR_EVER, prefix="journal/")
    disk = SimulatedDisk(1, faults=[fault])
    durable(disk)
    with pytest.raises(StorageError):
        disk.create("journal/00000001", SIZE)
    with pytest.raises(AssertionError):
        Fault(FaultKind.LOST_WRITE, "read")
    disk.plan.clear()
    disk.create("journal/00000001", SIZE)


def test_no_space_is_told_and_nothing_is_made() -> None:
    disk = SimulatedDisk(1, capacity_bytes=2 * SIZE, faults=[Fault(FaultKind.FULL, "create")])
    with pytest.raises(StorageFull):
        disk.create(A, SIZE)
    assert (disk.names("slab"), disk.free_bytes()) == ([], 2 * SIZE)
    disk.create(A, SIZE)
    with pytest.raises(StorageFull):
        disk.create(B, 2 * SIZE)
    assert (disk.used_bytes(), disk.free_bytes()) == (SIZE, SIZE)


def test_short_io_does_the_first_part_and_says_so() -> None:
    seen = set()
    for seed in range(20):
        disk = SimulatedDisk(seed)
        handle = durable(disk)
        disk.plan.add(Fault(FaultKind.SHORT, "write"))
        with pytest.raises(StorageError):
            disk.write(handle, 0, [aligned(3 * PAGE, 2), aligned(PAGE, 2)])
        written = pages(disk)
        done = written.count(b"\2")
        assert written == [b"\2"] * done + [b"\1"] * (16 - done)
        seen.add(done)
        disk.plan.add(Fault(FaultKind.SHORT, "read"))
        with pytest.raises(StorageError):
            read(disk, handle, 0, PAGE)
        assert read(disk, handle, 8 * PAGE, PAGE) == b"\1" * PAGE
    assert seen == {0, 1, 2, 3}


def test_a_flipped_bit_is_one_bit_for_once_when_read_and_for_good_when_written() -> None:
    disk = SimulatedDisk(1)
    handle = durable(disk)

    def flips() -> int:
        data = read(disk, handle, 0, SIZE)
        return (int.from_bytes(data) ^ int.from_bytes(b"\1" * SIZE)).bit_count()

    disk.plan.add(Fault(FaultKind.BIT_FLIP, "read"))
    assert (flips(), flips()) == (1, 0)
    disk.plan.add(Fault(FaultKind.BIT_FLIP, "write"))
    disk.write(handle, 0, [aligned(SIZE, 1)])
    assert (flips(), flips()) == (1, 1)
    disk.flip_bit(handle, 5 * PAGE * 8)
    assert flips() in (0, 2)


def test_a_lost_write_and_a_stale_read_say_that_all_is_well() -> None:
    disk = SimulatedDisk(1)
    handle = durable(disk)
    disk.plan.add(Fault(FaultKind.LOST_WRITE))
    disk.write(handle, 0, [aligned(PAGE, 2)])
    assert read(disk, handle, 0, PAGE) == b"\1" * PAGE
    disk.write(handle, PAGE, [aligned(PAGE, 2)])
    disk.plan.add(Fault(FaultKind.STALE_READ))
    assert read(disk, handle, 0, 2 * PAGE) == bytes(PAGE) + b"\1" * PAGE
    assert read(disk, handle, 0, 2 * PAGE) == b"\1" * PAGE + b"\2" * PAGE


def test_a_misdirected_write_lands_elsewhere_whole() -> None:
    landed = set()
    for seed in range(30):
        disk = SimulatedDisk(seed)
        handle = durable(disk, A)
        durable(disk, B)
        disk.plan.add(Fault(FaultKind.MISDIRECTED))
        disk.write(handle, 4 * PAGE, [aligned(4 * PAGE, 2)])
        found = [(n, i) for n in (A, B) for i, page in enumerate(pages(disk, n)) if page == b"\2"]
        assert len(found) == 4
        assert (A, 4) not in found
        landed.add(found[0])
    assert {name for name, _ in landed} == {A, B}


def test_a_sync_that_drops_fails_once_and_the_next_one_lies() -> None:
    disk = SimulatedDisk(1)
    handle = durable(disk)
    disk.write(handle, 0, [aligned(PAGE, 2)])
    disk.plan.add(Fault(FaultKind.SYNC_DROPS))
    with pytest.raises(StorageError):
        disk.sync(handle)
    disk.sync(handle)
    assert pages(disk)[0] == b"\2"
    assert disk.pending() == 0
    assert pages(disk.crash([]))[0] == b"\1"


def test_slow_io_takes_the_clocks_time_and_stuck_io_waits_for_the_test() -> None:
    clock = FakeClock()
    disk = SimulatedDisk(1, delay=clock.advance)
    handle = durable(disk)
    disk.plan.add(Fault(FaultKind.SLOW, "read", seconds=2.5))
    start = clock.monotonic()
    read(disk, handle, 0, PAGE)
    assert clock.monotonic() - start == 2.5
    disk.plan.add(Fault(FaultKind.NEVER, "read"))
    done = threading.Event()

    def stuck() -> None:
        read(disk, handle, 0, PAGE)
        done.set()

    reader = threading.Thread(target=stuck)
    reader.start()
    while disk.operations < 6:  # create, write, two syncs, two reads
        pass
    assert not done.is_set()
    disk.write(handle, 0, [aligned(PAGE, 2)])  # the others go on
    disk.unstick()
    reader.join(timeout=10.0)
    assert done.is_set()


def test_drawn_faults_come_at_their_rate_and_repeat_with_the_seed() -> None:
    def outcome(seed: int) -> str:
        disk = SimulatedDisk(seed, rates={FaultKind.IO_ERROR: 0.25, FaultKind.FULL: 0.1})
        told = []
        for _ in range(200):
            try:
                disk.release(disk.create(A, SIZE))
                told.append(".")
            except StorageFull:
                told.append("F")
            except StorageError:
                told.append("E")
            disk.remove(A)
        return "".join(told)

    assert outcome(3) == outcome(3) != outcome(4)
    assert 30 <= outcome(3).count("E") <= 70
    assert 5 <= outcome(3).count("F") <= 35


def test_whatever_fails_the_disk_keeps_its_order() -> None:
    kinds = [kind for kind in FaultKind if kind not in (FaultKind.NEVER, FaultKind.POWER_CUT)]
    for seed in range(40):
        disk = SimulatedDisk(seed, rates=dict.fromkeys(kinds, 0.02))
        with seed_told(seed):
            for turn in range(5):
                with contextlib.suppress(TierdError):
                    work(disk, random.Random(turn))
                disk.check_integrity()
            disk.crash(torn=True).check_integrity()


def test_a_failed_test_tells_its_seed() -> None:
    with pytest.raises(OSError, match="full") as caught, seed_told(41):
        raise OSError(errno.ENOSPC, "full")
    assert caught.value.__notes__ == ["seed 41 repeats this"]
    assert "seed 41" in repr(SimulatedDisk(41))
