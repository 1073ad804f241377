"""The mover: the one loop over the store. It makes room, brings pages up, keeps the house.

    demand before prefetch before spill:
    1. room that a planned demotion waits for      spill
    2. pages that a running engine asked for       promote
    3. pages that a hint foresees, by deadline     promote
    4. sessions that are suspended                  copies to cold
    5. spare warm slots for the next demotion      spill
    6. kept sessions that are in RAM only           copies to cold

`pump` is one pass: it takes in what the lanes have done, lets the store tick,
answers who waits, and begins new work while a lane is free. `run` pumps at
each event, and each TICK_SECONDS. All decisions are made here, on the loop's
thread; a lane only copies and checks bytes (carry.py).

Invariants:
  a batch's moves are finished, aborted or found damaged exactly once, when its
  lane reports, however late; one to cold when the flush that holds it reports
  a suspended session is its engine's no more only when all of it is durable
  every waiter is answered by its deadline
  while a batch is overdue, or just after an I/O error, nothing new is begun
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

from tierd.acknowledging import Acknowledgements
from tierd.backups import Backups
from tierd.carry import Batch
from tierd.demotions import DemotionPlan, RoomNeeded
from tierd.errors import (
    DeadlineExceeded,
    PageDamaged,
    StorageError,
    StorageFull,
    TierdError,
    TierFull,
)
from tierd.flusher import Arrival, Flusher, Group
from tierd.hintroom import shortfall
from tierd.hints import HintTicket
from tierd.lanes import Lanes
from tierd.lending import spare_needs, spare_slots
from tierd.memory.slabs import SlabPool
from tierd.moves import Move
from tierd.policy import NOTHING_IS_SAFE, Rank, Standing
from tierd.sessions import Session
from tierd.store import Store
from tierd.traffic import LOOK_BYTES
from tierd.types import CodecId, PageKey, SessionState, Tier
from tierd.waiters import PARK_SECONDS_MAX, ParkWaiter, PromotionWaiter, RoomWaiter, Waiters

Troubles = Mapping[str, str]  # what fails just now, and why

TICK_SECONDS = 0.05
# 64 MiB/s is the slowest disk we promise for: a batch takes 1/16 s there, so that a
# demand behind the ten batches of prefetch that the lanes take waits 5/8 s at most.
BATCH_BYTES = 4 << 20
SLOWEST_BYTES_PER_SECOND = 64 << 20
IO_DEADLINE_SECONDS = 10.0  # 160 times a batch's time on the slowest disk
RETRY_SECONDS = 1.0  # after an I/O error: a disk that is full or failing gets one try a second
STOP_SECONDS = 2.0  # 32 batches on the slowest disk; what hangs longer is left to its thread
BANDWIDTH_WEIGHT = 0.2  # of the newest batch: about the last 5 count


class Mover:
    """Background work over one store. All methods are for the event loop's thread."""

    def __init__(self, store: Store, lanes: Lanes) -> None:
        self._store = store
        self._lanes = lanes
        self._traffic = store.traffic
        self._clock = store.clock
        self._flying: list[Batch] = []
        self._landed: list[Batch] = []
        self._waiters = Waiters(store)
        self._bytes_per_second = float(SLOWEST_BYTES_PER_SECOND)
        self._retry_at_seconds = float("-inf")
        self.on_troubles: Callable[[Troubles, Troubles], None] = lambda before, now: None
        self._wake = asyncio.Event()
        self._stopping = False
        self._flusher = Flusher(store.ledger, store.placement.cold_files, lanes, self.wake)
        self.backups = Backups(store, self._flusher)
        self.acks = Acknowledgements(store, self._flusher, self._waiters, self.wake)

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
            self._waiters.stop()

    async def stop(self) -> None:
        """End `run`, fail who waits with DaemonUnavailable, wait STOP_SECONDS for the lanes."""
        self._stopping = True
        self._waiters.stop()
        self._lanes.stop()
        for _ in range(int(STOP_SECONDS / TICK_SECONDS)):
            self._wake.clear()
            self._take_in()
            if not self._flying and not self._flusher.busy:
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
        self._waiters.tell(now_seconds)
        if self._stalled(now_seconds) or self._stopping:
            return
        for begin in (
            self._flush,
            self._make_room,
            self._promote_demanded,
            self._promote_hinted,
            self._park,
            self._spare,
            self._back_up,
        ):
            while self._lanes.free() and begin():
                pass

    # -- for the service --------------------------------------------------------------
    async def plan_demotion(
        self, engine_id: int, number: int, hot_blocks: Sequence[int], need_blocks: int, *,
        codecs: Sequence[CodecId] | None = None, include_first: bool = False,
        writes_cold: bool = False, deadline_seconds: float = 10.0,
    ) -> DemotionPlan:  # fmt: skip
        """As Store.plan_demotion, but makes room first. Raises TierFull at the deadline.

        Slots of cold are lent where all of warm is in use or hinted: a running session displaces
        what nobody uses, and goes past the rest. While the disk fails, or hangs, none are lent.

        The calling engine must be quiescent: room is made by retiring slots,
        and these wait for every engine's step to end, the caller's too.
        """
        deadline = self._waiters.deadline(deadline_seconds)
        self._store.session(number, engine_id=engine_id).writes_cold = writes_cold
        while True:
            try:
                return self._store.plan_demotion(
                    engine_id,
                    number,
                    hot_blocks,
                    need_blocks,
                    codecs=codecs, include_first=include_first,
                    writes_cold=writes_cold and self._lends_cold(),
                )  # fmt: skip
            except RoomNeeded as full:
                await self._room(self._store.session(number), full, deadline)

    def _lends_cold(self) -> bool:
        return not self._stalled(self._clock.monotonic()) and not self._traffic.has_unused()

    async def commit(
        self, engine_id: int, reservation: int, digests: bytes, device_digests: bytes = b"",
        *, deadline_seconds: float = 10.0,
    ) -> None:  # fmt: skip
        """As Store.commit, and waits until it is published. DeadlineExceeded: it may yet be."""
        demotion = self._store.commit(engine_id, reservation, digests, device_digests)
        self.wake()
        if demotion is not None:
            answer = asyncio.get_running_loop().create_future()
            self._flusher.add_arrival(Arrival(demotion, answer))
            try:
                await asyncio.wait_for(answer, deadline_seconds)
            except TimeoutError:
                raise DeadlineExceeded("the cold tier's disk does not answer") from None

    async def suspend(
        self, engine_id: int, number: int, token_ids: bytes, sealed_blocks: int, *,
        deadline_seconds: float = 10.0,
    ) -> None:  # fmt: skip
        """Take a session from its engine once all that is kept of it is durable.

        Where nothing can be (the cold tier ends with the daemon), at once. Errors as
        Store.begin_suspend; TierFull, StorageError or DeadlineExceeded leave the session
        with its engine.
        """
        deadline = self._waiters.deadline(deadline_seconds, PARK_SECONDS_MAX)
        answer = self._waiters.new_answer()
        session = self._store.begin_suspend(engine_id, number, token_ids, sealed_blocks)
        if not self._store.keeper.durable:
            self._store.finish_suspend(session)
            return
        self._waiters.parks.append(ParkWaiter(session, engine_id, deadline, answer))
        self.wake()
        await answer

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
        cold = self._traffic.pages_in(Tier.COLD, session, wanted)
        missing = len(set(blocks)) * session.layers - sum(
            len(session.index.layers_of(b)) for b in wanted
        )
        self._store.counts["misses"] += missing
        if cold:
            deadline, answer = self._waiters.deadline(deadline_seconds), self._waiters.new_answer()
            waiter = PromotionWaiter(session, dict.fromkeys(cold), deadline, answer)
            self._waiters.promotions.append(waiter)
            self.wake()
            await waiter.answer
        return len(self._traffic.pages_in(Tier.WARM, session, wanted))

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
        lacks = shortfall(self._store, hint)
        queued_bytes = sum(batch.size_bytes for batch in self._flying) - lacks.bytes
        for other in self._store.hints.urgent_first():
            if other.wish.urgency <= hint.wish.urgency:
                queued_bytes += self._traffic.slots_bytes(other.awaited)
        moves = len(hint.awaited) > lacks.pages
        seconds = max(0, queued_bytes) / self._bytes_per_second if moves else 0.0
        self.wake()
        return HintTicket(hint.hint_id, len(hint.awaited), seconds, lacks.pages, lacks.why)

    async def _room(self, session: Session, full: RoomNeeded, deadline_seconds: float) -> None:
        answer = self._waiters.new_answer()
        waiter = RoomWaiter(session, full.needs, deadline_seconds, answer)
        self._waiters.rooms.append(waiter)
        self.wake()
        await waiter.answer

    # -- work, most urgent first: each begins one batch and says whether it did -----------
    def _flush(self) -> bool:
        self._flusher.refuse()
        return self._flusher.begin(self._clock.monotonic())

    def _park(self) -> bool:
        """Copy pages of a session that is being suspended to cold, or ask for its sync."""
        for waiter in self._waiters.parks:
            if waiter.flushing:
                continue
            session = waiter.session
            if not session.index.holds(range(session.sealed_blocks)):
                lost = StorageError("a page of the session was lost meanwhile")
                self._waiters.end_park(waiter, lost)
                return True
            if not session.index.unbacked_count:
                if self._waiters.end_if_removed(waiter):
                    return True
                self._store.settle_suspend(session)
                waiter.flushing = True
                self._flusher.add_waiter(waiter)
                return self._flush()
            unbacked = self._store.keeper.unbacked(session)
            at_rest = self._traffic.at_rest(unbacked)
            moves = self._moves_to_cold(at_rest, BATCH_BYTES, keeps_source=True)
            if self._begin(moves, Tier.COLD):
                return True
            waiting = list(self._traffic.at_rest(self._store.keeper.unbacked(session)))
            if waiting and not self._make_cold_room(waiting):
                self._waiters.end_park(waiter, self._waiters.refused_by_cold(waiting))
                return True
        return False

    def _make_cold_room(self, keys: Sequence[PageKey]) -> bool:
        """Free cold slots if that can be; say whether some are, or are coming."""
        if self._flying or self._store.retired_bytes(Tier.COLD):
            return True
        freed_bytes = self._traffic.evict(min(self._traffic.slots_bytes(keys), BATCH_BYTES))
        if freed_bytes:
            self.wake()
        return freed_bytes > 0

    def _make_room(self) -> bool:
        needs: Counter[SlabPool] = Counter()
        for waiter in self._waiters.rooms:
            needs.update(waiter.needs)
        need_bytes = self._store.placement.pools[Tier.WARM].shortage_bytes(needs)
        return self._spill(need_bytes, NOTHING_IS_SAFE, evict=True)

    def _promote_demanded(self) -> bool:
        for waiter in self._waiters.promotions:
            below = self._traffic.rank(waiter.session)
            if self._promote(waiter.session, waiter.cold(), below):
                return True
            if not self._flying and not self._store.retired_bytes(Tier.WARM):
                self._waiters.answer(waiter.answer)  # no room, and none to come
        return False

    def _promote_hinted(self) -> bool:
        for hint in self._store.hints.urgent_first():
            below = Rank(Standing.HINTED, -hint.wish.deadline_seconds)
            if self._promote(self._store.session(hint.wish.session), hint.awaited, below):
                return True
        return False

    def _spare(self) -> bool:
        pools = self._store.placement.pools[Tier.WARM]
        needs: dict[SlabPool, int] = {}
        for session in self._store.book:
            waits = session.state is SessionState.RUNNING and not session.writes_cold
            if waits and session.index.pages_in(Tier.WARM):
                needs.update(spare_needs(self._store.placement, session))
        # Each by itself: what is left of the budget may become any pool's.
        need_bytes = sum(pools.shortage_bytes({pool: slots}) for pool, slots in needs.items())
        return self._spill(need_bytes, NOTHING_IS_SAFE, evict=False)

    def _back_up(self) -> bool:
        troubled = bool(self._waiters.trouble or self._store.ledger.failed)
        keys = self.backups.next_keys(self._clock.monotonic(), troubled=troubled)
        if keys is None:
            return False
        return self._begin(self._moves_to_cold(keys, BATCH_BYTES, keeps_source=True), Tier.COLD)

    def _spill(self, need_bytes: int, below: Rank, *, evict: bool) -> bool:
        """Begin a spill towards `need_bytes` of room, less what is coming already."""
        need_bytes -= self._coming_bytes()
        if need_bytes <= 0:
            return False
        keys = self._traffic.choose_spills(min(need_bytes, LOOK_BYTES), below)
        need_bytes = min(need_bytes, BATCH_BYTES)
        copied = [key for key in keys if not self._traffic.fall_back(key)]
        if len(copied) < len(keys):
            self.wake()  # the slots are free when the epoch has passed
        moves = self._moves_to_cold(copied, need_bytes)
        full = bool(copied) and not moves and not self._store.retired_bytes(Tier.COLD)
        if evict and full and self._traffic.evict(need_bytes):
            self.wake()  # what was dropped may be these keys: choose anew in a moment
        return self._begin(moves, Tier.COLD)

    def _moves_to_cold(
        self, keys: Iterable[PageKey], need_bytes: int, *, keeps_source: bool = False
    ) -> list[Move]:
        if self._store.ledger.failed:
            return []
        keys = self._traffic.worth(self._traffic.in_runs(keys), need_bytes)
        return self._begin_moves(keys, Tier.COLD, keeps_source=keeps_source)

    def _promote(self, session: Session, keys: Iterable[PageKey], below: Rank) -> bool:
        """Begin to promote some of `keys`, or to make room for them from ranks under `below`."""
        placement = self._store.placement
        pools = placement.pools[Tier.WARM]
        moves: list[Move] = []
        short_bytes = 0
        at_rest = self._traffic.at_rest(keys)
        for pool, wanted in self._traffic.by_warm_pool(session, at_rest, BATCH_BYTES).items():
            spare = spare_slots(placement, session, pool)
            pools.make_available(pool, spare + len(wanted))
            roomy = max(0, pool.available_slots() - spare)
            moves += self._begin_moves(wanted[:roomy], Tier.WARM)
            if roomy < len(wanted):
                short_slots = spare + len(wanted) - pool.available_slots()
                short_bytes = max(short_bytes, short_slots * pool.slot_bytes)
        return self._begin(moves, Tier.WARM) or self._spill(short_bytes, below, evict=False)

    def _coming_bytes(self) -> int:
        """Bytes of warm that spills under way and ending steps will free without more work."""
        flying = sum(batch.size_bytes for batch in self._flying if batch.to is Tier.COLD)
        return flying + self._store.retired_bytes(Tier.WARM)

    # -- batches ----------------------------------------------------------------------------
    def _begin_moves(
        self, keys: Sequence[PageKey], to: Tier, *, keeps_source: bool = False
    ) -> list[Move]:
        try:
            return self._traffic.begin_moves(keys, to, keeps_source=keeps_source)
        except (StorageError, TierFull) as error:  # a slab that the budget allows cannot be made
            self._note_trouble(error)
            return []

    def _note_trouble(self, error: TierdError) -> None:
        self._waiters.trouble = str(error)
        self._waiters.lacks_space = isinstance(error, StorageFull | TierFull)
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
                    self._traffic.damaged(move)
                else:
                    self._traffic.abort(move)
                    self._note_trouble(error)
            if batch.to is Tier.COLD and self._store.keeper.durable:
                self._traffic.record(carried)
                self._flusher.add(carried)
            else:
                self._traffic.finish(carried)
                self._waiters.arrived(carried)
            if carried:
                self._measure(batch)
            if len(carried) == len(batch.moves):
                self._waiters.trouble = ""
        for group in self._flusher.take_landed():
            self._settle(group)
        found = {
            "disk": self._waiters.trouble,
            "ledger": self._store.ledger.failed,
            "snapshot": self._flusher.snapshot_error,
            "manifest": self._flusher.manifest_error,
            "folder": self._store.keeper.removed.trouble,
        }
        troubles = {what: why for what, why in found.items() if why}
        if troubles != self._store.troubles:
            self.on_troubles(self._store.troubles, troubles)
            self._store.troubles = troubles

    def _settle(self, group: Group) -> None:
        """Publish what a flush made findable, or leave it where it was."""
        for slab in self._store.placement.cold_files.suspects:
            self._store.placement.shut_slab(slab)
        self.backups.settle(group, self._clock.monotonic())
        self.acks.settle(group)
        for answer in group.recorded:
            self._waiters.answer(answer)
        for arrival in group.arrivals:
            error = self._store.finish_commit(arrival.demotion, group.error)
            self._waiters.answer(arrival.answer, error)
        parks = [park for park in self._waiters.parks if park in group.waiters and park.lasts]
        if group.error is None:
            self._traffic.finish(group.moves)
            for park in parks:
                self._waiters.end_park(park)
            return
        self._note_trouble(group.error)
        for move in group.moves:
            self._traffic.abort(move)
        for park in parks:
            self._waiters.end_park(park, group.error)

    def _measure(self, batch: Batch) -> None:
        if batch.seconds > 0:
            now = batch.size_bytes / batch.seconds
            self._bytes_per_second += BANDWIDTH_WEIGHT * (now - self._bytes_per_second)

    def _stalled(self, now_seconds: float) -> bool:
        overdue = any(now_seconds >= batch.deadline_seconds for batch in self._flying)
        overdue |= self._flusher.overdue(now_seconds, IO_DEADLINE_SECONDS)
        if overdue:
            self._waiters.trouble = f"no answer for {IO_DEADLINE_SECONDS:g} s"
            self._waiters.lacks_space = False
        return overdue or now_seconds < self._retry_at_seconds
