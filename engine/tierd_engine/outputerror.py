"""What a codec costs: encode, decode, attend with and without, and what the logits make of it.

What stands is the situation of a later decode step in little (`Scene`): the first tokens
(attention sinks) and the newest ones are exact, as a session keeps them; what lies between
is sealed and would be encoded. A query sees `measured` blocks through the codec, but for
its own newest `recent_tokens`.

From the change d of a layer's attention output to the loss: with logits z, p = softmax(z)
and F = diag(p) - p p^T, KL(p, p + dp) = dz^T F dz / 2 to second order (Kullback, Information
Theory and Statistics, 2.6), and dz = J d. With g = J^T F^(1/2) x, x of independent standard
normals, E (g . d)^2 = d^T J^T F J d; so half the mean of (g . d)^2 over tokens is the mean KL,
one backward pass for all layers at once (rehearsal.py). The changes of layers add up, to first
order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tierd.codec import decode_pages, encode_pages
from tierd.codec.layout import page_layout
from tierd.types import CodecId
from tierd_engine.arena import HotArena

SINK_TOKENS = 16
QUERIES_MAX = 32
MEASURED_TOKENS = 1024  # of four blocks hot of 256, all that may leave
RECENT_TOKENS_MAX = 128  # half a block: what an open block holds on the average
_PASS_BYTES = 4 << 20  # of exact keys and values: what a layer's sums touch stays in the caches

Floats = npt.NDArray[np.float64]


class Span(NamedTuple):
    """Tokens `first` to `last`, counted in their block."""

    block: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Scene:
    """What queries from position `at` on attend over, besides themselves.

    arena, slots: in RAM, slot by block. measured: the sealed blocks (not 0) to encode, whose
    spans, whole, stand first in `spans`. Nothing is changed; valid while the blocks stay hot.
    """

    arena: HotArena
    slots: dict[int, int]
    measured: list[int]
    spans: list[Span]
    at: int
    recent_tokens: int

    @classmethod
    def set_up(
        cls, arena: HotArena, slots: dict[int, int], candidates: Sequence[int], position: int
    ) -> Scene:
        """Choose from hot blocks of a session of `position` tokens.

        candidates: those that may leave, sealed, at least one. The queries stand for the
        session's newest tokens, but never before a candidate's end.
        """
        tokens = arena.geometry.block_tokens
        recent = min(RECENT_TOKENS_MAX, tokens // 2)
        blocks_max = max(1, MEASURED_TOKENS // tokens)
        measured = sorted(candidates)[:blocks_max]
        at = max((max(candidates) + 1) * tokens, position - QUERIES_MAX)
        oldest = at - recent
        spans = [Span(block, 0, tokens) for block in measured]
        for block in sorted(set(slots) - set(measured)):
            start = block * tokens
            first = 0 if block == 0 else max(0, oldest - start)
            last = min(tokens, at - start)
            if block == 0 and oldest >= SINK_TOKENS:
                last = min(last, SINK_TOKENS)
            if first < last:
                spans.append(Span(block, first, last))
        read = {span.block: slots[span.block] for span in spans}
        arena, read = arena.on_host(read)
        return cls(arena, read, measured, spans, at, recent)

    @property
    def coded_tokens(self) -> int:
        """Tokens of the measured blocks, the first that are attended over."""
        return len(self.measured) * self.arena.geometry.block_tokens

    def exact(self, part: torch.Tensor, some: slice) -> torch.Tensor:
        """Return keys or values of some layers, [layers, kv_heads, tokens, head_dim]."""
        pieces = [part[self.slots[b], some, :, i:j] for b, i, j in self.spans]
        return torch.cat(pieces, dim=2)

    def seen(self, n: int) -> torch.Tensor:
        """Return which keys, the scene's and n queries' own, each query sees: bool [n, tokens]."""
        held = sum(span.last - span.first for span in self.spans)
        return torch.ones(n, held + n, dtype=torch.bool).tril(held)

    def far(self, n: int) -> torch.Tensor:
        """Return which measured tokens n queries see through the codec: bool [n, coded]."""
        tokens = self.arena.geometry.block_tokens
        at = torch.cat([torch.arange(b * tokens, (b + 1) * tokens) for b in self.measured])
        return at[None] <= torch.arange(self.at, self.at + n)[:, None] - self.recent_tokens


@dataclass(frozen=True, slots=True)
class Heard:
    """Queries at a scene, their own K and V, and what their outputs matter; float32, in RAM.

    q [layers, heads, n, head_dim]; keys, values [layers, kv_heads, n, head_dim]; gradients g
    as above [layers, n, heads, head_dim]. The first `run_in` queries do not count.
    `seconds`: what it took.
    """

    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    gradients: torch.Tensor
    scale: float
    run_in: int
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Cost:
    """Of a codec, [layers]: the mean KL of its changes, and the outputs' relative L2 error.

    NaN: a page cannot be encoded.
    """

    kl: Floats
    error: Floats


class OutputProbe:
    """Attention of what was heard at a scene; `cost` tells what a codec does to it."""

    def __init__(self, scene: Scene, heard: Heard) -> None:
        self._scene, self._heard = scene, heard
        n = heard.q.shape[2]
        self._seen, self._far = scene.seen(n), scene.far(n)
        geometry = scene.arena.geometry
        token_bytes = 2 * geometry.kv_heads * geometry.head_dim * 4
        self._layers_per_pass = max(1, _PASS_BYTES // (self._seen.shape[1] * token_bytes))

    def cost(self, codec: CodecId) -> Cost:
        """Measure every layer."""
        layers = self._scene.arena.geometry.layers
        cost = Cost(np.empty(layers), np.empty(layers))
        for first in range(0, layers, self._layers_per_pass):
            some = slice(first, min(first + self._layers_per_pass, layers))
            cost.kl[some], cost.error[some] = self._cost_of(codec, some)
        return cost

    def _cost_of(self, codec: CodecId, some: slice) -> tuple[Floats, Floats]:
        heard, run_in = self._heard, self._heard.run_in
        outputs, moved, ok = self._outputs(codec, some)
        change = (moved - outputs)[:, run_in:]
        reach = (heard.gradients[some, run_in:] * change).sum((-2, -1)).double()
        kl = reach.square().mean(1) / 2
        error = (_squared(change) / _squared(outputs[:, run_in:]).clamp_min(1e-30)).sqrt()
        return np.where(ok, kl.numpy(), np.nan), np.where(ok, error.numpy(), np.nan)

    def _outputs(
        self, codec: CodecId, some: slice
    ) -> tuple[torch.Tensor, torch.Tensor, npt.NDArray[np.bool_]]:
        """Return o without and with the codec, [layers, n, heads, head_dim], and what could be."""
        scene, heard, geometry = self._scene, self._heard, self._scene.arena.geometry
        arena, count = scene.arena, some.stop - some.start
        keys = torch.cat([scene.exact(arena.keys, some).float(), heard.keys[some]], dim=2)
        values = torch.cat([scene.exact(arena.values, some).float(), heard.values[some]], dim=2)
        coded_keys, coded_values, ok = self._coded(codec, some)
        coded, n = scene.coded_tokens, heard.q.shape[2]
        # Heads of a KV head, then the queries, side by side.
        folded = (heard.q[some] * heard.scale).reshape(
            count, geometry.kv_heads, -1, geometry.head_dim
        )
        repeats = folded.shape[2] // n
        seen, far = self._seen.repeat(repeats, 1), self._far.repeat(repeats, 1)
        scores = (folded @ keys.transpose(2, 3)).masked_fill_(~seen, -torch.inf)
        outputs = scores.softmax(-1) @ values
        scores[..., :coded] = torch.where(
            far, folded @ coded_keys.transpose(2, 3), scores[..., :coded]
        )
        weights = scores.softmax(-1)
        moved = weights @ values
        moved += (weights[..., :coded] * far) @ (coded_values - values[:, :, :coded])
        by_query = (count, -1, n, geometry.head_dim)
        return (
            outputs.reshape(by_query).transpose(1, 2),
            moved.reshape(by_query).transpose(1, 2),
            ok,
        )

    def _coded(
        self, codec: CodecId, some: slice
    ) -> tuple[torch.Tensor, torch.Tensor, npt.NDArray[np.bool_]]:
        """Return the measured blocks' keys and values as decoded, and which layers could be."""
        arena, geometry = self._scene.arena, self._scene.arena.geometry
        layout = page_layout(geometry, codec)
        layers, slots = range(some.start, some.stop), self._scene.slots
        source = np.array(
            [arena.page_address(slots[b], layer) for layer in layers for b in self._scene.measured],
            dtype=np.int64,
        )
        payloads = torch.empty(len(source) * layout.payload_bytes, dtype=torch.uint8)
        target = payloads.data_ptr() + np.arange(len(source)) * layout.payload_bytes
        status = encode_pages(source, target, layout)
        shape = (geometry.kv_heads, len(source) * geometry.block_tokens, geometry.head_dim)
        keys, values = np.empty(shape, np.float32), np.empty(shape, np.float32)
        decode_pages(target, layout, keys, values)
        by_layer = (geometry.kv_heads, len(layers), -1, geometry.head_dim)
        ok = (status.reshape(len(layers), -1) == 0).all(axis=1)
        return (
            torch.from_numpy(keys).reshape(by_layer).transpose(0, 1),
            torch.from_numpy(values).reshape(by_layer).transpose(0, 1),
            ok,
        )


def _squared(x: torch.Tensor) -> torch.Tensor:
    """Return the squared L2 norm of each layer's part of x [layers, ...]."""
    return x.double().flatten(1).square().sum(1)
