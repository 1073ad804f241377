"""The benchmark's texts: disjoint kinds of one reference, long enough for 8,192 tokens and more."""

import pytest

from tierd.errors import InvalidArgument
from tierd_engine.bench.texts import TEXT_NAMES, WHOLE, python_reference, split_by_kind, text_of


def test_every_text_is_long_enough_and_all_of_the_reference_is_in_one_kind() -> None:
    sizes = {name: len(text_of(name)) for name in TEXT_NAMES}
    assert min(sizes.values()) > 50_000, sizes
    kinds = sum(size for name, size in sizes.items() if name != "source")
    assert len(python_reference()) - kinds == len(TEXT_NAMES) - 2  # newlines between the kinds


def test_topics_go_where_most_of_them_belongs() -> None:
    filler = "word " * 12_000
    topics = {
        "t": "| a | b |\n+---+---+\n" * 3_000,
        "g": 'x ::= "y"\n\n' * 6_000,
        "c": "   >>> f(1)\n\n" * 5_000,
        "p": filler,
    }
    texts = split_by_kind(topics)
    assert texts == {
        "tables": topics["t"], "grammar": topics["g"], "code": topics["c"], "prose": filler,
    }  # fmt: skip


def test_an_unknown_text_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgument, match="'poems' is not a text; choose one of prose"):
        text_of("poems")
    assert text_of(WHOLE) == python_reference()
