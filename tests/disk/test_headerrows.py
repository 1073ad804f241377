"""Rows of headers are what header.py packs one by one."""

import numpy as np

from tierd.disk.header import HEADER_BYTES, SlotHeader
from tierd.disk.headerrows import fill_rows, header_rows, place_rows
from tierd.types import CodecId, DType, PageKey, Place, Tier


def test_each_row_is_the_header_packed_alone() -> None:
    draw = np.random.default_rng()
    uuid, namespace = draw.bytes(16), draw.bytes(16)

    def header(place: Place, key: PageKey, digest: bytes) -> SlotHeader:
        return SlotHeader(
            uuid, place.slab, place.slot, place.generation, place.codec, DType.BFLOAT16,
            *key, namespace, 2**40 + 1, 12345, digest,
        )  # fmt: skip

    def place(tier: Tier) -> Place:
        slab, slot, generation = draw.integers(0, 2**32, 3, dtype=np.uint64).tolist()
        return Place(tier, CodecId.K8V4, slab, slot, generation)

    count = 23
    keys = [
        PageKey(int(draw.integers(0, 2**64, dtype=np.uint64)), *draw.integers(0, 2**32, 2).tolist())
        for _ in range(count)
    ]
    digests = [draw.bytes(15) + b"\0" for _ in range(count)]
    rows = header_rows(count)
    fill_rows(rows, header(place(Tier.WARM), keys[0], bytes(16)), keys, digests)
    for tier in (Tier.WARM, Tier.COLD):
        places = [place(tier) for _ in range(count)]
        place_rows(rows, places)
        packed = rows.tobytes()
        for i in range(count):
            own = header(places[i], keys[i], digests[i]).pack()
            assert packed[i * HEADER_BYTES :][:HEADER_BYTES] == own, i
            assert SlotHeader.unpack(own) == header(places[i], keys[i], digests[i])
