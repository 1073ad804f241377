"""Sizes and durations: what people write is read exactly, and what is unclear is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.errors import InvalidArgument
from tierd.units import (
    GIB,
    KIB,
    MIB,
    TIB,
    format_size,
    parse_duration,
    parse_share,
    parse_size,
    round_up,
)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0), ("4096", 4096), ("4096B", 4096), ("64KiB", 64 * KIB), ("64MiB", 64 * MIB),
        ("1.5GiB", 3 * GIB // 2), ("2TiB", 2 * TIB), ("1k", KIB), ("1M", MIB), ("1g", GIB),
        ("1kB", 1000), ("1MB", 10**6), ("2GB", 2 * 10**9), ("1TB", 10**12),
        (" 3 mib ", 3 * MIB), ("0.5b", 0),
    ],
)  # fmt: skip
def test_a_size_is_read_as_written(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@given(st.integers(0, 2**63), st.sampled_from([("", 1), ("KiB", KIB), ("TiB", TIB), ("GB", 10**9)]))
def test_a_whole_number_of_units_is_exact(count: int, unit: tuple[str, int]) -> None:
    name, factor = unit
    assert parse_size(f"{count}{name}") == count * factor


@pytest.mark.parametrize(
    "text",
    ["", " ", "MiB", "-1", "+1", "1e9", "0x10", "1,5GiB", "1_000", "1.", ".5", "1 2", "4KiBs",
     "4 PiB", "nan", "inf", "12MiB!", "٣MiB", "1\n2", "50%", "ten"],
)  # fmt: skip
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InvalidArgument, match="64MiB"):
        parse_size(text)


@pytest.mark.parametrize("text", ["9" * 400, "9" * 400 + "TiB", "9" * 400 + ".5", "9" * 5000])
def test_a_number_without_bound_is_an_error_and_no_infinity(text: str) -> None:
    for parse in (parse_size, parse_duration):
        with pytest.raises(InvalidArgument):
            parse(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("250ms", 0.25), ("2s", 2.0), ("2", 2.0), ("1.5", 1.5), ("5m", 300.0), ("5min", 300.0),
     ("1h", 3600.0), ("10us", 1e-5), ("0", 0.0), (" 3 S ", 3.0)],
)  # fmt: skip
def test_a_duration_is_read_in_seconds(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "ms", "-1s", "1d", "2 weeks", "1s2", "1MiB", "inf"])
def test_what_is_no_duration_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InvalidArgument, match="250ms"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "share_bytes"),
    [("25%", 250), ("100%", 1000), ("0%", 0), ("0.1 %", 1), (" 50% ", 500), ("2KiB", 2048),
     ("64", 64)],
)  # fmt: skip
def test_a_share_is_a_percentage_of_the_whole_or_a_size(text: str, share_bytes: int) -> None:
    assert parse_share(text, 1000) == share_bytes


@pytest.mark.parametrize("text", ["101%", "100.1%", "-5%", "%", "5MiB%", "5%%", "%5", "x"])
def test_what_is_no_share_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        parse_share(text, 1000)


@given(st.integers(0, 2**62), st.integers(1, 2**31))
def test_rounding_up_is_the_next_multiple(value: int, multiple: int) -> None:
    rounded = round_up(value, multiple)
    assert rounded % multiple == 0
    assert value <= rounded < value + multiple


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 * GIB // 2, "1.5 GiB"),
     (5 * TIB, "5.0 TiB"), (-2 * MIB, "-2.0 MiB"), (10.5, "10 B")],
)  # fmt: skip
def test_a_size_is_shown_in_the_largest_unit_that_fits(size_bytes: float, text: str) -> None:
    assert format_size(size_bytes) == text


@given(st.integers(0, 2**50))
def test_what_is_shown_is_read_back_within_its_last_digit(size_bytes: int) -> None:
    assert parse_size(format_size(size_bytes)) == pytest.approx(size_bytes, rel=0.06)
