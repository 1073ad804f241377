"""Checks of what a user wrote, before anything slow is imported. Each names its option.

All raise InvalidArgument (or StorageError where a folder cannot be used), one line.
"""

from __future__ import annotations

import os
from pathlib import Path

from tierd.errors import InvalidArgument, StorageError, TierdError
from tierd.types import BLOCK_TOKENS_MAX, BLOCK_TOKENS_MIN
from tierd.units import format_size, parse_duration, parse_share, parse_size

ROPE_KINDS = ("linear", "yarn")


def named(option: str, value: str | None) -> str | None:
    """Return what names a file, a socket or a session. Refuses what names nothing."""
    if value is not None and (not value.strip() or "\0" in value):
        raise InvalidArgument(f"{option} is empty: it must name something")
    return value


def text(option: str, value: str) -> str:
    """Return text for a model. Refuses bytes that are not UTF-8 (a shell passes them on)."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidArgument(
            f"{option} is not UTF-8 text: character {error.start + 1} is a stray byte"
        ) from None
    return value


def budget(option: str, value: str | None) -> str | None:
    """Return a tier's budget, in bytes or percent. Refuses more than the machine has."""
    if value is None:
        return None
    total = _memory_bytes()
    if _share(option, value) > total:  # a percentage of nothing is nothing
        raise InvalidArgument(
            f"{option} {value} is more than this machine's memory, {format_size(total)}"
        )
    return value


def size(option: str, value: str | None, *, smallest_bytes: int) -> int | None:
    """Return a size in bytes, at least the smallest that works."""
    if value is None:
        return None
    try:
        found = parse_size(value)
    except InvalidArgument as error:
        raise InvalidArgument(f"{option}: {error}") from None
    if found < smallest_bytes:
        raise InvalidArgument(
            f"{option} {value} is too small; the smallest that works is "
            f"{format_size(smallest_bytes)}"
        )
    return found


def block_tokens(value: int | None) -> int | None:
    """Return the tokens of a block."""
    if value is None:
        return None
    is_power = value > 0 and value & (value - 1) == 0
    if not is_power or not BLOCK_TOKENS_MIN <= value <= BLOCK_TOKENS_MAX:
        raise InvalidArgument(
            f"--block-tokens is {value}; it must be a power of two, "
            f"{BLOCK_TOKENS_MIN} to {BLOCK_TOKENS_MAX} tokens"
        )
    return value


def rope_scaling(value: str | None) -> str | None:
    """Return KIND:FACTOR."""
    if value is None:
        return None
    kind, _, factor = value.partition(":")
    try:
        number = float(factor)
    except ValueError:
        number = 0.0
    if kind not in ROPE_KINDS or not 1.0 <= number <= 1024.0:
        raise InvalidArgument(
            f"--rope-scaling {value!r} is not understood; write linear:FACTOR or yarn:FACTOR, "
            "with a factor of 1 to 1024"
        )
    return value


def cold_folder(option: str, value: str | None) -> Path | None:
    """Return a folder for cold pages, made if it is the only one missing in its path."""
    if named(option, value) is None:
        return None
    folder = Path(os.path.expanduser(str(value))).absolute()
    usable_folder(folder)
    return folder


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


def _share(option: str, value: str) -> int:
    try:
        return parse_share(value, 0)
    except TierdError as error:
        raise InvalidArgument(f"{option}: {error}") from None


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def duration(option: str, value: str) -> float:
    """Return the seconds of "30s" or "250ms"; 0 is allowed. Raises InvalidArgument."""
    try:
        return parse_duration(value)
    except InvalidArgument as error:
        raise InvalidArgument(f"{option}: {error}") from None
