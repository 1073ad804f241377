"""Runs of slots: every slot once, in order, and no copy past the end of a piece."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tierd.codec.layout import HEADER_BYTES
from tierd_engine.device.copyruns import slot_runs

SLOT = 3 * 4096


def test_equal_distances_are_one_run_and_neighbours_one_row() -> None:
    strided = [100 * SLOT + i * 30 * SLOT for i in range(9)]
    (run,) = slot_runs(strided, [1] * 9, SLOT)
    assert run.count == 9 and run.rows(0, SLOT).row_bytes == SLOT - HEADER_BYTES
    (run,) = slot_runs([i * SLOT for i in range(1, 5)], [1] * 4, SLOT)
    rows = run.rows(7 * 4096, SLOT)
    assert rows.count == 1 and rows.row_bytes == 4 * SLOT - HEADER_BYTES
    assert rows.source == SLOT + HEADER_BYTES and rows.target == 7 * 4096 + HEADER_BYTES


def test_a_piece_ends_a_run() -> None:
    runs = slot_runs([SLOT, 2 * SLOT, 3 * SLOT, 4 * SLOT], [1, 1, 2, 2], SLOT)
    assert [(run.first, run.count) for run in runs] == [(0, 2), (2, 2)]


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 2)), unique_by=lambda t: t[0]))
def test_runs_take_every_slot_once_in_order(slots: list[tuple[int, int]]) -> None:
    addresses = [number * SLOT for number, _ in slots]
    pieces = [piece for _, piece in slots]
    runs = slot_runs(addresses, pieces, SLOT)
    covered = [run.address + i * run.stride for run in runs for i in range(run.count)]
    assert covered == addresses
    assert [run.first for run in runs] == np.cumsum([0, *[r.count for r in runs]]).tolist()[:-1]
    for run in runs:
        rows = run.rows(0, SLOT)
        assert rows.source_stride >= rows.row_bytes and rows.target_stride >= rows.row_bytes
        assert len({pieces[run.first + i] for i in range(run.count)}) == 1
