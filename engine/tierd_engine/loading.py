"""Calls into transformers: quiet on the terminal, and what they raise is one clear line."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from tierd.errors import InvalidArgument, TierdError
from tierd.memorywords import NO_THREAD, says_shortage

_CAUSE_LINES_MAX = 6


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' progress bars and warnings off the user's terminal."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


@contextlib.contextmanager
def reading(failure: str) -> Iterator[None]:
    """Run one call that reads a user's files, quietly; raise InvalidArgument if it fails.

    Broken files come out of transformers, tokenizers and safetensors as
    errors of any class, a bare Exception among them, so that no list of
    classes is whole. What is not the files' fault passes: too little memory,
    too few threads, a package that is not installed.
    """
    try:
        with quiet():
            yield
    except (TierdError, MemoryError, ModuleNotFoundError):
        raise
    except Exception as error:
        if says_shortage(str(error)):
            raise MemoryError(cause_line(error)) from error
        if NO_THREAD in str(error):  # what to do about it is the command's to say
            raise
        raise InvalidArgument(f"{failure}: {cause_line(error)}") from error


def cause_line(error: Exception) -> str:
    """Return an error's first line, with those after it while they only continue it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    count = 1
    while count < min(len(lines), _CAUSE_LINES_MAX) and lines[count - 1].endswith((":", ",")):
        count += 1
    line = " ".join(lines[:count])
    # A KeyError's text is the key alone.
    return f"{line} is missing or not known" if isinstance(error, KeyError) else line


def require_whole(info: Mapping[str, Any], source: object) -> None:
    """Raise InvalidArgument unless the weights are those that the config describes.

    `info` is transformers' `output_loading_info`: it fills what is missing
    with random numbers and ignores what it does not expect.
    """
    names = {
        "missing": sorted(info["missing_keys"]),
        "unexpected": sorted(info["unexpected_keys"]),
        "of another shape": sorted(entry[0] for entry in info["mismatched_keys"]),
    }
    parts = [f"{len(found)} {what} (as {found[0]})" for what, found in names.items() if found]
    parts += [str(message) for message in info.get("error_msgs", ())][:1]
    if parts:
        raise InvalidArgument(
            f"the weights in {source} do not match its config: tensors {', '.join(parts)}"
        )
