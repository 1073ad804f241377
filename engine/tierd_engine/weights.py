"""Digests of weight files: what makes KV of two models different."""

from __future__ import annotations

from pathlib import Path

import xxhash

from tierd.units import MIB

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf")
# Files up to this size are hashed whole; of larger ones, the ends and evenly spaced pieces.
_HASH_WHOLE_BYTES = 2048 * MIB
_HASH_PIECES = 256


def weights_digest(folder: Path) -> str:
    """Return a digest of the weight files: whole up to 2 GiB a file, sampled beyond."""
    hasher = xxhash.xxh3_128()
    for path in sorted(path for path in folder.iterdir() if path.suffix in _WEIGHT_SUFFIXES):
        hasher.update(f"{path.name}:{path.stat().st_size}".encode())
        add_file(hasher, path)
    return hasher.hexdigest()


def add_file(hasher: xxhash.xxh3_128, path: Path) -> None:
    """Feed a file to a hasher: whole up to 2 GiB, sampled beyond."""
    size = path.stat().st_size
    step = MIB if size <= _HASH_WHOLE_BYTES else size // _HASH_PIECES
    with path.open("rb") as file:
        for start in [*range(0, size, step), max(0, size - MIB)]:
            file.seek(start)
            hasher.update(file.read(MIB))
