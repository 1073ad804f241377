"""The disk cache of kernels: never code of other sources, and done without where it cannot be."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
from numba import types
from numba.core import caching, event
from numba.extending import overload

from tierd.codec import compiling
from tierd.codec.compiling import Const, ConstType, compile_cached, read_sources
from tierd.codec.intrinsics import as_array

SIGNATURE = (ConstType(7), types.int64)


def _add_one(constant: Any, address: Any) -> None:
    as_array(address, 1, np.int64)[0] += 1


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "kernels"))
    return tmp_path / "kernels"


@pytest.fixture
def compiles() -> Iterator[list[str]]:
    """Names of functions that are compiled while a test runs."""
    names: list[str] = []

    class Listener(event.Listener):  # type: ignore[misc]
        def on_start(self, event: Any) -> None:
            names.append(event.data["dispatcher"].py_func.__name__)

        def on_end(self, event: Any) -> None:
            pass

    listener = Listener()
    event.register("numba:compile", listener)
    yield names
    event.unregister("numba:compile", listener)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _check(compiled: compiling.Compiled) -> None:
    target = np.full(1, 41, dtype=np.int64)
    compiled.call(Const(7), target.ctypes.data)
    assert target[0] == 42
    assert compiled.address != 0


def test_a_kernel_is_kept_and_loaded(folder: Path, compiles: list[str]) -> None:
    _check(compile_cached(_add_one, SIGNATURE))
    assert compiles.count("_add_one") == 1
    assert {path.suffix for path in _files(folder)} == {".nbc", ".nbi"}
    _check(compile_cached(_add_one, SIGNATURE))
    assert compiles.count("_add_one") == 1


def test_constants_signatures_options_and_sources_have_files_of_their_own(
    folder: Path, compiles: list[str]
) -> None:
    compile_cached(_add_one, SIGNATURE)
    compile_cached(_add_one, (ConstType(8), types.int64))
    compile_cached(_add_one, (ConstType(7), types.uint64))
    compile_cached(_add_one, SIGNATURE, nogil=True)
    compile_cached(_add_one, SIGNATURE, compiling.SHARED_SOURCES[1:])
    assert compiles.count("_add_one") == 5
    assert len(_files(folder)) == 10


def test_code_of_a_source_that_changed_since_is_not_kept(
    folder: Path, tmp_path: Path, compiles: list[str]
) -> None:
    source = tmp_path / "kernel.py"
    source.write_text("HERE = 1\n")
    assert not read_sources((source,)).is_as_loaded
    for _ in range(2):
        _check(compile_cached(_add_one, SIGNATURE, (source,)))
    assert compiles.count("_add_one") == 2
    assert _files(folder) == []


def test_what_was_written_before_python_began_in_a_process_is_what_it_read(tmp_path: Path) -> None:
    """A script that gets the sources and then becomes Python is older than they are."""
    source, said = tmp_path / "kernel.py", "read_sources((Path(sys.argv[1]),)).is_as_loaded"
    code = (
        f"import sys; from pathlib import Path; from tierd.codec.compiling import *; print({said})"
    )
    script = 'sleep 0.1; echo "X = 1" > "$1"; sleep 0.1; exec "$2" -c "$3" "$1"'
    done = subprocess.run(
        ["sh", "-c", script, "sh", str(source), sys.executable, code],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout == "True\n"


def test_a_digest_is_of_each_sources_name_and_content(tmp_path: Path) -> None:
    digests = set()
    for name, content in (("a.py", "x"), ("b.py", "x"), ("a.py", "y"), ("a.py", "xb.py 1\nx")):
        folder = tmp_path / str(len(digests))
        folder.mkdir()
        (folder / name).write_text(content)
        digests.add(read_sources((folder / name,)).digest)
    assert len(digests) == 4


@pytest.mark.parametrize("error", [RuntimeError("no locator available"), OSError("no folder")])
def test_compiles_where_there_is_no_folder_for_a_cache(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    real = compiling.njit

    def refuse_cache(*args: Any, cache: bool = False, **options: Any) -> Any:
        if cache:
            raise error
        return real(*args, **options)

    monkeypatch.setattr(compiling, "njit", refuse_cache)
    _check(compile_cached(_add_one, SIGNATURE))


@pytest.mark.parametrize("step", ["_save_index", "_save_data"])
def test_a_disk_that_is_full_or_read_only_costs_no_second_compilation(
    folder: Path, monkeypatch: pytest.MonkeyPatch, compiles: list[str], step: str
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as full:
        full.setattr(caching.IndexDataCacheFile, step, refuse)
        _check(compile_cached(_add_one, SIGNATURE))
    assert compiles.count("_add_one") == 1
    _check(compile_cached(_add_one, SIGNATURE))  # an index whose data was never written
    _check(compile_cached(_add_one, SIGNATURE))
    assert compiles.count("_add_one") == 2
    assert len(_files(folder)) == 2


@pytest.mark.parametrize("suffix", [".nbi", ".nbc"])
@pytest.mark.parametrize("left", [0, 1, 60, -1, -60])
def test_files_that_a_crash_left_damaged_are_replaced(
    folder: Path, compiles: list[str], suffix: str, left: int
) -> None:
    compile_cached(_add_one, SIGNATURE)
    (file,) = (path for path in _files(folder) if path.suffix == suffix)
    content = file.read_bytes()
    file.write_bytes(content[:left] if left >= 0 else content[:left] + bytes(-left))
    for _ in range(3):
        _check(compile_cached(_add_one, SIGNATURE))
    assert compiles.count("_add_one") <= 3  # once more without the cache, once to fill it
    assert len(_files(folder)) == 2


def test_an_error_of_the_function_itself_is_raised(folder: Path) -> None:
    def unknown(constant: Any, address: Any) -> None:
        address.no_such_method()

    with pytest.raises(numba.TypingError, match="no_such_method"):
        compile_cached(unknown, SIGNATURE)


_PROCESS = """
import sys
from tests.codec.test_compiling import run_number_kernel
for value in map(int, sys.argv[1:]):
    assert run_number_kernel(value) == value, value
"""


def _number(constant: Any) -> int:
    raise NotImplementedError("known when compiled")


@overload(_number, strict=False)
def _choose_number(constant: Any) -> Any:
    value = constant.value
    return lambda constant: value


def _set_number(constant: Any, address: Any) -> None:
    as_array(address, 1, np.int64)[0] = _number(constant)


def run_number_kernel(value: int) -> int:
    """Return what the code for a constant takes the constant for."""
    found = np.zeros(1, dtype=np.int64)
    kernel = compile_cached(_set_number, (ConstType(value), types.int64))
    kernel.call(Const(value), found.ctypes.data)
    return int(found[0])


def test_processes_that_compile_at_once_leave_every_signature_its_own_code(folder: Path) -> None:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(folder)}
    orders = (["1", "2", "3"], ["3", "2", "1"], ["2", "3", "1"])
    running = [
        subprocess.Popen([sys.executable, "-c", _PROCESS, *order], env=environment)
        for order in orders
    ]
    assert [process.wait(timeout=120) for process in running] == [0, 0, 0]
    assert len(_files(folder)) == 6
    assert [run_number_kernel(value) for value in (1, 2, 3)] == [1, 2, 3]


def test_a_second_process_compiles_no_codec(folder: Path) -> None:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(folder)}
    code = """
from numba.core import event
from tierd.codec import devicedigest, raw, spans
from tierd.types import CodecId
with event.install_recorder("numba:compile") as recorder:
    for module in (raw, devicedigest):
        for name in ("_encoder", "_decoder", "_compiled"):
            getattr(module, name, int)()
    spans._encoder(CodecId.INT8), spans._decoder(CodecId.INT8)
print(len(recorder.buffer))
"""
    counts = [
        int(
            subprocess.run(
                [sys.executable, "-c", code], env=environment, timeout=120, check=True,
                capture_output=True,
            ).stdout
        )
        for _ in range(2)
    ]  # fmt: skip
    assert counts[0] > 0
    assert counts[1] == 0
