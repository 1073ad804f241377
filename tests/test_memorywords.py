"""Want of memory is the same to the command, to its door and to what reads a model's files."""

import pytest

from tierd import memorywords
from tierd.cli import door, exits
from tierd.cli.shortage import is_shortage
from tierd.errors import InvalidArgument
from tierd_engine.loading import reading

SAID = [
    "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: 9 bytes",
    "unable to mmap 9 bytes from file <w>: Cannot allocate memory (12)",
    "Unable to allocate 9.00 GiB for an array with shape (9,) and data type float32",
    "DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes",
    "libx.so: failed to map segment from shared object",
    "std::bad_alloc",
    "error return without exception set",
]


@pytest.mark.parametrize("said", SAID)
def test_who_meets_it_takes_it_for_want_of_memory(
    said: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(argv: object) -> int:
        raise SystemError(said)

    assert is_shortage(RuntimeError(said)) and is_shortage(ImportError(said))
    with pytest.raises(MemoryError), reading("cannot read it"):
        raise RuntimeError(said)
    monkeypatch.setattr(door, "_main", fail)
    assert door.main([]) == exits.FAILED
    assert "out of memory" in capfd.readouterr().err


def test_each_of_the_words_stands_for_something_that_is_said() -> None:
    for words in memorywords.WORDS:
        assert any(words in said.lower() for said in SAID), words


def test_other_errors_are_what_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(argv: object) -> int:
        raise SystemError("a bug")

    assert not is_shortage(RuntimeError("a bug"))
    with pytest.raises(InvalidArgument, match="cannot read it: a bug"), reading("cannot read it"):
        raise RuntimeError("a bug")
    monkeypatch.setattr(door, "_main", fail)
    with pytest.raises(SystemError):
        door.main([])
