"""Pruning: a row needs a session, a slab, a slot and a namespace; a parked session has no gaps."""

from dataclasses import replace

import pytest

from tests.disk.ledgerrig import NAMESPACE, OTHER_NAMESPACE, SLOTS, rows_of, state_of
from tierd.disk.image import Image
from tierd.disk.prune import prune
from tierd.disk.records import SessionRecord, SlabRecord

SLAB = SlabRecord(1, NAMESPACE.digest(), 8192, SLOTS)
RUNNING = SessionRecord(7, NAMESPACE, "running")
PARKED = SessionRecord(7, NAMESPACE, "parked", bytes(4 * 16 * 3), 3)
RESUMED = replace(PARKED, state="running")
WHOLE = {(7, block, layer): (1, block * 2 + layer, 1, bytes(16)) for block in range(3)
         for layer in range(2)}  # fmt: skip


def image_of(session: SessionRecord = RUNNING, pages: dict | None = None) -> Image:
    image = Image(slabs={1: SLAB}, sessions={7: session})
    image.commit(rows_of(WHOLE if pages is None else pages))
    return image


@pytest.mark.parametrize("session", [RUNNING, PARKED])
def test_what_is_whole_is_left_alone(session: SessionRecord) -> None:
    image = image_of(session)
    before = state_of(image)
    pruned = prune(image, {1})
    assert state_of(image) == before
    assert pruned.rows == 6
    assert not (pruned.drops or pruned.cut or pruned.lost or pruned.damage or pruned.truncated)


@pytest.mark.parametrize("missing", list(WHOLE))
def test_a_parked_session_is_cut_at_its_first_gap(missing: tuple) -> None:
    image = image_of(PARKED, {page: put for page, put in WHOLE.items() if page != missing})
    pruned = prune(image, {1})
    block = missing[1]
    assert image.sessions[7] == replace(PARKED, sealed_blocks=block) == pruned.cut[0]
    assert pruned.lost == [(7, block * 16)]
    assert len(image.rows_of_session(7)) == block * 2 == pruned.rows
    assert pruned.dropped_pages == 5 - block * 2


def test_a_parked_session_keeps_no_page_beyond_its_sealed_blocks() -> None:
    image = image_of(replace(PARKED, sealed_blocks=2))
    pruned = prune(image, {1})
    assert (pruned.lost, pruned.truncated) == ([], [(7, 2)])
    assert len(image.rows_of_session(7)) == 4


def test_a_page_of_a_layer_that_the_model_lacks_is_a_gap() -> None:
    pages = {**WHOLE, (7, 1, 5): (1, 11, 1, bytes(16))}
    image = image_of(PARKED, pages)
    prune(image, {1})
    assert image.sessions[7].sealed_blocks == 2


def test_a_running_session_keeps_its_gaps() -> None:
    image = image_of(RUNNING, {(7, 2, 1): (1, 3, 1, bytes(16))})
    assert prune(image, {1}).rows == 1


def test_pages_of_no_session_go() -> None:
    image = image_of()
    image.sessions.clear()
    pruned = prune(image, {1})
    assert (pruned.orphans, pruned.rows, pruned.dropped_pages) == ([7], 0, 6)


@pytest.mark.parametrize("session", [RUNNING, RESUMED, PARKED])
def test_a_slab_that_is_gone_takes_its_pages(session: SessionRecord) -> None:
    image = image_of(session)
    pruned = prune(image, set())
    assert (pruned.missing_slabs, pruned.rows, pruned.dropped_pages) == ([1], 0, 6)
    told = (pruned.lost, pruned.unkept, pruned.empty_slabs)
    assert told == (([], [(7, 0)], [1]) if session is RUNNING else ([(7, 0)], [], []))
    assert not pruned.damage
    assert not image.slabs


@pytest.mark.parametrize(
    ("put", "what"),
    [
        ((2, 0, 1, bytes(16)), "no record names"),
        ((2**24, 0, 1, bytes(16)), "no record names"),
        ((1, SLOTS, 1, bytes(16)), "beyond the end"),
        ((1, 2**32 - 1, 1, bytes(16)), "beyond the end"),
    ],
)
def test_a_place_that_cannot_be_is_damage(put: tuple, what: str) -> None:
    image = image_of(RUNNING, {**WHOLE, (7, 1, 1): put})
    pruned = prune(image, {1})
    assert any(what in text for text in pruned.damage)
    assert pruned.rows == 5
    assert (pruned.lost, pruned.unkept) == ([], [(7, 16)])
    image.check_integrity()


def test_pages_beyond_what_a_resumed_session_keeps_are_not_kept() -> None:
    slabs = {1: SLAB, 2: replace(SLAB, slab=2)}
    image = Image(slabs=slabs, sessions={7: replace(RESUMED, sealed_blocks=2)})
    later = {page: (2, *put[1:]) for page, put in WHOLE.items() if page[1] == 2}
    image.commit(rows_of({**WHOLE, **later}))
    pruned = prune(image, {1})
    assert (pruned.lost, pruned.unkept) == ([], [(7, 32)])
    assert pruned.missing_slabs == pruned.empty_slabs == [2]


def test_a_slab_of_another_namespace_is_damage() -> None:
    image = image_of(replace(RUNNING, namespace=OTHER_NAMESPACE))
    pruned = prune(image, {1})
    assert pruned.rows == 0
    assert "another namespace" in pruned.damage[0]


@pytest.mark.parametrize("generations", [(1, 2), (2, 1)])
def test_of_two_pages_in_one_slot_the_newer_stays(generations: tuple[int, int]) -> None:
    image = image_of(
        RUNNING,
        {(7, n, 0): (1, 4, generation, bytes(16)) for n, generation in enumerate(generations)},
    )
    pruned = prune(image, {1})
    assert "slots of other pages" in pruned.damage[0]
    assert image.rows_of_session(7)["generation"].tolist() == [2]
    image.check_integrity()


def test_nothing_is_fine() -> None:
    assert prune(Image(), set()).rows == 0
    assert prune(Image(), {5}).rows == 0
