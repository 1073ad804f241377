"""README's table has every option of a job, and no option that is not there."""

import re
from pathlib import Path
from typing import Any

import pytest
import typer

from tierd.cli.app import build_app

README = Path(__file__).parent.parent.parent / "README.md"


def options_of(verb: str) -> set[str]:
    """Return a verb's long options."""
    command = typer.main.get_command(build_app()).commands[verb]  # type: ignore[attr-defined]
    return {
        option
        for parameter in command.params
        for option in parameter.opts
        if option.startswith("--")
    } - {"--help"}


def test_the_table_has_every_option_of_a_job_and_no_other() -> None:
    text = README.read_text()
    table = text[text.index("| option of `demo`") : text.index("Exit codes:")]
    named = set(re.findall(r"--[a-z][a-z-]*", "\n".join(re.findall(r"^\|.*", table, re.MULTILINE))))
    assert named == options_of("generate") | options_of("demo")


# What the command refuses side by side, with what goes beside it so that nothing else is wrong.
EXCLUDING = [
    ("--resume", "--document", "d.txt"),
    ("--resume", "--context", "9"),
    ("--resume", "--codec", "int8"),
    ("--resume", "--block-tokens", "16"),
    ("--daemon", "--warm", "1GiB"),
    ("--daemon", "--cold-dir", "cold"),
    ("--weights", "--device", "cuda"),
    ("--drop", "--keep", None),
]
BESIDE = {
    "--resume": ["--resume", "00000000000000ab", "--daemon", "/run/t.sock"],
    "--daemon": ["--daemon", "/run/t.sock"],
    "--weights": ["--weights", "int8"],
    "--drop": ["--drop", "--resume", "00000000000000ab", "--daemon", "/run/t.sock"],
}


@pytest.mark.parametrize(("first", "second", "value"), EXCLUDING)
def test_each_row_says_which_options_the_command_refuses_beside_its_own(
    tierd: Any, world: Any, first: str, second: str, value: str | None
) -> None:
    given = [second] if value is None else [second, value]
    outcome = tierd("generate", "--model", "m", "--prompt", "?", *BESIDE[first], *given)
    assert outcome.code == 2 and world.specs == []
    for option, other in ((first, second), (second, first)):
        row = next(
            line
            for line in README.read_text().splitlines()
            if line.startswith("| `--") and re.search(rf"{option}\b", line.split(" | ")[0])
        )
        assert other in row, f"{option}: {row}"
