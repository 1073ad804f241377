"""The static checks of `scripts/check`, as tests: what CI runs is what a developer runs."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CHECKS = {
    "ruff finds nothing": ["-m", "ruff", "check"],
    "every file is formatted": ["-m", "ruff", "format", "--check"],
    "types hold under mypy --strict": ["-m", "mypy"],
    "import layers hold": ["-c", "from importlinter.cli import lint_imports_command as c; c()"],
}


@pytest.mark.parametrize("arguments", CHECKS.values(), ids=CHECKS.keys())
def test_static_check(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, f"\n{done.stdout}\n{done.stderr}"
