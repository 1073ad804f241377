"""What pages below hot hold in a fidelity run, and what they took in the end.

A layout is written as a job's --codec is, `int4` or `k8v4,layers:0-1=int8`; with
`+guard` after it the quality guard is on, as it is in a job by default: then it gives
layers a better codec, and the bytes are those of what it gave. `q8_0`, the layout of
llama.cpp's cache, is a reference: its numbers, kept raw.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tierd.codec.layout import page_layout
from tierd.errors import InvalidArgument
from tierd.layercodecs import (
    CODEC_NAMES,
    CodecChoice,
    better_codecs,
    describe_codecs,
    parse_codec_choice,
)
from tierd.memory.slabs import smallest_budget
from tierd.types import CodecId, Geometry, Tier
from tierd_engine.session import SessionKV

Q8_0 = "q8_0"
_GUARD = "guard"
_Q8_GROUP = 32

# (keys or values [layers, kv_heads, tokens, head_dim]) -> the same, rounded
Rounding = Callable[[torch.Tensor], torch.Tensor]


def round_q8_0(x: torch.Tensor) -> torch.Tensor:
    """Return x rounded to 8 bits, symmetric, float16 scales over groups of 32 channels."""
    grouped = x.reshape(*x.shape[:-1], -1, _Q8_GROUP)
    scale = (grouped.abs().amax(-1, keepdim=True) / 127).half().float()
    codes = torch.where(scale > 0, (grouped / scale).round(), torch.zeros_like(grouped))
    rounded: torch.Tensor = (codes.clamp(-127, 127) * scale).flatten(-2)
    return rounded


@dataclass(frozen=True, slots=True)
class Layout:
    """What pages below hot hold: codecs' bytes, or `rounding`'s numbers kept raw.

    `codec` is the one asked for, by whose bar it is judged; `codec_layers` its exceptions,
    in canonical text; `guarded`: layers may get better ones.
    """

    name: str
    codec: CodecId
    rounding: Rounding | None = None
    codec_layers: str = ""
    guarded: bool = False

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Return the layout of CODEC[+guard], or the reference "q8_0". Raises InvalidArgument."""
        codec, plus, guard = text.strip().lower().partition("+")
        if plus and guard != _GUARD:
            raise InvalidArgument(f"{text!r} is not a layout; after + stands {_GUARD}")
        if codec == Q8_0:
            if plus:
                raise InvalidArgument(f"{Q8_0} is no codec of a job: it has no guard")
            return cls(Q8_0, CodecId.RAW, round_q8_0)
        if codec.partition(",")[0].strip() not in CODEC_NAMES:
            raise InvalidArgument(
                f"{text!r} is not a layout; choose one of {', '.join(CODEC_NAMES)}, {Q8_0}"
            )
        choice = parse_codec_choice(codec)
        return cls(f"{choice}{plus}{guard}", choice.base, None, choice.layers, bool(plus))

    @property
    def bar_name(self) -> str:
        """The name of the bar that it is judged by."""
        return Q8_0 if self.rounding is not None else self.codec.name.lower()

    def warm_bytes(self, geometry: Geometry, blocks: int) -> int:
        """Return a warm tier of about `blocks` blocks that holds one of whatever is chosen."""
        codecs = CodecChoice(self.codec, self.codec_layers).per_layer(geometry.layers)
        asked = sum(page_layout(geometry, codec).slot_bytes for codec in codecs)
        possible = set(codecs)
        if self.guarded:
            possible |= {better for codec in codecs for better in better_codecs(codec)}
        sizes = {page_layout(geometry, codec).slot_bytes for codec in possible}
        return max(blocks * asked, smallest_budget(geometry.layers * max(sizes), len(sizes)))


@dataclass(frozen=True, slots=True)
class PagesHeld:
    """What lay below hot when a run ended. Bytes are payloads: codes, scales, key errors.

    `codecs`: of the layers, as --codec writes them. `element_bits`: bits an element of K or V.
    `asked_token_bytes`, `int8_token_bytes`: were every page of the codec asked for, or int8.
    `kl_asked`: what the guard took for the mean KL of the codec asked for, where the model
    reads again what it has read, and `kl_chosen` of what it chose; None: not measured.
    """

    codecs: str
    token_bytes: float
    element_bits: float
    asked_token_bytes: float
    int8_token_bytes: float
    kl_asked: float | None = None
    kl_chosen: float | None = None


def pages_held(kv: SessionKV, layout: Layout) -> PagesHeld | None:
    """Return what the session's pages below hot are; None if there are none, or for a rounding.

    The first block is left out: it is exact under every codec.
    """
    geometry = kv.geometry
    table = kv.handle.table.read(kv.sealed_blocks)
    below = table.tier[:, 1:] != Tier.NONE
    if layout.rounding is not None or not below.any():
        return None
    found = table.codec[:, 1:]
    coarsest = [_most(found[layer][below[layer]].tolist()) for layer in range(geometry.layers)]
    per_page = np.zeros(256)
    for codec in set(found[below].tolist()):
        per_page[codec] = page_layout(geometry, CodecId(codec)).payload_bytes
    token_bytes = float(per_page[found[below]].mean()) * geometry.layers / geometry.block_tokens
    elements = 2 * geometry.layers * geometry.kv_heads * geometry.head_dim
    verdict = kv.guard.verdict if kv.guard is not None else None
    asked = CodecChoice(layout.codec, layout.codec_layers).per_layer(geometry.layers)
    return PagesHeld(
        codecs=describe_codecs(layout.codec, coarsest),
        token_bytes=token_bytes,
        element_bits=8 * token_bytes / elements,
        asked_token_bytes=_token_bytes(geometry, asked),
        int8_token_bytes=_token_bytes(geometry, [CodecId.INT8] * geometry.layers),
        kl_asked=None if verdict is None else verdict.kl_asked,
        kl_chosen=None if verdict is None else verdict.kl_chosen,
    )


def _most(codecs: Sequence[int]) -> CodecId:
    """Return the commonest: a block that its codec cannot encode is raw for itself."""
    return CodecId(max(set(codecs), key=codecs.count))


def _token_bytes(geometry: Geometry, codecs: Sequence[CodecId]) -> float:
    page_bytes = sum(page_layout(geometry, codec).payload_bytes for codec in codecs)
    return page_bytes / geometry.block_tokens
