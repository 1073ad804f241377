"""A short run of what scripts/torture does for hours: flips and cuts of every form on disk."""

import random

import pytest

from tests.disk.flips import flip, forms


@pytest.mark.parametrize("seed", range(2))
def test_no_flip_and_no_cut_of_any_form_passes(seed: int) -> None:
    assert flip(seed, 4000) == 4000


def test_every_form_is_read_when_it_is_whole() -> None:
    for whole, read in forms(random.Random(1)).values():
        read(bytearray(whole))
