"""GGUF headers, read without torch: is a file one, and is all of it there?

The format: github.com/ggml-org/ggml, docs/gguf.md.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path

from tierd.errors import InvalidArgument

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_HEADER = struct.Struct("<4sIQQ")
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
# The least that one entry takes: a key's length, its byte, a type and a one-byte value; a
# name's length, its byte, the number of dimensions, one dimension, a type and an offset.
_KEY_BYTES_MIN = 8 + 1 + 4 + 1
_TENSOR_BYTES_MIN = 8 + 1 + 4 + 8 + 4 + 8
# Bytes of a value by its type's number.
_VALUE_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9
_SIGNED = frozenset({1, 3, 5, 11})
_INTEGERS = _SIGNED | {0, 2, 4, 10}
_DIMENSIONS_MAX = 8
_ARRAY_DEPTH_MAX = 4


def check_gguf(path: Path) -> None:
    """Raise InvalidArgument if a file's first bytes are not a GGUF header that fits its size."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(_HEADER.size)
    if start[:4] != _MAGIC:
        raise InvalidArgument(f"{path} is no GGUF file: it does not begin with GGUF")
    if len(start) < _HEADER.size:
        raise InvalidArgument(f"{path} is cut short: it has {size} bytes")
    _, version, tensors, keys = _HEADER.unpack(start)
    if version not in _VERSIONS:
        raise InvalidArgument(f"{path} is of GGUF version {version}; 2 and 3 can be read")
    if not tensors or not keys:
        raise InvalidArgument(f"{path} holds no model: {tensors} tensors, {keys} keys")
    least = _HEADER.size + tensors * _TENSOR_BYTES_MIN + keys * _KEY_BYTES_MIN
    if size < least:
        raise InvalidArgument(
            f"{path} is cut short: it has {size} bytes and lists {tensors} tensors"
        )


def count_elements(path: Path) -> int:
    """Return how many numbers a GGUF file's tensors hold.

    Walks the whole header: a tenth of a second for 100,000 tokens. Raises
    InvalidArgument if keys or tensors are damaged or reach beyond the file's end.
    """
    check_gguf(path)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _Walk(path, data).count_elements()


def read_integers(path: Path) -> dict[str, int]:
    """Return a GGUF file's keys whose value is one integer. Raises as `count_elements`."""
    check_gguf(path)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _Walk(path, data).read_integers()


class _Walk:
    """One pass over a header. `_at` is where the next field begins."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._size = len(data)
        self._at = _HEADER.size

    def count_elements(self) -> int:
        _, _, tensors, keys = _HEADER.unpack_from(self._data, 0)
        for _ in range(keys):
            self._skip_string()
            self._skip_value(self._u32(), 0)
        elements = last = 0
        for _ in range(tensors):
            elements += self._tensor_elements()
            last = max(last, self._u64())
        # Data begins after the header; a tensor that begins at the file's end is not there.
        if self._at + last >= self._size:
            raise InvalidArgument(
                f"{self._path} is cut short: it has {self._size} bytes, and its last tensor "
                f"begins at {self._at + last}"
            )
        return elements

    def read_integers(self) -> dict[str, int]:
        _, _, _, keys = _HEADER.unpack_from(self._data, 0)
        found: dict[str, int] = {}
        for _ in range(keys):
            begin = self._at + _U64.size
            self._skip_string()
            key = self._data[begin : self._at].decode("utf-8", "replace")
            kind, at = self._u32(), self._at
            self._skip_value(kind, 0)
            if kind in _INTEGERS:
                signed = kind in _SIGNED
                found[key] = int.from_bytes(self._data[at : self._at], "little", signed=signed)
        return found

    def _skip(self, count: int) -> None:
        self._at += count
        if self._at > self._size:
            raise InvalidArgument(
                f"{self._path} is damaged or cut short: it has {self._size} bytes, and its "
                f"header goes on to {self._at}"
            )

    def _u32(self) -> int:
        self._skip(_U32.size)
        return int(_U32.unpack_from(self._data, self._at - _U32.size)[0])

    def _u64(self) -> int:
        self._skip(_U64.size)
        return int(_U64.unpack_from(self._data, self._at - _U64.size)[0])

    def _skip_string(self) -> None:
        self._skip(self._u64())

    def _skip_value(self, kind: int, depth: int) -> None:
        if kind == _STRING:
            self._skip_string()
        elif kind == _ARRAY and depth < _ARRAY_DEPTH_MAX:
            self._skip_array(depth)
        elif kind in _VALUE_BYTES:
            self._skip(_VALUE_BYTES[kind])
        else:
            raise InvalidArgument(f"{self._path} is damaged: its header has a value of type {kind}")

    def _skip_array(self, depth: int) -> None:
        kind, count = self._u32(), self._u64()
        if kind in _VALUE_BYTES:
            self._skip(count * _VALUE_BYTES[kind])
            return
        # Each takes eight bytes at least: a count beyond the file's end is damage, not work.
        self._skip(8 * count)
        self._at -= 8 * count
        for _ in range(count):
            self._skip_value(kind, depth + 1)

    def _tensor_elements(self) -> int:
        """Return the elements of the tensor here, and stop before its offset."""
        self._skip_string()
        dimensions = self._u32()
        if not 1 <= dimensions <= _DIMENSIONS_MAX:
            raise InvalidArgument(f"{self._path} is damaged: a tensor has {dimensions} dimensions")
        elements = math.prod(self._u64() for _ in range(dimensions))
        self._u32()  # its type
        return elements
