"""What scripts/bench is given is checked before anything is measured."""

import pytest

from tierd_engine.bench.__main__ import main


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["decode", "--context", "0"], "--context: '0' is no whole number"),
        (["decode", "--context", "-1"], "--context: '-1' is no whole number"),
        (["decode", "--context", "x"], "--context: 'x' is no whole number"),
        (["decode", "--context", "9" * 20], "is no whole number from 1 to"),
        (["decode", "--steps", ""], "--steps: '' is no whole number"),
        (["decode", "--rows", "99"], "--rows are from 0 to"),
        (["prefill", "--rounds", "\u0664"], "is no whole number"),
        (["memory", "--hot", "7"], "--hot: '7' is no share"),
        (["memory", "--hot", "nan"], "--hot: 'nan' is no share"),
        (["disk", "--size", "0"], "--size: 0 is less than 64.0 MiB"),
        (["disk", "--size", "much"], "--size: 'much' is not a size"),
        (["disk", "--pages", "0"], "--pages: '0' is no whole number"),
    ],
)
def test_odd_values_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    try:
        code = main(arguments)
    except SystemExit as error:  # argparse's way
        code = error.code if isinstance(error.code, int) else 1
    captured = capsys.readouterr()
    assert (code, captured.out) == (2, "")
    assert words in captured.err
