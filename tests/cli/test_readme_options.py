"""README's table has every option of a job, and no option that is not there."""

import re
from pathlib import Path

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
