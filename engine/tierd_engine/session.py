"""One session's KV as the engine sees it: what is hot, what is below, and one step at a time.

Invariants:
  outside a step every layer holds `position` tokens
  inside a step a layer holds `position` or `position + step_tokens` tokens
  every sealed block is hot, or published in the page table, never neither
  a promoted block is both, and sealed; it is never encoded again, and never opened again
  only the newest block is open; block 0 is demoted, or dropped, by `suspend` alone
  room is made before the epoch is entered, so a step never waits for itself

Static partition: hot are block 0 (attention sinks) and the newest blocks that
fit. Each block is demoted once, and a decode step reads what is below in the
same order every time. `adopt` may promote blocks; where they must make room,
they are dropped, the oldest first, before any other goes down.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from tierd.client import Client, SessionHandle
from tierd.errors import (
    DaemonUnavailable,
    HotBudgetExceeded,
    InvalidArgument,
    PageMiss,
    StaleGeneration,
)
from tierd.types import Geometry, Namespace, Tier
from tierd_engine.attention.executors import StepView
from tierd_engine.attention.plan import (
    LayerPlan,
    PlanMode,
    StepPlan,
    cold_units,
    require_published,
    warm_runs,
)
from tierd_engine.guard import QualityGuard
from tierd_engine.link import DaemonLink
from tierd_engine.outputerror import Scene
from tierd_engine.promotion import ascents, choose_blocks
from tierd_engine.stepcounts import StepCounts
from tierd_engine.workings import Workings

if TYPE_CHECKING:
    from tierd_engine.device.opening import DeviceRig

_ENTER_TRIES = 3  # spills come in batches, milliseconds apart; three in a row are rare


class SessionKV:
    """The KV of one session over all tiers. Used by one thread.

    A step is `begin(n)`, then for each layer `append` and `attend`, then
    `finish`; or `cancel` at any point. `heads`: query heads. `guard` None: pages get the
    namespace's codecs. `rig`: the device that the hot tier is on; None: the host.
    `promotes`: whether `adopt` brings warm blocks up. None: on a device. On the host it is of
    no use: the CPU reads encoded pages where they lie faster than it reads decoded ones.
    """

    def __init__(
        self,
        client: Client,
        handle: SessionHandle,
        heads: int,
        hot_budget_bytes: int,
        max_tokens: int,
        mode: PlanMode = PlanMode.AUTO,
        guard: QualityGuard | None = None,
        rig: DeviceRig | None = None,
        *,
        promotes: bool | None = None,
    ) -> None:
        namespace: Namespace = handle.namespace
        geometry: Geometry = namespace.geometry
        self.client, self.handle, self.geometry = client, handle, geometry
        self.mode, self.guard = mode, guard
        self.max_tokens = max_tokens
        workings = Workings(
            client, handle, heads, hot_budget_bytes, max_tokens, self._require_unreclaimed, rig
        )
        self.workings, self.arena, self.reader = workings, workings.arena, workings.reader
        self.agent, self.executors = workings.agent, workings.executors
        self.link = DaemonLink(client, handle, self._forget_table)
        self.position = 0
        self.step_tokens = 0
        self._epoch = 0
        self._rpcs_at_begin = 0
        self._resolved_version = -1
        self._lengths = [0] * geometry.layers
        self._hot: dict[int, int] = {}
        self._promotes = rig is not None if promotes is None else promotes
        self._promoted: set[int] = set()
        self.promoted_hot_blocks = 0
        self._plan: StepPlan | None = None
        self._appends_only = False
        self.counts = StepCounts()

    # -- hot blocks ---------------------------------------------------------

    def slot_of(self, block: int) -> int:
        """Return the arena slot of a hot block."""
        return self._hot[block]

    def drop(self, block: int) -> None:
        """Forget a hot block and release its slot."""
        self.arena.release(self._hot.pop(block))
        self._promoted.discard(block)
        self._plan = None

    @property
    def sealed_blocks(self) -> int:
        """Blocks that are full in every layer."""
        return self.position // self.geometry.block_tokens

    def _demotable(self) -> list[int]:
        return sorted(block for block in self._hot if 0 < block < self.sealed_blocks)

    def _encodable(self) -> list[int]:
        return [block for block in self._demotable() if block not in self._promoted]

    def step_tokens_max(self) -> int:
        """Return how many tokens the next step may hold within the hot budget."""
        tokens = self.geometry.block_tokens
        room = len(self._demotable()) + self.arena.free_slots
        open_room = -self.position % tokens
        return min(open_room + room * tokens, self.max_tokens - self.position)

    # -- a step -------------------------------------------------------------

    def begin(self, n: int) -> None:
        """Make room for `n` tokens, demoting as needed, and enter the epoch.

        Raises HotBudgetExceeded if `n` tokens cannot be hot at once, TierFull or
        DaemonUnavailable if what is hot cannot be demoted, PageMiss if a page is lost.
        """
        assert self.step_tokens == 0, "a step is already running"
        if self.position + n > self.max_tokens:
            raise InvalidArgument(
                f"the session was opened for {self.max_tokens} tokens; "
                f"{self.position} + {n} are more"
            )
        if n > self.step_tokens_max():
            raise HotBudgetExceeded(
                f"{n} tokens at once do not fit the hot budget of {self.arena.budget_bytes} "
                f"bytes; at most {self.step_tokens_max()} do now"
            )
        self.link.begin_step()
        missing, short = self._missing(n), self._short_of(n)
        rpcs_before = self.client.rpc_count
        if short > 0:
            demotable = self._demotable()
            together = min(self.agent.blocks_together, self.arena.slot_count // 2, len(demotable))
            self._demote(demotable, max(short, together))
        for block in missing:
            self._hot[block] = self.arena.allocate()
            self._plan = None
        self._enter()
        self.counts.room_rpcs += self._rpcs_at_begin - rpcs_before
        self.step_tokens = n
        self.executors.begin(self._refresh(), self._view(), self.mode)

    def _missing(self, n: int) -> list[int]:
        """Return the blocks that a step of `n` tokens writes to and that have no slot yet."""
        first = self.position // self.geometry.block_tokens
        wanted = range(first, self.geometry.blocks_for(self.position + n))
        return [block for block in wanted if block not in self._hot]

    def _short_of(self, n: int) -> int:
        """Return how many blocks at least must leave hot for a step of `n` tokens, if above 0."""
        return len(self._missing(n)) - self.arena.free_slots

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write the step's K and V, [kv_heads, n, head_dim] in the model's dtype, into hot.

        A leading 1 is allowed, here and in `attend`.
        """
        assert self._lengths[layer] == self.position, f"layer {layer} was written already"
        tokens = self.geometry.block_tokens
        done, n = 0, keys.shape[-2]
        while done < n:
            block, offset = divmod(self.position + done, tokens)
            count = min(tokens - offset, n - done)
            slot = self._hot[block]
            if count < n:
                part = slice(done, done + count)
                self.arena.write(slot, layer, offset, keys[..., part, :], values[..., part, :])
            else:
                self.arena.write(slot, layer, offset, keys, values)
            done += count
        self._lengths[layer] = self.position + n

    def appended(self) -> None:
        """Take the step's K and V as written in every layer, by who ran all of them at once."""
        self._lengths = [self.position + self.step_tokens] * self.geometry.layers

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """Return o [n, heads, head_dim] in the query's dtype, over every token up to each query.

        query: [heads, n, head_dim]; keys, values: [kv_heads, n, head_dim], the step's own.
        """
        return self.executors.attend(layer, query, keys, values, scale)

    def finish(self) -> None:
        """End a step whose every layer was appended and attended.

        Raises StaleGeneration if a page was given away while it was read or copied: `cancel`,
        begin again.
        """
        self.executors.finish()
        self._require_unreclaimed()
        expected = self.position + self.step_tokens
        assert all(length == expected for length in self._lengths), self._lengths
        rpcs = self.client.rpc_count - self._rpcs_at_begin
        self.counts.add_step(self._current_plan(), rpcs, self.reader.wait_seconds)
        self.position = expected
        if self._appends_only:
            self._plan, self._appends_only = None, False  # its cold reads stopped half-way
        self._leave()

    def append_only(self) -> None:
        """Let the running step attend over nothing: so a benchmark fills a session."""
        self.executors.cancel()
        self._appends_only = True

    def start_counting(self) -> None:
        """Count steps, pages and calls anew from here (a job does so before it decodes)."""
        self.counts = StepCounts(cold_wait_before=self.reader.wait_seconds)

    def cancel(self) -> None:
        """Undo a step at any point: the session is as it was before `begin`. Idempotent."""
        self.executors.cancel()  # first: copies read slots that the epoch holds
        if self.step_tokens:
            self._leave()
        for block in [b for b in self._hot if b >= self.geometry.blocks_for(self.position)]:
            self.drop(block)  # made for the step; kept, they would be room that nobody has
        self._lengths = [self.position] * self.geometry.layers
        self._plan = None

    def _enter(self) -> None:
        """Enter the epoch with every slab that the page table names already known.

        Between reading the epoch and entering it, other sessions' retirements may
        have moved the daemon on; then the epoch is read again.
        """
        assert self.client.epochs is not None
        table = self.handle.table
        for _ in range(_ENTER_TRIES):
            self._resolve_slabs()
            self._rpcs_at_begin = self.client.rpc_count
            self._epoch = table.epoch()
            self.client.epochs.enter(self._epoch)
            is_current = table.version() == self._resolved_version
            if is_current and table.reclaimed() <= self._epoch:
                return
            self.client.epochs.leave()
        # The table never rests: a slab may then have to be asked for inside the step,
        # and should the epoch be a stale one, the step is done again.
        self._epoch = table.epoch()
        self.client.epochs.enter(self._epoch)

    def _demote(self, candidates: list[int], need: int, *, include_first: bool = False) -> None:
        """Take `need` of the candidates from the hot tier, whatever becomes of the daemon."""
        goal = len(self._hot) - need
        for block in [block for block in candidates if block in self._promoted][:need]:
            self.drop(block)
        if len(self._hot) == goal:
            return
        candidates = [block for block in candidates if block in self._hot]

        def go_on() -> None:
            self._drop_published(candidates)
            left = [block for block in candidates if block in self._hot]
            short = len(self._hot) - goal
            if short <= 0:
                return
            try:
                self.agent.demote(self, left, short, include_first=include_first)
            except InvalidArgument:
                # What was asked before, and not answered in time, may have been done just now.
                if not self._drop_published(left):
                    raise
                go_on()

        self.link.run(go_on, repeatable=True)

    # -- codecs -------------------------------------------------------------

    def awaits_verdict(self, n: int | None = None) -> bool:
        """Whether a step of `n` tokens, or `suspend`, makes `rehearsal.judge_codecs` due."""
        if self.guard is None or not self.guard.is_due(self.position):
            return False
        return (n is None or self._short_of(n) > 0) and bool(self._encodable())

    def scene(self) -> Scene | None:
        """Return what the guard may measure now; None: nothing that would be encoded is hot."""
        blocks = self._encodable()
        return Scene.set_up(self.arena, self._hot, blocks, self.position) if blocks else None

    def follow_verdict(self) -> None:
        """Give pages that leave hot from now on the codecs that the guard chose."""
        verdict = self.guard.verdict if self.guard is not None else None
        if verdict is not None and not self.agent.codecs_refused:
            self.agent.codecs = verdict.codecs

    def _drop_published(self, candidates: list[int]) -> int:
        """Drop hot blocks whose pages are all below: a commit went through, its reply was lost.

        Returns how many.
        """
        tiers, before = self.handle.table.read(self.sealed_blocks).tier, len(self._hot)
        for block in candidates:
            if block in self._hot and bool((tiers[:, block] != Tier.NONE).all()):
                self.drop(block)
        return before - len(self._hot)

    def _forget_table(self) -> None:
        self._plan = None
        self._resolved_version = -1

    def _leave(self) -> None:
        self.step_tokens = 0
        assert self.client.epochs is not None
        self.client.epochs.leave()

    # -- plan ---------------------------------------------------------------

    def _current_plan(self) -> StepPlan:
        assert self._plan is not None, "no step is running"
        return self._plan

    def _resolve_slabs(self) -> None:
        """Ask for the fds of slabs not seen before, so that no step has to."""
        version = self.handle.table.version()
        if version == self._resolved_version:
            return
        table = self.handle.table.read(self.sealed_blocks)
        for slab in np.unique(table.slab[table.tier != Tier.NONE]):
            self.workings.slab(int(slab))
        self._resolved_version = version

    def _require_unreclaimed(self) -> None:
        """Raise StaleGeneration if a slot that this step may have read was given away."""
        if self.handle.table.reclaimed() > self._epoch:
            raise StaleGeneration("the daemon took this engine for dead and reused its pages")
        self.link.require_fresh()

    def _refresh(self) -> StepPlan:
        """Return the plan, made anew if what is hot or the page table has changed."""
        version = self.handle.table.version()
        if self._plan is None or self._plan.table_version != version:
            self._plan = self._build_plan(version)
            self.workings.schedule_cold(self._plan.cold_units)
        return self._plan

    def _view(self) -> StepView:
        end = self.position + self.step_tokens
        filled = np.clip(end - self._current_plan().hot_first, 0, self.geometry.block_tokens)
        positions = np.arange(self.position, end, dtype=np.int64)
        return StepView(self.position, positions, filled.astype(np.int32))

    def _build_plan(self, version: int) -> StepPlan:
        geometry = self.geometry
        total = geometry.blocks_for(self.position + self.step_tokens)
        below = np.setdiff1d(np.arange(total), np.array(sorted(self._hot), dtype=np.int64))
        table = self.handle.table.read(total)
        # Promoted ones too: of a lost page the suffix is recomputed at once, while it is short.
        promoted = np.array(sorted(self._promoted), dtype=np.int64)
        require_published(table, np.union1d(below, promoted))
        chunk_bytes = self.reader.ring.chunk_bytes
        make_page = partial(self.workings.cold_page, table)
        layers = tuple(
            LayerPlan(
                warm_runs(geometry, table, layer, below, self._slab_address),
                cold_units(geometry, table, layer, below, chunk_bytes, make_page),
            )
            for layer in range(geometry.layers)
        )
        return StepPlan.of(self.arena, self._hot, layers, version, total)

    def _slab_address(self, slab: int) -> int:
        return self.workings.slab(slab).address

    # -- loss, suspension, end ----------------------------------------------

    def recover(self, miss: PageMiss) -> None:
        """Forget everything from the missed block on; the caller recomputes it from token ids."""
        self.cancel()
        self.link.run(lambda: self.handle.truncate(miss.block, damaged_layer=miss.layer))
        self._truncate_hot(miss.block * self.geometry.block_tokens)

    def truncate(self, tokens: int) -> None:
        """Keep the first `tokens` tokens.

        A sealed block that this opens again must be hot, and not a promoted one.
        """
        self.cancel()
        if tokens >= self.position:
            return
        kept = self.geometry.blocks_for(tokens)
        own = self._hot.keys() - self._promoted
        if tokens % self.geometry.block_tokens and kept - 1 not in own:
            # The open block's bytes below hot may be lossy; start it from its first token.
            kept -= 1
            tokens = kept * self.geometry.block_tokens
        self.link.run(lambda: self.handle.truncate(kept))
        self._truncate_hot(tokens)

    def _truncate_hot(self, tokens: int) -> None:
        kept = self.geometry.blocks_for(tokens)
        for block in [block for block in self._hot if block >= kept]:
            self.drop(block)
        self.position = min(self.position, tokens)
        self._lengths = [self.position] * self.geometry.layers
        self._plan = None

    def suspend(self, token_ids: npt.NDArray[np.uint32]) -> None:
        """Demote every sealed block and hand the session to the daemon.

        Tokens past the last sealed block are kept as ids, and recomputed by `resume`.
        """
        self.cancel()
        sealed = sorted(block for block in self._hot if block < self.sealed_blocks)
        self._demote(sealed, len(sealed), include_first=True)
        self.link.run(
            lambda: self.handle.suspend(
                token_ids, self.sealed_blocks, wait_seconds=self.link.rejoin_seconds
            )
        )
        for block in list(self._hot):
            self.drop(block)

    def adopt(self, sealed_blocks: int, ahead_tokens: int = 0) -> None:
        """Take over a resumed session whose blocks all stand below the hot tier.

        Where it promotes, warm blocks come up as far as room is left for `ahead_tokens`, the
        tokens known to follow, and the open block: the first, then the newest. With codec raw
        the copies are exact; with a lossy one they are the decoded values, rounded to the
        model's dtype. Blocks that cannot be had now stay below. Raises DeviceFailed.
        """
        assert self.position == 0 and not self._hot, "only a fresh SessionKV adopts"
        self.position = sealed_blocks * self.geometry.block_tokens
        self._lengths = [self.position] * self.geometry.layers
        if self.guard is not None:
            self.guard.adopt(self.handle.table.read(sealed_blocks).codec)
            self.follow_verdict()
        if self._promotes:
            with contextlib.suppress(StaleGeneration, DaemonUnavailable):
                self._promote(max(1, self.geometry.blocks_for(ahead_tokens)))

    def _promote(self, blocks_ahead: int) -> None:
        self.link.begin_step()
        self._enter()
        slots: dict[int, int] = {}
        try:
            table = self.handle.table.read(self.sealed_blocks)
            for block in choose_blocks(table, self.arena.free_slots - blocks_ahead):
                slots[block] = self.arena.allocate()
            self.workings.promote(ascents(table, slots, self.arena, self._slab_address))
            self._require_unreclaimed()
            self._hot.update(slots)
            self._promoted.update(slots)
            self.promoted_hot_blocks += len(slots)
        finally:
            self._leave()
            for block, slot in slots.items():
                if block not in self._hot:
                    self.arena.release(slot)

    def close(self) -> None:
        """Stop reading, and close the session in the daemon unless it was suspended."""
        self.workings.close()
        self.handle.close()

    def check_integrity(self) -> None:
        """Raise AssertionError unless hot blocks, lengths and counts agree."""
        self.workings.check_integrity()
        used = self.arena.slot_count - self.arena.free_slots
        assert used == len(self._hot), f"{used=} != {len(self._hot)=}"
        promoted = self._promoted
        assert promoted <= self._hot.keys(), f"{promoted=} {self._hot=}"
        assert all(block < self.sealed_blocks for block in promoted), f"{promoted=}"
        allowed = {self.position, self.position + self.step_tokens}
        assert set(self._lengths) <= allowed, f"{self._lengths=} {allowed=}"
