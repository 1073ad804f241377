"""README.md says what is there: its file tree, its verbs, its files."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

from tests.wirerig import BLOCK_BYTES, GEOMETRY, LAYERS, small_config, store_session
from tierd.client import Client
from tierd.daemon import EmbeddedDaemon

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


def program() -> str:
    """Return README's program in Python."""
    (found,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
    return str(found)


def test_the_program_that_asks_a_daemon_does_what_is_said_of_it(tmp_path: Path) -> None:
    config = small_config(tmp_path, warm_bytes=16 * BLOCK_BYTES)
    with EmbeddedDaemon(config) as daemon:
        with Client.connect(daemon.socket) as engine:
            session, later = store_session(engine, 14), store_session(engine, 14)
            engine.close_session(later)  # for which the first went to disk: warm has room again
            (before,) = engine.sessions()
        script, count = re.subn('"/tmp/tierd.sock"', repr(daemon.socket), program())
        assert count == 1
        done = subprocess.run(
            [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == f"{session} suspended {14 * GEOMETRY.block_tokens}\n"
        with Client.connect(daemon.socket, kind="tool") as tool:
            (after,) = tool.sessions()
    assert before["warm_pages"] < after["warm_pages"] == 14 * LAYERS, "its cold pages come up"
