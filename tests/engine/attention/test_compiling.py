"""What the attention kernels are compiled from is what their files on disk are named by."""

from __future__ import annotations

import ast
from pathlib import Path

from tierd_engine.attention import compiling

ROOT = Path(__file__).parents[3]
# Nothing of these is compiled into a kernel.
WITHOUT_CONSTANTS = {"tierd/errors.py", "tierd/began.py"}


def _imported(path: Path) -> set[str]:
    """Return the files of ours that a module imports from."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tierd"):
            base = ROOT / ("engine" if node.module.startswith("tierd_engine") else "")
            module = base / node.module.replace(".", "/")
            names = [module / f"{alias.name}.py" for alias in node.names]
            files = [file for file in names if file.exists()] or [module.with_suffix(".py")]
            found.update(str(file.relative_to(ROOT)) for file in files)
    return found


def test_all_that_a_kernel_is_made_of_is_among_the_sources() -> None:
    sources = {str(path.relative_to(ROOT)) for path in compiling.KERNEL_SOURCES}
    codecs = {f"tierd/codec/{name}.py" for name in ("devicedigest", "raw", "spans")}
    assert codecs < sources
    found: set[str] = set()
    left = {name for name in sources if name.startswith("engine/")} | codecs
    while left:
        found |= left
        left = {name for path in left for name in _imported(ROOT / path)} - found
    assert found - sources <= WITHOUT_CONSTANTS
