"""The mover: the one loop over the store. It makes room, brings pages up, keeps the house.

    demand before prefetch before spill:
    1. room that a planned demotion waits for      spill
    2. pages that a running engine asked for       promote
    3. pages that a hint foresees, by deadline     promote
    4. spare warm slots for the next demotion      spill

`pump` is one pass: it takes in what the lanes have done, lets the store tick,
answers who waits, and begins new work while a lane is free. `run` pumps at
each event, and each TICK_SECONDS. All decisions are made here, on the loop's
thread; a lane only copies and checks bytes (carry.py).

Invariants:
  a batch's moves are finished, aborted or found damaged exactly once, when its
  lane reports, however late
  every waiter is answered by its deadline
  while a batch is overdue, or just after an I/O error, nothing new is begun
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass

from tierd.carry import Batch
from tierd.demotions import DemotionPlan, RoomNeeded
from tierd.errors import (
    DaemonUnavailable,
    InvalidArgument,
    PageDamaged,
    StorageError,
    TierdError,
    TierFull,
)
from tierd.hints import HintTicket
from tierd.lanes import Lanes
from tierd.memory.slabs import SlabPool
from tierd.placement import Move
from tierd.policy import NOTHING_IS_SAFE, Rank, Standing
from tierd.sessions import Session
from tierd.store import Store
from tierd.types import CodecId, PageKey, SessionState, Tier

TICK_SECONDS = 0.05
# 64 MiB/s is the slowest disk we promise for: a batch takes 1/16 s there, so that a
# demand behind four batches of prefetch waits a quarter of a second at most.
BATCH_BYTES = 4 << 20
SLOWEST_BYTES_PER_SECOND = 64 << 20
IO_DEADLINE_SECONDS = 10.0  # 160 times a batch's time on the slowest disk
RETRY_SECONDS = 1.0  # after an I/O error: a disk that is full or failing gets one try a second
WAIT_SECONDS_MAX = 60.0
STOP_SECONDS = 2.0  # 32 batches on the slowest disk; what hangs longer is left to its thread
BANDWIDTH_WEIGHT = 0.2  # of the newest batch: about the last 5 count
# Spare room lets a demotion start without waiting for the disk: a few blocks are enough
# to hide a batch; a sixteenth of warm is the most that may lie unused.
SPARE_BLOCKS = 4
SPARE_SHARE = 16


@dataclass(slots=True, eq=False)
class _RoomWaiter:
    """A demotion that waits until `slots` of `pool` can be reserved."""

    session: Session
    pool: SlabPool
    slots: int
    deadline_seconds: float
    answer: asyncio.Future[None]


@dataclass(slots=True, eq=False)
class _PromotionWaiter:
    """An engine that waits until `keys` are warm."""

    session: Session
    keys: list[PageKey]
    deadline_seconds: float
    answer: asyncio.Future[None]


class Mover:
    """Background work over one store. All methods are for the event loop's thread."""

    def __init__(self, store: Store, lanes: Lanes) -> None:
        self._store = store
        self._lanes = lanes
        self._clock = store.clock
        self._flying: list[Batch] = []
        self._landed: list[Batch] = []
        self._rooms: list[_RoomWaiter] = []
        self._promotions: list[_PromotionWaiter] = []
        self._bytes_per_second = float(SLOWEST_BYTES_PER_SECOND)
        self._retry_at_seconds = float("-inf")
        self._trouble = ""
        self._wake = asyncio.Event()
        self._stopping = False

    # -- life -----------------------------------------------------------------------
    async def run(self) -> None:
        """Work until `stop`. If it ends otherwise, something is broken and the daemon must end."""
        try:
            while not self._stopping:
                self._wake.clear()
                self.pump()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), TICK_SECONDS)
        finally:
            self._stopping = True
            self._fail_waiters()

    async def stop(self) -> None:
        """End `run`, fail who waits with DaemonUnavailable, wait STOP_SECONDS for the lanes."""
        self._stopping = True
        self._fail_waiters()
        self._lanes.stop()
        for _ in range(int(STOP_SECONDS / TICK_SECONDS)):
            self._wake.clear()
            self._take_in()
            if not self._flying:
                break
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), TICK_SECONDS)
        self._wake.set()

    def wake(self) -> None:
        """Pump soon rather than at the next tick."""
        self._wake.set()

    def pump(self) -> None:
        """Do one pass; never blocks."""
        self._take_in()
        self._store.tick()
        now_seconds = self._clock.monotonic()
        self._answer_rooms(now_seconds)
        self._answer_promotions(now_seconds)
        if self._stalled(now_seconds) or self._stopping:
            return
        for begin in (self._make_room, self._promote_demanded, self._promote_hinted, self._spare):
            while self._lanes.free() and begin():
                pass

    # -- for the service --------------------------------------------------------------
    async def plan_demotion(
        self,
        engine_id: int,
        number: int,
        hot_blocks: Sequence[int],
        need_blocks: int,
        *,
        codec: CodecId | None = None,
        include_first: bool = False,
        deadline_seconds: float = 10.0,
    ) -> DemotionPlan:
        """As Store.plan_demotion, but makes room first. Raises TierFull at the deadline.

        The calling engine must be quiescent: room is made by retiring slots,
        and these wait for every engine's step to end, the caller's too.
        """
        deadline = self._deadline(deadline_seconds)
        while True:
            try:
                return self._store.plan_demotion(
                    engine_id,
                    number,
                    hot_blocks,
                    need_blocks,
                    codec=codec,
                    include_first=include_first,
                )
            except RoomNeeded as full:
                await self._room(self._store.session(number), full, deadline)

    async def promote(
        self, engine_id: int, number: int, blocks: Sequence[int], *, deadline_seconds: float = 10.0
    ) -> int:
        """Bring the cold pages of `blocks` to warm; return how many of their pages are warm.

        By the deadline it returns what there is: fewer is a result, not an
        error. Pages of sessions that will be used sooner are not displaced.
        Raises NotFound, DaemonUnavailable (stopping).
        """
        session = self._store.session(number, engine_id=engine_id)
        wanted = sorted({b for b in blocks if session.index.layers_of(b)})
        cold = self._store.pages_in(Tier.COLD, session, wanted)
        missing = len(set(blocks)) * session.layers - sum(
            len(session.index.layers_of(b)) for b in wanted
        )
        self._store.counts["misses"] += missing
        if cold:
            waiter = _PromotionWaiter(
                session, cold, self._deadline(deadline_seconds), self._new_answer()
            )
            self._promotions.append(waiter)
            self.wake()
            await waiter.answer
        return len(self._store.pages_in(Tier.WARM, session, wanted))

    def hint(
        self,
        client_id: str,
        number: int,
        *,
        deadline_seconds: float,
        first_token: int = 0,
        last_token: int | None = None,
        confidence: float = 1.0,
        priority: int = 0,
    ) -> HintTicket:
        """As Store.hint, and says when the pages will be there at the disk's present speed."""
        hint = self._store.hint(
            client_id,
            number,
            deadline_seconds=deadline_seconds,
            first_token=first_token,
            last_token=last_token,
            confidence=confidence,
            priority=priority,
        )
        queued_bytes = sum(batch.size_bytes for batch in self._flying)
        for other in self._store.hints.urgent_first():
            if other.wish.urgency <= hint.wish.urgency:
                session = self._store.session(other.wish.session)
                slot_bytes = self._store.placement.slot_bytes(session, session.namespace.codec)
                queued_bytes += len(other.awaited) * slot_bytes
        estimated_seconds = queued_bytes / self._bytes_per_second if hint.awaited else 0.0
        self.wake()
        return HintTicket(hint.hint_id, len(hint.awaited), estimated_seconds)

    # -- who waits ----------------------------------------------------------------------
    def _deadline(self, seconds: float) -> float:
        if not 0.0 < seconds <= WAIT_SECONDS_MAX:
            raise InvalidArgument(f"deadline is {seconds} s, must be 0 to {WAIT_SECONDS_MAX:g}")
        return self._clock.monotonic() + seconds

    def _new_answer(self) -> asyncio.Future[None]:
        if self._stopping:
            raise DaemonUnavailable("the daemon is stopping")
        return asyncio.get_running_loop().create_future()

    async def _room(self, session: Session, full: RoomNeeded, deadline_seconds: float) -> None:
        waiter = _RoomWaiter(session, full.pool, full.slots, deadline_seconds, self._new_answer())
        self._rooms.append(waiter)
        self.wake()
        await waiter.answer

    def _answer_rooms(self, now_seconds: float) -> None:
        pools = self._store.placement.pools[Tier.WARM]
        promised: dict[SlabPool, int] = {}
        for waiter in list(self._rooms):
            slots = promised.get(waiter.pool, 0) + waiter.slots
            promised[waiter.pool] = slots
            closed = waiter.session.state is SessionState.CLOSED
            if closed or waiter.answer.done() or pools.make_available(waiter.pool, slots):
                self._answer(waiter.answer)
            elif now_seconds >= waiter.deadline_seconds:
                self._answer(waiter.answer, TierFull(self._why_full()))
            else:
                continue
            self._rooms.remove(waiter)

    def _answer_promotions(self, now_seconds: float) -> None:
        for waiter in list(self._promotions):
            index = waiter.session.index
            waiter.keys = [
                key
                for key in waiter.keys
                if (page := index.get(key.layer, key.block)) and page.place.tier is Tier.COLD
            ]
            overdue = now_seconds >= waiter.deadline_seconds
            if overdue or not waiter.keys or waiter.answer.done():
                self._answer(waiter.answer)
                self._promotions.remove(waiter)

    def _answer(
        self, answer: asyncio.Future[None], error: TierFull | DaemonUnavailable | None = None
    ) -> None:
        if answer.done():  # the call was cancelled
            return
        if error is None:
            answer.set_result(None)
        else:
            answer.set_exception(error)

    def _fail_waiters(self) -> None:
        answers = [room.answer for room in self._rooms]
        for answer in answers + [promotion.answer for promotion in self._promotions]:
            self._answer(answer, DaemonUnavailable("the daemon is stopping"))
        self._rooms.clear()
        self._promotions.clear()

    def _why_full(self) -> str:
        retired = self._retired_bytes(Tier.WARM)
        if self._trouble:
            return f"no room in warm: the cold disk fails: {self._trouble}"
        if retired:
            return f"no room in warm: {retired} bytes wait for engines to end their steps"
        return "no room in warm, and nothing in it can be spilled (is cold full?)"

    # -- work, most urgent first: each begins one batch and says whether it did -----------
    def _make_room(self) -> bool:
        short: dict[SlabPool, int] = {}
        for waiter in self._rooms:
            slots = short.setdefault(waiter.pool, -waiter.pool.available_slots())
            short[waiter.pool] = slots + waiter.slots
        need_bytes = sum(pool.slot_bytes * slots for pool, slots in short.items() if slots > 0)
        return self._spill(need_bytes, NOTHING_IS_SAFE, evict=True)

    def _promote_demanded(self) -> bool:
        for waiter in self._promotions:
            below = self._store.rank(waiter.session)
            if self._promote(waiter.session, waiter.keys, below):
                return True
            if not self._flying and not self._retired_bytes(Tier.WARM):
                self._answer(waiter.answer)  # no room, and none to come
        return False

    def _promote_hinted(self) -> bool:
        for hint in self._store.hints.urgent_first():
            session = self._store.session(hint.wish.session)
            below = Rank(Standing.HINTED, -hint.wish.deadline_seconds)
            if self._promote(session, hint.awaited, below):
                return True
        return False

    def _spare(self) -> bool:
        short: dict[SlabPool, int] = {}
        for session in self._store.book:
            if session.state is SessionState.RUNNING and session.index.pages_in(Tier.WARM):
                pool = self._store.placement.pool(Tier.WARM, session, session.namespace.codec)
                short[pool] = self._spare_slots(session, pool) - pool.available_slots()
        need_bytes = sum(pool.slot_bytes * slots for pool, slots in short.items() if slots > 0)
        return self._spill(need_bytes, NOTHING_IS_SAFE, evict=False)

    def _spill(self, need_bytes: int, below: Rank, *, evict: bool) -> bool:
        """Begin a spill towards `need_bytes` of room, less what is coming already."""
        need_bytes -= self._coming_bytes()
        if need_bytes <= 0:
            return False
        need_bytes = min(need_bytes, BATCH_BYTES)
        moves: list[Move] = []
        for key in self._store.choose_spills(need_bytes, below):
            move = self._begin_move(key, Tier.COLD)
            if move is None:
                break
            moves.append(move)
        else:
            evict = False
        if evict and not moves and not self._retired_bytes(Tier.COLD):
            self._store.evict(need_bytes)  # it may drop these keys: choose anew in a moment
            self.wake()
        return self._begin(moves, Tier.COLD)

    def _promote(self, session: Session, keys: Collection[PageKey], below: Rank) -> bool:
        """Begin to promote some of `keys`, or to make room for them from ranks under `below`."""
        store, pools = self._store, self._store.placement.pools[Tier.WARM]
        moves: list[Move] = []
        size_bytes = 0
        short_bytes: dict[SlabPool, int] = {}
        for key in keys:
            if key in store.placement.moving or size_bytes >= BATCH_BYTES:
                continue
            page = session.index.get(key.layer, key.block)
            assert page is not None and page.place.tier is Tier.COLD, f"{key} is not cold"
            pool = store.placement.pool(Tier.WARM, session, page.place.codec)
            if pool in short_bytes:
                continue
            spare = self._spare_slots(session, pool)
            roomy = pools.make_available(pool, spare + 1)
            move = self._begin_move(key, Tier.WARM) if roomy else None
            if move is None:
                wanted = min(len(keys), BATCH_BYTES // pool.slot_bytes + 1)
                slots = spare + wanted - pool.available_slots()
                short_bytes[pool] = slots * pool.slot_bytes
                continue
            moves.append(move)
            size_bytes += move.slot_bytes
        need_bytes = max(short_bytes.values(), default=0)
        return self._begin(moves, Tier.WARM) or self._spill(need_bytes, below, evict=False)

    def _spare_slots(self, session: Session, pool: SlabPool) -> int:
        slots = self._store.placement.pools[Tier.WARM].slots_max(pool.slot_bytes)
        return min(slots // SPARE_SHARE, SPARE_BLOCKS * session.layers)

    def _coming_bytes(self) -> int:
        """Bytes of warm that spills under way and ending steps will free without more work."""
        flying = sum(batch.size_bytes for batch in self._flying if batch.to is Tier.COLD)
        return flying + self._retired_bytes(Tier.WARM)

    def _retired_bytes(self, tier: Tier) -> int:
        return sum(p.counts().retired * p.slot_bytes for p in self._store.placement.pools[tier])

    # -- batches ----------------------------------------------------------------------------
    def _begin_move(self, key: PageKey, to: Tier) -> Move | None:
        try:
            return self._store.begin_move(key, to)
        except (StorageError, TierFull) as error:  # a slab that the budget allows cannot be made
            self._note_trouble(error)
            return None

    def _note_trouble(self, error: TierdError) -> None:
        self._trouble = str(error)
        self._retry_at_seconds = self._clock.monotonic() + RETRY_SECONDS

    def _begin(self, moves: list[Move], to: Tier) -> bool:
        if not moves:
            return False
        deadline_seconds = self._clock.monotonic() + IO_DEADLINE_SECONDS
        batch = Batch(moves, to, self._store.placement, self._clock, deadline_seconds)
        self._flying.append(batch)
        self._lanes.begin(batch.carry, lambda: self._land(batch))
        return True

    def _land(self, batch: Batch) -> None:
        self._landed.append(batch)
        self.wake()

    def _take_in(self) -> None:
        """Settle the moves of the batches that have landed."""
        landed, self._landed = self._landed, []
        for batch in landed:
            self._flying.remove(batch)
            carried: list[Move] = []
            for move, error in zip(batch.moves, batch.errors, strict=True):
                if error is None:
                    carried.append(move)
                elif isinstance(error, PageDamaged):
                    self._store.damaged(move)
                else:
                    self._store.abort_move(move)
                    self._note_trouble(error)
            self._store.finish_moves(carried)
            if carried:
                self._measure(batch)
            if len(carried) == len(batch.moves):
                self._trouble = ""

    def _measure(self, batch: Batch) -> None:
        if batch.seconds > 0:
            now = batch.size_bytes / batch.seconds
            self._bytes_per_second += BANDWIDTH_WEIGHT * (now - self._bytes_per_second)

    def _stalled(self, now_seconds: float) -> bool:
        overdue = any(now_seconds >= batch.deadline_seconds for batch in self._flying)
        if overdue:
            self._trouble = f"no answer for {IO_DEADLINE_SECONDS:g} s"
        return overdue or now_seconds < self._retry_at_seconds
