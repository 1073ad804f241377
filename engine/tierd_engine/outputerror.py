"""How far a codec moves attention's output: encode, decode, attend with and without.

What stands is the situation of a later decode step in little: the first tokens
(attention sinks) and the newest ones are exact, as a session keeps them; what
lies between is sealed and would be encoded. So a query sees `measured` blocks
through the codec, but for its own newest `recent_tokens`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tierd.codec import decode_pages, encode_pages
from tierd.codec.layout import page_layout
from tierd.types import CodecId
from tierd_engine.arena import HotArena

SINK_TOKENS = 16
# What a squared error of the values' rounding costs, to one of the weights (guard.py).
VALUE_SHARE = 0.3
_PASS_BYTES = 4 << 20  # of exact keys and values: what a layer's sums touch stays in the caches


@dataclass(frozen=True, slots=True)
class Queries:
    """Real queries of one step: q [layers, heads, n, head_dim] float32, positions int64 [n]."""

    q: torch.Tensor
    positions: torch.Tensor
    scale: float


class OutputProbe:
    """Attention of `queries` over hot blocks; `errors` tells what a codec does to it.

    slots: arena slot by hot block; measured: the sealed blocks (not 0) to encode;
    `position`: tokens of the session. Nothing is changed; valid while the blocks stay hot.
    """

    def __init__(
        self,
        arena: HotArena,
        slots: dict[int, int],
        measured: Sequence[int],
        queries: Queries,
        position: int,
        recent_tokens: int,
    ) -> None:
        self._arena, self._slots, self._measured = arena, slots, list(measured)
        self._queries = queries
        geometry = arena.geometry
        tokens = geometry.block_tokens
        newest = int(queries.positions.max())
        oldest = int(queries.positions.min()) - recent_tokens
        # (block, first, last) of what is attended over: the measured blocks first.
        self._spans = [(block, 0, tokens) for block in self._measured]
        for block in sorted(set(slots) - set(self._measured)):
            start = block * tokens
            first = 0 if block == 0 else max(0, oldest - start)
            last = min(tokens, min(newest + 1, position) - start)
            if block == 0 and oldest >= SINK_TOKENS:
                last = min(last, SINK_TOKENS)
            if first < last:
                self._spans.append((block, first, last))
        at = torch.cat([torch.arange(b * tokens + i, b * tokens + j) for b, i, j in self._spans])
        coded = len(self._measured) * tokens
        self._seen = at[None] <= queries.positions[:, None]
        self._far = at[None, :coded] <= queries.positions[:, None] - recent_tokens
        token_bytes = 2 * geometry.kv_heads * geometry.head_dim * 4
        self._layers_per_pass = max(1, _PASS_BYTES // (len(at) * token_bytes))

    @property
    def is_telling(self) -> bool:
        """Whether a query sees a measured token at all."""
        return bool(self._far.any())

    def errors(self, codec: CodecId) -> npt.NDArray[np.float64]:
        """Return the relative L2 error of the output, [layers]; NaN: a page cannot be encoded.

        Of the keys' rounding, which moves the weights, and the values', whose square counts
        for VALUE_SHARE: the two are as good as orthogonal, so their squares add up.
        """
        layers = self._arena.geometry.layers
        errors = np.empty(layers)
        for first in range(0, layers, self._layers_per_pass):
            some = slice(first, min(first + self._layers_per_pass, layers))
            errors[some] = self._errors_of(codec, some)
        return errors

    def _errors_of(self, codec: CodecId, some: slice) -> npt.NDArray[np.float64]:
        geometry = self._arena.geometry
        keys, values = self._exact(self._arena.keys, some), self._exact(self._arena.values, some)
        coded_keys, coded_values, ok = self._coded(codec, some)
        count, coded = some.stop - some.start, coded_keys.shape[2]
        n = len(self._queries.positions)
        q = self._queries.q[some] * self._queries.scale
        rows = (count, geometry.kv_heads, -1, geometry.head_dim)  # heads of a KV head, then n
        folded = q.reshape(rows)
        repeats = folded.shape[2] // n
        seen, far = self._seen.repeat(repeats, 1), self._far.repeat(repeats, 1)
        scores = (folded @ keys.transpose(2, 3)).masked_fill_(~seen, -torch.inf)
        weights = scores.softmax(-1)
        o = weights @ values
        moved = folded @ coded_keys.transpose(2, 3)
        scores[..., :coded] = torch.where(far & seen[:, :coded], moved, scores[..., :coded])
        moved_weights = scores.softmax(-1)
        by_keys = (moved_weights - weights) @ values
        by_values = (moved_weights[..., :coded] * far) @ (coded_values - values[:, :, :coded])
        squared = _squared(by_keys) + VALUE_SHARE * _squared(by_values)
        error = (squared / _squared(o).clamp_min(1e-30)).sqrt()
        return np.where(ok, error.numpy(), np.nan)

    def _exact(self, part: torch.Tensor, some: slice) -> torch.Tensor:
        """Return [layers of the pass, kv_heads, tokens, head_dim] float32."""
        spans = [part[self._slots[b], some, :, i:j].float() for b, i, j in self._spans]
        return torch.cat(spans, dim=2)

    def _coded(
        self, codec: CodecId, some: slice
    ) -> tuple[torch.Tensor, torch.Tensor, npt.NDArray[np.bool_]]:
        """Return the measured blocks' keys and values as decoded, and which layers could be."""
        arena, geometry = self._arena, self._arena.geometry
        layout = page_layout(geometry, codec)
        layers, blocks = range(some.start, some.stop), self._measured
        source = np.array(
            [arena.page_address(self._slots[b], layer) for layer in layers for b in blocks],
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
