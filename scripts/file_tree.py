"""Write the file tree of README.md: one line a file, from the first line of what it says of itself.

Run it after adding, renaming or redescribing a file; a test says when it is due.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- files: scripts/file_tree.py writes these lines -->\n```\n", "```\n<!-- end -->\n"
NAME_COLUMNS = 28
# Folders listed whole, and what is said of those that are not.
LISTED = ("tierd", "engine/tierd_engine")
SAID = {
    "proto/tierd/rpc/v1/tierd.proto": "The wire contract.",
    "tierd/rpc/v1/": "Generated from it by scripts/proto, and committed.",
    "tests/": "Mirrors the tree; model/ is a state machine, test_tidy.py the house style.",
    "scripts/demo": "Sets up everything, then the main job.",
    "scripts/test": "Sets up everything, then all tests.",
    "scripts/check": "Linters, types, import layers, style, tests: a developer's one door.",
    "scripts/bench": "Measures, beside this machine's limits.",
    "scripts/gpu-compile": "Compiles every GPU kernel without a GPU; one that spills fails.",
    "scripts/torture": "Power cuts, kills and faults on the cold tier's records, for hours.",
    "scripts/proto": "Writes tierd/rpc/v1 from the wire contract.",
    "docs/fidelity.md": "What each codec costs on real text, measured.",
    "constraints.txt": "The lock: every package, pinned.",
}


def tree_lines() -> Iterator[str]:
    """Yield the lines of the tree."""
    for folder in LISTED:
        yield f"{folder}/"
        yield from _folder_lines(ROOT / folder, depth=1)
    for name, text in SAID.items():
        if not name.startswith(LISTED):
            yield _line(name, text, depth=0)


def _folder_lines(folder: Path, depth: int) -> Iterator[str]:
    for path in sorted(folder.iterdir(), key=lambda path: (path.is_dir(), path.name)):
        name = path.relative_to(ROOT).as_posix()
        if f"{name}/" in SAID:
            yield _line(f"{path.name}/", SAID[f"{name}/"], depth)
        elif path.is_dir() and (path / "__init__.py").is_file():
            yield _line(f"{path.name}/", first_line(path / "__init__.py"), depth)
            yield from _folder_lines(path, depth + 1)
        elif path.suffix == ".py" and path.name != "__init__.py":
            yield _line(path.name, first_line(path), depth)


def first_line(path: Path) -> str:
    """Return the first line of a module's docstring; empty if it has none."""
    said = ast.get_docstring(ast.parse(path.read_text()))
    return said.splitlines()[0] if said else ""


def _line(name: str, text: str, depth: int) -> str:
    return f"{'  ' * depth + name:<{NAME_COLUMNS}}  {text}".rstrip()


def with_tree(readme: str) -> str:
    """Return README.md's text with the tree as it is now. Raises ValueError without the marks."""
    start = readme.index(BEGIN) + len(BEGIN)
    end = readme.index(END, start)
    return readme[:start] + "".join(f"{line}\n" for line in tree_lines()) + readme[end:]


def main() -> int:
    """Write the tree into README.md."""
    readme = ROOT / "README.md"
    readme.write_text(with_tree(readme.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
