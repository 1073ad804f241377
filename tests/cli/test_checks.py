"""What a user wrote is checked before anything slow is imported, and the option is named."""

from pathlib import Path
from typing import Any

import pytest
import typer

from tierd.cli import checks
from tierd.cli.app import build_app
from tierd.errors import DaemonUnavailable, InvalidArgument, StorageError, UnsupportedModel

DAEMON = ["--daemon", "/run/t.sock"]
RESUME = ["generate", "--model", "m", "--prompt", "Why?", *DAEMON, "--resume", "00000000000000ab"]


def job(tmp_path: Path, *more: str) -> list[str]:
    """Return a job's arguments; `more` come last, and win."""
    path = tmp_path / "document.txt"
    path.write_text("Some text.\n")
    return ["generate", "--model", "m", "--document", str(path), "--prompt", "Why?", *more]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--hot", "99999999999TiB"], "--hot 99999999999TiB is more than this machine's memory"),
        (["--warm", "99999999999TiB"], "--warm 99999999999TiB is more than"),
        (["--hot", "much"], "--hot: 'much' is not a size"),
        (["--warm", "x%"], "--warm: 'x%' is not a percentage"),
        (["--warm", "101%"], "--warm: '101%' is more than 100%"),
        (["--block-tokens", "0"], "--block-tokens is 0"),
        (["--block-tokens", "48"], "--block-tokens is 48; it must be a power of two"),
        (["--rope-scaling", "linear:0"], "--rope-scaling"),
        (["--cold-dir", ""], "--cold-dir is empty"),
        (["--daemon", ""], "--daemon is empty"),
        (["--document", ""], "--document is empty"),
        (["--prompt", b"caf\xe9 au lait".decode("utf-8", "surrogateescape")],
         "--prompt is not UTF-8 text: character 4 is a stray byte"),
        (["--prompt", ""], "--prompt is empty"),
        (["--prompt", " \n"], "--prompt holds nothing but blanks and line ends"),
        (["--hot", "0"], "--hot 0 holds nothing"),
        (["--hot", "0%"], "--hot 0% holds nothing"),
        (["--context", "1"], "--context"),
        (["--context", "9" * 20], "--context"),
        (["--max-new-tokens", "0"], "--max-new-tokens"),
        (["--max-new-tokens", "9" * 20], "--max-new-tokens"),
        (["--rejoin", "25h"], "--rejoin 25h is more than 86400 s"),
        (["--device", "cuda", "--weights", "int8"], "--weights int8 runs on the CPU"),
        (["--drop"], "--drop goes with --resume"),
        (["--keep"], "--keep and --resume need --daemon"),
    ],
)  # fmt: skip
def test_odd_values_are_refused_before_the_job(
    tierd: Any, world: Any, tmp_path: Path, more: list[str], words: str
) -> None:
    outcome = tierd(*job(tmp_path, *more))
    assert (outcome.code, outcome.out) == (2, "")
    assert words in outcome.err and outcome.err.count("\n") == 1
    assert world.specs == []


BAD_VALUES = {
    "--model": "", "--document": " ", "--prompt": "", "--context": "x", "--hot": "nan%",
    "--warm": "nan", "--cold-dir": "", "--codec": "int3", "--plan": "far",
    "--max-new-tokens": "nan", "--dtype": "int8", "--block-tokens": "48",
    "--rope-scaling": "linear:nan", "--weights": "int3", "--device": "tpu", "--daemon": "",
    "--resume": "foo", "--rejoin": "nan", "--socket": "", "--cold-cap": "1e9", "--config": "",
    "--deadline": "inf", "--first-token": "-1", "--last-token": "x", "--confidence": "nan",
    "--priority": "1.5",
}  # fmt: skip


def valued_options(verb: str) -> list[str]:
    """Return the options of a verb that take a value."""
    command = typer.main.get_command(build_app()).commands[verb]  # type: ignore[attr-defined]
    return [
        option
        for parameter in command.params
        for option in parameter.opts
        if option.startswith("--") and not parameter.is_flag
    ]


@pytest.mark.parametrize(
    ("verb", "option"),
    [
        (verb, option)
        for verb in ("generate", "demo", "serve", "hint")
        for option in valued_options(verb)
    ],
)
def test_a_bad_value_is_named_before_what_is_missing(
    tierd: Any, world: Any, verb: str, option: str
) -> None:
    outcome = tierd(verb, option, BAD_VALUES[option])
    assert (outcome.code, outcome.out) == (2, "")
    assert option in outcome.err and outcome.err.count("\n") == 1
    assert BAD_VALUES[option].strip() in outcome.err
    assert "issing" not in outcome.err and "give --document" not in outcome.err
    assert world.models == world.sockets == []


def test_a_bad_size_is_refused_before_a_folder_is_made(
    tierd: Any, world: Any, tmp_path: Path
) -> None:
    for verb in ("serve", "demo"):
        assert tierd(verb, "--cold-dir", str(tmp_path / "new"), "--warm", "nan").code == 2
    assert not (tmp_path / "new").exists()


def test_a_number_that_is_none_or_out_of_range_is_said(tierd: Any) -> None:
    assert "'--context': 'x' should be" in tierd("generate", "--context", "x").err
    assert "'--max-new-tokens': '0' should be" in tierd("generate", "--max-new-tokens", "0").err


@pytest.mark.parametrize(
    "fixed",
    [["--document", "d.txt"], ["--codec", "int8"], ["--block-tokens", "16"], ["--context", "9"]],
)
def test_what_a_kept_session_has_already_cannot_be_given_again(
    tierd: Any, world: Any, fixed: list[str]
) -> None:
    outcome = tierd(*RESUME, *fixed)
    assert outcome.code == 2
    assert f"{fixed[0]} and --resume exclude each other" in outcome.err
    assert world.specs == []


def test_keep_and_drop_exclude_each_other(tierd: Any, world: Any) -> None:
    assert "--keep and --drop exclude" in tierd(*RESUME, "--keep", "--drop").err


def test_a_resumed_session_is_kept_unless_dropped_and_its_id_is_told(
    tierd: Any, world: Any
) -> None:
    assert "session 00000000000000ab is kept" in tierd(*RESUME).err
    assert "is kept" not in tierd(*RESUME, "--drop").err
    assert [spec.keeps for spec in world.specs] == [True, False]


def test_the_help_says_what_becomes_of_a_resumed_session(tierd: Any) -> None:
    words = " ".join(tierd("generate", "--help").out.replace("│", " ").split())
    assert "It is kept again, with the answer; as it was, if the job fails." in words
    assert "do not keep the session after the answer" in words


def test_a_model_is_refused_before_the_daemon_and_the_engine(
    tierd: Any, world: Any, tmp_path: Path
) -> None:
    world.model_error = UnsupportedModel("model m: it is an encoder")
    outcome = tierd(*job(tmp_path, *DAEMON))
    assert (outcome.code, outcome.err) == (2, "tierd: error: model m: it is an encoder\n")
    assert (world.models, world.sockets, world.specs) == (["m"], [], [])


def test_an_absent_daemon_is_found_before_the_engine(
    tierd: Any, world: Any, tmp_path: Path
) -> None:
    world.connect_error = DaemonUnavailable("no daemon at /run/t.sock")
    assert tierd(*job(tmp_path, *DAEMON)).code == 3
    assert world.specs == []


def test_more_memory_than_is_free_is_refused(tierd: Any, world: Any) -> None:
    world.hot_bytes = 1 << 60
    outcome = tierd("demo", "--quiet")
    assert outcome.code == 2
    assert "--hot and --warm" in outcome.err and "free" in outcome.err


def test_a_cold_folder_is_made_if_only_it_is_missing(tmp_path: Path) -> None:
    assert checks.cold_folder("--cold-dir", str(tmp_path / "new")) == tmp_path / "new"
    assert (tmp_path / "new").is_dir()
    with pytest.raises(StorageError, match=r"cannot be made: .*absent is no folder"):
        checks.cold_folder("--cold-dir", str(tmp_path / "absent" / "new"))
    assert not (tmp_path / "absent").exists()


def test_a_cold_folder_that_is_a_file_is_said_to_be_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="is a file, not a folder"):
        checks.cold_folder("--cold-dir", str(tmp_path / "file"))


def test_a_size_below_the_smallest_names_it() -> None:
    assert checks.size("--warm", "2MiB", smallest_bytes=1 << 20) == 2 << 20
    with pytest.raises(InvalidArgument, match=r"--cold-cap 1 is too small.* 1\.0 MiB"):
        checks.size("--cold-cap", "1", smallest_bytes=1 << 20)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "--cold-cap", "1"], "--cold-cap 1 is too small"),
        (["serve", "--cold-cap", "64KiB"], "the smallest that works is 1.0 MiB, and more where"),
        (["serve", "--warm", "63KiB"], "the smallest that works is 64.0 KiB"),
        (["serve", "--warm", "x"], "--warm: 'x' is not a size"),
        (["serve", "--socket", ""], "--socket is empty"),
        (["serve", "--config", ""], "--config is empty"),
        (["config", "show", "--config", ""], "--config is empty"),
        (["stats", "--daemon", ""], "--daemon is empty"),
        (["doctor", "--cold-dir", ""], "--cold-dir is empty"),
        ([""], "no command is named"),
    ],
)
def test_other_verbs_name_what_is_wrong(
    tierd: Any, world: Any, arguments: list[str], words: str
) -> None:
    outcome = tierd(*arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert words in outcome.err and outcome.err.count("\n") == 1


def test_a_gpu_that_is_not_there_is_refused_before_the_engine(
    tierd: Any, world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "_GPU_PATHS", (str(tmp_path / "nvidia"),))
    outcome = tierd(*job(tmp_path, "--device", "cuda"))
    assert outcome.code == 2
    assert "--device cuda: no NVIDIA driver is loaded" in outcome.err
    assert world.models == [] and world.specs == []
    (tmp_path / "nvidia").touch()
    assert tierd(*job(tmp_path, "--device", "cuda")).code == 0


def test_an_empty_document_on_stdin_is_refused(
    tierd: Any, world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").touch()
    with (tmp_path / "empty").open() as nothing:
        monkeypatch.setattr("sys.stdin", nothing)
        outcome = tierd(*job(tmp_path, "--document", "-"))
    assert outcome.code == 2 and outcome.err == "tierd: error: document stdin is empty\n"
    assert world.specs == []


@pytest.mark.parametrize("verb", [["serve"], ["generate"]])
def test_a_folder_that_takes_no_file_is_named_with_the_reason(
    tierd: Any, world: Any, tmp_path: Path, verb: list[str]
) -> None:
    arguments = verb if verb == ["serve"] else job(tmp_path)
    outcome = tierd(*arguments, "--cold-dir", "/proc")
    assert outcome.code == 1 and outcome.err.count("\n") == 1
    assert "cold folder /proc" in outcome.err
    assert world.specs == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["stats", "--watch", "1e30"], "--watch"),
        (["stats", "--watch", "nan"], "--watch"),
        (["sessions", "--drop", ""], "--drop is empty"),
        (["hint", "", "--deadline", "1s"], "SESSION is empty"),
        (["sessions", "--drop", "12", "--yes"], "--drop: '12' is not a session id: it has 16 hex"),
        (["sessions", "--drop", "z" * 16, "--yes"], "is not a session id: it has 16 hex digits"),
        (["hint", "abc", "--deadline", "1s"], "SESSION: 'abc' is not a session id: it has 16 hex"),
        (
            ["hint", "00000000000000ab", "--deadline", "1s", "--first-token", "9" * 20],
            "--first-token",
        ),
        (
            ["hint", "00000000000000ab", "--deadline", "1s", "--last-token", "9" * 20],
            "--last-token",
        ),
    ],
)
def test_odd_values_are_refused_before_a_daemon_is_asked(
    tierd: Any, world: Any, arguments: list[str], words: str
) -> None:
    outcome = tierd(*arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert words in outcome.err
    assert world.sockets == []


def test_a_context_longer_than_the_document_is_said(tierd: Any, world: Any, tmp_path: Path) -> None:
    outcome = tierd(*job(tmp_path, "--context", "301"))
    assert outcome.code == 0
    assert "--context 301 is more than there is: document and prompt are 300 tokens" in outcome.err
    assert "more than there is" not in tierd(*job(tmp_path, "--context", "300")).err


def test_what_is_no_session_id_is_refused_at_once(tierd: Any) -> None:
    outcome = tierd(*RESUME[:-1], "foo")
    assert outcome.code == 2
    assert "'foo' is not a session id" in outcome.err
