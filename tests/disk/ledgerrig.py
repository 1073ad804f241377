"""A ledger beside a model of plain dicts: what may be found after a crash is one of its states.

The model keeps the state after each thing said since the last acknowledged
flush. Whatever happens to the disk, what is recovered must be one of these,
less what recovery is to leave out, said here once more in the plainest way.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tierd.disk.image import Image
from tierd.disk.ledger import Ledger
from tierd.disk.ports import DiskPort
from tierd.disk.records import PAGE_ROW, SessionRecord, SlabRecord
from tierd.disk.recovery import recover
from tierd.testing import FakeClock, SimulatedDisk
from tierd.types import DType, Geometry, Namespace

LAYERS, BLOCK_TOKENS, TOKEN_BYTES = 2, 16, 4
NAMESPACE = Namespace(Geometry(LAYERS, 1, 64, DType.FLOAT32, BLOCK_TOKENS), "weights")
OTHER_NAMESPACE = replace(NAMESPACE, tenant_salt="other")
SLOT_BYTES, SLOTS = 8192, 12
SEGMENT_BYTES = 64 * 1024
UUID = bytes(range(16))

Page = tuple[int, int, int]  # session, block, layer
Put = tuple[int, int, int, bytes]  # slab, slot, generation, digest


@dataclass
class State:
    """All that a ledger holds, as plain values that compare."""

    sessions: dict[int, SessionRecord] = field(default_factory=dict)
    pages: dict[Page, Put] = field(default_factory=dict)
    slabs: dict[int, SlabRecord] = field(default_factory=dict)
    bad: dict[int, frozenset[int]] = field(default_factory=dict)

    def copy(self) -> State:
        return State(dict(self.sessions), dict(self.pages), dict(self.slabs), dict(self.bad))

    def without(self, number: int) -> State:
        """Return this state less a session and its pages."""
        left = self.copy()
        left.sessions.pop(number, None)
        left.pages = {page: put for page, put in self.pages.items() if page[0] != number}
        return left

    def pruned(self, slab_files: set[int]) -> State:
        """Return what recovery leaves of this state."""
        left = self.copy()
        left.slabs = {s: record for s, record in self.slabs.items() if s in slab_files}
        left.bad = {s: bad for s, bad in self.bad.items() if s in slab_files}
        for page, put in self.pages.items():
            if page[0] not in self.sessions or put[0] not in left.slabs:
                del left.pages[page]
        for number, session in self.sessions.items():
            if session.state == "parked":
                block = 0
                while block < session.sealed_blocks and all(
                    (number, block, layer) in left.pages for layer in range(LAYERS)
                ):
                    block += 1
                left.sessions[number] = replace(session, sealed_blocks=block)
                beyond = [p for p in left.pages if p[0] == number and p[1] >= block]
                for page in beyond:
                    del left.pages[page]
        return left


def state_of(image: Image) -> State:
    """Return an image's state."""
    rows = image.all_rows()
    names = ("session", "block", "layer", "slab", "slot", "generation")
    columns = zip(*(rows[name].tolist() for name in names), strict=True)
    digests = [bytes(digest) for digest in rows["digest"]]
    pages = {c[:3]: (*c[3:], d) for c, d in zip(columns, digests, strict=True)}
    bad = {slab: frozenset(slots) for slab, slots in image.bad_slots.items()}
    return State(dict(image.sessions), pages, dict(image.slabs), bad)


def slab_files(disk: DiskPort) -> set[int]:
    """Return the slabs whose files are there."""
    return {int(name.rpartition("/")[2], 16) for name in disk.names("slab")}


def rows_of(pages: dict[Page, Put]) -> np.ndarray[Any, Any]:
    """Return pages as rows, in the dict's order."""
    rows = np.zeros(len(pages), PAGE_ROW)
    for row, ((session, block, layer), (slab, slot, generation, digest)) in enumerate(
        pages.items()
    ):
        put = (slab, slot, generation, np.frombuffer(digest, np.uint8))
        rows[row] = (session, block, layer, 1, 0, *put)
    return rows


def open_ledger(disk: DiskPort, *, patient: bool = False) -> Ledger:
    """Open a ledger with the smallest segments."""
    return Ledger.open(
        disk, new_uuid=lambda: UUID, clock=FakeClock(), segment_bytes=SEGMENT_BYTES, patient=patient
    )


class Rig:
    """A ledger, its model, and random steps of both."""

    def __init__(
        self, disk: DiskPort, seed: int, *, lies: bool = False, manifests: bool = False
    ) -> None:
        self.disk, self.seed = disk, seed
        # A disk that lies may lose what it called durable: what is found is still a state that was.
        self.lies = lies
        # With manifests, where frames are lost some sessions are found later than the others.
        self.manifests = manifests
        self.draw = random.Random(seed)
        self.states = [State()]  # after each thing said since the last acknowledged flush
        self.history = [State()]  # after each thing said
        self.used_ids: set[int] = set()
        self.numbers = 0
        self.generations: dict[tuple[int, int], int] = {}
        self.doomed: list[int] = []  # slabs whose record is dropped, their file not yet
        self.ledger: Ledger | None = None
        self.ledger = open_ledger(disk)

    @property
    def now(self) -> State:
        """What was said, all of it."""
        return self.states[-1]

    @property
    def led(self) -> Ledger:
        assert self.ledger is not None
        return self.ledger

    def say(self, change: Callable[[State], None]) -> None:
        """Change the model; to be called before the ledger's own method."""
        state = self.now.copy()
        change(state)
        self.states.append(state)
        self.history.append(state)

    # -- what is found --------------------------------------------------------------
    def check_found(self, found: State, files: set[int]) -> State:
        """Raise AssertionError unless `found` is a state that may be left; return it unpruned."""
        for state in reversed(self.history if self.lies else self.states):
            if state.pruned(files) == found:
                return state
        raise AssertionError(
            f"seed {self.seed}: recovered what was never said, or less than was acknowledged:\n"
            f"{found}\nacknowledged: {self.states[0]}\nsaid: {self.now}"
        )

    def check_disk(self, disk: DiskPort) -> None:
        """Recover a disk, without writing, and check it."""
        found = recover(disk, new_uuid=lambda: UUID, clock=FakeClock())
        if not self.lies:
            assert not found.report.damage, f"seed {self.seed}: {found.report.damage}"
            assert found.next_slab > max(self.used_ids, default=0), f"seed {self.seed}"
        self.check_found(state_of(found.image), slab_files(disk))

    def check_reopened(self, disk: DiskPort) -> Ledger:
        """Open a ledger on a disk and check it; what it then holds is acknowledged."""
        ledger = open_ledger(disk)
        ledger.check_integrity()
        fresh = ledger.take_slab_id()
        assert self.lies or fresh > max(self.used_ids, default=0), f"seed {self.seed}"
        found = state_of(ledger._image)
        self.check_found(found, slab_files(disk))
        if self.lies:
            # What this start gave up it gave up for good, though a slab's file may be back.
            self.history.append(found)
        return ledger

    def check_now(self) -> None:
        """Check that the ledger holds what was said."""
        self.led.check_integrity()
        assert state_of(self.led._image) == self.now, f"seed {self.seed}"
        for number in self.now.sessions:
            rows = self.led.pages_of(number)
            said = sorted(page[1:] for page in self.now.pages if page[0] == number)
            assert list(zip(rows["block"].tolist(), rows["layer"].tolist(), strict=True)) == said

    def adopt(self, disk: DiskPort) -> None:
        """Go on with the disk that a crash left."""
        self.disk, self.doomed = disk, []
        files = slab_files(disk)
        # Opening makes what it found durable, or fails; before, it may be any of the states.
        self.ledger = open_ledger(disk)
        found = state_of(self.ledger._image)
        self.check_found(found, files)
        self.states = [found]
        self.history.append(found)
        self.generations = {(s, slot): g for s, slot, g, _ in self.now.pages.values()}
        for slab in self.now.slabs:
            occupied = self.ledger.occupancy(slab)
            said = sorted((p[1], p[2]) for p in self.now.pages.values() if p[0] == slab)
            got = list(zip(occupied.slots.tolist(), occupied.generations.tolist(), strict=True))
            assert got == said, f"seed {self.seed}"

    def start_on_a_full_disk(self, *, cut_power: bool) -> None:
        """The process dies and starts where no byte is free; sessions are dropped there.

        Then there is space, or the power goes: what was dropped is gone, whatever else is found.
        """
        assert isinstance(self.disk, SimulatedDisk)
        disk = self.disk.kill()
        disk.capacity_bytes = disk.used_bytes()
        led = open_ledger(disk, patient=True)
        assert led.waiting, f"seed {self.seed}"
        self.check_found(state_of(led._image), slab_files(disk))
        for number in self.draw.sample(sorted(led.sessions()), min(2, len(led.sessions()))):
            led.forget(number)
            led.drop_session(number)
            self.states = [state.without(number) for state in self.states]
        led.check_integrity()
        if cut_power:
            disk = disk.crash()
        disk.capacity_bytes = 2**40
        if not cut_power:
            led.flush(sync=True)
            led.check_integrity()
            disk = disk.kill()
        self.adopt(disk)

    # -- steps ----------------------------------------------------------------------
    def step(self) -> None:
        """Do one random thing."""
        steps: list[tuple[int, Callable[[], None]]] = [
            (6, self.commit), (2, self.drop_pages), (1, self.truncate), (2, self.open_session),
            (2, self.park), (1, self.resume), (1, self.drop_session), (2, self.add_slab),
            (1, self.drop_slab), (1, self.quarantine), (3, self.flush), (3, self.flush_durably),
            (1, self.snapshot),
        ]  # fmt: skip
        self.draw.choices([s for _, s in steps], [w for w, _ in steps])[0]()

    def _session(self) -> int | None:
        return self.draw.choice(sorted(self.now.sessions)) if self.now.sessions else None

    def open_session(self) -> None:
        self.numbers += 1
        number = self.draw.getrandbits(48) << 8 | self.numbers & 255
        record = SessionRecord(number, NAMESPACE, "running")
        self.say(lambda state: state.sessions.update({number: record}))
        self.led.put_session(record)

    def add_slab(self) -> None:
        slab = self.led.take_slab_id()
        assert self.lies or slab not in self.used_ids, (
            f"seed {self.seed}: slab id {slab} was used before"
        )
        self.used_ids.add(slab)
        handle = self.disk.create(f"slab/{slab:08x}", SLOT_BYTES)
        self.disk.sync(handle)
        self.disk.sync_folder("slab")
        self.disk.release(handle)
        record = SlabRecord(slab, NAMESPACE.digest(), SLOT_BYTES, SLOTS)
        self.say(lambda state: state.slabs.update({slab: record}))
        self.led.add_slab(record)

    def _free_slots(self) -> list[tuple[int, int]]:
        used = {(put[0], put[1]) for put in self.now.pages.values()}
        return [
            (slab, slot) for slab in self.now.slabs for slot in range(SLOTS)
            if (slab, slot) not in used and slot not in self.now.bad.get(slab, ())
        ]  # fmt: skip

    def _puts(self, pages: list[Page]) -> dict[Page, Put]:
        free = self._free_slots()
        chosen = self.draw.sample(free, min(len(free), len(pages)))
        puts = {}
        for page, place in zip(pages, chosen, strict=False):
            self.generations[place] = self.generations.get(place, 0) + 1
            puts[page] = (*place, self.generations[place], self.draw.randbytes(16))
        return puts

    def commit(self) -> None:
        number = self._session()
        if number is None:
            return self.open_session()
        first = self.draw.randrange(4)
        pages = [
            (number, block, layer) for block in range(first, first + self.draw.randrange(1, 4))
            for layer in range(LAYERS)
        ]  # fmt: skip
        if self.draw.random() < 0.3:
            pages.reverse()
        puts = self._puts(pages)
        if not puts:
            return self.add_slab()
        self.say(lambda state: state.pages.update(puts))
        return self.led.commit(rows_of(puts))

    def drop_pages(self) -> None:
        number = self._session()
        if number is None:
            return
        own = [page for page in self.now.pages if page[0] == number]
        gone = self.draw.sample(own, min(len(own), self.draw.randrange(4)))

        def change(state: State) -> None:
            for page in gone:
                del state.pages[page]

        self.say(change)
        self.led.drop_pages(number, [(layer, block) for _, block, layer in gone])

    def truncate(self) -> None:
        number = self._session()
        if number is None:
            return
        first = self.draw.randrange(6)

        def change(state: State) -> None:
            state.pages = {p: v for p, v in state.pages.items() if p[0] != number or p[1] < first}

        self.say(change)
        self.led.truncate(number, first)

    def park(self) -> None:
        """Park a session as the store does: its pages durable first, beyond them none."""
        number = self._session()
        if number is None:
            return
        sealed = 0
        while all((number, sealed, layer) in self.now.pages for layer in range(LAYERS)):
            sealed += 1
        tokens = self.draw.randbytes(
            (sealed * BLOCK_TOKENS + self.draw.choice([0, 5, 3000])) * TOKEN_BYTES
        )
        record = SessionRecord(number, NAMESPACE, "parked", tokens, sealed)
        self.say(lambda state: state.sessions.update({number: record}))
        self.led.put_session(record)
        if self.draw.random() < 0.5:
            self.flush_durably()
            if self.manifests:
                self.led.keep(number)

    def resume(self) -> None:
        number = self._session()
        if number is not None:
            record = SessionRecord(number, NAMESPACE, "running")
            self.say(lambda state: state.sessions.update({number: record}))
            self.led.put_session(record)

    def drop_session(self) -> None:
        number = self._session()
        if number is None:
            return

        def change(state: State) -> None:
            del state.sessions[number]
            state.pages = {p: v for p, v in state.pages.items() if p[0] != number}

        self.say(change)
        self.led.drop_session(number)

    def drop_slab(self) -> None:
        """Drop an empty slab: the record, a flush, then the file."""
        used = {put[0] for put in self.now.pages.values()}
        empty = [slab for slab in self.now.slabs if slab not in used]
        if not empty:
            return
        slab = self.draw.choice(empty)

        def change(state: State) -> None:
            del state.slabs[slab]
            state.bad.pop(slab, None)

        self.say(change)
        self.led.drop_slab(slab)
        self.doomed.append(slab)
        self.flush()

    def quarantine(self) -> None:
        free = self._free_slots()
        if not free:
            return
        slab, slot = self.draw.choice(free)
        self.say(lambda s: s.bad.update({slab: s.bad.get(slab, frozenset()) | {slot}}))
        self.led.quarantine(slab, slot, "digest")

    def flush(self) -> None:
        self.led.flush()
        self._delete_doomed()

    def flush_durably(self) -> None:
        self.led.flush(sync=True)
        self.states = self.states[-1:]
        self._delete_doomed()

    def _delete_doomed(self) -> None:
        while self.doomed:
            self.disk.remove(f"slab/{self.doomed.pop():08x}")

    def snapshot(self) -> None:
        self.led.snapshot()
        self.states = self.states[-1:]
        self._delete_doomed()

    def reopen(self) -> None:
        """Close and open again."""
        self.led.close()
        self.states = self.states[-1:]
        self.adopt(self.disk)
