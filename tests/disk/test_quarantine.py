"""The quarantine log: plain lines, across starts, in 64 KiB for ever; its failures harm nothing."""

import pytest

from tests.disk.ledgerrig import NAMESPACE, open_ledger
from tierd.disk.ledger import Ledger
from tierd.disk.memory import MemoryDisk
from tierd.disk.quarantine import LOG_BYTES, NAME, QuarantineLog, quarantine_line, read_lines
from tierd.errors import StorageError
from tierd.testing import FOR_EVER, Fault, FaultKind, SimulatedDisk
from tierd.types import SlabRecord


def with_slab(disk: MemoryDisk | SimulatedDisk) -> tuple[Ledger, int]:
    led = open_ledger(disk)
    slab = led.take_slab_id()
    disk.create(f"slab/{slab:08x}", 8192)
    led.add_slab(SlabRecord(slab, NAMESPACE.digest(), 8192, 500))
    return led, slab


def test_what_was_given_up_stands_in_the_log_over_starts() -> None:
    disk = MemoryDisk()
    led, slab = with_slab(disk)
    led.quarantine(slab, 3, "the bytes do not match\ntheir digest")
    led.quarantine(slab, 4, "read: I/O")
    led.flush(sync=True)
    led.close()
    led = open_ledger(disk)
    assert led.quarantined(slab) == {3, 4}
    led.quarantine(slab, 9, "é")
    led.flush()
    assert read_lines(disk) == [
        "epoch 2 slab 00000001 slot 3: the bytes do not match?their digest",
        "epoch 2 slab 00000001 slot 4: read: I/O",
        f"epoch {led.epoch} slab 00000001 slot 9: ?",
    ]
    assert led.metadata_bytes() == sum(
        len(data) for name, data in disk.named.items() if not name.startswith("slab")
    )


def test_a_full_log_begins_anew_and_lines_stay_whole() -> None:
    disk = MemoryDisk()
    log = QuarantineLog(disk)
    for number in range(2000):
        log.write([quarantine_line(1, 5, number, "x" * 1000)] * 3)
    assert len(disk.named[NAME]) == LOG_BYTES
    lines = read_lines(disk)
    assert len(lines) == 16 * 3
    assert all(line.startswith("epoch 1 slab 00000005 slot ") for line in lines)
    log.close()
    log.close()


def test_without_lines_there_is_no_file() -> None:
    disk = MemoryDisk()
    led, _ = with_slab(disk)
    led.close()
    assert disk.names("") == ["superblock", "superblock.spare"]


@pytest.mark.parametrize("operation", ["create", "write", "open", "read"])
def test_its_failures_harm_nothing(operation: str) -> None:
    disk = SimulatedDisk(1)
    led, slab = with_slab(disk)
    disk.plan.add(Fault(FaultKind.IO_ERROR, operation, count=FOR_EVER, prefix=NAME))
    led.quarantine(slab, 3, "digest")
    led.flush(sync=True)
    led.close()
    assert open_ledger(disk).quarantined(slab) == {3}


def test_a_log_that_was_cut_is_made_anew() -> None:
    disk = MemoryDisk()
    led, slab = with_slab(disk)
    led.quarantine(slab, 3, "digest")
    led.close()
    disk.named[NAME] = disk.named[NAME][:10]
    with pytest.raises(StorageError):
        read_lines(disk)
    led = open_ledger(disk)
    led.quarantine(slab, 4, "digest")
    led.flush()
    assert [line.partition(":")[0][-6:] for line in read_lines(disk)] == ["slot 4"]
