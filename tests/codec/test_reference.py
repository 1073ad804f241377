"""The formats that the reference is made of, beside other definitions of them."""

from __future__ import annotations

import numpy as np
import pytest

from tierd.codec.reference import e4m3_codes, e4m3_numbers, pack_lines, unpack_lines

ALL_BYTES = np.arange(256, dtype=np.uint8)


def test_e4m3_means_what_pytorch_means_by_it() -> None:
    torch = pytest.importorskip("torch")
    theirs = torch.from_numpy(ALL_BYTES).view(torch.float8_e4m3fn).float().numpy()
    is_number = ~np.isnan(theirs)
    assert ALL_BYTES[~is_number].tolist() == [0x7F, 0xFF]
    np.testing.assert_array_equal(e4m3_numbers(ALL_BYTES)[is_number], theirs[is_number])


def test_e4m3_rounds_as_pytorch_does() -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng()
    numbers = e4m3_numbers(ALL_BYTES[:127])
    halfway = (numbers[:-1] + numbers[1:]) / 2
    drawn = (rng.standard_normal(50_000) * 2.0 ** rng.integers(-14, 7, 50_000)).astype("f4")
    beside = np.concatenate([np.nextafter(halfway, np.float32(end)) for end in (0, 448)])
    y = np.concatenate([numbers, halfway, beside, drawn[np.abs(drawn) <= 448], np.float32([448])])
    y = np.concatenate([y, -y])
    theirs = torch.from_numpy(y).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    np.testing.assert_array_equal(e4m3_codes(y), theirs)


def test_a_run_of_codes_stands_across_the_words_of_its_line() -> None:
    codes = np.random.default_rng().integers(0, 16, (3, 8, 16), dtype=np.uint8)
    lines = pack_lines(codes)
    assert lines.shape == (3, 16) and lines.dtype == np.uint32
    for line, run, lane in ((0, 0, 0), (1, 3, 5), (2, 7, 15)):
        assert int(lines[line, lane]) >> 4 * run & 15 == codes[line, run, lane]
    np.testing.assert_array_equal(unpack_lines(lines.view(np.uint8).ravel()), codes.ravel())
