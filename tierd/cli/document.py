"""Documents: a user's UTF-8 text, or CPython's own language reference."""

from __future__ import annotations

import sys
from pathlib import Path

from tierd.errors import InvalidArgument
from tierd.units import GIB, format_size

# Ten million tokens of English are 40 MiB; what is larger by far is no text.
DOCUMENT_BYTES_MAX = 1 * GIB


def read_document(name: str) -> str:
    """Return the text of a file, or of stdin for "-". Raises InvalidArgument with one line."""
    shown = "stdin" if name == "-" else name
    data = sys.stdin.buffer.read(DOCUMENT_BYTES_MAX + 1) if name == "-" else _read_file(name)
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
        raise InvalidArgument(f"document {shown} is empty")
    return text


def _read_file(name: str) -> bytes:
    path = Path(name).expanduser()
    try:
        with path.open("rb") as file:
            return file.read(DOCUMENT_BYTES_MAX + 1)
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
