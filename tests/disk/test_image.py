"""The image: rows of sessions, merged in columns, against a dict."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.disk.ledgerrig import SLOTS, rows_of, state_of
from tierd.disk import image as images
from tierd.disk.image import Image, SessionPages, last_of_equals
from tierd.disk.records import SlabRecord, empty_rows, keys_of

SLAB = SlabRecord(1, bytes(16), 8192, 4096)
PAGES = st.tuples(st.integers(1, 3), st.integers(0, 5), st.integers(0, 2))
CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("commit"), st.lists(PAGES, max_size=6)),
        st.tuples(st.just("drop"), st.integers(1, 3), st.lists(PAGES, max_size=4)),
        st.tuples(st.just("truncate"), st.integers(1, 3), st.integers(0, 6)),
        st.tuples(st.just("drop_session"), st.integers(1, 3)),
        st.tuples(st.just("look"), st.integers(1, 3)),
    ),
    max_size=20,
)


@pytest.mark.parametrize("pending_min", [0, 5, 4096])
@given(changes=CHANGES)
def test_rows_are_those_of_a_dict(pending_min: int, changes: list) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(images, "_PENDING_ROWS_MIN", pending_min)
        _compare(changes)


def _compare(changes: list) -> None:
    image, model, slot = Image(slabs={1: SLAB}), {}, 0
    for name, *what in changes:
        if name == "commit":
            puts = {}
            for page in what[0]:
                slot += 1
                puts[page] = (1, slot, 1, bytes([slot % 256]) * 16)
            image.commit(rows_of(puts))
            model.update(puts)
        elif name == "drop":
            gone = {(what[0], block, layer) for _, block, layer in what[1]}
            image.drop_pages(what[0], keys_of([(layer, block) for _, block, layer in gone]))
            model = {page: put for page, put in model.items() if page not in gone}
        elif name == "truncate":
            image.truncate(*what)
            model = {p: put for p, put in model.items() if p[0] != what[0] or p[1] < what[1]}
        elif name == "drop_session":
            image.drop_session(what[0])
            model = {page: put for page, put in model.items() if page[0] != what[0]}
        else:
            rows = image.rows_of_session(what[0])
            pages = list(zip(rows["block"].tolist(), rows["layer"].tolist(), strict=True))
            assert pages == sorted(page[1:] for page in model if page[0] == what[0])
    copy = image.copy()
    assert state_of(image).pages == model
    image.check_integrity()
    assert sorted(image.occupancy(1).slots.tolist()) == sorted(put[1] for put in model.values())
    image.truncate(1, 0)
    assert state_of(copy).pages == model


def test_the_same_page_twice_in_one_commit_is_the_later() -> None:
    image = Image(slabs={1: SLAB})
    rows = np.concatenate([rows_of({(9, 1, 0): (1, n, 1, bytes(16))}) for n in range(3)])
    image.commit(rows)
    assert image.rows_of_session(9)["slot"].tolist() == [2]


def test_what_is_returned_cannot_be_written() -> None:
    image = Image(slabs={1: SLAB})
    rows = rows_of({(9, 1, 0): (1, 0, 1, bytes(16))})
    image.commit(rows)
    with pytest.raises(ValueError, match="read-only"):
        image.rows_of_session(9)["slot"] = 5


def test_nothing_is_fine() -> None:
    image = Image()
    image.check_integrity()
    assert len(image.all_rows()) == 0
    assert len(image.occupancy(1).slots) == 0
    image.commit(empty_rows())
    assert image.pages == {}
    assert len(last_of_equals(np.empty(0, np.uint64))) == 0


@pytest.mark.parametrize(
    ("pages", "message"),
    [
        ({(1, 0, 0): (2, 0, 1, bytes(16))}, "not there"),
        ({(1, 0, 0): (1, SLAB.slots, 1, bytes(16))}, "beyond"),
        ({(1, 0, 0): (1, 3, 1, bytes(16)), (2, 0, 0): (1, 3, 1, bytes(16))}, "2 rows in 1 slots"),
    ],
)
def test_integrity_says_what_is_wrong(pages: dict, message: str) -> None:
    image = Image(slabs={1: SLAB})
    image.commit(rows_of(pages))
    with pytest.raises(AssertionError, match=message):
        image.check_integrity()


def test_a_session_of_a_million_rows_takes_commits_at_their_own_cost() -> None:
    pages = SessionPages(empty_rows())
    merges = 0
    rows = np.zeros(1000, images.PAGE_ROW)
    for number in range(1000):
        rows = rows.copy()
        rows["block"] = number * 1000 + np.arange(1000)
        pages.add(rows)
        merges += not pages.pending
    assert len(pages.settle()) == 1_000_000
    assert merges < 20  # each takes half as much again: log of 250 to the base 1.5


def test_slots_are_listed_in_order_by_slab() -> None:
    image = Image(slabs={n: SlabRecord(n, bytes(16), 8192, SLOTS) for n in (3, 900)})
    image.commit(
        rows_of({(1, 0, 0): (900, 5, 8, bytes(16)), (2, 0, 0): (3, 1, 7, bytes(16)),
                 (3, 0, 0): (900, 2, 9, bytes(16))})
    )  # fmt: skip
    assert image.occupancy(900).slots.tolist() == [2, 5]
    assert image.occupancy(900).generations.tolist() == [9, 8]
    assert image.occupancy(3).slots.tolist() == [1]
    assert image.occupancy(4).slots.tolist() == []
