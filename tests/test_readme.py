"""README.md says what is there: its file tree, its verbs, its files."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parent.parent


def file_tree() -> ModuleType:
    spec = importlib.util.spec_from_file_location("file_tree", ROOT / "scripts" / "file_tree.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_file_tree_is_current() -> None:
    readme = (ROOT / "README.md").read_text()
    assert file_tree().with_tree(readme) == readme, "run: python scripts/file_tree.py"


def test_every_script_named_is_there() -> None:
    readme = (ROOT / "README.md").read_text() + (ROOT / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"scripts/[a-z_-]+(?:\.py)?", readme))
    assert named
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []
