"""Documents: a user's UTF-8 text, or CPython's own language reference."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import BinaryIO

from tierd.errors import InvalidArgument
from tierd.units import GIB, MIB, format_size

# Ten million tokens of English are 40 MiB; what is larger by far is no text.
DOCUMENT_BYTES_MAX = 1 * GIB
_READ_BYTES = 1 * MIB


def read_document(name: str) -> str:
    """Return the text of a file, or of stdin for "-". Raises InvalidArgument with one line."""
    shown = "stdin" if name == "-" else name
    data = _read(sys.stdin.buffer) if name == "-" else _read_file(name)
    if len(data) > DOCUMENT_BYTES_MAX:
        raise InvalidArgument(f"document {shown} is larger than {format_size(DOCUMENT_BYTES_MAX)}")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidArgument(
            f"document {shown} is not UTF-8 text: byte {error.start} is "
            f"0x{data[error.start]:02x}; convert it, for example with iconv"
        ) from None
    if not text.strip():
        holds = "holds nothing but blanks and line ends" if text else "is empty"
        raise InvalidArgument(f"document {shown} {holds}")
    return text


def _read(file: BinaryIO) -> bytearray:
    """Return what a file holds, or more than a document may. `read(n)` would map all of n first."""
    data = bytearray()
    while len(data) <= DOCUMENT_BYTES_MAX and (piece := file.read(_READ_BYTES)):
        data += piece
    return data


def _read_file(name: str) -> bytearray:
    path = Path(name).expanduser()
    try:
        with path.open("rb") as file:
            return _read(file)
    except FileNotFoundError:
        raise InvalidArgument(f"document {name} not found") from None
    except IsADirectoryError:
        raise InvalidArgument(f"document {name} is a folder, not a file") from None
    except OSError as error:
        raise InvalidArgument(f"document {name} cannot be read: {error.strerror}") from None


def language_reference() -> str:
    """Return CPython's language reference: 465 KB of English that every installation carries."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics.values())
