"""What a terminal is shown: progress, sizes, and nothing that steers it."""

import sys
from typing import Any

import pytest

from tierd.cli import terminal


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\ttext\n", "plain\ttext\n"),
        ("\x1b[2Jgone", "\ufffd[2Jgone"),
        ("\x9b31m\x07", "\ufffd31m\ufffd"),
        ("漢字 é", "漢字 é"),
    ],
)
def test_control_characters_do_not_reach_a_terminal(text: str, shown: str) -> None:
    assert terminal.printable(text) == shown


def test_figures_that_are_not_there_are_a_dash() -> None:
    assert terminal.figure(None) == terminal.figure("x") == terminal.figure(True) == "-"
    assert terminal.size(None) == "-"
    assert terminal.figure(1234.5) == "1,234"


def test_long_prefill_without_a_terminal_tells_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    now = [0.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    with terminal.JobDisplay(stream_text=True, quiet=False) as display:
        display.prefill_started(4000)
        for step in range(1, 5):
            now[0] = 6.0 * step
            display.prefill_advanced(1000 * step)
        display.token("x")
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "tierd: prefill: 2,000 of 4,000 tokens, 167 tokens/s",
        "tierd: prefill: 4,000 of 4,000 tokens, 167 tokens/s",
        "tierd: prefill: 4,000 tokens, 167 tokens/s",
    ]


def test_a_terminal_gets_a_bar_that_is_gone_when_the_text_comes(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with terminal.JobDisplay(stream_text=True, quiet=False) as display:
        display.prefill_started(100)
        display.prefill_advanced(50)
        assert display._bar is not None
        display.note("half way")
        display.token("text")
        assert display._bar is None
    captured = capsys.readouterr()
    assert captured.out == "text\n"
    assert "half way" in captured.err


def test_where_the_answer_is_not_shown_its_making_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    now = [0.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    display = terminal.JobDisplay(stream_text=False, quiet=False)
    display.prefill_started(100)
    display.token("text")
    capsys.readouterr()
    now[0] += terminal.PROGRESS_SECONDS
    display.tick()
    assert capsys.readouterr() == ("", "tierd: generating: 10 s so far\n")


def test_a_long_path_is_not_folded_where_there_is_no_terminal(capsys: Any) -> None:
    path = "/" + "p" * 4000
    terminal.print_table("", ["setting", "value"], [["cold.folder", path]], text_columns=2)
    assert path in capsys.readouterr().out


def test_a_silent_stretch_is_told_every_ten_seconds_until_the_answer_comes(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    now = [0.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(terminal, "TICK_SECONDS", 3600.0)  # the test ticks
    display = terminal.JobDisplay(stream_text=True, quiet=False)

    def told_at(*seconds: float) -> list[str]:
        for second in seconds:
            now[0] = second
            display.tick()
        return list(capsys.readouterr().err.splitlines())

    display.working("loading the model")
    assert told_at(9.0) == []
    assert told_at(10.0, 15.0) == ["tierd: loading the model: 10 s so far"]
    display.prefill_started(4000, 1000)
    assert told_at(24.0) == []
    assert told_at(25.0) == ["tierd: prefill: 1,000 of 4,000 tokens, 0 tokens/s"]
    display.token("x")
    capsys.readouterr()
    assert told_at(100.0) == []


def test_the_rate_of_prefill_leaves_out_what_a_resumed_session_held(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    now = [0.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    with terminal.JobDisplay(stream_text=True, quiet=False) as display:
        display.prefill_started(4000, 3900)
        now[0] = 2.0
        display.prefill_advanced(4000)
        display.token("x")
    assert capsys.readouterr().err == "tierd: prefill: 100 tokens, 3,900 were held, 50 tokens/s\n"


def test_a_quiet_display_starts_no_ticker() -> None:
    with terminal.JobDisplay(stream_text=True, quiet=True) as display:
        assert not display._ticker.is_alive()


@pytest.mark.parametrize(("is_terminal", "answer"), [(False, "one two\n"), (True, "one \ntwo\n")])
def test_a_note_amid_the_answer_does_not_get_into_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, *, is_terminal: bool, answer: str
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    with terminal.JobDisplay(stream_text=True, quiet=False) as display:
        display.token("one ")
        display.note("block 3 was lost")
        display.token("two")
    captured = capsys.readouterr()
    assert captured.out == answer
    assert captured.err.endswith("tierd: block 3 was lost\n")
