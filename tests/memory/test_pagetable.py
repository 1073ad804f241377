"""Page table: a reader sees what was published, whole entries only, and cannot write."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.errors import InvalidArgument, LayoutMismatch, StaleGeneration, StorageError
from tierd.memory import pagetable
from tierd.memory.memfd import Mapping, create_memfd
from tierd.memory.pagetable import PageTableReader, PageTableView, PageTableWriter, table_bytes
from tierd.types import CodecId, Place, Tier

LAYERS, BLOCKS = 3, 5
U32_MAX = 2**32 - 1

places = st.builds(
    Place,
    tier=st.sampled_from([Tier.HOT, Tier.WARM, Tier.COLD]),
    codec=st.sampled_from(list(CodecId)),
    slab=st.integers(1, 2**24 - 1),
    slot=st.integers(0, U32_MAX),
    generation=st.integers(0, U32_MAX),
)
keys = st.tuples(st.integers(0, LAYERS - 1), st.integers(0, BLOCKS - 1))
PLACE = Place(Tier.WARM, CodecId.INT8, slab=1, slot=2, generation=3)


@pytest.fixture
def table():
    writer = PageTableWriter(session_id=2**64 - 1, layers=LAYERS, max_blocks=BLOCKS)
    reader = PageTableReader(writer.fd)
    yield writer, reader
    reader.close()
    writer.close()


def place_in(view: PageTableView, layer: int, block: int) -> Place | None:
    if view.tier[layer, block] == Tier.NONE:
        return None
    return Place(
        Tier(view.tier[layer, block]),
        CodecId(view.codec[layer, block]),
        int(view.slab[layer, block]),
        int(view.slot[layer, block]),
        int(view.generation[layer, block]),
    )


def test_a_new_table_is_empty_and_says_whose_it_is(table) -> None:
    _, reader = table
    assert (reader.session, reader.layers, reader.max_blocks) == (2**64 - 1, LAYERS, BLOCKS)
    assert (reader.version(), reader.epoch()) == (0, 0)
    assert not reader.read(BLOCKS).tier.any()


def test_a_view_has_the_shape_and_types_it_promises(table) -> None:
    writer, reader = table
    writer.publish(0, 0, PLACE)
    view = reader.read(2)
    assert view.tier.shape == view.generation.shape == (LAYERS, 2)
    assert view.tier.dtype == view.codec.dtype == np.uint8
    assert view.slab.dtype == view.slot.dtype == view.generation.dtype == np.uint32
    assert reader.read(0).tier.shape == (LAYERS, 0)


@given(st.lists(st.tuples(keys, st.none() | places), max_size=30))
def test_a_reader_sees_the_last_that_was_written_of_each_page(changes) -> None:
    writer = PageTableWriter(1, LAYERS, BLOCKS)
    reader = PageTableReader(writer.fd)
    model: dict[tuple[int, int], Place | None] = {}
    for (layer, block), place in changes:
        if place is None:
            writer.unpublish(layer, block)
        else:
            writer.publish(layer, block, place)
        model[layer, block] = place
    view = reader.read(BLOCKS)
    for layer in range(LAYERS):
        for block in range(BLOCKS):
            assert place_in(view, layer, block) == model.get((layer, block))
    reader.close()
    writer.close()


def test_a_view_is_a_copy(table) -> None:
    writer, reader = table
    writer.publish(1, 1, PLACE)
    view = reader.read(BLOCKS)
    writer.unpublish(1, 1)
    assert place_in(view, 1, 1) == PLACE
    assert place_in(reader.read(BLOCKS), 1, 1) is None


def test_epoch_and_version_are_seen(table) -> None:
    writer, reader = table
    writer.set_epoch(2**40)
    writer.bump_version()
    writer.bump_version()
    assert (reader.version(), reader.epoch()) == (2, 2**40)


def test_an_engine_can_not_write(table) -> None:
    writer, _ = table
    with pytest.raises(StorageError):
        Mapping(writer.fd, table_bytes(LAYERS, BLOCKS), writable=True)
    with pytest.raises(PermissionError):
        os.pwrite(writer.fd, b"x", 4096)


@pytest.mark.parametrize(("layer", "block"), [(-1, 0), (LAYERS, 0), (0, -1), (0, BLOCKS)])
def test_a_page_outside_the_table_is_a_bug(table, layer, block) -> None:
    writer, _ = table
    with pytest.raises(AssertionError):
        writer.publish(layer, block, PLACE)
    with pytest.raises(AssertionError):
        writer.unpublish(layer, block)


@pytest.mark.parametrize("blocks", [-1, BLOCKS + 1])
def test_reading_more_than_the_table_has_is_a_bug(table, blocks) -> None:
    with pytest.raises(AssertionError):
        table[1].read(blocks)


@pytest.mark.parametrize(("layers", "blocks"), [(0, 1), (1, 0), (-1, 1)])
def test_a_table_of_nothing_is_refused(layers, blocks) -> None:
    with pytest.raises(InvalidArgument):
        PageTableWriter(1, layers, blocks)


# -- torn entries ---------------------------------------------------------------


def word_of(place: Place | None) -> tuple[int, int]:
    if place is None:
        return 0, 0
    word = int(place.tier) | int(place.codec) << 4 | place.slab << 8 | place.slot << 32
    return word, place.generation


@given(st.none() | places, st.none() | places)
def test_an_entry_half_written_over_another_is_detected(old, new) -> None:
    (old_word, old_generation), (new_word, new_generation) = word_of(old), word_of(new)
    whole = {(old_word, old_generation), (new_word, new_generation)}
    old_check = pagetable._check(old_word, old_generation)
    new_check = pagetable._check(new_word, new_generation)
    for word in (old_word, new_word):
        for generation in (old_generation, new_generation):
            if (word, generation) not in whole:
                assert pagetable._check(word, generation) not in (old_check, new_check)
    if len(whole) == 2:
        assert old_check != new_check


@given(places)
def test_each_flipped_bit_of_an_entry_is_detected(place) -> None:
    word, generation = word_of(place)
    check = pagetable._check(word, generation)
    for bit in range(64):
        assert pagetable._check(word ^ 1 << bit, generation) != check
    for bit in range(32):
        assert pagetable._check(word, generation ^ 1 << bit) != check


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, U32_MAX)), min_size=1))
def test_checks_of_many_are_the_checks_of_each(entries) -> None:
    words = np.array([word for word, _ in entries], np.uint64)
    generations = np.array([generation for _, generation in entries], np.uint32)
    expected = [pagetable._check(word, generation) for word, generation in entries]
    assert pagetable._checks(words, generations).tolist() == expected


def test_an_empty_entry_is_all_zeros() -> None:
    assert pagetable._check(0, 0) == 0


def test_a_torn_entry_is_read_again_until_it_is_whole(table, monkeypatch) -> None:
    writer, reader = table
    writer.publish(1, 2, PLACE)
    writer._entries["generation"][1, 2] += 1
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            writer.publish(1, 2, PLACE)

    monkeypatch.setattr("time.sleep", pause)
    assert place_in(reader.read(BLOCKS), 1, 2) == PLACE
    assert len(pauses) == 3


def test_an_entry_that_stays_torn_is_an_error_within_250_ms(table, monkeypatch) -> None:
    writer, reader = table
    writer._entries["check"][0, 0] = 1
    pauses: list[float] = []
    monkeypatch.setattr("time.sleep", pauses.append)
    with pytest.raises(StaleGeneration):
        reader.read(BLOCKS)
    assert 0.05 < sum(pauses) < 0.125  # a timer's slack at most doubles them


READER = """
import sys
from tierd.memory.pagetable import PageTableReader
reader = PageTableReader(int(sys.argv[1]))
print("ready", flush=True)
seen = set()
while reader.version() == 0:
    view = reader.read(reader.max_blocks)
    assert (view.slab == view.slot).all() and (view.slot == view.generation).all(), view
    seen.update(view.slot.ravel().tolist())
print(len(seen))
"""


def test_another_process_reads_whole_entries_while_they_are_written(table) -> None:
    writer, _ = table
    reading = subprocess.Popen(
        [sys.executable, "-c", READER, str(writer.fd)],
        pass_fds=[writer.fd],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert reading.stdout is not None
    assert reading.stdout.readline() == "ready\n"
    for number in range(1, 100_000):
        place = Place(Tier.WARM, CodecId.INT8, number, number, number)
        writer.publish(number % LAYERS, number % BLOCKS, place)
    writer.bump_version()
    output, _ = reading.communicate(timeout=30)
    assert reading.returncode == 0
    assert int(output) > 1


# -- what is not a page table ---------------------------------------------------


def copied(writer: PageTableWriter, size_bytes: int) -> tuple[int, Mapping]:
    fd = create_memfd("copy", size_bytes)
    copy = Mapping(fd, size_bytes, writable=True)
    copy.buffer[:4096] = os.pread(writer.fd, 4096, 0)
    return fd, copy


def test_each_flipped_bit_of_magic_and_format_is_refused(table) -> None:
    fd, copy = copied(table[0], table_bytes(LAYERS, BLOCKS))
    with copy:
        PageTableReader(fd).close()
        for bit in range(12 * 8):
            copy.buffer[bit // 8] ^= 1 << bit % 8
            with pytest.raises(LayoutMismatch):
                PageTableReader(fd)
            copy.buffer[bit // 8] ^= 1 << bit % 8
    os.close(fd)


def test_a_table_shorter_than_it_says_is_refused(table) -> None:
    fd, copy = copied(table[0], 4096)
    with copy, pytest.raises(StorageError):
        PageTableReader(fd)
    os.close(fd)


def test_a_reader_outlives_the_writer_and_closing_twice_is_allowed() -> None:
    writer = PageTableWriter(1, LAYERS, BLOCKS)
    writer.publish(0, 0, PLACE)
    reader = PageTableReader(writer.fd)
    writer.close()
    writer.close()
    assert place_in(reader.read(1), 0, 0) == PLACE
    reader.close()
    reader.close()


def test_tables_leave_nothing_behind() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        writer = PageTableWriter(1, LAYERS, BLOCKS)
        PageTableReader(writer.fd).close()
        writer.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_a_dead_daemon_left_is_read_around_a_torn_entry() -> None:
    writer = PageTableWriter(1, 2, 4)
    place = Place(Tier.WARM, CodecId.INT8, 3, 5, 7)
    for layer in range(2):
        writer.publish(layer, 1, place)
    writer._entries["generation"][1, 1] = 8  # torn: written, and its check not yet
    reader = PageTableReader(writer.fd)
    view, torn = reader.read_left(4)
    assert np.argwhere(torn).tolist() == [[1, 1]]
    assert (view.tier[0, 1], view.tier[1, 1], view.slot[0, 1]) == (Tier.WARM, Tier.NONE, 5)
    reader.close()
    writer.close()
