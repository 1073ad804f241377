"""House style as a test. Each rule is a pure function from a parsed file to its offences."""

import ast
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
GENERATED = "tierd/rpc/v1/"
FUNCTION_LINES_MAX = 70  # a function fits a screen
FILE_LINES_MAX = 500
BROAD = {"Exception", "BaseException"}
UNSAFE_MODULES = {"pickle", "cPickle", "marshal", "shelve", "dill", "joblib"}
UNSAFE_CALLS = {"eval", "exec"}
PRINTING = ("tierd/cli/", "scripts/", "tests/", "engine/tierd_engine/bench/")
# Written in pieces, so that this file does not break its own rules.
OPEN_TASK = re.compile(r"#.*\b(TO" r"DO|FIX" r"ME|X" r"XX)\b(?!.*#\d+)")


def calls_by_name(tree: ast.Module) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node.func.id, node.lineno


def offences_of_size(path: str, source: str, tree: ast.Module) -> Iterator[str]:
    lines = source.count("\n")
    if lines > FILE_LINES_MAX:
        yield f"{path}: {lines} lines, at most {FILE_LINES_MAX}"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES_MAX:
                yield f"{path}:{node.lineno}: {node.name} has {length} lines"


def offences_of_docstring(path: str, source: str, tree: ast.Module) -> Iterator[str]:
    if not ast.get_docstring(tree):
        yield f"{path}: no module docstring"


def offences_of_broad_except(path: str, source: str, tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.ExceptHandler):
            continue
        kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        broad = any(k is None or (isinstance(k, ast.Name) and k.id in BROAD) for k in kinds)
        raises = any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
        if broad and not raises:
            yield f"{path}:{node.lineno}: broad except that does not raise again"


def offences_of_finaliser(path: str, source: str, tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == "__del__":
            yield f"{path}:{node.lineno}: __del__; clean up in close()"


def offences_of_unsafe(path: str, source: str, tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name.partition(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [(node.module or "").partition(".")[0]]
        for name in UNSAFE_MODULES.intersection(names):
            yield f"{path}:{node.lineno}: imports {name}"
    for name, line in calls_by_name(tree):
        if name in UNSAFE_CALLS:
            yield f"{path}:{line}: calls {name}"


def offences_of_print(path: str, source: str, tree: ast.Module) -> Iterator[str]:
    if path.startswith(PRINTING):
        return
    for name, line in calls_by_name(tree):
        if name == "print":
            yield f"{path}:{line}: print outside the command line"


def offences_of_open_task(path: str, source: str, tree: ast.Module) -> Iterator[str]:
    for number, line in enumerate(source.splitlines(), 1):
        if OPEN_TASK.search(line):
            yield f"{path}:{number}: an open task without an issue number"


def offences_of_unbounded_wait(path: str, source: str, tree: ast.Module) -> Iterator[str]:
    """A thread, process or event waited for without a limit. Awaited waits are cancellable."""
    awaited = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Await)}
    wrapped = {
        id(argument)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        for argument in node.args
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        bare = not node.args and not node.keywords
        ignored = id(node) in awaited or id(node) in wrapped
        if node.func.attr in {"join", "wait"} and bare and not ignored:
            yield f"{path}:{node.lineno}: .{node.func.attr}() without a timeout"


Rule = Callable[[str, str, ast.Module], Iterator[str]]
RULES: list[Rule] = [
    offences_of_size,
    offences_of_docstring,
    offences_of_broad_except,
    offences_of_finaliser,
    offences_of_unsafe,
    offences_of_print,
    offences_of_open_task,
    offences_of_unbounded_wait,
]
# One source per rule that breaks it, and nothing else.
BROKEN = {
    offences_of_size: '"""Doc."""\ndef f():\n' + "    x = 1\n" * FUNCTION_LINES_MAX,
    offences_of_docstring: "x = 1\n",
    offences_of_broad_except: '"""Doc."""\ntry:\n    f()\nexcept (OSError, Exception):\n    pass\n',
    offences_of_finaliser: '"""Doc."""\nclass C:\n    def __del__(self): ...\n',
    offences_of_unsafe: '"""Doc."""\nfrom pickle import loads\n',
    offences_of_print: '"""Doc."""\nprint(1)\n',
    offences_of_open_task: '"""Doc."""\nx = 1  # TO' + "DO later\n",
    offences_of_unbounded_wait: '"""Doc."""\nthread.join()\n',
}
TIDY = """'Doc.'
try:
    f()
except Exception:
    close()
    raise
x = 1  # {task} #12: later
thread.join(timeout=2.0)
text = ",".join(words)
async def g():
    await event.wait()
    await wait_for(event.wait(), 2.0)
""".replace("{task}", "TO" + "DO")


def python_files() -> list[str]:
    """Return the repository's Python files, generated ones left out, as relative paths."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        cwd=ROOT, capture_output=True, text=True, check=True, timeout=30,
    )  # fmt: skip
    found = [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]
    return [name for name in found if not name.startswith(GENERATED)]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_file_keeps_the_rule(rule: Rule) -> None:
    offences = []
    for name in python_files():
        source = (ROOT / name).read_text()
        offences += rule(name, source, ast.parse(source))
    assert not offences, "\n" + "\n".join(offences)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_rule_sees_an_offence_and_passes_tidy_code(rule: Rule) -> None:
    broken = BROKEN[rule]
    assert list(rule("tierd/x.py", broken, ast.parse(broken)))
    assert not list(rule("tierd/x.py", TIDY, ast.parse(TIDY)))


def test_a_file_too_long_is_seen() -> None:
    source = '"""Doc."""\n' + "x = 1\n" * FILE_LINES_MAX
    assert list(offences_of_size("tierd/x.py", source, ast.parse(source)))


def test_the_files_are_found() -> None:
    assert "tierd/types.py" in python_files()


def test_the_lock_pins_every_package_and_names_no_host() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", pin) for pin in pins)
    assert "torch==2.13.0" in pins
    assert not any("://" in line for line in lines)
