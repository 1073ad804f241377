"""GGUF files, converted once to safetensors in `$XDG_CACHE_HOME/tierd/models`.

Invariants:
  an entry is named by its source's content and by what converts it, not by a path
  an entry appears whole, by a rename, and goes by a rename
  only who holds the folder's lock converts and removes; the lock ends with its
    process, so work in progress that its next holder finds is a dead process's
  an entry used within the last day is never removed

Importing this loads neither torch nor transformers.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib.metadata
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import xxhash

from tierd.errors import InvalidArgument, StorageError, StorageFull
from tierd.units import GIB, MIB, format_size
from tierd_engine.ggufheader import check_gguf, check_gguf_whole
from tierd_engine.loading import quiet, reading, require_whole
from tierd_engine.modelcheck import check_folder
from tierd_engine.weights import add_file

# Raised when what a conversion writes changes.
_CONVERSION = 2
_ENTRY_PREFIX = "gguf-"
_WORK_PREFIX = ".converting-"
_DAY_SECONDS = 24 * 3600
UNUSED_SECONDS_MAX = 30 * _DAY_SECONDS
SPARED_SECONDS = _DAY_SECONDS
# 16 GiB: thirty of the demo's model (517 MiB), or one of four billion float32 parameters.
TOTAL_BYTES_MAX = 16 * GIB
# 600 s: 30 GiB, an 8-billion-parameter model in float32, at 50 MiB/s.
LOCK_SECONDS_MAX = 600.0
_LOCK_POLL_SECONDS = 0.1
# Beside the weights: a config, and a tokenizer of some MiB.
_BESIDE_WEIGHTS_BYTES = 32 * MIB


def model_cache_folder() -> Path:
    """Return the folder for converted models."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The specification of base directories: a relative path is to be ignored.
    if not os.path.isabs(base):
        base = os.path.expanduser("~/.cache")
    return Path(base) / "tierd" / "models"


def needs_conversion(source: Path) -> bool:
    """Return whether a run of this .gguf file would first convert it, which takes a while."""
    return not _is_whole(model_cache_folder() / _entry_name(source))


def converted_gguf(source: Path, check_config: Callable[[Any], object]) -> Path:
    """Return a folder in Hugging Face layout with what a .gguf file holds, float32.

    `check_config` is called with transformers' config before anything is
    written, and raises if the model cannot run. Raises InvalidArgument for a
    broken file, StorageError or StorageFull for the cache folder.
    """
    check_gguf(source)
    folder = model_cache_folder()
    target = folder / _entry_name(source)
    _mark_used(target)
    if _is_whole(target):
        _tidy_if_idle(folder)
        return target
    check_gguf_whole(source)
    with _writing(folder, 0):
        folder.mkdir(parents=True, exist_ok=True)
    with _lock(folder, LOCK_SECONDS_MAX) as held:
        if not held:
            raise StorageError(
                f"another process has been converting a model in {folder} for "
                f"{LOCK_SECONDS_MAX / 60:.0f} minutes; try again when it has ended"
            )
        # Another process may have converted it while this one waited.
        if not _is_whole(target):
            _convert(source, target, check_config)
        tidy(folder, time.time())
    return target


def _entry_name(source: Path) -> str:
    hasher = xxhash.xxh3_128()
    size = source.stat().st_size
    version = importlib.metadata.version("transformers")
    hasher.update(f"{_CONVERSION}:{version}:{size}:".encode())
    add_file(hasher, source)
    return f"{_ENTRY_PREFIX}{hasher.hexdigest()}"


def _is_whole(entry: Path) -> bool:
    try:
        check_folder(entry)
    except InvalidArgument:
        return False
    return True


def _mark_used(entry: Path) -> None:
    # Another user's folder, or a read-only disk: then nobody removes it either.
    with contextlib.suppress(OSError):
        os.utime(entry)


@contextlib.contextmanager
def _lock(folder: Path, wait_seconds: float) -> Iterator[bool]:
    """Hold the folder's lock, or tell after `wait_seconds` that another process does."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + wait_seconds
        held = _try_lock(descriptor)
        while not held and time.monotonic() < deadline:
            time.sleep(_LOCK_POLL_SECONDS)
            held = _try_lock(descriptor)
        yield held
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _tidy_if_idle(folder: Path) -> None:
    with contextlib.suppress(OSError), _lock(folder, 0.0) as held:
        if held:
            tidy(folder, time.time())


def tidy(folder: Path, now: float) -> None:
    """Remove what dead processes left, and entries long unused or beyond the folder's bound.

    The caller holds the folder's lock. `now` is seconds since the epoch.
    """
    for work in folder.glob(f"{_WORK_PREFIX}*"):
        shutil.rmtree(work, ignore_errors=True)
    entries = []
    for path in folder.glob(f"{_ENTRY_PREFIX}*"):
        size = sum(file.stat().st_size for file in path.iterdir())
        entries.append((path.stat().st_mtime, size, path))
    total = sum(size for _, size, _ in entries)
    for used, size, path in sorted(entries):
        unused_seconds = now - used
        too_much = total > TOTAL_BYTES_MAX and unused_seconds > SPARED_SECONDS
        if too_much or unused_seconds > UNUSED_SECONDS_MAX:
            _remove(path)
            total -= size


def _remove(entry: Path) -> None:
    gone = entry.with_name(f"{_WORK_PREFIX}{entry.name}")
    entry.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def _convert(source: Path, target: Path, check_config: Callable[[Any], object]) -> None:
    folder = target.parent
    tidy(folder, time.time())
    with _writing(folder, 0):
        work = Path(tempfile.mkdtemp(prefix=_WORK_PREFIX, dir=folder))
    try:
        _write_converted(source, work, check_config)
        if target.exists():  # not whole: its disk or its owner damaged it
            _remove(target)
        (work / "model").rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _write_converted(source: Path, work: Path, check_config: Callable[[Any], object]) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # Alone in a folder: transformers would read a tokenizer or template that lies beside it.
    alone = work / "source"
    alone.mkdir()
    (alone / "model.gguf").symlink_to(source.resolve())
    with _reading(source, alone):
        model, info = AutoModelForCausalLM.from_pretrained(
            alone,
            gguf_file="model.gguf",
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    with _reading(source, alone):
        tokenizer = AutoTokenizer.from_pretrained(alone, gguf_file="model.gguf")
    require_whole(info, source)
    check_config(model.config)
    # What was loaded is plain float32; only the marker of its origin stands in the way.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    needed_bytes = _BESIDE_WEIGHTS_BYTES + sum(
        parameter.numel() * parameter.element_size() for parameter in model.parameters()
    )
    with _writing(work.parent, needed_bytes), quiet():
        tokenizer.save_pretrained(work / "model")
        model.save_pretrained(work / "model")
        _sync(work / "model")


@contextlib.contextmanager
def _reading(source: Path, alone: Path) -> Iterator[None]:
    try:
        with reading(f"cannot read {source}: it is damaged, or of a kind that is not supported"):
            yield
    except InvalidArgument as error:
        # The user knows their file, not where it was linked to.
        text = str(error).replace(str(alone / "model.gguf"), str(source))
        raise InvalidArgument(text.replace(str(alone), str(source.parent))) from error


@contextlib.contextmanager
def _writing(folder: Path, needed_bytes: int) -> Iterator[None]:
    """Turn what writing to the cache folder may raise into one line with a way out."""
    from safetensors import SafetensorError

    way_out = "free some, or set XDG_CACHE_HOME to a folder elsewhere"
    if needed_bytes and shutil.disk_usage(folder).free < needed_bytes:
        raise StorageFull(
            f"the model cache {folder} has {format_size(shutil.disk_usage(folder).free)} free; "
            f"the converted model takes {format_size(needed_bytes)}: {way_out}"
        )
    try:
        yield
    except (OSError, SafetensorError) as error:
        # safetensors tells the system's error in its text only.
        code = getattr(error, "errno", None)
        if code in (errno.ENOSPC, errno.EDQUOT) or f"os error {errno.ENOSPC}" in str(error):
            raise StorageFull(f"the model cache {folder} is full: {way_out}") from error
        reason = getattr(error, "strerror", None) or str(error)
        raise StorageError(
            f"the model cache {folder} cannot be written: {reason}; "
            "set XDG_CACHE_HOME to a folder elsewhere"
        ) from error


def _sync(folder: Path) -> None:
    """Have every file on the disk before the rename says that it is."""
    for path in [*folder.iterdir(), folder]:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
