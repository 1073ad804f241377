"""Checks of what a user wrote, before anything slow is imported. Each names its option.

All raise InvalidArgument (or StorageError where a folder cannot be used), one line.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from tierd.errors import DeviceUnavailable, InvalidArgument, StorageError, TierdError
from tierd.types import BLOCK_TOKENS_MAX, BLOCK_TOKENS_MIN
from tierd.units import format_size, parse_duration, parse_share, parse_size

ROPE_KINDS = ("linear", "yarn")
DAY_SECONDS = 86400.0  # a wait that is longer is a slip of the pen
_NEVER_EMPTY = ("--hot",)  # warm may be, beside a hot tier that holds all
# A file of the driver is there from the moment it is loaded: no CUDA library need be.
_GPU_PATHS = ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/nvmap", "/dev/dxg")


def named(option: str, value: str | None) -> str | None:
    """Return what names a file, a socket or a session. Refuses what names nothing."""
    if value is not None and (not value.strip() or "\0" in value):
        raise InvalidArgument(f"{option} is empty: it must name something")
    return value


def text(option: str, value: str) -> str:
    """Return text for a model. Refuses none, and bytes that are not UTF-8 (a shell passes them)."""
    if not value.strip():
        holds = "holds nothing but blanks and line ends" if value else "is empty"
        raise InvalidArgument(f"{option} {holds}: it must say something")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidArgument(
            f"{option} is not UTF-8 text: character {error.start + 1} is a stray byte"
        ) from None
    return value


def session(option: str, value: str) -> str:
    """Return a session's id. Refuses what is none."""
    from tierd.rpc.wire import session_number

    named(option, value)
    try:
        session_number(value)
    except InvalidArgument as error:
        raise InvalidArgument(f"{option}: {error}") from None
    return value


def budget(option: str, value: str) -> str:
    """Return a tier's budget, in bytes or percent. Refuses more than the machine has."""
    total = _memory_bytes()
    if _share(option, value, total) == 0 and option in _NEVER_EMPTY:
        raise InvalidArgument(f"{option} {value} holds nothing; leave it out for what works")
    if _share(option, value, 0) > total:  # a percentage of nothing is nothing
        raise InvalidArgument(
            f"{option} {value} is more than this machine's memory, {format_size(total)}"
        )
    return value


def size(option: str, value: str, *, smallest_bytes: int, where: str = "") -> int:
    """Return a size in bytes, at least the smallest that works (`where`, if not everywhere)."""
    try:
        found = parse_size(value)
    except InvalidArgument as error:
        raise InvalidArgument(f"{option}: {error}") from None
    if found < smallest_bytes:
        raise InvalidArgument(
            f"{option} {value} is too small; the smallest that works is "
            f"{format_size(smallest_bytes)}{where}"
        )
    return found


def block_tokens(option: str, value: int) -> int:
    """Return the tokens of a block."""
    is_power = value > 0 and value & (value - 1) == 0
    if not is_power or not BLOCK_TOKENS_MIN <= value <= BLOCK_TOKENS_MAX:
        raise InvalidArgument(
            f"{option} is {value}; it must be a power of two, "
            f"{BLOCK_TOKENS_MIN} to {BLOCK_TOKENS_MAX} tokens"
        )
    return value


def rope_scaling(option: str, value: str) -> str:
    """Return KIND:FACTOR."""
    kind, _, factor = value.partition(":")
    try:
        number = float(factor)
    except ValueError:
        number = 0.0
    if kind not in ROPE_KINDS or not 1.0 <= number <= 1024.0:
        raise InvalidArgument(
            f"{option} {value!r} is not understood; write linear:FACTOR or yarn:FACTOR, "
            "with a factor of 1 to 1024"
        )
    return value


def folder(option: str, value: str | None) -> Path | None:
    """Return the path of a folder, which need not be there."""
    if named(option, value) is None:
        return None
    return Path(os.path.expanduser(str(value))).absolute()


def cold_folder(option: str, value: str | None) -> Path | None:
    """Return a folder for cold pages, made if it is the only one missing in its path."""
    found = folder(option, value)
    if found is not None:
        usable_folder(found)
    return found


def usable_folder(folder: Path) -> None:
    """Make a folder whose parent exists, and see that it can be written."""
    try:
        if not folder.is_dir():
            if folder.exists():
                raise StorageError(f"cold folder {folder} is a file, not a folder")
            if not folder.parent.is_dir():
                raise StorageError(
                    f"cold folder {folder} cannot be made: {folder.parent} is no folder"
                )
            folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise StorageError(f"cold folder {folder} cannot be used: {error.strerror}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise StorageError(f"cold folder {folder} is not writable")
    try:  # what the kernel makes up, as /proc, is writable and takes no file
        tempfile.TemporaryFile(dir=folder, prefix="tierd-").close()
    except OSError as error:
        raise StorageError(
            f"cold folder {folder} cannot be used: no file can be made in it ({error.strerror})"
        ) from None


def _share(option: str, value: str, whole_bytes: int) -> int:
    try:
        return parse_share(value, whole_bytes)
    except TierdError as error:
        raise InvalidArgument(f"{option}: {error}") from None


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def duration(option: str, value: str, *, longest_seconds: float = DAY_SECONDS) -> float:
    """Return the seconds of "30s" or "250ms"; 0 is allowed. Raises InvalidArgument."""
    try:
        seconds = parse_duration(value)
    except InvalidArgument as error:
        raise InvalidArgument(f"{option}: {error}") from None
    if seconds > longest_seconds:
        raise InvalidArgument(f"{option} {value} is more than {longest_seconds:g} s")
    return seconds


def device(name: str, weights: str) -> None:
    """Refuse a GPU where no driver is loaded, and what a GPU does not do.

    The engine looks more closely, once it is loaded. Raises DeviceUnavailable, InvalidArgument.
    """
    if name != "cuda":
        return
    if weights == "int8":
        raise InvalidArgument("--weights int8 runs on the CPU: give --device cpu, or leave it out")
    if not any(os.path.exists(path) for path in _GPU_PATHS):
        raise DeviceUnavailable(
            "--device cuda: no NVIDIA driver is loaded (nvidia-smi?); or give --device cpu"
        )
