"""Sizes and durations as people write them: "64MiB", "250ms", "25%"."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction

from tierd.errors import InvalidArgument

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
TIB = 1024 * GIB

CACHE_LINE_BYTES = 64
SECTOR_BYTES = 4096  # O_DIRECT and GPUDirect Storage both ask for this alignment
# A step reads a layer at a time. A disk is at its full speed from about 1 MiB an I/O; where I/Os
# are counted, as with disks of virtual machines, pages of 108 KiB read one by one come at half of
# it, and take four times the processor's time. So a layer's pages are laid side by side, and read,
# so many bytes together.
RUN_BYTES = MIB

_SIZE_FACTORS = {
    "": 1, "b": 1,
    "kib": KIB, "mib": MIB, "gib": GIB, "tib": TIB,
    "k": KIB, "m": MIB, "g": GIB, "t": TIB,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip
_DURATION_FACTORS = {"": 1.0, "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
# Twenty digits hold any 64-bit number; without a bound a float becomes infinity.
_NUMBER_UNIT = re.compile(r"\s*([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([a-zA-Z]*)\s*\Z", re.ASCII)


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def _parse(text: str, factors: Mapping[str, float], what: str, example: str) -> Fraction:
    match = _NUMBER_UNIT.match(text)
    factor = factors.get(match.group(2).lower()) if match else None
    if match is None or factor is None:
        raise InvalidArgument(f"{text!r} is not a {what}; write it as {example}")
    return Fraction(match.group(1)) * Fraction(factor)


def parse_size(text: str) -> int:
    """Return bytes for "64MiB", "1.5GiB", "4096". Raises InvalidArgument."""
    return int(_parse(text, _SIZE_FACTORS, "size", '"64MiB" or "1.5GiB"'))


def parse_duration(text: str) -> float:
    """Return seconds for "250ms", "2s", "5m". Raises InvalidArgument."""
    return float(_parse(text, _DURATION_FACTORS, "duration", '"250ms" or "2s"'))


def parse_share(text: str, whole_bytes: int) -> int:
    """Return bytes for a size ("64MiB") or a percentage ("25%") of `whole_bytes`."""
    stripped = text.strip()
    if not stripped.endswith("%"):
        return parse_size(stripped)
    try:
        percent = _parse(stripped[:-1], {"": 1.0}, "percentage", '"25%"')
    except InvalidArgument:
        raise InvalidArgument(f'{text!r} is not a percentage; write it as "25%"') from None
    if percent > 100:
        raise InvalidArgument(f"{text!r} is more than 100%")
    return int(whole_bytes * percent / 100)


def format_size(size_bytes: float) -> str:
    """Return "1.5 GiB" for 1610612736."""
    for unit, factor in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(size_bytes) >= factor:
            return f"{size_bytes / factor:.1f} {unit}"
    return f"{int(size_bytes)} B"
