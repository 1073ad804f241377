"""Documents: every way a file can be wrong has one clear line."""

import io
from pathlib import Path
from typing import Any

import pytest

from tierd.cli import document
from tierd.errors import InvalidArgument


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        ("\ufeff".encode(), "is empty"),
        (b"\n" * 5000, "holds nothing but blanks and line ends"),
        ("\ufeff \r\n\t\u3000".encode(), "holds nothing but blanks and line ends"),
        (b"caf\xe9 au lait", "not UTF-8 text: byte 3 is 0xe9"),
        ("text".encode("utf-16"), "not UTF-8"),
    ],
)
def test_a_file_without_text_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "d.txt"
    path.write_bytes(content)
    with pytest.raises(InvalidArgument, match=message) as caught:
        document.read_document(str(path))
    assert str(path) in str(caught.value)


def test_a_missing_file_a_folder_and_an_unreadable_file_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="not found"):
        document.read_document(str(tmp_path / "none.txt"))
    with pytest.raises(InvalidArgument, match="is a folder"):
        document.read_document(str(tmp_path))
    file = tmp_path / "d.txt"
    file.write_text("text")
    with pytest.raises(InvalidArgument, match="cannot be read"):
        document.read_document(str(file / "below"))


def test_text_is_returned_unchanged_but_for_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "d.txt"
    path.write_bytes("\ufeffgrüße\r\n漢".encode())
    assert document.read_document(str(path)) == "grüße\r\n漢"


def test_a_dash_reads_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"from a pipe")))
    assert document.read_document("-") == "from a pipe"


def test_an_empty_stdin_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"")))
    with pytest.raises(InvalidArgument, match="stdin is empty"):
        document.read_document("-")


def test_a_document_too_large_is_refused_before_it_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(document, "DOCUMENT_BYTES_MAX", 10)
    path = tmp_path / "d.txt"
    path.write_bytes(b"\xff" * 11)
    with pytest.raises(InvalidArgument, match="larger than"):
        document.read_document(str(path))


def test_the_engine_is_not_started_for_a_document_that_is_not_there(tierd: Any, world: Any) -> None:
    outcome = tierd("generate", "--model", "m", "--document", "/none", "--prompt", "p")
    assert outcome.code == 2
    assert outcome.err == "tierd: error: document /none not found\n"
    assert world.specs == []


def test_reading_a_document_maps_no_more_than_it_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(document, "DOCUMENT_BYTES_MAX", 1 << 50)  # nobody has so much
    path = tmp_path / "d.txt"
    path.write_text("text")
    assert document.read_document(str(path)) == "text"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"from a pipe")))
    assert document.read_document("-") == "from a pipe"
