"""Codecs by name, and per layer: a base codec, its exceptions, what may stand in for a codec.

A user writes `k8v4,layers:0-1=int8,layers:5=raw`. The exceptions travel in one
canonical text, `0-1=int8,5=raw`: ranges ascending, adjacent ones of one codec
joined, no layer of the base codec named. "" is no exception: so a namespace
has one way to be written, and its digest one value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from tierd.errors import InvalidArgument
from tierd.types import CodecId, Namespace

CODEC_NAMES = tuple(codec.name.lower() for codec in CodecId if codec is not CodecId.NONE)
_LAYERS_MAX = 65535  # a geometry's own limit
_RANGE = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?=([a-z0-9]+)")
_PREFIX = "layers:"
# What a page may be stored as where its own codec is not good enough, next best first.
# fp8 is coarser than int8 at the same size; each rung keeps more than the one before.
_BETTER = {
    CodecId.INT4: (CodecId.K8V4, CodecId.INT8, CodecId.RAW),
    CodecId.K8V4: (CodecId.INT8, CodecId.RAW),
    CodecId.FP8: (CodecId.INT8, CodecId.RAW),
    CodecId.INT8: (CodecId.RAW,),
    CodecId.RAW: (),
}


def parse_codec(text: str) -> CodecId:
    """Return the codec of a name such as "int8". Raises InvalidArgument naming the choices."""
    name = text.strip().lower()
    if name in CODEC_NAMES:
        return CodecId[name.upper()]
    raise InvalidArgument(f"{text!r} is not a codec; choose one of {', '.join(CODEC_NAMES)}")


def better_codecs(codec: CodecId) -> tuple[CodecId, ...]:
    """Return the codecs that keep more of a page than `codec`, next best first."""
    return _BETTER[codec]


@dataclass(frozen=True, slots=True)
class CodecChoice:
    """A base codec and its exceptions in canonical text: what a namespace holds of it."""

    base: CodecId
    layers: str = ""

    def per_layer(self, layers: int) -> tuple[CodecId, ...]:
        """Return the codec of each layer. Raises InvalidArgument for a text that is not right."""
        codecs = [self.base] * layers
        named: dict[int, CodecId] = {}
        for part in self.layers.split(",") if self.layers else ():
            _add(named, part, self.layers)
        for layer, codec in named.items():
            if layer >= layers:
                raise InvalidArgument(
                    f"codec {self} names layer {layer}; the model has layers 0 to {layers - 1}"
                )
            codecs[layer] = codec
        if format_layers(self.base, named) != self.layers:
            raise InvalidArgument(f"codec_layers {self.layers!r} is not in canonical form")
        return tuple(codecs)

    def __str__(self) -> str:
        parts = [_PREFIX + part for part in self.layers.split(",") if part]
        return ",".join([self.base.name.lower(), *parts])


def parse_codec_choice(text: str) -> CodecChoice:
    """Return the choice that a user writes, as above. Raises InvalidArgument: what, and how.

    How many layers the model has is not known here: `layer_codecs` checks it.
    """
    first, *exceptions = (part.strip() for part in text.lower().split(","))
    if first.startswith(_PREFIX):
        raise InvalidArgument(f"codec {text!r} begins with layers; write k8v4,{first}")
    named: dict[int, CodecId] = {}
    base = parse_codec(first)
    for part in exceptions:
        if not part.startswith(_PREFIX):
            raise InvalidArgument(
                f"codec {text!r}: {part!r} is not understood; write {_PREFIX}0-1=int8"
            )
        _add(named, part.removeprefix(_PREFIX), text)
    return CodecChoice(base, format_layers(base, named))


def _add(named: dict[int, CodecId], part: str, text: str) -> None:
    found = _RANGE.fullmatch(part)
    if found is None:
        raise InvalidArgument(f"codec {text!r}: {part!r} is not understood; write 0-1=int8")
    first, last = int(found[1]), int(found[2] or found[1])
    if not first <= last < _LAYERS_MAX:
        raise InvalidArgument(f"codec {text!r}: layers {first} to {last} are no range")
    codec = parse_codec(found[3])
    for layer in range(first, last + 1):
        if layer in named:
            raise InvalidArgument(f"codec {text!r} names layer {layer} twice")
        named[layer] = codec


def format_layers(base: CodecId, named: Mapping[int, CodecId]) -> str:
    """Return the canonical text of the layers whose codec is not `base`."""
    ranges: list[tuple[int, int, CodecId]] = []
    for layer in sorted(layer for layer, codec in named.items() if codec is not base):
        codec = named[layer]
        if ranges and ranges[-1][1] == layer - 1 and ranges[-1][2] is codec:
            ranges[-1] = (ranges[-1][0], layer, codec)
        else:
            ranges.append((layer, layer, codec))
    return ",".join(
        f"{first}{f'-{last}' if last > first else ''}={codec.name.lower()}"
        for first, last, codec in ranges
    )


def describe_codecs(base: CodecId, codecs: Sequence[CodecId]) -> str:
    """Return a codec a layer as a user would write it."""
    return str(CodecChoice(base, format_layers(base, dict(enumerate(codecs)))))


@lru_cache(maxsize=256)
def layer_codecs(namespace: Namespace) -> tuple[CodecId, ...]:
    """Return the codec of each layer. Raises InvalidArgument for a text that is not canonical."""
    choice = CodecChoice(namespace.codec, namespace.codec_layers)
    return choice.per_layer(namespace.geometry.layers)
