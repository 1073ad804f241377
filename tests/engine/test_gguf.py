"""GGUF conversions: one per content, whole or absent, bounded; the dead's remains go."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError

from tests.engine.folders import tiny_gguf
from tierd.errors import InvalidArgument, StorageError, StorageFull, UnsupportedModel
from tierd.types import DType
from tierd_engine import gguf, hf

Usage = namedtuple("Usage", "total used free")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return gguf.model_cache_folder()


@contextmanager
def lock_held(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, as another process that converts does."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(descriptor)


def entry(folder: Path, name: str, *, size: int = 10, unused_seconds: float = 0.0) -> Path:
    path = folder / f"gguf-{name}"
    path.mkdir(parents=True)
    with (path / "model.safetensors").open("wb") as file:
        file.truncate(size)
    used = time.time() - unused_seconds
    os.utime(path, (used, used))
    return path


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_gguf_becomes_a_folder_that_runs(whole: Path, cache: Path) -> None:
    assert gguf.needs_conversion(whole)
    folder = hf.resolve_model(str(whole))
    assert not gguf.needs_conversion(whole)
    config = hf.load_config(folder)
    hf.load_model(folder, config, DType.FLOAT32)
    assert hf.load_tokenizer(folder).eos_token_id == 257
    assert names(cache) == {folder.name}


def test_equal_content_is_converted_once_whatever_its_path(
    whole: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = hf.resolve_model(str(whole))
    clone = tmp_path / "elsewhere.GGUF"
    shutil.copy(whole, clone)
    monkeypatch.setattr(gguf, "_convert", None)
    assert hf.resolve_model(str(clone)) == first


def test_other_content_is_another_entry(whole: Path, cache: Path, tmp_path: Path) -> None:
    other = tmp_path / "tiny.gguf"
    data = bytearray(whole.read_bytes())
    data[-3] ^= 1
    other.write_bytes(data)
    assert hf.resolve_model(str(whole)) != hf.resolve_model(str(other))


def test_what_lies_beside_a_gguf_is_not_taken_for_its_own(
    whole: Path, cache: Path, tmp_path: Path
) -> None:
    shutil.copy(whole, tmp_path / "a.gguf")
    (tmp_path / "chat_template.jinja").write_text("another model's")
    folder = hf.resolve_model(str(tmp_path / "a.gguf"))
    assert "another" not in hf.load_tokenizer(folder).chat_template


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.001, 0.005, 0.02, 0.1, 0.5, 0.95, 0.99999])
def test_a_gguf_that_is_cut_is_one_clear_line_and_leaves_nothing(
    whole: Path, cache: Path, tmp_path: Path, share: float
) -> None:
    cut = tmp_path / "cut.gguf"
    data = whole.read_bytes()
    cut.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(InvalidArgument, match=r"cut\.gguf") as raised:
        hf.resolve_model(str(cut))
    assert "\n" not in str(raised.value)
    assert not cache.exists() or names(cache) == set()


def test_a_gguf_with_damage_anywhere_in_its_header_never_ends_in_another_error(
    whole: Path, cache: Path, tmp_path: Path
) -> None:
    data = whole.read_bytes()
    for place in range(8, 3000, 61):
        damaged = bytearray(data)
        damaged[place] ^= 0xFF
        path = tmp_path / "damaged.gguf"
        path.write_bytes(damaged)
        try:
            hf.resolve_model(str(path))
        except InvalidArgument as error:
            assert "\n" not in str(error) and ".converting" not in str(error), str(error)
    assert not list(cache.glob(".converting-*"))


def test_a_gguf_whose_tensors_are_fewer_than_its_config_says_is_refused(
    cache: Path, tmp_path: Path
) -> None:
    path = tiny_gguf(tmp_path / "three.gguf", layers=3)
    with pytest.raises(InvalidArgument, match="9 missing"):
        hf.resolve_model(str(path))
    assert names(cache) == set()


def test_a_model_that_cannot_run_is_refused_before_anything_is_written(
    whole: Path, cache: Path
) -> None:
    def refuse(config: Any) -> None:
        raise UnsupportedModel(config.model_type)

    with pytest.raises(UnsupportedModel, match="llama"):
        gguf.converted_gguf(whole, refuse)
    assert names(cache) == set()


def test_what_a_killed_conversion_left_goes_on_the_next_run(whole: Path, cache: Path) -> None:
    code = (
        "import os, signal, sys, pathlib\n"
        "from tierd_engine import gguf\n"
        "gguf._write_converted = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "gguf.converted_gguf(pathlib.Path(sys.argv[1]), print)\n"
    )
    killed = subprocess.run(
        [sys.executable, "-c", code, str(whole)], timeout=60, check=False,
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    assert killed.returncode == -signal.SIGKILL
    assert [name for name in names(cache) if name.startswith(".converting-")]
    folder = hf.resolve_model(str(whole))
    assert names(cache) == {folder.name}


def test_what_was_left_goes_too_when_nothing_is_converted(whole: Path, cache: Path) -> None:
    folder = hf.resolve_model(str(whole))
    (cache / ".converting-dead").mkdir()
    hf.resolve_model(str(whole))
    assert names(cache) == {folder.name}


def test_what_a_living_process_converts_is_left_alone(whole: Path, cache: Path) -> None:
    folder = hf.resolve_model(str(whole))
    (cache / ".converting-alive").mkdir()
    with lock_held(cache):
        assert hf.resolve_model(str(whole)) == folder
    assert ".converting-alive" in names(cache)


def test_waiting_for_another_process_ends(
    whole: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf, "LOCK_SECONDS_MAX", 0.0)
    with lock_held(cache), pytest.raises(StorageError, match="another process"):
        hf.resolve_model(str(whole))


def test_an_entry_that_the_disk_has_damaged_is_made_again(whole: Path, cache: Path) -> None:
    folder = hf.resolve_model(str(whole))
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-100])
    assert hf.resolve_model(str(whole)) == folder
    assert (folder / "model.safetensors").read_bytes() == data


def test_too_little_room_is_told_before_anything_is_written(
    whole: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(100, 100, 1000))
    with pytest.raises(StorageFull, match=r"1000 B free.*32\.\d MiB.*XDG_CACHE_HOME"):
        hf.resolve_model(str(whole))
    assert names(cache) == set()


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), StorageFull),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), StorageFull),
        (SafetensorError("I/O error: No space left on device (os error 28)"), StorageFull),
        (OSError(errno.EIO, "Input/output error"), StorageError),
        (SafetensorError("I/O error: Input/output error (os error 5)"), StorageError),
    ],
    ids=["enospc", "edquot", "safetensors-enospc", "eio", "safetensors-eio"],
)
def test_a_disk_that_fails_while_writing_is_one_line_and_leaves_nothing(
    whole: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type
) -> None:
    def fail(folder: Path) -> None:
        raise error

    monkeypatch.setattr(gguf, "_sync", fail)
    with pytest.raises(kind, match="model cache") as raised:
        hf.resolve_model(str(whole))
    assert type(raised.value) is kind and "\n" not in str(raised.value)
    assert names(cache) == set()


def test_a_cache_folder_that_cannot_be_made_is_one_line(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(StorageError, match="XDG_CACHE_HOME"):
        hf.resolve_model(str(whole))


def test_a_relative_cache_folder_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "somewhere")
    assert gguf.model_cache_folder() == tmp_path / ".cache" / "tierd" / "models"


def test_entries_long_unused_go(cache: Path) -> None:
    entry(cache, "old", unused_seconds=gguf.UNUSED_SECONDS_MAX + 60)
    kept = entry(cache, "new", unused_seconds=gguf.UNUSED_SECONDS_MAX - 60)
    (cache / "a folder of the user's").mkdir()
    gguf.tidy(cache, time.time())
    assert names(cache) == {kept.name, "a folder of the user's"}


def test_beyond_the_bound_the_longest_unused_go_and_todays_stay(cache: Path) -> None:
    third = gguf.TOTAL_BYTES_MAX // 3 + 1
    days = {"four": 4, "three": 3, "two": 2, "today": 0.5}
    for name, age in days.items():
        entry(cache, name, size=third, unused_seconds=age * 24 * 3600)
    gguf.tidy(cache, time.time())
    assert names(cache) == {"gguf-two", "gguf-today"}
    for path in cache.iterdir():
        os.utime(path)
    entry(cache, "more", size=third)
    gguf.tidy(cache, time.time())
    assert len(names(cache)) == 3


def test_use_keeps_an_entry(whole: Path, cache: Path) -> None:
    folder = hf.resolve_model(str(whole))
    os.utime(folder, (0, 0))
    assert hf.resolve_model(str(whole)) == folder
    assert folder.is_dir() and time.time() - folder.stat().st_mtime < 600
