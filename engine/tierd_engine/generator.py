"""Greedy generation over a TierCache: chunked prefill, decode, and recovery from lost pages.

A lost or damaged page costs its suffix: the session forgets everything from
that block on and recomputes it from the token ids, so the output is the same.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tierd.errors import HotBudgetExceeded, PageMiss, StaleGeneration, StorageError
from tierd_engine.attention.executors import FEW_QUERIES_MAX
from tierd_engine.cache import TierCache, cached_in
from tierd_engine.fidelity import finite
from tierd_engine.recorded import DecodeStep
from tierd_engine.rehearsal import judge_codecs
from tierd_engine.session import SessionKV
from tierd_engine.stepthreads import StepThreads

# Larger chunks keep the linear layers busier; past this the gain is under 2 %.
PREFILL_CHUNK_TOKENS = 512
LOSSES_PER_BLOCK_MAX = 3  # a block lost more often than this has no working disk under it
STALE_STEPS_MAX = 3  # steps done again because pages moved under them, in one call


class Generator:
    """Drives one model over one session. `token_ids` are all tokens given or made so far."""

    def __init__(self, model: Any, kv: SessionKV) -> None:
        self._model = model
        # transformers' models tell where they are; without one, the CPU.
        self._device: torch.device | None = getattr(model, "device", None)
        self._cache = TierCache(kv)
        self.decode_step = DecodeStep(model, self._cache)
        self._threads = StepThreads(model)
        self.kv = kv
        self.token_ids: list[int] = []
        self.losses: Counter[int] = Counter()
        self.lost_blocks = 0  # full ones forgotten: damaged or gone, or after one that was
        self.recomputed_tokens = 0
        self.note: Callable[[str], None] = lambda text: None  # told of each loss, in one line

    def resume(self, token_ids: list[int], sealed_blocks: int) -> None:
        """Take over a resumed session; what lies past its sealed blocks is recomputed by `feed`.

        Blocks that were sealed when it was suspended and are not there any more count as lost.
        """
        block_tokens = self.kv.geometry.block_tokens
        self.kv.adopt(sealed_blocks, len(token_ids) - sealed_blocks * block_tokens)
        held = max(0, len(token_ids) - 1)  # the newest token was answered, and not yet read
        lost = range(sealed_blocks, held // block_tokens)
        self.lost_blocks += len(lost)
        self.recomputed_tokens += len(lost) * block_tokens
        if lost:
            self.note(
                f"{len(lost)} blocks of the session were lost, from block {lost.start} on: "
                f"computing {len(lost) * block_tokens:,} tokens anew"
            )
        self.token_ids = list(token_ids)

    def feed(
        self, token_ids: list[int], advanced: Callable[[int], None] | None = None
    ) -> torch.Tensor:
        """Append tokens and return the logits [vocab] float32 after the last of them.

        `advanced(tokens)` is called with the session's length after each chunk.
        """
        self.token_ids.extend(token_ids)
        logits: torch.Tensor | None = None
        stale = 0
        while self.kv.position < len(self.token_ids):
            try:
                logits = self._step()
            except PageMiss as miss:
                self._recover(miss)
            except StaleGeneration:
                stale += 1
                if stale > STALE_STEPS_MAX:
                    raise
            if advanced is not None:
                advanced(self.kv.position)
        assert logits is not None, "feed takes at least one token"
        return logits

    def suspend(self, token_ids: npt.NDArray[np.uint32]) -> None:
        """Hand the session to the daemon; see SessionKV. token_ids: all that are to be kept."""
        if self.kv.awaits_verdict():
            judge_codecs(self._model, self.kv, self.token_ids)
        self.kv.suspend(token_ids)

    def _step(self) -> torch.Tensor:
        start = self.kv.position
        chunk = min(
            PREFILL_CHUNK_TOKENS, self.kv.step_tokens_max() or 1, len(self.token_ids) - start
        )
        if self.kv.awaits_verdict(chunk):
            judge_codecs(self._model, self.kv, self.token_ids)
        ids = torch.tensor([self.token_ids[start : start + chunk]], device=self._device)
        few = self._threads.few_queries() if chunk <= FEW_QUERIES_MAX else contextlib.nullcontext()
        try:
            with few, torch.inference_mode():
                logits = self.decode_step(ids) if chunk == 1 else self._chunk(ids)
        except torch.OutOfMemoryError as error:  # of a GPU alone
            self.kv.cancel()
            raise HotBudgetExceeded(
                f"the GPU has no memory left for a step of {chunk} tokens: give a smaller --hot"
            ) from error
        except BaseException:
            self.kv.cancel()
            raise
        return finite(logits[0, -1].float().cpu())

    def _chunk(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._model(
            input_ids=ids,
            use_cache=True,
            logits_to_keep=1,
            **cached_in(self._model, self._cache),
        ).logits
        return logits

    def _recover(self, miss: PageMiss) -> None:
        self.losses[miss.block] += 1
        if self.losses[miss.block] > LOSSES_PER_BLOCK_MAX:
            raise StorageError(
                f"block {miss.block} was lost {self.losses[miss.block]} times; "
                f"the last time: {miss}"
            ) from miss
        before, sealed = self.kv.position, self.kv.sealed_blocks
        self.kv.recover(miss)
        self.lost_blocks += sealed - self.kv.sealed_blocks
        anew = before - self.kv.position
        self.recomputed_tokens += anew
        self.note(f"block {miss.block} was lost ({miss}): computing {anew:,} tokens anew")
