"""A slab file of real slots, a cold reader over it, and a step that reads it into a device."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from tests.engine.device.world import GEOMETRY, Validity
from tierd.codec.devicedigest import device_digests
from tierd.codec.layout import page_layout
from tierd.disk.header import SlotCheck, SlotHeader
from tierd.types import CodecId
from tierd_engine.coldread import ColdPage, ColdReader, ColdUnit
from tierd_engine.device.coldpath import ColdPath
from tierd_engine.device.direct import DirectCold
from tierd_engine.device.fake import FakeDevice, bytes_at
from tierd_engine.device.kernels import HostKernels
from tierd_engine.device.stager import Piece, Staged, Stager
from tierd_engine.staging import StagingRing

LAYOUT = page_layout(GEOMETRY, CodecId.RAW)
SIZE = LAYOUT.payload_bytes


@dataclass
class ColdFile:
    """`units` of `unit_pages` pages in one file; those of `without` carry no device digest."""

    folder: Path
    units: int = 5
    unit_pages: int = 2
    without: frozenset[int] = frozenset()
    payloads: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(9)
        count = self.units * self.unit_pages
        self.payloads = [rng.integers(0, 256, SIZE, dtype=np.uint8) for _ in range(count)]
        path = self.folder / "slab"
        path.write_bytes(b"".join(self.slot(i) for i in range(count)))
        self.fd = os.open(path, os.O_RDWR)

    def header(self, number: int) -> SlotHeader:
        payload = self.payloads[number]
        digest = int(device_digests(np.array([payload.ctypes.data], np.int64), SIZE)[0])
        return SlotHeader(
            b"u" * 16, 1, number, 1, LAYOUT.codec, LAYOUT.dtype, 7, 0, number, b"n" * 16, SIZE,
            SIZE, xxhash.xxh3_128_digest(payload), None if number in self.without else digest,
        )  # fmt: skip

    def slot(self, number: int) -> bytes:
        used = self.header(number).pack() + self.payloads[number].tobytes()
        return used + bytes(LAYOUT.slot_bytes - len(used))

    def put(self, number: int, slot: bytes) -> None:
        """Overwrite a slot."""
        os.pwrite(self.fd, slot, number * LAYOUT.slot_bytes)

    def page(self, number: int) -> ColdPage:
        header = self.header(number)
        known = SlotHeader(**{
            name: getattr(header, name) for name in header.__dataclass_fields__
        } | {"payload_digest": b"", "device_digest": None})  # fmt: skip
        offset = number * LAYOUT.slot_bytes
        return ColdPage(0, number, self.fd, offset, SlotCheck(known), 1)

    def cold_units(self) -> list[ColdUnit]:
        pages = range(self.unit_pages)
        return [
            ColdUnit(LAYOUT, tuple(self.page(unit * self.unit_pages + i) for i in pages))
            for unit in range(self.units)
        ]


class Rig:
    """A stager over a cold file, with a direct path or none. Each step checks every byte."""

    def __init__(
        self, device: FakeDevice, file: ColdFile, path: ColdPath | None, *, chunks: int = 2,
        landing: int = 3,
    ) -> None:  # fmt: skip
        self.device, self.file = device, file
        chunk = file.unit_pages * LAYOUT.slot_bytes
        self.reader = ColdReader(StagingRing(0, chunk_bytes=chunk))
        self.direct = DirectCold(
            device, HostKernels(), self.reader, lambda fd: path, chunk, chunks=landing
        )
        self.stager = Stager(
            device, self.reader, LAYOUT.slot_bytes, Validity(), chunk_bytes=chunk, chunks=chunks,
            direct=self.direct,
        )  # fmt: skip
        self.units = file.cold_units()
        self.direct.prepare({LAYOUT})
        self.schedule()

    def schedule(self) -> None:
        """As a session does when its plan is made anew."""
        self.direct.schedule(self.units)

    def step(self) -> None:
        """Read every unit on the compute stream and compare."""
        pieces = [Piece(0, LAYOUT, len(unit.pages), ()) for unit in self.units]
        read: list[bytes] = []
        self.stager.begin(pieces)
        for _ in pieces:
            staged = self.stager.take()
            self.stager.wait_filled(staged)
            kernel = functools.partial(_read_pages, staged, read)
            self.device.launch(self.device.compute, kernel)
            self.stager.release()
            self.stager.check_integrity()
            self.direct.check_integrity()
        self.stager.settle()
        self.device.follow(self.device.compute)
        assert read == [payload.tobytes() for payload in self.file.payloads]

    def close(self) -> None:
        self.stager.close()
        self.direct.close()
        self.reader.close()
        self.device.check_integrity()
        os.close(self.file.fd)


def _read_pages(staged: Staged, into: list[bytes]) -> None:
    into.extend(bytes_at(address, SIZE).tobytes() for address in staged.addresses.tolist())
