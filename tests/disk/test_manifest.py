"""Manifests: whole, or seen to be not; newer than the journal only where that was lost."""

import random

import numpy as np
import pytest

from tests.disk.ledgerrig import LAYERS, NAMESPACE, SLOT_BYTES, SLOTS, UUID, open_ledger
from tierd.disk.ledger import Ledger
from tierd.disk.manifest import (
    Manifest,
    ManifestHeader,
    find_manifests,
    manifest_name,
    manifest_of,
    read_manifest,
    write_manifest,
)
from tierd.disk.memory import MemoryDisk
from tierd.disk.records import PAGE_ROW, SessionRecord
from tierd.errors import StorageError
from tierd.testing import Fault, FaultKind, SimulatedDisk
from tierd.types import SlabRecord
from tierd.units import SECTOR_BYTES

RECORD = SessionRecord(7, NAMESPACE, "parked", bytes(range(256)) * 30, 3)
SLAB = SlabRecord(1, NAMESPACE.digest(), SLOT_BYTES, SLOTS)
NAME = manifest_name(7)


def rows(blocks: int) -> np.ndarray:
    made = np.zeros(blocks * LAYERS, PAGE_ROW)
    index = np.arange(len(made))
    made["session"], made["slab"], made["generation"] = 7, 1, 5
    made["block"], made["layer"], made["slot"] = index // LAYERS, index % LAYERS, index
    made["digest"] = np.random.default_rng(1).integers(0, 256, (len(made), 16))
    return made


def manifest() -> Manifest:
    return manifest_of(RECORD, rows(5), {1: SLAB, 2: SLAB})


def written() -> MemoryDisk:
    disk = MemoryDisk()
    write_manifest(disk, manifest(), store_uuid=UUID, stamp=(3, 40))
    return disk


def test_what_was_written_is_read_and_pages_beyond_the_sealed_blocks_are_left_out() -> None:
    disk = written()
    assert list(disk.named) == [NAME] and not disk.files
    found = read_manifest(disk, NAME, UUID)
    assert (found.session, found.slabs) == (RECORD, (SLAB,))
    assert np.array_equal(found.rows, rows(3))
    assert ManifestHeader.unpack(bytes(disk.named[NAME][:SECTOR_BYTES])).stamp == (3, 40)


def test_each_flipped_bit_and_each_length_is_noticed() -> None:
    disk = written()
    whole, draw = bytes(disk.named[NAME]), random.Random(1)
    body_bytes = ManifestHeader.unpack(whole[:SECTOR_BYTES]).body_bytes
    bits = range(0, 8 * (SECTOR_BYTES + body_bytes))
    for bit in [*bits[: 8 * 120], *draw.sample(bits, 2000)]:
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        disk.named[NAME] = data
        with pytest.raises(StorageError):
            read_manifest(disk, NAME, UUID)
    for length in (0, 1, 4095, 4096, *range(4097, len(whole), 577)):
        disk.named[NAME] = bytearray(whole[:length])
        with pytest.raises(StorageError):
            read_manifest(disk, NAME, UUID)


def test_anothers_store_or_session_is_refused() -> None:
    disk = written()
    with pytest.raises(StorageError, match="another store"):
        read_manifest(disk, NAME, bytes(16))
    disk.named[manifest_name(8)] = disk.named[NAME]
    with pytest.raises(StorageError, match="another session"):
        read_manifest(disk, manifest_name(8), UUID)


def test_only_what_is_newer_than_the_journal_is_read_whole() -> None:
    disk = written()
    for end, newer in (((3, 40), 0), ((4, 1), 0), ((3, 39), 1), ((2, 99), 1)):
        found = find_manifests(disk, UUID, end)
        assert len(found.newer) == newer and found.sizes == {7: len(disk.named[NAME])}
    disk.named[NAME][SECTOR_BYTES + 9] ^= 1
    assert not find_manifests(disk, UUID, (3, 40)).damaged
    assert set(find_manifests(disk, UUID, (3, 39)).damaged) == {7}


@pytest.mark.parametrize(
    ("kind", "operation"),
    [(FaultKind.IO_ERROR, name) for name in ("create", "write", "sync", "rename", "sync_folder")]
    + [(FaultKind.FULL, name) for name in ("create", "write", "sync")],
)
def test_a_manifest_that_cannot_be_written_leaves_none(kind: FaultKind, operation: str) -> None:
    """The older one would say less than what is acknowledged next."""
    disk = SimulatedDisk(1)
    write_manifest(disk, manifest(), store_uuid=UUID, stamp=(3, 40))
    disk.plan.add(Fault(kind, operation))
    with pytest.raises(StorageError):
        write_manifest(disk, manifest(), store_uuid=UUID, stamp=(3, 50))
    assert disk.names("kept") == []


# -- the ledger's ---------------------------------------------------------------------


def kept(disk: MemoryDisk, number: int = 7) -> Ledger:
    led = open_ledger(disk)
    slab = led.take_slab_id()
    disk.create(f"slab/{slab:08x}", SLOT_BYTES * SLOTS)
    led.add_slab(SlabRecord(slab, NAMESPACE.digest(), SLOT_BYTES, SLOTS))
    led.put_session(SessionRecord(number, NAMESPACE, "running", bytes(4 * 48), 3))
    made = rows(3)
    made["session"], made["slab"] = number, slab
    led.commit(made)
    led.flush(sync=True)
    led.keep(number)
    return led


def test_a_dropped_session_takes_its_manifest_along_after_the_flush() -> None:
    disk = MemoryDisk()
    led = kept(disk)
    led.drop_session(7)
    assert NAME in disk.named
    led.flush()
    assert NAME not in disk.named


def test_a_manifest_that_outlived_its_session_goes_at_the_next_start() -> None:
    disk = MemoryDisk()
    led = kept(disk)
    left = bytes(disk.named[NAME])
    led.drop_session(7)
    led.close()
    disk.named[NAME] = bytearray(left)
    led = open_ledger(disk)
    assert NAME not in disk.named and not led.sessions() and not led.recovery.damage


def test_a_start_that_finds_its_journal_lost_takes_up_what_manifests_know() -> None:
    disk = MemoryDisk()
    kept(disk).close()
    for name in [name for name in disk.named if name.startswith(("journal", "snap"))]:
        del disk.named[name]
    led = open_ledger(disk)
    assert led.recovery.restored == [7]
    assert any("newer than the journal" in line for line in led.recovery.damage)
    record = led.sessions()[7]
    assert (record.state, record.sealed_blocks, record.token_ids) == ("parked", 3, bytes(4 * 48))
    assert len(led.pages_of(7)) == 3 * LAYERS
    led.close()
    again = open_ledger(disk)
    assert not again.recovery.damage and len(again.pages_of(7)) == 3 * LAYERS
    assert NAME in disk.named and again.unmanifested == []


def test_a_session_whose_slab_is_gone_too_is_cut_and_named() -> None:
    disk = MemoryDisk()
    kept(disk).close()
    for name in [name for name in disk.named if name.startswith(("journal", "snap", "slab"))]:
        del disk.named[name]
    led = open_ledger(disk)
    assert led.recovery.lost == [(7, 0)]
    assert led.sessions()[7].sealed_blocks == 0 and not len(led.pages_of(7))
    led.check_integrity()
