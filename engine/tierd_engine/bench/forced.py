"""Teacher-forced runs over one text: on the model's own cache, and over tiers.

Two protocols differ in what the prefix went through:
  tiers    the prefill itself runs over encoded pages, as a job's does: an early
           token's error changes the keys and values of the later ones
  prefix   the prefix's exact keys and values, as the own cache has them, are
           demoted through the tiers once; only the forced tokens read encoded pages
The forced tokens are fed in steps of decode's own path in both.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tierd.client import Demotion
from tierd.errors import InvalidArgument
from tierd.types import BLOCK_TOKENS_DEFAULT, DType
from tierd.units import parse_share
from tierd_engine import hf
from tierd_engine.agent import Digests, HotBlocks, TransferAgent
from tierd_engine.arena import HotArena, hot_block_bytes
from tierd_engine.attention.executors import FEW_QUERIES_MAX
from tierd_engine.attention.plan import PlanMode
from tierd_engine.bench.layouts import Layout, PagesHeld, Rounding, pages_held
from tierd_engine.bench.rig import open_session_kv
from tierd_engine.cache import TierCache, cached_in
from tierd_engine.fidelity import own_attention
from tierd_engine.generator import PREFILL_CHUNK_TOKENS
from tierd_engine.rehearsal import judge_codecs
from tierd_engine.session import SessionKV
from tierd_engine.sizing import HOT_BLOCKS_MIN, size_tiers

SMALLEST = "smallest"
_WARM_SHARE = 0.75  # the rest is cold, so that every step reads both
_OWN_CHUNK_TOKENS = 1024

Logits = dict[int, torch.Tensor]  # by context: [tokens, vocab] float32


class Protocol(enum.StrEnum):
    """What the prefix went through; see above."""

    TIERS = "tiers"
    PREFIX = "prefix"


@dataclass(frozen=True, slots=True)
class Setting:
    """A plan, how much is hot, tokens a block: "near", "stream:25%", "near:smallest:128".

    `hot` is a size, a share of the whole KV (then blocks are as large as a job's), or "smallest":
    two blocks.
    """

    mode: PlanMode
    hot: str = SMALLEST
    block_tokens: int | None = None

    @classmethod
    def parse(cls, text: str) -> Setting:
        """Return the setting of MODE[:HOT[:BLOCK]]. Raises InvalidArgument."""
        mode, _, rest = text.partition(":")
        hot, _, block = rest.partition(":")
        if hot and hot != SMALLEST:
            parse_share(hot, 1)
        if block and not block.isdecimal():
            raise InvalidArgument(f"block tokens {block!r} of plan {text!r} are no whole number")
        return cls(PlanMode.parse(mode), hot or SMALLEST, int(block) if block else None)

    @property
    def name(self) -> str:
        """As it is written."""
        block = "" if self.block_tokens is None else f":{self.block_tokens}"
        return f"{self.mode.value}:{self.hot}{block}"

    @property
    def is_share(self) -> bool:
        """Whether what is hot grows with the context."""
        return self.hot.endswith("%")


@dataclass(frozen=True, slots=True)
class OwnRun:
    """The reference: its logits, and its whole cache."""

    logits: Logits
    cache: Any


@dataclass(frozen=True, slots=True)
class TiersRun:
    """A run over tiers: logits, and what lay below hot at the end, each by context."""

    logits: Logits
    held: dict[int, PagesHeld | None]


class RoundingAgent(TransferAgent):
    """Demotes as ever, but rounds blocks in their hot slots first: any layout, same moments."""

    def __init__(self, kv: SessionKV, rounding: Rounding) -> None:
        super().__init__(kv.client, kv.handle, kv.arena)
        self._rounded: HotArena = kv.arena
        self._rounding = rounding

    def _encode(self, demotion: Demotion, hot: HotBlocks) -> Digests:
        for block in demotion.blocks:
            slot = hot.slot_of(block)
            for part in (self._rounded.keys, self._rounded.values):
                part[slot] = self._rounding(part[slot])
        return super()._encode(demotion, hot)


class ForcedRuns:
    """SmolLM2 in float32, fed one text; windows of `tokens` forced tokens after each context.

    Contexts rise, each at least `tokens` beyond the last; the text is long enough for all.
    """

    def __init__(
        self, model: Any, shape: hf.ModelShape, ids: list[int], contexts: Sequence[int], tokens: int
    ) -> None:
        self.model, self.ids, self.tokens = model, ids, tokens
        self.contexts = list(contexts)
        self.shape = shape

    def targets(self, context: int) -> list[int]:
        """Return the forced tokens: what each row of logits is to predict."""
        return self.ids[context : context + self.tokens]

    def own(self) -> OwnRun:
        """Run the model on its own full-precision cache."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self.model.config)
        logits = {}
        position = 0
        with own_attention(self.model):
            for context in self.contexts:
                for start in range(position, context - 1, _OWN_CHUNK_TOKENS):
                    self._feed(cache, start, min(start + _OWN_CHUNK_TOKENS, context - 1))
                position = context - 1 + self.tokens
                logits[context] = self._feed(cache, context - 1, position, keep=self.tokens)
        return OwnRun(logits, cache)

    def over_tiers(
        self, layout: Layout, setting: Setting, protocol: Protocol, own: OwnRun
    ) -> TiersRun:
        """Run over tiers that hold `layout` below hot."""
        run = TiersRun({}, {})
        for contexts in self._sessions(setting, protocol):
            total = contexts[-1] + self.tokens
            with self._open(layout, setting, total) as kv:
                if layout.rounding is not None:
                    kv.agent = RoundingAgent(kv, layout.rounding)
                for context in contexts:
                    if protocol is Protocol.PREFIX:
                        _demote_exact(kv, own.cache, context - 1)
                    run.logits[context] = self._forced(kv, context)
                    run.held[context] = pages_held(kv, layout)
        return run

    def _sessions(self, setting: Setting, protocol: Protocol) -> list[list[int]]:
        """Return the contexts by session: one serves all where a longer one only goes on."""
        if protocol is Protocol.TIERS and not setting.is_share:
            return [self.contexts]
        return [[context] for context in self.contexts]

    def _open(self, layout: Layout, setting: Setting, total: int) -> Any:
        if setting.hot == SMALLEST:
            geometry = self.shape.geometry(
                DType.FLOAT32, setting.block_tokens or BLOCK_TOKENS_DEFAULT
            )
            hot_bytes = HOT_BLOCKS_MIN * hot_block_bytes(geometry)
        else:
            sizes = size_tiers(
                self.shape, DType.FLOAT32, layout.codec, context_tokens=total - self.tokens,
                max_new_tokens=self.tokens, hot=setting.hot, warm=None,
                block_tokens=setting.block_tokens, codec_layers=layout.codec_layers,
                guarded=layout.guarded,
            )  # fmt: skip
            geometry = self.shape.geometry(DType.FLOAT32, sizes.block_tokens)
            hot_bytes = sizes.hot_budget_bytes
        blocks = max(2, int(geometry.blocks_for(total) * _WARM_SHARE))
        return open_session_kv(
            geometry, layout.codec, self.shape.heads, hot_bytes=hot_bytes,
            warm_bytes=layout.warm_bytes(geometry, blocks), total_tokens=total,
            plan=setting.mode, codec_layers=layout.codec_layers, guarded=layout.guarded,
        )  # fmt: skip

    def _forced(self, kv: SessionKV, context: int) -> torch.Tensor:
        cache = TierCache(kv)

        def feed(n: int, keep: int) -> torch.Tensor:
            if kv.awaits_verdict(n):
                judge_codecs(self.model, kv, self.ids)
            return self._feed(cache, kv.position, kv.position + n, keep=keep)

        while kv.position < context - 1:
            feed(min(PREFILL_CHUNK_TOKENS, kv.step_tokens_max(), context - 1 - kv.position), 1)
        end = context - 1 + self.tokens
        rows = []
        while kv.position < end:
            # Few enough queries for the fused kernel: what is measured is decode's own path.
            step = min(FEW_QUERIES_MAX, kv.step_tokens_max(), end - kv.position)
            rows.append(feed(step, step))
        return torch.cat(rows)

    def _feed(self, cache: Any, start: int, end: int, keep: int = 1) -> torch.Tensor:
        """Feed the text's tokens from `start` to `end`; return the last `keep` rows of logits."""
        ids = torch.tensor([self.ids[start:end]])
        with torch.inference_mode():
            output = self.model(
                input_ids=ids, use_cache=True, logits_to_keep=keep, **cached_in(self.model, cache)
            )
        logits: torch.Tensor = output.logits[0].float()
        return logits


def _demote_exact(kv: SessionKV, own: Any, tokens: int) -> None:
    """Fill a fresh session with the own cache's first `tokens` tokens, demoting as it goes."""
    while kv.position < tokens:
        n = min(PREFILL_CHUNK_TOKENS, kv.step_tokens_max(), tokens - kv.position)
        part = slice(kv.position, kv.position + n)
        kv.begin(n)
        for layer, held in enumerate(own.layers):
            kv.append(layer, held.keys[0][:, part], held.values[0][:, part])
        kv.finish()
